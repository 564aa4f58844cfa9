// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/concept.hpp>
#include <zero/core/any_span.hpp>
#include <zero/shard/layout.hpp>

#include <cstddef>
#include <cstdint>

/// @file
/// One collective per segment of a bucket: reduce-scatter and all-reduce of its gradients,
/// all-gather of its parameters; and pack and unpack, which move nothing for a tensor that is bound
/// into its bucket. `full` and `shard` say where a segment is: callables from its index to a
/// `std::byte*`.

namespace zero::inline v0 {

namespace detail {

template <class Visit>
void for_each_segment(layout const& of, std::size_t bucket, bool trainable_only, Visit visit) {
  for (std::size_t const index : of.buckets()[bucket].segments) {
    layout::segment const& segment = of.segments()[index];
    if (segment.cut.padded() != 0 && (segment.trainable || !trainable_only)) {
      visit(index, segment);
    }
  }
}

}  // namespace detail

/// Average each trainable segment's gradients over the ranks and keep this rank's slice.
///
/// Shapes:     full(s) [padded] in the type the engine writes; shard(s) [slice] in the reduced
///             type.
/// Ordering:   enqueued on `stream`; in place where shard(s) is this rank's slice of full(s).
/// Collective: every rank calls it, in the same order.
template <communicator Communicator, class Stream, class Full, class Shard>
void reduce_scatter_bucket(Communicator& comm, layout const& of, std::size_t bucket, Full full,
                           Shard shard, combine how, Stream& stream) {
  detail::for_each_segment(of, bucket, true, [&](std::size_t index, layout::segment const& s) {
    comm.reduce_scatter(const_any_span{full(index), s.cut.padded(), s.gradient},
                        any_span{shard(index), s.cut.slice(), s.reduced}, how, reduction::average,
                        stream);
  });
}

/// The same, whole on every rank: result(s) [padded] in the reduced type.
template <communicator Communicator, class Stream, class Full, class Result>
void all_reduce_bucket(Communicator& comm, layout const& of, std::size_t bucket, Full full,
                       Result result, combine how, Stream& stream) {
  detail::for_each_segment(of, bucket, true, [&](std::size_t index, layout::segment const& s) {
    comm.all_reduce(const_any_span{full(index), s.cut.padded(), s.gradient},
                    any_span{result(index), s.cut.padded(), s.reduced}, how, reduction::average,
                    stream);
  });
}

enum class segments : std::uint8_t { all, trainable };

/// Make each segment's parameters whole from the ranks' slices.
template <communicator Communicator, class Stream, class Shard, class Full>
void all_gather_bucket(Communicator& comm, layout const& of, std::size_t bucket, Shard shard,
                       Full full, segments which, Stream& stream) {
  detail::for_each_segment(
      of, bucket, which == segments::trainable, [&](std::size_t index, layout::segment const& s) {
        comm.all_gather(const_any_span{shard(index), s.cut.slice(), s.value},
                        any_span{full(index), s.cut.padded(), s.value}, stream);
      });
}

namespace detail {

/// Call `move(tensor, place)` for each parameter of the bucket whose tensor isn't already at its
/// place.
template <class Tensor, class Full, class Type, class Move>
void for_each_unbound(layout const& of, std::size_t bucket, Tensor tensor, Full full, Type type,
                      Move move) {
  for (std::size_t const unit : of.buckets()[bucket].units) {
    for (std::size_t const id : of.units()[unit].parameters) {
      layout::parameter const& p = of.parameters()[id];
      any_span const elements = tensor(id);
      any_span const place =
          any_span{full(p.segment), of.segments()[p.segment].cut.padded(), type(p.spec)}.subspan(
              p.offset, p.spec.size);
      if (elements.data() != place.data() && p.spec.size != 0 && elements.data() != nullptr) {
        move(elements, place);
      }
    }
  }
}

}  // namespace detail

/// Copy a bucket's parameter values from their tensors into their places; `tensor(id)` gives an
/// `any_span` (without data: nothing to copy). A tensor that is bound into its place costs nothing.
template <class Device, class Tensor, class Full>
void pack_bucket(layout const& of, std::size_t bucket, Tensor tensor, Full full,
                 typename Device::stream& stream) {
  detail::for_each_unbound(
      of, bucket, tensor, full, [](parameter_spec const& spec) { return spec.value; },
      [&](any_span elements, any_span place) { Device::copy(stream, elements, place); });
}

/// Copy a bucket's parameter values from their places into their tensors.
template <class Device, class Tensor, class Full>
void unpack_bucket(layout const& of, std::size_t bucket, Tensor tensor, Full full,
                   typename Device::stream& stream) {
  detail::for_each_unbound(
      of, bucket, tensor, full, [](parameter_spec const& spec) { return spec.value; },
      [&](any_span elements, any_span place) { Device::copy(stream, place, elements); });
}

}  // namespace zero::inline v0
