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

std::uint64_t check(std::uint64_t stride, test::setting const& how,
                    zero::nccl_options communication) {
  communication.scratch_bytes = std::size_t{1} << 20U;
  communication.deadline = std::chrono::seconds{10};
  auto const on_two = [&](auto const& on_rank) {
    fake::set_device_count(2);
    zero::run_nccl(2, on_rank, communication);
  };
  auto const registered = [] { return fake::live_registrations() + fake::live_windows(); };
  std::size_t left = registered();
  std::size_t leaving = 0;
  std::uint64_t const loud = test::fail_each_call(
      how.name, stride,
      [&] {
        test::messages thrown = test::lives(on_two, how);
        CHECK_MESSAGE(fake::live_communicators() == 0, how.name);
        leaving += registered() != left ? 1 : 0;
        left = registered();
        CHECK_MESSAGE(fake::live_nccl_allocations() == 0, how.name);
        return thrown;
      },
      // The threads that watch: the next look finds what one has missed, and queries work whatever
      // device is current. What they find late is nobody's any more.
      [](test::call_place const& where) { return where.first < 0; });
  // A destructor that can't tell what device is current leaves a registration, which ends with the
  // communicator: those of an arena, as memory and as a window, on two ranks.
  CHECK_MESSAGE(leaving <= 2 * 2, how.name);
  return loud;
}

std::uint64_t check_stage3(std::uint64_t stride, std::string const& name, zero::nccl_mode mode) {
  return check(stride, {name, zero::stage3{}, zero::reduce_per_microbatch{}, {.clip_norm = 1.0}},
               {.mode = mode});
}

/// With memory of NCCL's for the arena, and for what a communicator takes.
std::uint64_t check_stage2(std::uint64_t stride, std::string const& name, zero::nccl_mode mode) {
  return check(stride,
               {name, zero::stage2{}, zero::local_accumulate{}, {.memory = zero::nccl_memory()}},
               {.mode = mode, .nccl_memory = true});
}

}  // namespace

TEST_CASE("every call of a model's life over NCCL fails, one in each life, in stage 3") {
  CHECK(check_stage3(1, "stage 3, ordered", zero::nccl_mode::ordered) > 1000);
}

TEST_CASE("so do those in fast mode") {
  CHECK(check_stage3(3, "stage 3, fast", zero::nccl_mode::fast) > 1000);
}

TEST_CASE("so do those in stage 2, with memory of NCCL's, in either mode") {
  CHECK(check_stage2(3, "stage 2, ordered", zero::nccl_mode::ordered) > 900);
  CHECK(check_stage2(3, "stage 2, fast", zero::nccl_mode::fast) > 900);
}
