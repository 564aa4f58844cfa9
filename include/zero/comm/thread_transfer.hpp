// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/collective.hpp>
#include <zero/comm/rendezvous.hpp>
#include <zero/core/any_span.hpp>
#include <zero/core/error.hpp>
#include <zero/core/partition.hpp>
#include <zero/device/host_copy.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

/// @file
/// What a rank reads of its peers' memory, and writes to its own, in a collective of threads.
/// Nothing here is for users.

namespace zero::inline v0::detail {

/// A rank in a call, at which all ranks have arrived.
struct thread_place {
  rendezvous& channel;
  int rank;
  std::uint64_t sequence;
  collective const& call;

  [[nodiscard]] int size() const noexcept { return channel.size(); }
  [[nodiscard]] collective const& peer(int other) const noexcept {
    return channel.call(other, sequence);
  }
  [[nodiscard]] std::string title() const { return text(name(call.op), " #", sequence); }

  /// All ranks but this one, from the next one on, so that not all read the same one at a time.
  template <class Function>
  void for_peers(Function const& function) const {
    for (int step = 1; step < size(); ++step) {
      function((rank + step) % size());
    }
  }
};

/// Copy all ranks' bytes of the control channel to their places.
inline void gather_bytes(thread_place const& here) noexcept {
  std::size_t const bytes = here.call.input_bytes;
  for (int rank = 0; rank < here.size(); ++rank) {
    host_copy(here.call.output + static_cast<std::size_t>(rank) * bytes, here.peer(rank).input,
              bytes);
  }
}

/// Moves elements between ranks' memory of a device, in `stream`. Each function returns the bytes
/// that it reads from peers.
template <class Device>
class thread_transfer {
 public:
  thread_transfer(thread_place const& here, typename Device::stream& stream) noexcept
      : here_{here}, stream_{stream} {}

  /// Sum this rank's slice of all inputs into its place in the result. `sources` is space for as
  /// many pointers as there are ranks, and outlives the work.
  std::uint64_t reduce_slice(std::span<void const*> sources) const {
    slice const mine = slice_of(here_.rank);
    for (int rank = 0; rank < here_.size(); ++rank) {
      sources[static_cast<std::size_t>(rank)] =
          here_.peer(rank).input + mine.first * size_bytes(call().input_dtype);
    }
    std::size_t const place = call().op == operation::all_reduce ? mine.first : 0;
    double const scale =
        call().what == reduction::average ? 1 / static_cast<double>(here_.size()) : 1;
    Device::sum(stream_, sources, call().input_dtype,
                any_span{call().output + place * size_bytes(call().output_dtype), mine.count,
                         call().output_dtype},
                call().how == combine::add, scale);
    return (sources.size() - 1) * mine.count * size_bytes(call().input_dtype);
  }

  /// Copy the other ranks' slices of the result.
  std::uint64_t gather_results() const {
    std::size_t const element_bytes = size_bytes(call().output_dtype);
    std::uint64_t read = 0;
    here_.for_peers([&](int rank) {
      slice const theirs = slice_of(rank);
      std::size_t const first = theirs.first * element_bytes;
      copy(here_.peer(rank).output + first, call().output + first, theirs.count);
      read += theirs.count * element_bytes;
    });
    return read;
  }

  /// Copy all ranks' inputs to their places.
  std::uint64_t gather_inputs() const {
    std::size_t const bytes = call().input_bytes;
    std::size_t const count = bytes / size_bytes(call().output_dtype);
    auto const take = [&](int rank) {
      copy(here_.peer(rank).input, call().output + static_cast<std::size_t>(rank) * bytes, count);
    };
    take(here_.rank);
    here_.for_peers(take);
    return static_cast<std::uint64_t>(here_.size() - 1) * bytes;
  }

  /// Copy the root's input.
  std::uint64_t copy_root() const {
    if (here_.rank == call().root) {
      return 0;
    }
    copy(here_.peer(call().root).input, call().output,
         call().output_bytes / size_bytes(call().output_dtype));
    return call().output_bytes;
  }

 private:
  /// The elements that a rank reduces.
  struct slice {
    std::size_t first;
    std::size_t count;
  };

  [[nodiscard]] collective const& call() const noexcept { return here_.call; }

  [[nodiscard]] slice slice_of(int rank) const noexcept {
    auto const index = static_cast<std::uint64_t>(rank);
    partition const cut{call().count, static_cast<std::uint64_t>(here_.size())};
    return {std::min(cut.offset(index), cut.elements()), cut.size(index)};
  }

  void copy(std::byte const* from, std::byte* to, std::size_t count) const {
    Device::copy(stream_, const_any_span{from, count, call().output_dtype},
                 any_span{to, count, call().output_dtype});
  }

  thread_place const& here_;
  typename Device::stream& stream_;
};

}  // namespace zero::inline v0::detail
