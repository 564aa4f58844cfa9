// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/error.hpp>
#include <zero/device/wait.hpp>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <type_traits>

/// @file
/// The worker thread of a `host_stream` and its fixed ring of work. Nothing here is for users.

namespace zero::inline v0::detail {

/// Whether F can be work of a stream: the ring holds it by value, without an allocation.
template <class F>
concept stream_work = std::is_trivially_copyable_v<F> && std::is_invocable_v<F&> &&
                      sizeof(F) <= 128 && alignof(F) <= alignof(std::max_align_t);

/// One thread that runs work in the order in which it came.
///
/// Ordering: any thread may enqueue and wait, except that work must not enqueue on its own queue.
///           After work threw, later work is discarded: its `discarded(exception)` runs in its
///           place, where it has one.
class host_queue {
 public:
  static constexpr std::size_t capacity = 128;

  host_queue() {
    try {
      worker_ = std::thread{[this] { run(); }};
    } catch (std::system_error const& cause) {
      throw error{text("host_stream: could not start a thread: ", cause.what())};
    }
  }
  host_queue(host_queue const&) = delete;
  host_queue& operator=(host_queue const&) = delete;
  ~host_queue() {
    stopping_.store(true, std::memory_order_release);
    arrived_.notify();
    worker_.join();
  }

  /// Waits while the ring is full.
  template <stream_work F>
  void enqueue(F work) {
    {
      std::lock_guard const lock{enqueue_mutex_};
      std::uint64_t const place = enqueued_.load(std::memory_order_relaxed);
      done_.wait_until(
          [&] { return place - finished_.load(std::memory_order_acquire) < capacity; });
      slot& next = ring_[place % capacity];
      ::new (static_cast<void*>(next.work.data())) F(work);
      next.run = [](void* stored) { (*static_cast<F*>(stored))(); };
      next.discard = []([[maybe_unused]] void* stored,
                        [[maybe_unused]] std::exception_ptr const& failure) noexcept {
        if constexpr (requires(F& discardable) { discardable.discarded(failure); }) {
          static_cast<F*>(stored)->discarded(failure);
        }
      };
      enqueued_.store(place + 1, std::memory_order_release);
    }
    arrived_.notify();
  }

  [[nodiscard]] std::uint64_t enqueued() const noexcept {
    return enqueued_.load(std::memory_order_acquire);
  }
  [[nodiscard]] std::uint64_t finished() const noexcept {
    return finished_.load(std::memory_order_acquire);
  }

  /// Wait for the first `count` pieces of work; rethrows what one of them threw.
  void wait(std::uint64_t count) {
    done_.wait_until([&] { return finished() >= count; });
    if (failed_.load(std::memory_order_acquire) < count) {
      std::rethrow_exception(failure_);
    }
  }

 private:
  struct slot {
    alignas(std::max_align_t) std::array<std::byte, 128> work;
    void (*run)(void*);
    void (*discard)(void*, std::exception_ptr const&) noexcept;
  };

  void run() noexcept {
    for (std::uint64_t place = 0;; ++place) {
      arrived_.wait_until(
          [&] { return enqueued() != place || stopping_.load(std::memory_order_acquire); });
      if (enqueued() == place) {
        return;
      }
      slot& next = ring_[place % capacity];
      if (failed_.load(std::memory_order_relaxed) != none) {
        next.discard(next.work.data(), failure_);
      } else {
        try {
          next.run(next.work.data());
        } catch (...) {
          failure_ = std::current_exception();
          failed_.store(place, std::memory_order_release);
        }
      }
      finished_.store(place + 1, std::memory_order_release);
      done_.notify();
    }
  }

  static constexpr std::uint64_t none = std::numeric_limits<std::uint64_t>::max();

  std::mutex enqueue_mutex_;
  std::atomic<std::uint64_t> enqueued_{0};
  std::atomic<std::uint64_t> finished_{0};
  std::atomic<std::uint64_t> failed_{none};  // the place of the work that threw `failure_`
  std::atomic<bool> stopping_{false};
  std::exception_ptr failure_;
  waiter arrived_;
  waiter done_;
  std::array<slot, capacity> ring_;
  std::thread worker_;
};

}  // namespace zero::inline v0::detail
