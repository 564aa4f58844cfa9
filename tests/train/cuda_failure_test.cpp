// SPDX-License-Identifier: MIT
// A call of the CUDA runtime fails, each in turn: an exception on every rank, no leak, no hang. Of
// stage 3 every call fails; else, for time, every third of each rank and function, and under
// ThreadSanitizer a fifth of those.
#include <zero/comm/loopback.hpp>

#include <doctest/doctest.h>
#include <support/failing_call.hpp>

#include <chrono>
#include <cstdint>

namespace {

std::uint64_t check(std::uint64_t stride, test::setting const& how) {
  auto const on_two = [](auto const& on_rank) {
    zero::run_loopback(2, on_rank, {.deadline = std::chrono::seconds{20}});
  };
  return test::fail_each_call(
      how.name, stride, [&] { return test::lives(on_two, how); },
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
