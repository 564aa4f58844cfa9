// SPDX-License-Identifier: MIT
#include <doctest/doctest.h>

#include <zero/core/placement.hpp>
#include <zero/train/stage.hpp>

#include <initializer_list>

namespace {

constexpr auto replicated = zero::placement::replicated;
constexpr auto sharded = zero::placement::sharded;

}  // namespace

TEST_CASE("a stage is three placements, and its number how many are sharded") {
  CHECK(zero::stage(zero::stage0{}).placed == zero::placements{replicated, replicated, replicated});
  CHECK(zero::stage(zero::stage1{}).placed == zero::placements{sharded, replicated, replicated});
  CHECK(zero::stage(zero::stage2{}).placed == zero::placements{sharded, sharded, replicated});
  CHECK(zero::stage(zero::stage3{}).placed == zero::placements{sharded, sharded, sharded});
  CHECK(zero::stage(zero::stage0{}).number() == 0);
  CHECK(zero::stage(zero::stage1{}).number() == 1);
  CHECK(zero::stage(zero::stage2{}).number() == 2);
  CHECK(zero::stage(zero::stage3{}).number() == 3);
}

TEST_CASE("only stage 0 replicates updates, and only stage 3 shards parameters") {
  for (zero::stage const& each : {zero::stage(zero::stage0{}), zero::stage(zero::stage1{}),
                                  zero::stage(zero::stage2{}), zero::stage(zero::stage3{})}) {
    CHECK(each.replicates_updates() == (each.number() == 0));
    CHECK(each.shards_parameters() == (each.number() == 3));
  }
}

TEST_CASE("the reduced gradient is whole in stage 0, and in stage 1 with an all-reduce") {
  using zero::gradient_collective;
  CHECK(zero::stage(zero::stage0{}).reduces_whole());
  CHECK_FALSE(zero::stage(zero::stage1{}).reduces_whole());
  CHECK(zero::stage(zero::stage1{gradient_collective::all_reduce}).reduces_whole());
  CHECK_FALSE(zero::stage(zero::stage2{}).reduces_whole());
  CHECK_FALSE(zero::stage(zero::stage3{}).reduces_whole());
}

TEST_CASE(
    "stage 3 gathers one bucket ahead, keeps nothing and leases one unit, unless one says so") {
  zero::stage const usual = zero::stage3{};
  CHECK(usual.prefetch == 1);
  CHECK_FALSE(usual.keep_after_forward);
  CHECK_FALSE(usual.keep_last);
  CHECK(usual.max_live_units == 1);

  zero::stage const chosen =
      zero::stage3{.prefetch = 4, .keep_after_forward = true, .max_live_units = 3};
  CHECK(chosen.prefetch == 4);
  CHECK(chosen.keep_after_forward);
  CHECK_FALSE(chosen.keep_last);
  CHECK(chosen.max_live_units == 3);

  zero::stage const last = zero::stage3{.keep_last = true};
  CHECK(last.keep_last);
  CHECK_FALSE(last.keep_after_forward);
}
