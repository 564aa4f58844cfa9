// SPDX-License-Identifier: MIT
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

/// @file
/// A limit on a test's time.

namespace test {

/// Ends the program when a test takes longer than it may: a hang is a failure, not a wait.
class watchdog {
 public:
  explicit watchdog(std::chrono::seconds limit = std::chrono::seconds{120},
                    std::string what = "the test")
      : thread_{[this, limit, what = std::move(what)] {
          std::unique_lock lock{mutex_};
          if (!wake_.wait_for(lock, limit, [this] { return done_; })) {
            std::fprintf(stderr, "watchdog: %s still runs after %lld s\n", what.c_str(),
                         static_cast<long long>(limit.count()));
            std::abort();
          }
        }} {}
  watchdog(watchdog const&) = delete;
  watchdog& operator=(watchdog const&) = delete;
  ~watchdog() {
    {
      std::lock_guard const lock{mutex_};
      done_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable wake_;
  bool done_ = false;
  std::thread thread_;
};

}  // namespace test
