// SPDX-License-Identifier: MIT
// What a step finds on the device, on ranks that share one.
#include <zero/comm/loopback.hpp>
#include <zero/comm/solo.hpp>

#include <doctest/doctest.h>
#include <fake/cuda.hpp>
#include <support/device_reports.hpp>
#include <support/watchdog.hpp>

#include <chrono>

namespace {

template <class Function>
void on_ranks(int ranks, Function const& function) {
  test::watchdog const limit;
  zero::run_loopback(ranks, function, {.deadline = std::chrono::seconds{20}});
  fake::reset();
}

}  // namespace

TEST_CASE("case 7: a gradient that isn't finite on one rank skips the step on every rank") {
  for (test::setting const& how : test::overlapping_settings({.clip_norm = 1.0})) {
    zero::basic_solo<zero::cuda> alone;
    test::check_overflow(alone, how);
    on_ranks(3, [&](zero::loopback& comm) { test::check_overflow(comm, how); });
  }
}

TEST_CASE(
    "a disagreement that the device finds late is thrown on every rank, and updates nothing") {
  for (test::setting const& how : test::overlapping_settings({})) {
    on_ranks(3, [&](zero::loopback& comm) { test::check_late_disagreement(comm, how); });
  }
}
