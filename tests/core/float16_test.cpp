// SPDX-License-Identifier: MIT
#include <zero/core/float16.hpp>

#include <doctest/doctest.h>
#include <core/small_float.hpp>

#include <bit>
#include <cstdint>
#include <limits>

using zero::float16;

static_assert(float16{1.0F}.bits() == 0x3c00U && float16{-2.0F}.bits() == 0xc000U);
static_assert(float16::from_bits(0x3555U) == 0.333251953125F);

TEST_CASE("float16 widens every pattern to the value that IEEE 754 gives it") {
  small_float::check_widening<float16, 5>();
}

TEST_CASE("float16 gives every pattern back, and NaNs quiet") {
  small_float::check_round_trip<float16, 5>();
}

TEST_CASE("float16 rounds midpoints to even and their neighbours to nearest") {
  small_float::check_midpoints<float16, 5>();
}

TEST_CASE("float16 rounds floats of every size as double arithmetic does") {
  small_float::check_rounding<float16, 5>();
}

TEST_CASE("float16 overflows at 65520, which is half a unit past its largest value") {
  CHECK(float16{65504.0F}.bits() == 0x7bffU);
  CHECK(float16{65519.996F}.bits() == 0x7bffU);
  CHECK(float16{65520.0F}.bits() == 0x7c00U);
  CHECK(float16{-65520.0F}.bits() == 0xfc00U);
  CHECK(float16{std::numeric_limits<float>::max()}.bits() == 0x7c00U);
  CHECK(float16{std::numeric_limits<float>::infinity()}.bits() == 0x7c00U);
}

TEST_CASE("float16 underflows through subnormals to a zero with the value's sign") {
  CHECK(float16{0x1p-14F}.bits() == 0x0400U);
  CHECK(float16{0x1p-24F}.bits() == 0x0001U);
  CHECK(float16{0x1p-25F}.bits() == 0x0000U);
  CHECK(float16{0x1.000002p-25F}.bits() == 0x0001U);
  CHECK(float16{-0x1p-26F}.bits() == 0x8000U);
  CHECK(float16{-0.0F}.bits() == 0x8000U);
  CHECK(float16{std::numeric_limits<float>::denorm_min()}.bits() == 0x0000U);
}

TEST_CASE("float16 keeps a NaN a NaN even where its payload is in the lost bits") {
  CHECK(float16{std::bit_cast<float>(0x7f800001U)}.bits() == 0x7e00U);
  CHECK(float16{std::bit_cast<float>(0xff800001U)}.bits() == 0xfe00U);
  CHECK(float16{std::bit_cast<float>(0x7fffffffU)}.bits() == 0x7fffU);
}

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
TEST_CASE("float16 equals the compiler's own type") {
  int wrong = 0;
  for (std::uint32_t bits = 0; bits <= 0xffffU; ++bits) {
    auto const half = float16::from_bits(static_cast<std::uint16_t>(bits));
    auto const theirs = static_cast<float>(std::bit_cast<_Float16>(half));
    bool const is_nan = theirs != theirs;
    wrong += is_nan || small_float::same(half, theirs) ? 0 : 1;
  }
  for (std::uint64_t bits = 0; bits <= 0xffffffffU; bits += 2039) {
    auto const x = std::bit_cast<float>(static_cast<std::uint32_t>(bits));
    wrong += float16{x}.bits() == std::bit_cast<std::uint16_t>(static_cast<_Float16>(x)) ? 0 : 1;
  }
  CHECK(wrong == 0);
}
#endif
