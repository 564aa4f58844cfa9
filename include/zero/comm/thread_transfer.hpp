// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/collective.hpp>
#include <zero/comm/reduce_ordered.hpp>
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
/// What a rank reads of its peers' memory, and writes to its own, in a collective of threads. Each
/// function returns the bytes that it has read from peers. Nothing here is for users.

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
  void for_peers(Function const& function) const noexcept {
    for (int step = 1; step < size(); ++step) {
      function((rank + step) % size());
    }
  }
};

/// The elements that `rank` reduces: `count` from `first` on.
struct reduced_slice {
  std::size_t first;
  std::size_t count;

  reduced_slice(thread_place const& here, int rank) noexcept {
    auto const index = static_cast<std::uint64_t>(rank);
    partition const cut{here.call.count, static_cast<std::uint64_t>(here.size())};
    first = std::min(cut.offset(index), cut.elements());
    count = cut.size(index);
  }
};

/// Sum this rank's slice of all inputs into its place in the result. `sources` is space for as many
/// pointers as there are ranks.
inline std::uint64_t reduce_slice(thread_place const& here,
                                  std::span<void const*> sources) noexcept {
  collective const& call = here.call;
  reduced_slice const mine{here, here.rank};
  for (int rank = 0; rank < here.size(); ++rank) {
    sources[static_cast<std::size_t>(rank)] =
        here.peer(rank).input + mine.first * size_bytes(call.input_dtype);
  }
  std::size_t const place = call.op == operation::all_reduce ? mine.first : 0;
  any_span const result{call.output + place * size_bytes(call.output_dtype), mine.count,
                        call.output_dtype};
  reduce_ordered(sources, call, result);
  return (sources.size() - 1) * mine.count * size_bytes(call.input_dtype);
}

/// Copy the other ranks' slices of the result.
inline std::uint64_t gather_results(thread_place const& here) noexcept {
  std::size_t const element_bytes = size_bytes(here.call.output_dtype);
  std::uint64_t read = 0;
  here.for_peers([&](int rank) {
    reduced_slice const theirs{here, rank};
    std::size_t const first = theirs.first * element_bytes;
    host_copy(here.call.output + first, here.peer(rank).output + first,
              theirs.count * element_bytes);
    read += theirs.count * element_bytes;
  });
  return read;
}

/// Copy all ranks' inputs to their places.
inline std::uint64_t gather_inputs(thread_place const& here) noexcept {
  std::size_t const bytes = here.call.input_bytes;
  auto const place_of = [&](int rank) {
    return here.call.output + static_cast<std::size_t>(rank) * bytes;
  };
  host_copy(place_of(here.rank), here.call.input, bytes);
  here.for_peers([&](int rank) { host_copy(place_of(rank), here.peer(rank).input, bytes); });
  return static_cast<std::uint64_t>(here.size() - 1) * bytes;
}

/// Copy the root's input.
inline std::uint64_t copy_root(thread_place const& here) noexcept {
  if (here.rank == here.call.root) {
    return 0;
  }
  host_copy(here.call.output, here.peer(here.call.root).input, here.call.output_bytes);
  return here.call.output_bytes;
}

}  // namespace zero::inline v0::detail
