// SPDX-License-Identifier: MIT
// Models on the CUDA device end with the bits of models on the host.
#include <zero/comm/loopback.hpp>
#include <zero/comm/solo.hpp>
#include <zero/optim/adamw.hpp>
#include <zero/optim/sgd.hpp>

#include <doctest/doctest.h>
#include <support/device_engine.hpp>
#include <support/same_bits.hpp>
#if defined(ZERO_FAKE_CUDA)
#include <fake/child.hpp>
#include <fake/cuda.hpp>
#include <support/watchdog.hpp>
#endif

#include <cstddef>
#include <vector>

namespace {

/// Ten steps in every setting on the device, against the host's stage 0.
template <class T, class Optimizer>
void check_bits(zero::options const& options, Optimizer const& optimizer,
                test::run_settings const& run) {
#if defined(ZERO_FAKE_CUDA)
  fake::protect_device_memory(FAKE_HAS_TSAN == 0);  // for speed
#endif
  for (int const ranks : {1, 2, 3, 4}) {
    test::host_values<T> const expected{ranks, options, optimizer, run};
    for (test::setting const& how : test::every_setting(options)) {
      test::watchdog const limit;
      zero::run_loopback(ranks, [&](zero::loopback& comm) {
        std::vector<T> const actual = test::train<T>(comm, how, optimizer, run);
        CHECK_MESSAGE(test::same_bits(actual, expected.of(how)), how.name, ", ", ranks, " ranks");
      });
    }
  }
}

}  // namespace

TEST_CASE("ten steps of adamw on the device have the bits of the host, in every setting") {
  check_bits<float>({.bucket_bytes = 0}, zero::adamw{.learning_rate = 0.01}, {});
}

TEST_CASE("so have those with clipping, buckets of several units, and no alignment") {
  check_bits<float>({.clip_norm = 5.0, .bucket_bytes = 500, .alignment = 1},
                    zero::adamw{.learning_rate = 0.01}, {.steps = 4});
}

TEST_CASE("so have bfloat16 parameters with master weights") {
  check_bits<zero::bfloat16>({.clip_norm = 5.0, .bucket_bytes = 0, .precision = zero::bf16},
                             zero::sgd{.learning_rate = 0.01, .momentum = 0.9}, {.steps = 4});
}

TEST_CASE("so have gradients that come one by one") {
  check_bits<float>({.bucket_bytes = 0}, zero::adamw{.learning_rate = 0.01},
                    {.steps = 3, .by_parameter = true});
}

TEST_CASE("a model of one rank runs over solo on the device") {
  test::run_settings const run{.steps = 3};
  test::host_values<float> const expected{1, {}, zero::adamw{}, run};
  for (test::setting const& how : test::every_setting()) {
    zero::basic_solo<zero::cuda> comm;
    CHECK_MESSAGE(
        test::same_bits(test::train<float>(comm, how, zero::adamw{}, run), expected.of(how)),
        how.name);
  }
}
