// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/run_threads.hpp>
#include <zero/core/error.hpp>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

/// @file
/// What tests with several ranks share: a limit on their time, and the errors that ranks caught.

namespace test {

/// Ends the program when a test takes longer than it may: a hang is a failure, not a wait.
class watchdog {
 public:
  explicit watchdog(std::chrono::seconds limit = std::chrono::seconds{120})
      : thread_{[this, limit] {
          std::unique_lock lock{mutex_};
          if (!wake_.wait_for(lock, limit, [this] { return done_; })) {
            std::fprintf(stderr, "watchdog: the test still runs after %lld s\n",
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

/// `zero::run_threads` under a watchdog.
template <class Function>
void run_ranks(int ranks, Function&& function, zero::thread_options options = {}) {
  watchdog const limit;
  zero::run_threads(ranks, std::forward<Function>(function), options);
}

/// An error that was caught.
struct failure {
  std::string message = "no error";
  int origin = -2;
  std::chrono::milliseconds after{0};

  [[nodiscard]] bool says(std::string const& part) const {
    return message.find(part) != std::string::npos;
  }
};

/// The communication error that `call` throws, and when.
template <class Call>
failure failure_of(Call const& call) {
  using clock = std::chrono::steady_clock;
  failure out;
  auto const start = clock::now();
  try {
    call();
  } catch (zero::communication_error const& caught) {
    out.message = caught.what();
    out.origin = caught.origin();
  }
  out.after = std::chrono::duration_cast<std::chrono::milliseconds>(clock::now() - start);
  return out;
}

/// The text of the usage error that `call` throws.
template <class Call>
std::string usage_error_of(Call const& call) {
  try {
    call();
  } catch (zero::usage_error const& caught) {
    return caught.what();
  }
  return "no error";
}

}  // namespace test
