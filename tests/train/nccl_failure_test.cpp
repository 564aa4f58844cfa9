// SPDX-License-Identifier: MIT
// A call of NCCL or the CUDA runtime fails under a model over NCCL, each in turn: an exception on
// every rank, no leak, no hang. Of stage 3 in ordered mode every call fails; else, for time, every
// third of each rank and function, and under ThreadSanitizer a fifth of those.
#include <zero/comm/nccl.hpp>
#include <zero/optim/adamw.hpp>

#include <doctest/doctest.h>
#include <fake/child.hpp>
#include <fake/nccl.hpp>
#include <support/device_engine.hpp>
#include <support/failing_call.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

namespace {

/// How two ranks live.
struct life {
  zero::stage stage;
  zero::accumulation policy;
  zero::options options;
  zero::nccl_options communication;
};

/// Build a model on two ranks, train a step, read the values, and part together.
test::messages live(life const& how) {
  fake::set_device_count(2);
  zero::nccl_options communication = how.communication;
  communication.scratch_bytes = std::size_t{1} << 20U;
  communication.deadline = std::chrono::seconds{10};
  return test::messages_of([&](auto const& on_rank) { zero::run_nccl(2, on_rank, communication); },
                           [&](zero::nccl& comm) {
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

std::uint64_t check(std::string const& title, std::uint64_t stride, life const& how) {
  auto const registered = [] { return fake::live_registrations() + fake::live_windows(); };
  std::size_t left = registered();
  std::size_t leaving = 0;
  std::uint64_t const loud = test::fail_each_call(
      title, FAKE_HAS_TSAN == 0 ? stride : 5 * stride,
      [&] {
        test::messages thrown = live(how);
        CHECK_MESSAGE(fake::live_communicators() == 0, title);
        leaving += registered() != left ? 1 : 0;
        left = registered();
        CHECK_MESSAGE(fake::live_nccl_allocations() == 0, title);
        return thrown;
      },
      // The threads that watch: the next look finds what one has missed, and queries work whatever
      // device is current. What they find late is nobody's any more.
      [](test::call_place const& where) { return where.first < 0; });
  // A destructor that can't tell what device is current leaves a registration, which ends with the
  // communicator: those of an arena, as memory and as a window, on two ranks.
  CHECK_MESSAGE(leaving <= 2 * 2, title);
  return loud * stride * (FAKE_HAS_TSAN == 0 ? 1 : 5);
}

life stage3_in(zero::nccl_mode mode) {
  return {zero::stage3{}, zero::reduce_per_microbatch{}, {.clip_norm = 1.0}, {.mode = mode}};
}

/// Memory of NCCL's for the arena, and for what a communicator takes.
life stage2_in(zero::nccl_mode mode) {
  return {zero::stage2{},
          zero::local_accumulate{},
          {.memory = zero::nccl_memory()},
          {.mode = mode, .nccl_memory = true}};
}

}  // namespace

TEST_CASE("every call of a model's life over NCCL fails, one in each life, in stage 3") {
  CHECK(check("stage 3, ordered", 1, stage3_in(zero::nccl_mode::ordered)) > 1000);
}

TEST_CASE("so do those in fast mode") {
  CHECK(check("stage 3, fast", 3, stage3_in(zero::nccl_mode::fast)) > 1000);
}

TEST_CASE("so do those in stage 2, with memory of NCCL's, in either mode") {
  CHECK(check("stage 2, ordered", 3, stage2_in(zero::nccl_mode::ordered)) > 900);
  CHECK(check("stage 2, fast", 3, stage2_in(zero::nccl_mode::fast)) > 900);
}
