// SPDX-License-Identifier: MIT
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

/// @file
/// What IEEE 754 says of a 16-bit format with `ExponentBits`, computed in double, and the checks of
/// a type `Float` against it.

namespace small_float {

template <int ExponentBits>
struct format {
  static constexpr int significand_bits = 15 - ExponentBits;
  static constexpr int bias = (1 << (ExponentBits - 1)) - 1;
  static constexpr std::uint32_t infinity = ((1U << ExponentBits) - 1U) << significand_bits;

  /// The value of a pattern that isn't a NaN.
  static double value(std::uint32_t bits) {
    double const sign = (bits & 0x8000U) != 0 ? -1.0 : 1.0;
    std::uint32_t const magnitude = bits & 0x7fffU;
    if (magnitude == infinity) {
      return sign * std::numeric_limits<double>::infinity();
    }
    int const exponent = static_cast<int>(magnitude >> significand_bits);
    double const fraction =
        std::ldexp(magnitude & ((1U << significand_bits) - 1U), -significand_bits);
    return sign * (exponent == 0 ? std::ldexp(fraction, 1 - bias)
                                 : std::ldexp(1.0 + fraction, exponent - bias));
  }

  /// `x` rounded to a value of the format, to nearest, ties to even.
  static double round(double x) {
    if (x == 0.0 || std::isinf(x)) {
      return x;
    }
    int const exponent = std::max(std::ilogb(x), 1 - bias);
    double const unit = std::ldexp(1.0, exponent - significand_bits);
    double const rounded = std::nearbyint(x / unit) * unit;
    return std::abs(rounded) > value(infinity - 1)
               ? std::copysign(std::numeric_limits<double>::infinity(), x)
               : rounded;
  }
};

/// Equal, and of the same sign where both are zero.
inline bool same(double a, double b) { return a == b && std::signbit(a) == std::signbit(b); }

template <class Float, int ExponentBits>
void check_widening() {
  using format = format<ExponentBits>;
  int wrong = 0;
  for (std::uint32_t bits = 0; bits <= 0xffffU; ++bits) {
    float const widened = Float::from_bits(static_cast<std::uint16_t>(bits));
    bool const right = (bits & 0x7fffU) > format::infinity
                           ? std::isnan(widened) && std::signbit(widened) == ((bits >> 15U) != 0)
                           : same(widened, format::value(bits));
    wrong += right ? 0 : 1;
  }
  CHECK(wrong == 0);
}

template <class Float, int ExponentBits>
void check_round_trip() {
  using format = format<ExponentBits>;
  constexpr std::uint32_t quiet = 1U << (format::significand_bits - 1);
  int wrong = 0;
  for (std::uint32_t bits = 0; bits <= 0xffffU; ++bits) {
    std::uint32_t const expected = (bits & 0x7fffU) > format::infinity ? bits | quiet : bits;
    float const widened = Float::from_bits(static_cast<std::uint16_t>(bits));
    wrong += Float{widened}.bits() == expected ? 0 : 1;
  }
  CHECK(wrong == 0);
}

/// Between two neighbours, the midpoint rounds to the even one, and the floats beside it to the
/// nearer one. Past the last one lies infinity, where the next value would be.
template <class Float, int ExponentBits>
void check_midpoints() {
  using format = format<ExponentBits>;
  int wrong = 0;
  for (std::uint32_t bits = 0; bits < format::infinity; ++bits) {
    double const low = format::value(bits);
    double const high = bits + 1 < format::infinity
                            ? format::value(bits + 1)
                            : 2.0 * format::value(bits) - format::value(bits - 1);
    auto const middle = static_cast<float>((low + high) / 2.0);
    float const below = std::nextafter(middle, 0.0F);
    float const above = std::nextafter(middle, std::numeric_limits<float>::infinity());
    std::uint32_t const even = bits + (bits & 1U);
    bool const right =
        Float{middle}.bits() == even && Float{below}.bits() == bits &&
        Float{above}.bits() == bits + 1 && Float{-middle}.bits() == (0x8000U | even) &&
        Float{-below}.bits() == (0x8000U | bits) && Float{-above}.bits() == (0x8000U | (bits + 1));
    wrong += right ? 0 : 1;
  }
  CHECK(wrong == 0);
}

/// Floats from all over the range, some million of them.
template <class Float, int ExponentBits>
void check_rounding() {
  using format = format<ExponentBits>;
  int wrong = 0;
  for (std::uint64_t bits = 0; bits <= 0xffffffffU; bits += 3079) {
    auto const x = std::bit_cast<float>(static_cast<std::uint32_t>(bits));
    float const rounded = Float{x};
    bool const right = std::isnan(x)
                           ? std::isnan(rounded) && std::signbit(rounded) == std::signbit(x)
                           : same(rounded, format::round(x));
    wrong += right ? 0 : 1;
  }
  CHECK(wrong == 0);
}

}  // namespace small_float
