// SPDX-License-Identifier: MIT
// Tied, frozen and skipped parameters, mixed types, recomputation, gradients handed over, memory of
// the user's: models on the CUDA device end with the bits of models on the host.
#include <zero/comm/loopback.hpp>
#include <zero/comm/solo.hpp>

#include <doctest/doctest.h>
#include <fake/child.hpp>
#include <fake/cuda.hpp>
#include <support/device_features.hpp>
#include <support/watchdog.hpp>

#include <cstddef>
#include <vector>

TEST_CASE("whatever a model offers has the bits of the host, in every setting") {
  fake::protect_device_memory(FAKE_HAS_TSAN == 0);  // for speed
  test::every_feature_run({1, 2, 3}, [](int ranks, test::setting const& how, auto const& features,
                                        std::vector<std::byte> const& expected) {
    test::watchdog const limit;
    zero::run_loopback(ranks, [&](zero::loopback& comm) {
      CHECK_MESSAGE(test::same_bits(test::train_features(comm, how, features), expected), how.name);
    });
    if (ranks == 1) {
      zero::basic_solo<zero::cuda> alone;
      CHECK_MESSAGE(test::same_bits(test::train_features(alone, how, features), expected),
                    how.name);
    }
  });
}
