// SPDX-License-Identifier: MIT
#include <zero/core/bfloat16.hpp>

#include <doctest/doctest.h>
#include <core/small_float.hpp>

#include <bit>
#include <limits>

using zero::bfloat16;

static_assert(bfloat16{1.0F}.bits() == 0x3f80U && bfloat16{-2.0F}.bits() == 0xc000U);
static_assert(bfloat16::from_bits(0x4049U) == 3.140625F);

TEST_CASE("bfloat16 widens every pattern to the value that its format gives it") {
  small_float::check_widening<bfloat16, 8>();
}

TEST_CASE("bfloat16 gives every pattern back, and NaNs quiet") {
  small_float::check_round_trip<bfloat16, 8>();
}

TEST_CASE("bfloat16 rounds midpoints to even and their neighbours to nearest") {
  small_float::check_midpoints<bfloat16, 8>();
}

TEST_CASE("bfloat16 rounds floats of every size as double arithmetic does") {
  small_float::check_rounding<bfloat16, 8>();
}

TEST_CASE("bfloat16 overflows half a unit past its largest value") {
  CHECK(bfloat16{0x1.fep127F}.bits() == 0x7f7fU);
  CHECK(bfloat16{0x1.fefffep127F}.bits() == 0x7f7fU);
  CHECK(bfloat16{0x1.ffp127F}.bits() == 0x7f80U);
  CHECK(bfloat16{std::numeric_limits<float>::max()}.bits() == 0x7f80U);
  CHECK(bfloat16{-std::numeric_limits<float>::infinity()}.bits() == 0xff80U);
}

TEST_CASE("bfloat16 underflows through subnormals to a zero with the value's sign") {
  CHECK(bfloat16{0x1p-126F}.bits() == 0x0080U);
  CHECK(bfloat16{0x1p-133F}.bits() == 0x0001U);
  CHECK(bfloat16{0x1p-134F}.bits() == 0x0000U);
  CHECK(bfloat16{-std::numeric_limits<float>::denorm_min()}.bits() == 0x8000U);
}

TEST_CASE("bfloat16 keeps a NaN a NaN even where its payload is in the lost bits") {
  CHECK(bfloat16{std::bit_cast<float>(0x7f800001U)}.bits() == 0x7fc0U);
  CHECK(bfloat16{std::bit_cast<float>(0xff800001U)}.bits() == 0xffc0U);
  CHECK(bfloat16{std::bit_cast<float>(0x7fffffffU)}.bits() == 0x7fffU);
}
