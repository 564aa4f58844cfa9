// SPDX-License-Identifier: MIT
// Whole steps over NCCL captured into a CUDA graph on each rank, and replayed.
#include <zero/comm/nccl.hpp>

#include <doctest/doctest.h>
#include <fake/cuda.hpp>
#include <support/graph.hpp>
#include <support/watchdog.hpp>

#include <chrono>
#include <cstddef>

namespace {

/// Two ranks, with a device each.
template <class Function>
void run_two(zero::nccl_mode mode, Function const& function) {
  fake::set_device_count(2);
  fake::protect_device_memory(false);  // for speed
  zero::run_nccl(
      2, function,
      {.mode = mode, .scratch_bytes = std::size_t{1} << 20U, .deadline = std::chrono::seconds{20}});
}

}  // namespace

TEST_CASE("ten replays of a step on two ranks have the bits of ten eager steps, in each mode") {
  for (zero::nccl_mode const mode : {zero::nccl_mode::ordered, zero::nccl_mode::fast}) {
    for (test::setting const& how : test::captured_settings()) {
      test::watchdog const limit;
      run_two(mode, [&](zero::nccl& comm) { test::check_replays(comm, how); });
    }
  }
}
