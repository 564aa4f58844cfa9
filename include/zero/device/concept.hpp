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

/// A point in a stream's work: a copyable value, ready when default-constructed.
template <class Event>
concept device_event =
    std::default_initializable<Event> && std::copyable<Event> && requires(Event const& event) {
      { event.ready() } -> std::same_as<bool>;
      event.wait();
    };

namespace detail {

/// The work that the concept is checked with.
struct host_work {
  void operator()() const;
};

}  // namespace detail

/// In-order work on a device, whose destructor waits for it. `Stream(true)` runs it concurrently
/// with the caller, where the device can, and `threaded` says whether it does; a default stream
/// need not run it before it is waited for. `enqueue` takes work for the host, as small and trivial
/// as `host_stream` wants.
template <class Stream, class Event>
concept device_stream = std::default_initializable<Stream> &&
                        std::constructible_from<Stream, bool> && std::destructible<Stream> &&
                        requires(Stream& stream, Event const& event, detail::host_work work) {
                          { stream.threaded() } -> std::same_as<bool>;
                          stream.enqueue(work);
                          { stream.record() } -> std::same_as<Event>;
                          stream.wait(event);
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

}  // namespace detail

/// All operations are static: a device has no state of its own. Those with a stream are enqueued on
/// it.
///
/// A type with all of `host`'s members except `launch` is no device: the optimizer couldn't run on
/// it.
template <class Device>
concept device =
    device_event<typename Device::event> &&
    device_stream<typename Device::stream, typename Device::event> &&
    requires(typename Device::stream& stream, std::size_t count, void* memory, const_any_span from,
             any_span to, detail::range_function function, detail::range_sum sum, double* result) {
      { Device::name } -> std::convertible_to<std::string_view>;
      { Device::alignment_bytes } -> std::convertible_to<std::size_t>;
      { Device::allocate(count) } -> std::same_as<void*>;
      { Device::deallocate(memory, count) } noexcept;
      Device::fill_zero(stream, to);
      Device::copy(stream, from, to);
      Device::add(stream, from, to);
      Device::convert(stream, from, to);
      Device::launch(stream, count, function);
      Device::reduce(stream, count, sum, result);
    };

}  // namespace zero::inline v0
