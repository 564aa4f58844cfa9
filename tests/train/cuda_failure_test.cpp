// SPDX-License-Identifier: MIT
// A call of the CUDA runtime fails, each in turn: an exception on every rank, no leak, no hang. Of
// stage 3 every call fails; else, for time, every third of each rank and function, and under
// ThreadSanitizer a fifth of those.
#include <zero/comm/loopback.hpp>
#include <zero/optim/adamw.hpp>

#include <doctest/doctest.h>
#include <fake/child.hpp>
#include <support/device_engine.hpp>
#include <support/failing_call.hpp>

#include <chrono>
#include <cstdint>
#include <string>

namespace {

/// Build a model on two ranks, train a step, read the values, and part together.
test::messages live(test::setting const& how) {
  return test::messages_of(
      [](auto const& on_rank) {
        zero::run_loopback(2, on_rank, {.deadline = std::chrono::seconds{20}});
      },
      [&](zero::loopback& comm) {
        zero::cuda_stream stream;
        zero::options options = how.options;
        options.stream = stream.native();
        test::device_engine<zero::cuda, float> engine{stream};
        zero::sharded_model model{comm,          engine.units(), how.stage,
                                  zero::adamw{}, how.policy,     options};
        engine.step(model, {.microbatches = 1}, comm.rank(), 0);
        static_cast<void>(model.steps(0));
        static_cast<void>(engine.values(model));
        test::part(comm);
      });
}

std::uint64_t check(std::uint64_t stride, test::setting const& how) {
  std::uint64_t const each = FAKE_HAS_TSAN == 0 ? stride : 5 * stride;
  return each * test::fail_each_call(
                    how.name, each, [&] { return live(how); },
                    [](test::call_place const& /*where*/) { return false; });
}

}  // namespace

TEST_CASE("every call of a model's life over loopback fails, one in each life, in stage 3") {
  CHECK(check(1, {"stage 3",
                  zero::stage3{},
                  zero::reduce_per_microbatch{},
                  {.clip_norm = 1.0, .overlap = true}}) > 1000);
}

TEST_CASE("so do those in stages 1 and 2") {
  CHECK(check(3, {"stage 1", zero::stage1{}, zero::local_accumulate{}, {.overlap = false}}) > 600);
  CHECK(check(3, {"stage 2", zero::stage2{}, zero::local_accumulate{}, {.clip_norm = 1.0}}) > 600);
}
