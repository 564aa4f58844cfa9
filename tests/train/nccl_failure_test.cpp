// SPDX-License-Identifier: MIT
// A call of NCCL or the CUDA runtime fails under a model over NCCL, each in turn: an exception on
// every rank, no leak, no hang. Under ThreadSanitizer, every fifth call.
#include <zero/comm/nccl.hpp>
#include <zero/optim/adamw.hpp>

#include <doctest/doctest.h>
#include <comm/ranks.hpp>
#include <fake/child.hpp>
#include <fake/cuda.hpp>
#include <fake/nccl.hpp>
#include <support/device_engine.hpp>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace {

/// What each rank's life threw; empty where it threw nothing.
using messages = std::array<std::string, 2>;

/// Build a model on two ranks, train a step, read the values, and part together.
messages live(zero::nccl_options const& how) {
  messages out;
  auto const body = [&](zero::nccl& comm) {
    zero::cuda_stream stream;
    test::device_engine<zero::cuda, float> engine{stream};
    zero::sharded_model model{comm,
                              engine.units(),
                              zero::stage3{},
                              zero::adamw{},
                              zero::reduce_per_microbatch{},
                              {.clip_norm = 1.0, .stream = stream.native()}};
    engine.step(model, {.microbatches = 1}, comm.rank(), 0);
    static_cast<void>(model.steps(0));
    static_cast<void>(engine.values(model));
    std::array<std::byte, 2> all{};
    comm.exchange(std::array{std::byte{1}}, all);  // a rank that throws isn't here
  };
  try {
    zero::run_nccl(
        2,
        [&](zero::nccl& comm) {
          try {
            body(comm);
          } catch (std::exception const& failure) {
            out[static_cast<std::size_t>(comm.rank())] = failure.what();
            throw;
          }
        },
        how);
  } catch (std::exception const& failure) {
    for (std::string& each : out) {
      each = each.empty() ? failure.what() : each;  // before the ranks began
    }
  }
  return out;
}

/// One of a rank's threads' calls of a function: the first, the second, ... Rank -1 is a thread
/// before it knows its rank.
using place = std::pair<int, std::string>;

/// Notes what is called, and fails one call.
class calls {
 public:
  calls() {
    fake::set_device_count(2);
    fake::protect_device_memory(false);  // for speed
    fake::fail_call(1, cudaErrorUnknown, [this](char const* function) {
      std::lock_guard const lock{mutex_};
      place const here{zero::detail::rank_of_thread, function};
      return ++counts_[here] == number_ && here == failing_;
    });
  }
  /// Call `number` of `failing` fails.
  calls(place failing, std::uint64_t number) : calls{} {
    std::lock_guard const lock{mutex_};
    failing_ = std::move(failing);
    number_ = number;
  }
  calls(calls const&) = delete;
  calls& operator=(calls const&) = delete;
  ~calls() { fake::reset(); }

  [[nodiscard]] std::map<place, std::uint64_t> counts() {
    std::lock_guard const lock{mutex_};
    return counts_;
  }
  [[nodiscard]] bool failed() { return counts()[failing_] >= number_; }

 private:
  std::mutex mutex_;
  place failing_;
  std::uint64_t number_ = 0;
  std::map<place, std::uint64_t> counts_;
};

/// Every call of a model's life fails, one in each life.
void check(zero::nccl_mode mode) {
  zero::nccl_options const how{
      .mode = mode, .scratch_bytes = std::size_t{1} << 20U, .deadline = std::chrono::seconds{10}};
  std::map<place, std::uint64_t> all;
  {
    calls noted;
    CHECK(live(how) == messages{});
    all = noted.counts();
  }
  constexpr std::uint64_t stride = FAKE_HAS_TSAN == 0 ? 1 : 5;  // for time
  std::uint64_t index = 0;
  std::uint64_t lives = 0;
  std::uint64_t failures = 0;
  for (auto const& [where, count] : all) {
    for (std::uint64_t n = 1; n <= count; ++n) {
      if (index++ % stride != 0) {
        continue;
      }
      test::watchdog const limit{std::chrono::seconds{60}};
      messages thrown;
      {
        calls one{where, n};
        thrown = live(how);
        ++lives;
        failures += one.failed() ? 1 : 0;  // how often a call is repeated until it succeeds varies
      }
      std::string const title =
          where.second + " #" + std::to_string(n) + " of rank " + std::to_string(where.first);
      CHECK_MESSAGE(thrown[0].empty() == thrown[1].empty(), title, ": ", thrown[0], " | ",
                    thrown[1]);
      CHECK_MESSAGE(fake::live() == fake::live_counts{}, title);
      CHECK_MESSAGE(fake::live_communicators() == 0, title);
    }
  }
  CHECK(lives * stride > 1000);
  CHECK(10 * failures > 9 * lives);
}

}  // namespace

TEST_CASE("every call of a model's life over NCCL fails, one in each life, in ordered mode") {
  check(zero::nccl_mode::ordered);
}

TEST_CASE("and in fast mode") { check(zero::nccl_mode::fast); }
