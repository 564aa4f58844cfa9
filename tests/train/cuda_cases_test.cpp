// SPDX-License-Identifier: MIT
// Real faults of other systems that need a device with streams, on ranks that share one.
#include <zero/comm/loopback.hpp>
#include <zero/comm/solo.hpp>
#include <zero/optim/adamw.hpp>

#include <doctest/doctest.h>
#include <fake/child.hpp>
#include <fake/cuda.hpp>
#include <support/device_cases.hpp>
#include <support/failures.hpp>
#include <support/watchdog.hpp>

#include <chrono>
#include <cstddef>
#include <span>
#include <vector>

using namespace std::chrono_literals;

namespace {

/// Ranks that share a device, for `test::run_failing`.
constexpr auto on_loopback = [](int ranks, auto const& function) {
  zero::run_loopback(ranks, function, {.deadline = 3s});
};

template <class Function>
void on_ranks(int ranks, Function const& function) {
  test::watchdog const limit{200s};
  zero::run_loopback(ranks, function);
}

}  // namespace

TEST_CASE("case 33: 16-bit gradients neither overflow nor underflow on the way to their mean") {
  fake::protect_device_memory(FAKE_HAS_TSAN == 0);  // for speed
  on_ranks(4, [](zero::loopback& comm) { test::check_16_bit_means(comm); });
}

TEST_CASE("case 35: two gradient slots and slow reductions: parameter i gets the gradient i + 1") {
  on_ranks(2, [](zero::loopback& comm) { test::check_slow_reductions(comm); });
}

TEST_CASE("case 37: a unit that is released at once stays until the kernel that reads it has run") {
  zero::basic_solo<zero::cuda> alone;
  test::check_slow_readers(alone);
  on_ranks(2, [](zero::loopback& comm) { test::check_slow_readers(comm); });
}

TEST_CASE("case 37: a gradient that is released at once stays until its reduction has read it") {
  zero::basic_solo<zero::cuda> alone;
  test::check_slow_reducers(alone);
  on_ranks(2, [](zero::loopback& comm) { test::check_slow_reducers(comm); });
}

TEST_CASE("case 37: a model that is destroyed with work in flight waits for it") {
  zero::basic_solo<zero::cuda> alone;
  test::check_destruction_in_flight(alone);
  on_ranks(2, [](zero::loopback& comm) { test::check_destruction_in_flight(comm); });
}

TEST_CASE(
    "case 53: a rank that throws or ends, at any moment, ends the others within the deadline") {
  test::pairs<zero::loopback> pairs;
  test::check_dying_rank(on_loopback, [&](int rank) {
    return pairs.take(rank, [] { return zero::loopback::create(2, {.deadline = 20s}); });
  });
}

TEST_CASE("a host tensor of an erased parameter is refused on every rank") {
  test::failures const caught = test::run_failing(
      2,
      [](zero::loopback& comm) {
        std::vector<float> value(4);  // with zero::tensor_traits of the host
        std::vector<std::vector<zero::any_parameter>> const units{{zero::parameter("w", value)}};
        zero::sharded_model const model{comm, units, zero::stage0{}, zero::adamw{},
                                        zero::local_accumulate{}};
      },
      on_loopback);
  CHECK_MESSAGE(caught.all_say({"sharded_model: parameter 'w': expected its value on cuda, actual "
                                "on another device (rank 0)"}),
                caught.text());
}

TEST_CASE("too little memory for the plan says so on every rank") {
  test::failures const caught = test::run_failing(
      2,
      [](zero::loopback& comm) {
        zero::cuda_stream stream;
        std::vector<std::vector<zero::any_parameter>> const units{
            {zero::parameter<float>("big", {1U << 20U}, [](std::span<float>, std::size_t) {})}};
        fake::set_memory(std::size_t{1} << 20U);
        zero::sharded_model const model{comm,
                                        units,
                                        zero::stage0{},
                                        zero::adamw{},
                                        zero::local_accumulate{},
                                        {.stream = stream.native()}};
      },
      on_loopback);
  fake::reset();
  // Value, gradient and two states of 4 MiB; 4592 bytes beside them, to a multiple of 256.
  CHECK_MESSAGE(caught.all_say({"the plan's 16781824 bytes", " free of 1048576"}), caught.text());
}
