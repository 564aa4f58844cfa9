// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/run_threads.hpp>
#include <zero/core/error.hpp>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <initializer_list>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

/// @file
/// What every rank throws when one of them does something wrong, and a watchdog for the case that
/// none does.

namespace test {

/// Ends the program when it lives too long: a hang is a failure, not a wait.
class watchdog {
 public:
  explicit watchdog(std::string_view what, std::chrono::seconds limit = std::chrono::seconds{60})
      : thread_{[this, what, limit] {
          std::unique_lock lock{mutex_};
          if (!ended_.wait_for(lock, limit, [this] { return done_; })) {
            std::fprintf(stderr, "watchdog: %.*s hangs\n", static_cast<int>(what.size()),
                         what.data());
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
    ended_.notify_one();
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable ended_;
  bool done_ = false;
  std::thread thread_;
};

enum class kind { nothing, usage, communication, other };

/// What a rank threw.
struct thrown {
  test::kind kind = test::kind::nothing;
  std::string message;

  [[nodiscard]] bool says(std::string_view part) const {
    return message.find(part) != std::string::npos;
  }
  [[nodiscard]] bool says(std::initializer_list<std::string_view> parts) const {
    return std::all_of(parts.begin(), parts.end(),
                       [this](std::string_view part) { return says(part); });
  }
};

/// What `call()` throws.
template <class Call>
[[nodiscard]] thrown what_throws(Call call) {
  try {
    call();
  } catch (zero::usage_error const& caught) {
    return {kind::usage, caught.what()};
  } catch (zero::communication_error const& caught) {
    return {kind::communication, caught.what()};
  } catch (std::exception const& caught) {
    return {kind::other, caught.what()};
  } catch (...) {
    return {kind::other, "not an exception"};
  }
  return {};
}

/// What each of `ranks` ranks throws from `body(comm)`, and how long all of them took.
struct failures {
  std::vector<thrown> ranks;
  std::chrono::milliseconds took{};

  /// Every rank failed, and its message has every part.
  [[nodiscard]] bool all_say(std::initializer_list<std::string_view> parts) const {
    return std::all_of(ranks.begin(), ranks.end(), [&](thrown const& each) {
      return each.kind != kind::nothing && each.says(parts);
    });
  }
  /// All messages, for a failed check.
  [[nodiscard]] std::string text() const {
    std::string out;
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      out += "rank " + std::to_string(rank) + ": " +
             (ranks[rank].kind == kind::nothing ? "threw nothing" : ranks[rank].message) + "\n";
    }
    return out;
  }
};

template <class Body>
[[nodiscard]] failures run_failing(int ranks, Body body) {
  watchdog const guard{"run_failing"};
  failures out;
  out.ranks.resize(static_cast<std::size_t>(ranks));
  auto const start = std::chrono::steady_clock::now();
  auto const run = [&](zero::thread_communicator& comm) {
    std::exception_ptr caught;
    out.ranks[static_cast<std::size_t>(comm.rank())] = what_throws([&] {
      try {
        body(comm);
      } catch (...) {
        caught = std::current_exception();
        throw;
      }
    });
    if (caught) {
      std::rethrow_exception(caught);
    }
  };
  static_cast<void>(what_throws([&] {
    zero::run_threads(ranks, run, zero::thread_options{.deadline = std::chrono::seconds{3}});
  }));
  out.took = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::steady_clock::now() - start);
  return out;
}

}  // namespace test
