// SPDX-License-Identifier: MIT
#pragma once

#include <doctest/doctest.h>
#include <fake/child.hpp>
#include <fake/cuda.hpp>
#include <support/device_engine.hpp>
#include <support/graph.hpp>
#include <support/settings.hpp>
#include <support/watchdog.hpp>
#include <zero/device/cuda.hpp>
#include <zero/device/cuda_error.hpp>
#include <zero/optim/adamw.hpp>
#include <zero/train/sharded_model.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

/// @file
/// A call of the CUDA runtime or of NCCL that fails, each in turn, in the lives of two ranks: which
/// of them the ranks must throw about.

namespace test {

/// What each rank's life threw; empty where it threw nothing.
using messages = std::array<std::string, 2>;

/// A rank's calls of a function. Rank -1 are threads before they know their rank, and the threads
/// that watch a rank's handles of NCCL.
using call_place = std::pair<int, std::string>;

/// This rank's life is over, but for destructors: they can't throw.
inline thread_local bool only_destructors_left = false;

/// The end of a life: all ranks come here, unless one throws.
template <class Communicator>
void part(Communicator& comm) {
  std::vector<std::byte> all(static_cast<std::size_t>(comm.size()));
  comm.exchange(std::array{std::byte{1}}, all);
  only_destructors_left = true;
}

/// A rank's life: build a model, train a step, read the values, release it, and part together.
template <class Communicator>
void live(Communicator& comm, setting const& how, bool by_parameter = false) {
  zero::cuda_stream stream;
  zero::options options = how.options;
  options.stream = stream.native();
  device_engine<zero::cuda, float> engine{stream};
  zero::sharded_model model{comm, engine.units(), how.stage, zero::adamw{}, how.policy, options};
  engine.step(model, {.microbatches = 1, .by_parameter = by_parameter}, comm.rank(), 0);
  static_cast<void>(model.steps(0));
  static_cast<void>(engine.values(model));
  model.release();
  part(comm);
}

/// A rank's life whose second step is a graph's.
template <class Communicator>
void live_captured(Communicator& comm, setting const& how) {
  graph_rank rank{comm, how};
  rank.step();
  rank.settle();
  graph captured{rank.stream.native(), [&] {
                   rank.step();
                   rank.model.wait();
                 }};
  rank.meet();
  rank.model.write_hyperparameters();
  captured.launch(rank.stream.native());
  rank.model.replayed(1);
  static_cast<void>(rank.values());
  part(comm);
}

/// Live, on at most two ranks, by `run(on_rank)`, the life `life(comm)`, and catch what they throw.
template <class Run, class Life>
[[nodiscard]] messages lives(Run const& run, Life const& life) {
  messages out;
  std::array<bool, 2> began{};
  try {
    run([&](auto& comm) {
      auto const rank = static_cast<std::size_t>(comm.rank());
      began[rank] = true;
      try {
        life(comm);
      } catch (std::exception const& failure) {
        out[rank] = failure.what();
        throw;
      }
    });
  } catch (std::exception const& failure) {
    for (std::size_t rank = 0; rank < out.size(); ++rank) {
      if (!began[rank]) {  // or there is no such rank
        out[rank] = failure.what();
      }
    }
  }
  return out;
}

/// Counts what is called, and fails one call.
class failing_call {
 public:
  /// Only counts.
  failing_call() : failing_call{{}, 0} {}
  /// Call `number` of `failing` fails.
  failing_call(call_place failing, std::uint64_t number)
      : failing_{std::move(failing)}, number_{number} {
    fake::protect_device_memory(false);  // for speed
    fake::fail_call(1, cudaErrorUnknown, [this](char const* function) {
      observe(function);
      return false;  // it hears of every call
    });
    fake::fail_call(1, cudaErrorUnknown,
                    [this](char const* /*function*/) { return std::exchange(now_, false); });
  }
  failing_call(failing_call const&) = delete;
  failing_call& operator=(failing_call const&) = delete;
  ~failing_call() { fake::reset(); }

  [[nodiscard]] std::map<call_place, std::uint64_t> counts() {
    std::lock_guard const lock{mutex_};
    return counts_;
  }
  /// The call was made: how often one is repeated until it succeeds varies.
  [[nodiscard]] bool happened() { return counts()[failing_] >= number_; }

  /// Whether ranks may go on as if nothing had happened.
  [[nodiscard]] bool may_be_quiet() {
    // What ends something frees it in spite of an error, which a destructor can't throw.
    static constexpr std::array<std::string_view, 8> ends{
        "cudaFree",        "cudaFreeHost", "cudaStreamDestroy",  "cudaEventDestroy",
        "ncclCommDestroy", "ncclMemFree",  "ncclCommDeregister", "ncclCommWindowDeregister"};
    // An event that can't be asked for isn't done, and is asked for again, in whatever capture mode
    // the thread is: that matters to captures only.
    static constexpr std::array<std::string_view, 2> asks{"cudaEventQuery",
                                                          "cudaThreadExchangeStreamCaptureMode"};
    std::lock_guard const lock{mutex_};
    auto const is_in = [this](auto const& names) {
      return std::find(names.begin(), names.end(), failing_.second) != names.end();
    };
    // A destructor asks for the device, sets its own, and waits, before it ends something.
    bool const before_end =
        (failing_.second == "cudaStreamSynchronize" && next_ == "cudaStreamDestroy") ||
        (failing_.second == "cudaGetDevice" && next_ == "cudaSetDevice");
    return is_in(ends) || is_in(asks) || before_end || in_destructors_;
  }

 private:
  void observe(char const* function) {
    thread_local bool watches = false;  // NCCL's handle; such a thread begins without a rank
    std::string_view const name{function};
    std::lock_guard const lock{mutex_};
    bool const sets_mode = name == "cudaThreadExchangeStreamCaptureMode";
    watches = watches || (zero::detail::rank_of_thread < 0 && sets_mode);
    if (caller_ == std::this_thread::get_id() && next_.empty() && !sets_mode) {
      next_ = function;
    }
    call_place const here{watches ? -1 : zero::detail::rank_of_thread, function};
    if (++counts_[here] == number_ && here == failing_) {
      now_ = true;
      caller_ = std::this_thread::get_id();
      in_destructors_ = only_destructors_left;
    }
  }

  std::mutex mutex_;
  call_place failing_;
  std::uint64_t number_ = 0;
  std::map<call_place, std::uint64_t> counts_;
  bool now_ = false;             // this call fails
  std::thread::id caller_;       // of the failed call
  std::string next_;             // what it called next, but for modes of capture
  bool in_destructors_ = false;  // it was made at the end of the rank's life
};

/// Every call of the lives that `live()` is fails, one in each life: of each place every
/// `stride`-th, from the first on, and under ThreadSanitizer every fifth of those. Further ones
/// that ranks need not throw about are `is_quiet(place)`. Returns for how many calls every rank had
/// to throw, each that failed standing for those that were passed over.
template <class Live, class Quiet>
std::uint64_t fail_each_call(std::string const& title, std::uint64_t stride, Live const& live,
                             Quiet const& is_quiet) {
  std::uint64_t const each = FAKE_HAS_TSAN == 0 ? stride : 5 * stride;
  std::map<call_place, std::uint64_t> all;
  {
    failing_call noted;
    messages const thrown = live();
    CHECK_MESSAGE((thrown[0] + thrown[1]).empty(), title, ": ", thrown[0], " | ", thrown[1]);
    all = noted.counts();
  }
  std::uint64_t loud = 0;
  fake::live_counts left;
  for (auto const& [where, count] : all) {
    for (std::uint64_t n = 1; n <= count; n += each) {
      watchdog const limit{std::chrono::seconds{60}};
      messages thrown;
      bool must_throw = false;
      {
        failing_call one{where, n};
        thrown = live();
        must_throw = one.happened() && !one.may_be_quiet() && !is_quiet(where);
      }
      std::string const about = title + ": " + where.second + " #" + std::to_string(n) +
                                " of rank " + std::to_string(where.first) + ": " + thrown[0] +
                                " | " + thrown[1];
      CHECK_MESSAGE(thrown[0].empty() == thrown[1].empty(), about);
      CHECK_MESSAGE((!must_throw || !thrown[0].empty()), about);
      CHECK_MESSAGE((!must_throw || thrown[0].find(where.second) != std::string::npos ||
                     thrown[1].find(where.second) != std::string::npos),
                    about);
      CHECK_MESSAGE(fake::live() == left, about);
      left = fake::live();  // each leak is told once
      loud += must_throw ? 1 : 0;
    }
  }
  return loud * each;
}

}  // namespace test
