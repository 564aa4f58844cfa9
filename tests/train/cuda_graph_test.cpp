// SPDX-License-Identifier: MIT
// Whole steps captured into a CUDA graph, and replayed.
#include <zero/comm/loopback.hpp>
#include <zero/comm/solo.hpp>
#include <zero/device/cuda.hpp>
#include <zero/optim/adamw.hpp>

#include <doctest/doctest.h>
#if defined(ZERO_FAKE_CUDA)
#include <fake/cuda.hpp>
#endif
#include <support/failures.hpp>
#include <support/graph.hpp>
#include <support/thrown.hpp>
#include <support/watchdog.hpp>

#include <chrono>
#include <string>
#include <string_view>

namespace {

using solo = zero::basic_solo<zero::cuda>;
using solo_rank = test::graph_rank<solo>;

constexpr auto on_loopback = [](int ranks, auto const& function) {
  zero::run_loopback(ranks, function, {.deadline = std::chrono::seconds{20}});
};

/// What capturing `attempt(rank)` throws, after an eager step.
template <class Attempt>
std::string tried(zero::stage at, Attempt attempt) {
  solo comm;
  solo_rank rank{comm,
                 {"", at, zero::reduce_per_microbatch{}, {.clip_norm = 2.0, .bucket_bytes = 0}}};
  rank.step();
  rank.settle();
  return test::message_of<zero::error>([&] {
    test::graph{rank.stream.native(), [&] { attempt(rank); }};
  });
}

}  // namespace

TEST_CASE("ten replays of a step have the bits of ten eager steps, learning rates included") {
  for (test::setting const& how : test::captured_settings()) {
    solo comm;
    test::check_replays(comm, how);
  }
}

TEST_CASE("so have those of one rank of loopback") {
  for (test::setting const& how : test::captured_settings()) {
    test::watchdog const limit;
    zero::run_loopback(1, [&](zero::loopback& comm) { test::check_replays(comm, how); });
  }
}

TEST_CASE("ranks that share a GPU meet on the host, so each of them refuses a capture") {
  for (test::named_stage const& each : test::every_stage()) {
    test::failures const caught = test::run_failing(
        2,
        [&each](zero::loopback& comm) {
          test::graph_rank rank{comm, {"", each.second, zero::reduce_per_microbatch{}, {}}};
          rank.step();
          rank.settle();
          test::graph const captured{rank.stream.native(),
                                     [&] {
                                       rank.step();
                                       rank.model.wait();
                                     },
                                     cudaStreamCaptureModeThreadLocal};
        },
        on_loopback);
    CHECK_MESSAGE(
        caught.all_say({"expected no capture where threads share a GPU, actual one (rank "}),
        each.first, ": ", caught.text());
  }
}

TEST_CASE("what a capture can't hold throws when it is tried") {
  std::string_view const no_wait = "expected no wait of the host in a capture, actual one";
  std::string_view const refused = "actual cudaErrorStreamCaptureUnsupported";
  std::string_view const unjoined = "actual cudaErrorStreamCaptureUnjoined";
  for (test::named_stage const& each : test::every_stage()) {
    auto const check = [&](std::string_view what, std::string_view expected, auto attempt) {
      std::string const actual = tried(each.second, attempt);
      CHECK_MESSAGE(actual.find(expected) != std::string::npos, each.first, ", ", what, ": ",
                    actual);
    };
    // Results, which the host would wait for.
    check("a norm", no_wait, [](solo_rank& rank) { static_cast<void>(rank.step().norm()); });
    check("whether it was skipped", no_wait,
          [](solo_rank& rank) { static_cast<void>(rank.step().skipped()); });
    check("a count of steps", no_wait, [](solo_rank& rank) {
      rank.step();
      static_cast<void>(rank.model.steps(0));
    });
    check("the count of steps before", refused,
          [](solo_rank& rank) { static_cast<void>(rank.model.steps(0)); });
    check("a reduced gradient", no_wait, [](solo_rank& rank) {
      rank.engine.microbatch(rank.model, {.microbatches = 1}, 0, 0, 0);
      static_cast<void>(rank.model.gradient(0));
    });
    check("a wait for the stream", no_wait, [](solo_rank& rank) {
      rank.step();
      rank.stream.synchronize();
    });
    check("values that are read", refused, [](solo_rank& rank) {
      rank.step();
      static_cast<void>(rank.values());
    });
    // What allocates.
    check("a release", "release: expected no capture, actual one under way (rank 0)",
          [](solo_rank& rank) {
            rank.step();
            rank.model.release();
          });
    check("another model", refused, [&](solo_rank& rank) {
      solo_rank const other{rank.comm, {"", each.second, zero::reduce_per_microbatch{}, {}}};
    });
    // What doesn't end idle.
    check("a step without a wait", unjoined, [](solo_rank& rank) { rank.step(); });
    check("half a window", unjoined, [](solo_rank& rank) {
      rank.engine.microbatch(rank.model, rank.run, 0, 0, 0);
      rank.model.wait();
    });
    // Its own replay.
    check("a replay", "replayed: expected no capture, actual one under way (rank 0)",
          [](solo_rank& rank) { rank.model.replayed(1); });
    // What each replay would write again.
    check("hyperparameters", "write_hyperparameters: expected no capture, actual one under way (",
          [](solo_rank& rank) { rank.model.write_hyperparameters(); });
  }
}

#if defined(ZERO_FAKE_CUDA)
TEST_CASE("a capture that begins with work in flight, or in a window, is refused") {
  for (test::named_stage const& each : test::every_stage()) {
    solo comm;
    solo_rank rank{comm, {"", each.second, zero::local_accumulate{}, {}}};
    fake::delay_all(std::chrono::milliseconds{5});
    rank.step();
    std::string const actual = test::message_of<zero::error>([&] {
      test::graph{rank.stream.native(), [&] {
                    rank.step();
                    rank.model.wait();
                  }};
    });
    CHECK_MESSAGE(
        actual.find("expected nothing in flight where a capture begins") != std::string::npos,
        each.first, ": ", actual);
    fake::delay_all(std::chrono::microseconds{0});
  }
  for (test::named_stage const& each : test::every_stage()) {
    solo comm;
    solo_rank rank{comm, {"", each.second, zero::local_accumulate{}, {}}};
    {
      auto micro = rank.model.microbatch(0, 2);
      for (std::size_t u = test::device_units().size(); u-- > 0;) {
        auto const lease = micro.backward(u);
      }
    }
    rank.stream.synchronize();
    CHECK_MESSAGE(test::message_of<zero::error>([&] {
                    test::graph{rank.stream.native(),
                                [&] { auto const micro = rank.model.microbatch(1, 2); }};
                  }) ==
                      "capture: expected to begin before a window's first micro-batch, actual "
                      "after 1 of 2 (rank 0)",
                  each.first);
  }
}
#endif
