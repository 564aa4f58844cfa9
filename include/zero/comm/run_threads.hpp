// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/threads.hpp>
#include <zero/core/error.hpp>

#include <concepts>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

/// @file
/// `run_threads`: a function on P ranks, each in a thread of its own.

namespace zero::inline v0 {
namespace detail {

/// The error to report of those that the ranks of a group threw: the first that isn't the
/// consequence of another rank's.
class rank_errors {
 public:
  /// Keep the exception that is being handled.
  void add(bool primary) noexcept {
    std::lock_guard const lock{mutex_};
    std::exception_ptr& kept = primary ? primary_ : consequence_;
    if (kept == nullptr) {
      kept = std::current_exception();
    }
  }

  void rethrow() const {
    if (primary_ != nullptr || consequence_ != nullptr) {
      std::rethrow_exception(primary_ != nullptr ? primary_ : consequence_);
    }
  }

 private:
  std::mutex mutex_;
  std::exception_ptr primary_;
  std::exception_ptr consequence_;
};

/// One rank: call `function`, and let the peers know how it failed.
template <class Function, class Device>
void run_rank(Function& function, basic_thread_communicator<Device> comm,
              rank_errors& errors) noexcept {
  try {
    std::invoke(function, comm);
  } catch (communication_error const& failure) {
    errors.add(false);
    comm.abort(failure.what());
  } catch (std::exception const& failure) {
    errors.add(true);
    comm.abort(failure.what());
  } catch (...) {
    errors.add(true);
    comm.abort("an exception of unknown type");
  }
}

}  // namespace detail

/// Call `function(comm)` on `ranks` threads, with `comm` a `thread_communicator&` of ranks 0 to
/// `ranks` - 1, and wait for all of them.
///
/// When one throws, its peers' pending and later calls throw, too. Then the first exception is
/// thrown here; a `communication_error`, which is mostly another's consequence, only if there is no
/// other.
/// @throws zero::usage_error  fewer than one rank, or a deadline that isn't in the future.
template <device Device = host, class Function>
  requires std::invocable<Function&, basic_thread_communicator<Device>&>
void run_threads(int ranks, Function&& function, thread_options options = {}) {
  using communicator = basic_thread_communicator<Device>;
  std::vector<communicator> comms = communicator::create(ranks, options);
  detail::rank_errors errors;
  std::vector<std::thread> threads;
  threads.reserve(comms.size());
  auto const join = [&] {
    comms.clear();  // a rank without a thread leaves the group, so that no peer waits for it
    for (std::thread& thread : threads) {
      thread.join();
    }
  };
  try {
    for (communicator& comm : comms) {
      threads.emplace_back([&function, &errors, mine = std::move(comm)]() mutable {
        detail::run_rank(function, std::move(mine), errors);
      });
    }
  } catch (std::system_error const& cause) {
    std::size_t const started = threads.size();
    join();
    throw error{detail::text("run_threads: expected ", ranks, " threads, actual ", started, ": ",
                             std::string_view{cause.what()})};
  }
  join();
  errors.rethrow();
}

}  // namespace zero::inline v0
