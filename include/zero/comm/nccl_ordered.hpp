// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/collective.hpp>
#include <zero/comm/nccl_call.hpp>
#include <zero/core/any_span.hpp>
#include <zero/device/cuda.hpp>

#include <nccl.h>

#include <algorithm>
#include <cstddef>

/// @file
/// Reductions in rank order. Nothing here is for users.

namespace zero::inline v0::detail {

/// Every rank sends each other its slice, and sums what it receives: the bits of
/// `thread_communicator`.
class nccl_ordered : nccl_call {
 public:
  using nccl_call::nccl_call;

  void run() const {
    slice const mine = slice_of(rank());
    std::size_t const most = slice_of(0).count;
    std::size_t const part = size() == 1 ? most : slot_bytes(ranks() - 1) / in_size();
    for (std::size_t offset = 0; offset < most; offset += part) {
      std::size_t const count = mine.part(offset, part);
      if (size() > 1) {
        send_slices(offset, part, count);
      }
      for (int other = 0; other < size(); ++other) {
        sources_[static_cast<std::size_t>(other)] =
            other == rank() ? call_.input + (mine.first + offset) * in_size() : slot(other);
      }
      cuda::sum(on_, sources_, call_.input_dtype, result(place() + offset, count), adds(), scale());
    }
    if (call_.op == operation::all_reduce) {
      gather_slices();
    }
  }

 private:
  /// Where the slice that `other` sends lies, in slots without this rank's own.
  [[nodiscard]] std::byte* slot(int other) const noexcept {
    auto const index = static_cast<std::size_t>(other < rank() ? other : other - 1);
    return scratch_.data() + index * slot_bytes(ranks() - 1);
  }

  void send_slices(std::size_t offset, std::size_t part, std::size_t count) const {
    ncclDataType_t const type = nccl_type(call_.input_dtype);
    handle_.group([&](ncclComm_t comm, auto const& note) {
      for (int by = 1; by < size(); ++by) {
        int const to = step(by);
        int const from = step(-by);
        slice const theirs = slice_of(to);
        if (std::size_t const n = theirs.part(offset, part); n != 0) {
          note("ncclSend", ncclSend(call_.input + (theirs.first + offset) * in_size(), n, type, to,
                                    comm, on_.native()));
        }
        if (count != 0) {
          note("ncclRecv", ncclRecv(slot(from), count, type, from, comm, on_.native()));
        }
      }
    });
  }
};

}  // namespace zero::inline v0::detail
