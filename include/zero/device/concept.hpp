// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/any_span.hpp>

#include <concepts>
#include <cstddef>
#include <string_view>

/// @file
/// What the library needs of a place where tensors live: memory, streams of work, events between
/// them, and a few elementwise operations. `host` models it.

namespace zero::inline v0 {

/// A point in a stream's work, where `stream.record(event)` put it last; ready before that.
template <class Event>
concept device_event =
    std::default_initializable<Event> && std::movable<Event> && requires(Event const& event) {
      { event.ready() } -> std::same_as<bool>;
      event.wait();
    };

/// In-order work on a device, whose destructor waits for it. `threaded` says whether it runs
/// concurrently with the caller, `capturing` whether it is recorded into a graph instead.
template <class Stream, class Event>
concept device_stream = std::default_initializable<Stream> && std::destructible<Stream> &&
                        requires(Stream& stream, Event& event, Event const& recorded) {
                          { stream.threaded() } -> std::same_as<bool>;
                          { stream.capturing() } -> std::same_as<bool>;
                          stream.record(event);
                          stream.wait(recorded);
                          stream.synchronize();
                        };

namespace detail {

/// The elementwise functions that the concept is checked with.
struct range_function {
  void operator()(std::size_t first, std::size_t count) const;
};
struct range_sum {
  double operator()(std::size_t first, std::size_t count) const;
};
struct any_work {
  void operator()() const;
};

}  // namespace detail

/// All operations are static: a device has no state of its own. Those with a stream are enqueued on
/// it.
///
///   engine_stream(native)                   the stream that the engine's own work is ordered with
///   communication_stream(overlap, native)   for collectives; without overlap the engine's, too
///   clean_up(work)                          work(), at an end: it may wait whatever another thread
///                                           does, and its exceptions are dropped
///   has_host_memory                         the host may touch the device's memory
///   any_collective_order                    ranks may use two communicators in orders that differ
///   copy, upload, download                  within the device, from and to the host; the last two
///                                           wait
///   publish(stream, from, to)               copy a few bytes to memory of `allocate_host`
///   launch(stream, n, function)             function(first, count) over ranges that cover [0, n)
///   accumulate(stream, n, function, result, scratch)
///                                           *result += function(first, count), over such ranges;
///                                           scratch has reduce_blocks times the result's bytes
///
/// A type with all of `host`'s members except `launch` is no device: the optimizer couldn't run on
/// it.
template <class Device>
concept device =
    device_event<typename Device::event> &&
    device_stream<typename Device::stream, typename Device::event> &&
    requires(typename Device::stream& stream, std::size_t count, void* memory, const_any_span from,
             any_span to, bool overlap, detail::range_function function, detail::range_sum sum,
             double* result, detail::any_work work) {
      { Device::name } -> std::convertible_to<std::string_view>;
      { Device::alignment_bytes } -> std::convertible_to<std::size_t>;
      { Device::reduce_blocks } -> std::convertible_to<std::size_t>;
      { Device::has_host_memory } -> std::convertible_to<bool>;
      { Device::any_collective_order } -> std::convertible_to<bool>;
      { Device::engine_stream(memory) } -> std::same_as<typename Device::stream>;
      { Device::communication_stream(overlap, memory) } -> std::same_as<typename Device::stream>;
      { Device::allocate(count) } -> std::same_as<void*>;
      { Device::deallocate(memory, count) } noexcept;
      { Device::allocate_host(count) } -> std::same_as<void*>;
      { Device::deallocate_host(memory, count) } noexcept;
      { Device::clean_up(work) } noexcept;
      Device::fill_zero(stream, to);
      Device::copy(stream, from, to);
      Device::upload(stream, from, to);
      Device::download(stream, from, to);
      Device::publish(stream, from, to);
      Device::add(stream, from, to);
      Device::convert(stream, from, to);
      Device::launch(stream, count, function);
      Device::accumulate(stream, count, sum, result, memory);
    };

}  // namespace zero::inline v0
