// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/any_span.hpp>
#include <zero/device/concept.hpp>

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

/// @file
/// What the library needs of a communicator: one concept per collective, and `communicator`
/// for all of them. `solo` and `thread_communicator` model it; `metered` wraps any.
///
/// Every collective but `exchange` and `split` is enqueued on a stream and returns; the spans given
/// to it stay alive, and a span that it writes stays untouched, until the stream has run it. Then
/// no peer reads them any more, whether it succeeded or threw. All ranks call the same collectives
/// in the same order, and a rank uses one stream at a time; `split` gives a communicator for a
/// second stream. A communicator outlives the work that it enqueued.

namespace zero::inline v0 {

/// What a reduction does with the values that its result had before.
enum class combine : std::uint8_t { overwrite, add };

/// What a reduction computes over the ranks.
enum class reduction : std::uint8_t { sum, average };

/// The stream that a communicator's collectives are enqueued on.
template <class Communicator>
using communicator_stream = typename Communicator::device::stream;

/// Sum a span over all ranks, in rank order, and keep this rank's slice.
template <class Communicator>
concept has_reduce_scatter =
    requires(Communicator& comm, const_any_span full, any_span shard, combine how, reduction what,
             communicator_stream<Communicator>& stream) {
      comm.reduce_scatter(full, shard, how, what, stream);
    };

/// Collect the slices of all ranks.
template <class Communicator>
concept has_all_gather =
    requires(Communicator& comm, const_any_span shard, any_span full,
             communicator_stream<Communicator>& stream) { comm.all_gather(shard, full, stream); };

/// Sum a span of any size over all ranks: the bits of a reduce-scatter followed by an all-gather.
template <class Communicator>
concept has_all_reduce =
    requires(Communicator& comm, const_any_span full, any_span result, combine how, reduction what,
             communicator_stream<Communicator>& stream) {
      comm.all_reduce(full, result, how, what, stream);
    };

/// Copy one rank's span to all ranks.
template <class Communicator>
concept has_broadcast =
    requires(Communicator& comm, any_span data, int root,
             communicator_stream<Communicator>& stream) { comm.broadcast(data, root, stream); };

/// Wait until all ranks are here.
template <class Communicator>
concept has_barrier = requires(Communicator& comm, communicator_stream<Communicator>& stream) {
  comm.barrier(stream);
};

/// The control channel: collect a few bytes of every rank, blocking, beside the streams.
template <class Communicator>
concept has_exchange = requires(Communicator& comm, std::span<std::byte const> mine,
                                std::span<std::byte> all) { comm.exchange(mine, all); };

/// Cut the ranks into groups with a communicator each.
template <class Communicator>
concept has_split = requires(Communicator& comm, int color, int key) {
  { comm.split(color, key) } -> std::same_as<Communicator>;
};

/// Give every rank's pending and later calls an error.
template <class Communicator>
concept has_abort = requires(Communicator& comm, std::string_view reason) {
  { comm.abort(reason) } noexcept;
};

/// A movable handle of one rank to a group of `size()` ranks.
///
/// `solo` is one. A type that can do all but `exchange` is not: fingerprints and errors need a
/// channel.
template <class Communicator>
concept communicator =
    std::move_constructible<Communicator> && device<typename Communicator::device> &&
    requires(Communicator& comm, Communicator const& fixed, std::chrono::milliseconds deadline) {
      { fixed.rank() } -> std::same_as<int>;
      { fixed.size() } -> std::same_as<int>;
      comm.set_deadline(deadline);
    } && has_reduce_scatter<Communicator> && has_all_gather<Communicator> &&
    has_all_reduce<Communicator> && has_broadcast<Communicator> && has_barrier<Communicator> &&
    has_exchange<Communicator> && has_split<Communicator> && has_abort<Communicator>;

}  // namespace zero::inline v0
