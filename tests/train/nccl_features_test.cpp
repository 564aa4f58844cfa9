// SPDX-License-Identifier: MIT
// Tied, frozen and skipped parameters, mixed types, recomputation, gradients handed over, memory of
// the user's that NCCL registers: models over NCCL end with the bits of models on the host.
#include <zero/comm/nccl.hpp>

#include <doctest/doctest.h>
#include <fake/child.hpp>
#include <fake/cuda.hpp>
#include <fake/nccl.hpp>
#include <support/device_features.hpp>
#include <support/watchdog.hpp>

#include <cstddef>
#include <vector>

TEST_CASE("whatever a model offers has the bits of the host over NCCL, in every setting") {
  fake::protect_device_memory(FAKE_HAS_TSAN == 0);  // for speed
  fake::set_device_count(3);
  test::every_feature_run({2, 3}, [](int ranks, test::setting const& how, auto const& features,
                                     std::vector<std::byte> const& expected) {
    test::watchdog const limit;
    zero::run_nccl(ranks,
                   [&](zero::nccl& comm) {
                     CHECK_MESSAGE(
                         test::same_bits(test::train_features(comm, how, features), expected),
                         how.name);
                   },
                   {.scratch_bytes = std::size_t{1} << 20U});
    CHECK(fake::live_communicators() == 0);
    CHECK_MESSAGE(fake::nccl_misuse().empty(), fake::nccl_misuse());
  });
}
