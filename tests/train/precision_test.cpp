// SPDX-License-Identifier: MIT
#include <doctest/doctest.h>

#include <zero/core/dtype.hpp>
#include <zero/train/precision.hpp>

using zero::dtype;

TEST_CASE("a precision names its parameters' type, and takes the wider ones beside it") {
  CHECK(zero::fp32.accepts(dtype::float32));
  CHECK(zero::fp32.accepts(dtype::float64));
  CHECK_FALSE(zero::fp32.accepts(dtype::bfloat16));
  CHECK_FALSE(zero::fp32.accepts(dtype::float16));
  for (zero::precision const& each : {zero::bf16, zero::bf16_reduced}) {
    CHECK(each.accepts(dtype::bfloat16));
    CHECK(each.accepts(dtype::float32));
    CHECK(each.accepts(dtype::float64));
    CHECK_FALSE(each.accepts(dtype::float16));
  }
}

TEST_CASE("only a 16-bit parameter's reduced gradient may have another type") {
  CHECK(zero::bf16.reduced_of(dtype::bfloat16) == dtype::float32);
  CHECK(zero::bf16_reduced.reduced_of(dtype::bfloat16) == dtype::bfloat16);
  for (zero::precision const& each : {zero::fp32, zero::bf16, zero::bf16_reduced}) {
    CHECK(each.reduced_of(dtype::float32) == dtype::float32);
    CHECK(each.reduced_of(dtype::float64) == dtype::float64);
  }
}

TEST_CASE("a 16-bit parameter has master weights; any other is its own") {
  CHECK(zero::has_master(dtype::bfloat16));
  CHECK(zero::has_master(dtype::float16));
  CHECK_FALSE(zero::has_master(dtype::float32));
  CHECK_FALSE(zero::has_master(dtype::float64));
}

TEST_CASE("precisions are equal when their types are") {
  CHECK(zero::bf16 == zero::precision{.parameters = dtype::bfloat16});
  CHECK_FALSE(zero::bf16 == zero::bf16_reduced);
  CHECK_FALSE(zero::bf16 == zero::fp32);
}
