// SPDX-License-Identifier: MIT
// What a step over NCCL calls of NCCL and of the CUDA runtime: it allocates, frees and waits for
// nothing.
#include <zero/comm/nccl.hpp>

#include <doctest/doctest.h>
#include <support/step_calls.hpp>
#include <support/watchdog.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace {

/// Two ranks, with a device each.
template <class Function>
void run_two(zero::nccl_mode mode, Function const& function) {
  test::watchdog const limit;
  fake::set_device_count(2);
  zero::run_nccl(2, function, {.mode = mode, .scratch_bytes = std::size_t{1} << 20U});
}

/// What both modes have in common. Each collective has a record, by which its end is known.
test::counts calls_in(std::size_t stage, int rank) {
  std::uint64_t const gathers = test::gathers[stage] + 1;  // with the ranks' messages
  return {{"zeroFakeLaunch", test::launches_of_two(stage, rank)},
          {"cudaMemcpyAsync", test::reports},
          {"cudaMemsetAsync", test::fills_of(2)},
          {"cudaEventRecord", test::records_in(stage) + test::reductions + gathers},
          {"cudaStreamWaitEvent", test::waits_in(stage)},
          {"ncclAllGather", gathers}};
}

}  // namespace

TEST_CASE("a step allocates, frees and waits for nothing, in every setting and each mode") {
  for (zero::nccl_mode const mode : {zero::nccl_mode::ordered, zero::nccl_mode::fast}) {
    for (test::setting const& how : test::clipped_or_not()) {
      run_two(mode, [&](zero::nccl& comm) {
        CHECK_MESSAGE(test::other_calls(test::calls_of_step(comm, how)).empty(), how.name);
      });
    }
  }
}

TEST_CASE("all that each of two ranks calls in a step in ordered mode, by hand") {
  std::vector<test::setting> const settings = test::plain_stages();
  for (std::size_t stage = 0; stage < settings.size(); ++stage) {
    run_two(zero::nccl_mode::ordered, [&](zero::nccl& comm) {
      test::counts expected = calls_in(stage, comm.rank());
      // Ranks swap their slices of a gradient, and in stage 0 the sums: each in a group.
      for (char const* const name : {"ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd"}) {
        expected[name] = (stage == 0 ? 2 : 1) * test::reductions;
      }
      CHECK_MESSAGE(
          test::in_words(test::calls_of_step(comm, settings[stage])) == test::in_words(expected),
          settings[stage].name, ", rank ", comm.rank());
    });
  }
}

TEST_CASE("all that each of two ranks calls in a step in fast mode, by hand") {
  std::vector<test::setting> const settings = test::plain_stages();
  for (std::size_t stage = 0; stage < settings.size(); ++stage) {
    run_two(zero::nccl_mode::fast, [&](zero::nccl& comm) {
      test::counts expected = calls_in(stage, comm.rank());
      // NCCL writes the sums of the first micro-batch itself. Those of the second are added to
      // them: gradients are copied to the scratch before, whole in stage 0, else slice by slice;
      // and in stage 0 each rank adds its half, and they swap halves.
      std::uint64_t const added = test::reductions / 2;
      expected["cudaMemcpyAsync"] += (stage == 0 ? 1 : 2) * added;
      expected[stage == 0 ? "ncclAllReduce" : "ncclReduceScatter"] = test::reductions;
      for (char const* const name : {"ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd"}) {
        expected[name] = stage == 0 ? added : 0;
      }
      CHECK_MESSAGE(
          test::in_words(test::calls_of_step(comm, settings[stage])) == test::in_words(expected),
          settings[stage].name, ", rank ", comm.rank());
    });
  }
}
