// SPDX-License-Identifier: MIT
// A call of the CUDA runtime fails, each in turn: an exception on every rank, no leak, no hang. Of
// stage 3 every call fails; else, for time, every third of each rank and function, and under
// ThreadSanitizer a fifth of those.
#include <zero/comm/loopback.hpp>

#include <doctest/doctest.h>
#include <support/failing_call.hpp>

#include <chrono>
#include <cstdint>
#include <string>

namespace {

template <class Life>
std::uint64_t check(std::uint64_t stride, int ranks, std::string const& name, Life const& life) {
  auto const run = [&](auto const& on_rank) {
    zero::run_loopback(ranks, on_rank, {.deadline = std::chrono::seconds{20}});
  };
  return test::fail_each_call(
      name, stride, [&] { return test::lives(run, life); },
      [](test::call_place const& /*where*/) { return false; });
}

std::uint64_t check(std::uint64_t stride, test::setting const& how, bool by_parameter = false) {
  return check(stride, 2, how.name, [&](auto& comm) { test::live(comm, how, by_parameter); });
}

}  // namespace

TEST_CASE("every call of a model's life over loopback fails, one in each life, in stage 3") {
  CHECK(check(1, {"stage 3",
                  zero::stage3{},
                  zero::reduce_per_microbatch{},
                  {.clip_norm = 1.0, .overlap = true}}) > 1000);
}

TEST_CASE("so do those in stages 0, 1 and 2, and with gradients one by one") {
  CHECK(check(3, {"stage 0", zero::stage0{}, zero::local_accumulate{}, {}}) > 600);
  CHECK(check(3, {"stage 1", zero::stage1{}, zero::local_accumulate{}, {.overlap = false}}) > 600);
  CHECK(check(3, {"stage 2", zero::stage2{}, zero::local_accumulate{}, {.clip_norm = 1.0}}) > 600);
  CHECK(check(3, {"stage 2, one by one", zero::stage2{}, zero::reduce_per_microbatch{}, {}}, true) >
        600);
}

TEST_CASE("so do those of a life with a captured step") {
  test::setting const how{"captured, stage 3", zero::stage3{}, zero::reduce_per_microbatch{}, {}};
  CHECK(check(3, 1, how.name, [&](auto& comm) { test::live_captured(comm, how); }) > 600);
}
