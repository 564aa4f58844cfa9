// SPDX-License-Identifier: MIT
// Real faults of other systems that need a device with streams, over NCCL.
#include <zero/comm/nccl.hpp>

#include <doctest/doctest.h>
#include <fake/child.hpp>
#include <fake/cuda.hpp>
#include <fake/nccl.hpp>
#include <support/device_cases.hpp>
#include <support/watchdog.hpp>

#include <chrono>
#include <cstddef>
#include <memory>
#include <utility>

using namespace std::chrono_literals;

namespace {

constexpr zero::nccl_mode modes[] = {zero::nccl_mode::ordered, zero::nccl_mode::fast};

zero::nccl_options options_of(zero::nccl_mode mode) {
  return {.mode = mode, .scratch_bytes = std::size_t{1} << 20U, .deadline = 20s};
}

/// Ranks with a device each, in either mode.
template <class Function>
void on_ranks(int ranks, Function const& function) {
  for (zero::nccl_mode const mode : modes) {
    test::watchdog const limit{200s};
    fake::set_device_count(ranks);
    fake::protect_device_memory(FAKE_HAS_TSAN == 0);  // for speed
    zero::run_nccl(ranks, function, options_of(mode));
  }
}

}  // namespace

// In fast mode NCCL sums float16 as float32.
TEST_CASE("case 33: 16-bit gradients neither overflow nor underflow on the way to their mean") {
  on_ranks(4, [](zero::nccl& comm) { test::check_16_bit_means(comm); });
}

TEST_CASE("case 35: two gradient slots and slow reductions: parameter i gets the gradient i + 1") {
  on_ranks(2, [](zero::nccl& comm) { test::check_slow_reductions(comm); });
}

TEST_CASE("case 37: a unit that is released at once stays until the kernel that reads it has run") {
  on_ranks(2, [](zero::nccl& comm) { test::check_slow_readers(comm); });
}

TEST_CASE("case 37: a gradient that is released at once stays until its reduction has read it") {
  on_ranks(2, [](zero::nccl& comm) { test::check_slow_reducers(comm); });
}

TEST_CASE("case 37: a model that is destroyed with work in flight waits for it") {
  on_ranks(2, [](zero::nccl& comm) { test::check_destruction_in_flight(comm); });
}

TEST_CASE(
    "case 53: a rank that throws or ends, at any moment, ends the others within the deadline") {
  using client = std::shared_ptr<zero::detail::control_client>;
  for (zero::nccl_mode const mode : modes) {
    fake::set_device_count(3);
    zero::nccl_options options = options_of(mode);
    options.deadline = 3s;
    auto const run = [&](int ranks, auto const& function) {
      zero::run_nccl(ranks, function, options);
    };
    test::pairs<client> pairs;
    test::check_dying_rank(run, [&](int rank) {
      client mine = pairs.take(rank, [] { return zero::detail::memory_store::create(2); });
      return zero::nccl{std::move(mine), options_of(mode)};
    });
    CHECK(fake::live_communicators() == 0);
    CHECK(fake::live() == fake::live_counts{});
  }
}
