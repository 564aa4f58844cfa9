// SPDX-License-Identifier: MIT
#pragma once

#include <zero/device/host_queue.hpp>

#include <cstdint>
#include <memory>

/// @file
/// `host_stream`: an in-order queue of work on the host, run by the caller or by a thread of its
/// own. After construction neither it nor its events allocate.

namespace zero::inline v0 {

/// A point in a stream's work. A default-constructed one is ready.
///
/// Ordering: a value, to be copied freely; it must not be used after its stream was destroyed.
class host_event {
 public:
  host_event() = default;

  /// Whether the work before the event has run, or was discarded after a failure.
  [[nodiscard]] bool ready() const noexcept {
    return queue_ == nullptr || queue_->finished() >= place_;
  }

  /// Wait for the work before the event. Rethrows what that work threw.
  void wait() const {
    if (queue_ != nullptr) {
      queue_->wait(place_);
    }
  }

 private:
  friend class host_stream;
  host_event(detail::host_queue& queue, std::uint64_t place) noexcept
      : queue_{&queue}, place_{place} {}

  detail::host_queue* queue_ = nullptr;
  std::uint64_t place_ = 0;
};

/// Work in order. An inline stream runs it in the caller, before `enqueue` returns; a threaded one
/// runs it on a thread of its own, concurrently with the caller.
///
/// Ordering: any thread may enqueue, but work must not enqueue on, or synchronize, its own stream.
class host_stream {
 public:
  explicit host_stream(bool threaded = false)
      : queue_{threaded ? std::make_unique<detail::host_queue>() : nullptr} {}

  host_stream(host_stream const&) = delete;
  host_stream& operator=(host_stream const&) = delete;
  /// Waits for the work; an exception that nobody waited for is dropped.
  ~host_stream() = default;

  [[nodiscard]] bool threaded() const noexcept { return queue_ != nullptr; }
  [[nodiscard]] static constexpr bool capturing() noexcept { return false; }

  /// Run `work()` after all earlier work. It is trivially copyable, at most 128 bytes, and what it
  /// refers to must outlive it. Waits while 128 pieces of work are pending.
  ///
  /// An exception from work leaves an inline stream's `enqueue` at once and changes nothing. A
  /// threaded stream keeps the first one, discards all later work, and throws it from every wait
  /// for that work. Work with a member `discarded(std::exception_ptr const&) noexcept` learns of
  /// it.
  template <detail::stream_work F>
  void enqueue(F work) {
    if (queue_ != nullptr) {
      queue_->enqueue(work);
    } else {
      work();
    }
  }

  /// Move `event` behind all work enqueued so far.
  void record(host_event& event) noexcept {
    event = queue_ != nullptr ? host_event{*queue_, queue_->enqueued()} : host_event{};
  }

  /// Let all later work wait for `event`, of this or another stream. If the work before the event
  /// failed, this stream fails alike.
  void wait(host_event const& event) {
    if (queue_ == nullptr) {
      event.wait();
    } else if (event.queue_ != nullptr) {
      queue_->enqueue([event] { event.wait(); });
    }
  }

  /// Wait for all work enqueued so far. Rethrows what it threw.
  void synchronize() {
    host_event all;
    record(all);
    all.wait();
  }

 private:
  std::unique_ptr<detail::host_queue> queue_;
};

}  // namespace zero::inline v0
