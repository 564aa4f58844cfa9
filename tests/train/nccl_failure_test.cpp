// SPDX-License-Identifier: MIT
// A call of NCCL or the CUDA runtime fails under a model over NCCL, each in turn: an exception on
// every rank, no leak, no hang. Of stage 3 in ordered mode every call fails; else, for time, every
// third of each rank and function, and under ThreadSanitizer a fifth of those.
#include <zero/comm/nccl.hpp>

#include <doctest/doctest.h>
#include <fake/nccl.hpp>
#include <support/failing_call.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

namespace {

template <class Life>
std::uint64_t check(std::uint64_t stride, std::string const& name, zero::nccl_options communication,
                    Life const& life) {
  communication.scratch_bytes = std::size_t{1} << 20U;
  communication.deadline = std::chrono::seconds{10};
  auto const on_two = [&](auto const& on_rank) {
    fake::set_device_count(2);
    zero::run_nccl(2, on_rank, communication);
  };
  return test::fail_each_call(
      name, stride,
      [&] {
        test::messages thrown = test::lives(on_two, life);
        CHECK_MESSAGE(fake::live_communicators() == 0, name);
        CHECK_MESSAGE(fake::live_registrations() + fake::live_windows() == 0, name);
        CHECK_MESSAGE(fake::live_nccl_allocations() == 0, name);
        return thrown;
      },
      // The threads that watch: the next look finds what one has missed, and queries work whatever
      // device is current. What they find late is nobody's any more.
      [](test::call_place const& where) { return where.first < 0; });
}

std::uint64_t check_stage3(std::uint64_t stride, std::string const& name, zero::nccl_mode mode) {
  test::setting const how{name, zero::stage3{}, zero::reduce_per_microbatch{}, {.clip_norm = 1.0}};
  return check(stride, name, {.mode = mode}, [&](auto& comm) { test::live(comm, how); });
}

/// With memory of NCCL's for the arena, and for what a communicator takes.
std::uint64_t check_stage2(std::uint64_t stride, std::string const& name, zero::nccl_mode mode) {
  test::setting const how{
      name, zero::stage2{}, zero::local_accumulate{}, {.memory = zero::nccl_memory()}};
  return check(stride, name, {.mode = mode, .nccl_memory = true},
               [&](auto& comm) { test::live(comm, how); });
}

}  // namespace

TEST_CASE("every call of a model's life over NCCL fails, one in each life, in stage 3") {
  CHECK(check_stage3(1, "stage 3, ordered", zero::nccl_mode::ordered) > 1000);
}

TEST_CASE("so do those in fast mode") {
  CHECK(check_stage3(3, "stage 3, fast", zero::nccl_mode::fast) > 1000);
}

TEST_CASE("so do those in stage 1") {
  test::setting const how{"stage 1", zero::stage1{}, zero::local_accumulate{}, {}};
  CHECK(check(3, how.name, {.mode = zero::nccl_mode::ordered},
              [&](auto& comm) { test::live(comm, how); }) > 900);
}

TEST_CASE("so do those in stage 2, with memory of NCCL's, in either mode") {
  CHECK(check_stage2(3, "stage 2, ordered", zero::nccl_mode::ordered) > 900);
  CHECK(check_stage2(3, "stage 2, fast", zero::nccl_mode::fast) > 900);
}

TEST_CASE("so do those of a life with a captured step, in stages 0 and 3") {
  for (test::setting const& how :
       {test::setting{"captured, stage 0", zero::stage0{}, zero::local_accumulate{}, {}},
        test::setting{"captured, stage 3", zero::stage3{}, zero::reduce_per_microbatch{}, {}}}) {
    CHECK(check(3, how.name, {.mode = zero::nccl_mode::ordered},
                [&](auto& comm) { test::live_captured(comm, how); }) > 1000);
  }
}
