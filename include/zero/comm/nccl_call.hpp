// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/collective.hpp>
#include <zero/comm/nccl_handle.hpp>
#include <zero/comm/nccl_options.hpp>
#include <zero/core/any_span.hpp>
#include <zero/core/partition.hpp>
#include <zero/device/cuda.hpp>

#include <nccl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

/// @file
/// What the parts of an enqueued call share. Nothing here is for users.

namespace zero::inline v0::detail {

/// A call of one rank in its stream.
class nccl_call {
 public:
  nccl_call(nccl_handle& handle, std::span<std::byte> scratch, collective const& call,
            std::span<void const*> sources, cuda_stream& on) noexcept
      : handle_{handle}, scratch_{scratch}, call_{call}, sources_{sources}, on_{on} {}

 protected:
  /// The elements that a rank reduces.
  struct slice {
    std::size_t first;
    std::size_t count;

    /// What is left of it from `offset` on, at most `room`.
    [[nodiscard]] std::size_t part(std::size_t offset, std::size_t room) const noexcept {
      return count > offset ? std::min(room, count - offset) : 0;
    }
  };

  [[nodiscard]] int rank() const noexcept { return handle_.rank(); }
  [[nodiscard]] int size() const noexcept { return handle_.size(); }
  [[nodiscard]] std::size_t ranks() const noexcept { return static_cast<std::size_t>(size()); }
  [[nodiscard]] std::size_t in_size() const noexcept { return size_bytes(call_.input_dtype); }
  [[nodiscard]] std::size_t out_size() const noexcept { return size_bytes(call_.output_dtype); }
  [[nodiscard]] double scale() const noexcept {
    return call_.what == reduction::average ? 1 / static_cast<double>(size()) : 1;
  }
  [[nodiscard]] bool adds() const noexcept { return call_.how == combine::add; }

  [[nodiscard]] slice slice_of(int rank) const noexcept {
    auto const index = static_cast<std::uint64_t>(rank);
    partition const cut{call_.count, static_cast<std::uint64_t>(size())};
    return {std::min<std::size_t>(cut.offset(index), cut.elements()), cut.size(index)};
  }

  /// The element of the result at which this rank's slice begins.
  [[nodiscard]] std::size_t place() const noexcept {
    return call_.op == operation::all_reduce ? slice_of(rank()).first : 0;
  }

  [[nodiscard]] any_span result(std::size_t first, std::size_t count) const noexcept {
    return {call_.output + first * out_size(), count, call_.output_dtype};
  }

  /// The bytes of one of `slots` equal parts of the scratch.
  [[nodiscard]] std::size_t slot_bytes(std::size_t slots) const noexcept {
    return scratch_.size() / slots / scratch_alignment * scratch_alignment;
  }

  [[nodiscard]] int step(int by) const noexcept { return (rank() + by + size()) % size(); }

  /// Collect all ranks' slices of the result in place, also where they aren't as large.
  void gather_slices() const {
    if (size() == 1) {
      return;
    }
    ncclDataType_t const type = nccl_type(call_.output_dtype);
    slice const mine = slice_of(rank());
    handle_.group([&](ncclComm_t comm, auto const& note) {
      for (int by = 1; by < size(); ++by) {
        int const from = step(-by);
        slice const theirs = slice_of(from);
        if (mine.count != 0) {
          note("ncclSend", ncclSend(call_.output + mine.first * out_size(), mine.count, type,
                                    step(by), comm, on_.native()));
        }
        if (theirs.count != 0) {
          note("ncclRecv", ncclRecv(call_.output + theirs.first * out_size(), theirs.count, type,
                                    from, comm, on_.native()));
        }
      }
    });
  }

  nccl_handle& handle_;
  std::span<std::byte> scratch_;  // or what a barrier sums
  collective const& call_;
  std::span<void const*> sources_;
  cuda_stream& on_;
};

}  // namespace zero::inline v0::detail
