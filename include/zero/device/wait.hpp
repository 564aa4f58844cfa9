// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/config.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

/// @file
/// How a host thread waits for another: it spins for half a microsecond, yields for two hundred,
/// then sleeps. So a wait is short where both threads have a core, and costs no core where they
/// share one.

namespace zero::inline v0::detail {

/// Lets threads wait for a condition over atomics that other threads change and then `notify`.
///
/// Ordering: a thread changes the atomics (release or weaker) and then calls `notify`; what it
///           wrote before is seen by a waiter whose predicate (acquire) held. It must outlive
///           `notify`.
class waiter {
 public:
  using clock = std::chrono::steady_clock;

  waiter() = default;
  waiter(waiter const&) = delete;
  waiter& operator=(waiter const&) = delete;

  /// Wait until `ready()`, which may run under a lock and must neither throw nor notify.
  /// Returns its value: false only after the deadline.
  template <class Predicate>
  bool wait_until(Predicate ready, clock::time_point deadline = clock::time_point::max()) {
    if (ready()) {
      return true;
    }
    clock::time_point const start = clock::now();
    for (clock::time_point now = start; now - start < spin_time; now = clock::now()) {
      pause();
      if (ready()) {
        return true;
      }
    }
    for (clock::time_point now = start; now - start < yield_time; now = clock::now()) {
      if (now >= deadline) {
        return ready();
      }
      std::this_thread::yield();
      if (ready()) {
        return true;
      }
    }
    return sleep_until(ready, deadline);
  }

  /// Wake every waiter whose condition may hold now. Cheap while nobody sleeps.
  void notify() noexcept {
    // A read-modify-write, like the one of a thread that goes to sleep: whichever is second sees
    // what the other thread did before its own.
    if (sleeping_.fetch_add(0, std::memory_order_acq_rel) != 0) {
      {
        std::lock_guard const lock{mutex_};
      }
      wake_.notify_all();
    }
  }

 private:
  static constexpr std::chrono::nanoseconds spin_time{500};
  static constexpr std::chrono::microseconds yield_time{200};

  static void pause() noexcept {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  template <class Predicate>
  bool sleep_until(Predicate& ready, clock::time_point deadline) {
    std::unique_lock lock{mutex_};
    sleeping_.fetch_add(1, std::memory_order_acq_rel);
    bool in_time = true;
    while (!ready() && in_time) {
      if (deadline ==
          clock::time_point::max()) {  // would overflow in the conversion to a system time
        wake_.wait(lock);
      } else {
        in_time = wake_.wait_until(lock, deadline) == std::cv_status::no_timeout;
      }
    }
    sleeping_.fetch_sub(1, std::memory_order_relaxed);
    return in_time || ready();
  }

  std::atomic<int> sleeping_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace zero::inline v0::detail
