// SPDX-License-Identifier: MIT
// What a step finds on the device, over NCCL.
#include <zero/comm/nccl.hpp>

#include <doctest/doctest.h>
#include <fake/cuda.hpp>
#include <support/device_reports.hpp>
#include <support/watchdog.hpp>

#include <chrono>
#include <cstddef>

namespace {

template <class Function>
void on_ranks(zero::nccl_mode mode, Function const& function) {
  test::watchdog const limit;
  fake::set_device_count(3);
  fake::protect_device_memory(false);  // for speed
  zero::run_nccl(
      3, function,
      {.mode = mode, .scratch_bytes = std::size_t{1} << 20U, .deadline = std::chrono::seconds{20}});
  fake::reset();
}

}  // namespace

TEST_CASE("case 7: a gradient that isn't finite on one rank skips the step on every rank") {
  for (zero::nccl_mode const mode : {zero::nccl_mode::ordered, zero::nccl_mode::fast}) {
    for (test::setting const& how : test::overlapping_settings({.clip_norm = 1.0})) {
      on_ranks(mode, [&](zero::nccl& comm) { test::check_overflow(comm, how); });
    }
  }
}

TEST_CASE(
    "a disagreement that the device finds late is thrown on every rank, and updates nothing") {
  for (zero::nccl_mode const mode : {zero::nccl_mode::ordered, zero::nccl_mode::fast}) {
    for (test::setting const& how : test::overlapping_settings({})) {
      on_ranks(mode, [&](zero::nccl& comm) { test::check_late_disagreement(comm, how); });
    }
  }
}
