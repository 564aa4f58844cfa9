// SPDX-License-Identifier: MIT
// What a step calls of the CUDA runtime: it allocates, frees and waits for nothing.
#include <zero/comm/loopback.hpp>
#include <zero/comm/solo.hpp>

#include <doctest/doctest.h>
#include <support/step_calls.hpp>
#include <support/watchdog.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

TEST_CASE("a step allocates, frees and waits for nothing, in every setting") {
  for (test::setting const& how : test::clipped_or_not()) {
    zero::basic_solo<zero::cuda> comm;
    CHECK_MESSAGE(test::other_calls(test::calls_of_step(comm, how)).empty(), how.name);
    test::watchdog const limit;
    zero::run_loopback(2, [&](zero::loopback& each) {
      CHECK_MESSAGE(test::other_calls(test::calls_of_step(each, how)).empty(), how.name);
    });
  }
}

TEST_CASE("what a step found costs one wait of the host, however much of it is read") {
  for (test::setting const& how : test::every_setting({.clip_norm = 1.0, .bucket_bytes = 0})) {
    zero::basic_solo<zero::cuda> comm;
    zero::cuda_stream stream;
    test::device_engine<zero::cuda, float> engine{stream};
    zero::options options = how.options;
    options.stream = stream.native();
    zero::sharded_model model{comm, engine.units(), how.stage, zero::adamw{}, how.policy, options};
    for (std::size_t step = 0; step < 2; ++step) {
      auto const result = engine.step(model, {}, 0, step);
      fake::log(true);
      CHECK_MESSAGE(result.norm() > 0, how.name);
      CHECK_FALSE(result.skipped());
      CHECK(result.norm() > 0);
      test::counts calls;
      for (std::string const& name : fake::logged()) {
        ++calls[name];
      }
      fake::log(false);
      test::erase_questions(calls);
      CHECK_MESSAGE(test::in_words(calls) == "cudaEventSynchronize 1\n", how.name);
    }
  }
}

TEST_CASE("all that a rank alone calls in a step, by hand") {
  std::vector<test::setting> const settings = test::plain_stages();
  for (std::size_t stage = 0; stage < settings.size(); ++stage) {
    zero::basic_solo<zero::cuda> comm;
    // It copies its message, and what it gathers in stage 3.
    test::counts const expected{
        {"zeroFakeLaunch", test::launches_with(10)},
        {"cudaMemcpyAsync", test::reports + 1 + (stage == 3 ? test::gathers[stage] : 0)},
        {"cudaMemsetAsync", test::fills_of(1)},
        {"cudaEventRecord", test::records_in(stage)},
        {"cudaStreamWaitEvent", test::waits_in(stage)}};
    CHECK_MESSAGE(
        test::in_words(test::calls_of_step(comm, settings[stage])) == test::in_words(expected),
        settings[stage].name);
  }
}

TEST_CASE("all that each of two ranks of loopback calls in a step, by hand") {
  std::vector<test::setting> const settings = test::plain_stages();
  for (std::size_t stage = 0; stage < settings.size(); ++stage) {
    test::watchdog const limit;
    zero::run_loopback(2, [&](zero::loopback& comm) {
      std::uint64_t const gathers = test::gathers[stage];
      // Copies: two messages; the peer's half of each all-reduce in stage 0; of what is gathered,
      // the peer's part, and in stage 3 this rank's, too, which is elsewhere.
      std::uint64_t const copies =
          test::reports + 2 + (stage == 0 ? test::reductions : 0) + (stage == 3 ? 2 : 1) * gathers;
      // In each collective a rank tells that it is there, and that it has read, and waits for both
      // of its peer; in an all-reduce also for the sums.
      std::uint64_t const meetings =
          2 * (test::reductions + gathers + 1) + (stage == 0 ? test::reductions : 0);
      test::counts const expected{{"zeroFakeLaunch", test::launches_of_two(stage, comm.rank())},
                                  {"cudaMemcpyAsync", copies},
                                  {"cudaMemsetAsync", test::fills_of(2)},
                                  {"cudaEventRecord", test::records_in(stage) + meetings},
                                  {"cudaStreamWaitEvent", test::waits_in(stage) + meetings}};
      CHECK_MESSAGE(
          test::in_words(test::calls_of_step(comm, settings[stage])) == test::in_words(expected),
          settings[stage].name, ", rank ", comm.rank());
    });
  }
}
