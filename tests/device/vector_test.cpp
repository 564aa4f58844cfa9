// SPDX-License-Identifier: MIT
#include <zero/device/vector.hpp>

#include <doctest/doctest.h>
#include <core/small_float.hpp>

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>

namespace {

using namespace zero::detail;

using half = small_float::format<5>;
using brain = small_float::format<8>;

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float quiet_nan = std::numeric_limits<float>::quiet_NaN();

std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }

/// Calls `check(vector, lanes)` for floats of every exponent, beside zeros, subnormal numbers,
/// infinities and NaN, in every lane.
template <class Check>
void for_many_floats(Check check) {
  std::mt19937 random{3};
  constexpr std::array special{0.0F,      -0.0F,     infinity,        -infinity,
                               quiet_nan, 0x1p-149F, 0x1.fffffep-127F};
  for (int repeat = 0; repeat < 100'000; ++repeat) {
    std::array<float, 4> lanes;
    for (float& lane : lanes) {
      auto const bits = static_cast<std::uint32_t>(random());
      lane = random() % 8 == 0 ? special[bits % special.size()] : std::bit_cast<float>(bits);
    }
    check(load_vector<float_vector>(lanes.data()), lanes);
  }
}

/// Around every rounding boundary of a 16-bit format: each value, the midpoint to the next one, and
/// the floats beside it.
template <class Format, class Check>
void for_every_boundary(Check check) {
  for (std::uint32_t bits = 0; bits < Format::infinity; ++bits) {
    double const low = Format::value(bits);
    double const high =
        bits + 1 < Format::infinity ? Format::value(bits + 1) : 2 * low - Format::value(bits - 1);
    auto const middle = static_cast<float>((low + high) / 2);
    for (float const sign : {1.0F, -1.0F}) {
      check(std::array{sign * static_cast<float>(low), sign * std::nextafter(middle, 0.0F),
                       sign * middle, sign * std::nextafter(middle, infinity)});
    }
  }
}

/// The value of the 16 bits that are in the high half of a lane, or that of a NaN.
template <class Format>
double value_of(std::uint32_t lane) {
  std::uint32_t const bits = lane >> 16U;
  return (bits & 0x7fffU) > Format::infinity ? double{quiet_nan} : Format::value(bits);
}

}  // namespace

TEST_CASE("a vector is loaded from any address, and cast bit for bit") {
  std::array<std::byte, 17> memory{};
  for (std::size_t i = 0; i < memory.size(); ++i) {
    memory[i] = static_cast<std::byte>(i);
  }
  for (std::size_t const first : {0U, 1U}) {
    auto const words = load_vector<uint_vector>(memory.data() + first);
    auto const same = vector_cast<uint_vector>(vector_cast<double_vector>(words));
    for (std::size_t lane = 0; lane < 4; ++lane) {
      std::uint32_t expected = 0;
      std::memcpy(&expected, memory.data() + first + 4 * lane, 4);
      CHECK(words[lane] == expected);
      CHECK(same[lane] == expected);
    }
  }
}

TEST_CASE("select takes each bit from where the mask says") {
  auto const mask = uint_vector{0xffffffffU, 0, 0xffffffffU, 0};
  auto const chosen = select(mask, uint_vector{1, 2, 3, 4}, uint_vector{5, 6, 7, 8});
  CHECK(chosen[0] == 1);
  CHECK(chosen[1] == 6);
  CHECK(chosen[2] == 3);
  CHECK(chosen[3] == 8);
}

TEST_CASE("square roots are the scalar ones, bit for bit") {
  long wrong = 0;
  for_many_floats([&](float_vector value, std::array<float, 4> const& lanes) {
    float_vector const roots = square_root(value);
    double_vector const wide = square_root(widen_low(value));
    for (std::size_t i = 0; i < 4; ++i) {
      float const expected = std::sqrt(lanes[i]);
      wrong += small_float::same(roots[i], expected) || expected != expected ? 0 : 1;
      wrong += (expected != expected) == (roots[i] != roots[i]) ? 0 : 1;
    }
    for (std::size_t i = 0; i < 2; ++i) {
      double const expected = std::sqrt(double{lanes[i]});
      wrong += small_float::same(wide[i], expected) || expected != expected ? 0 : 1;
    }
  });
  CHECK(wrong == 0);
}

TEST_CASE("floats are widened exactly, each half to its place") {
  long wrong = 0;
  for_many_floats([&](float_vector value, std::array<float, 4> const& lanes) {
    double_vector const low = widen_low(value);
    double_vector const high = widen_high(value);
    double_vector const memory = load_widened(lanes.data() + 1);
    auto const equal = [](double a, float b) {
      return small_float::same(a, double{b}) || (a != a && b != b);
    };
    for (std::size_t i = 0; i < 2; ++i) {
      wrong +=
          equal(low[i], lanes[i]) && equal(high[i], lanes[2 + i]) && equal(memory[i], lanes[1 + i])
              ? 0
              : 1;
    }
  });
  CHECK(wrong == 0);
}

TEST_CASE(
    "16-bit numbers go to high halves and back, in order, and no byte beside them is written") {
  std::array<std::uint16_t, 10> const from{1, 0x8000, 0xffff, 0x7fff, 0x1234, 6, 7, 8, 9, 10};
  for (std::size_t const first : {0U, 1U, 2U}) {
    auto const one = load_high_halves(from.data() + first);
    auto const two = load_two_high_halves(from.data() + first);
    for (std::size_t i = 0; i < 4; ++i) {
      CHECK(one[i] == std::uint32_t{from[first + i]} << 16U);
      CHECK(two[0][i] == std::uint32_t{from[first + i]} << 16U);
      CHECK(two[1][i] == std::uint32_t{from[first + 4 + i]} << 16U);
    }
    std::array<std::uint16_t, 10> few;
    std::array<std::uint16_t, 10> all;
    few.fill(0xabcd);
    all.fill(0xabcd);
    uint_vector const noise = uint_vector{0xffff, 0x8000, 0x7fff, 1};  // low halves are ignored
    store_high_halves(few.data() + first, one | noise);
    store_two_high_halves(all.data() + first, two[0] | noise, two[1] | noise);
    for (std::size_t i = 0; i < few.size(); ++i) {
      CHECK(few[i] == (i >= first && i < first + 4 ? from[i] : 0xabcd));
      CHECK(all[i] == (i >= first && i < first + 8 ? from[i] : 0xabcd));
    }
  }
}

TEST_CASE("a NaN is found in any lane of either vector, and an infinity is none") {
  CHECK_FALSE(any_nan(float_vector{0, infinity, -infinity, 1}, float_vector{}));
  for (std::size_t lane = 0; lane < 4; ++lane) {
    for (float const each : {quiet_nan, -quiet_nan, std::bit_cast<float>(0x7f800001U)}) {
      std::array<float, 4> lanes{};
      lanes[lane] = each;
      auto const value = load_vector<float_vector>(lanes.data());
      CHECK(any_nan(value, float_vector{}));
      CHECK(any_nan(float_vector{}, value));
      CHECK(any_nan(value, value));
    }
  }
}

TEST_CASE("bfloat16 is the nearest one, ties to even, and its NaN stays one") {
  long wrong = 0;
  auto const check = [&](std::array<float, 4> const& lanes) {
    auto const value = load_vector<float_vector>(lanes.data());
    uint_vector const rounded = round_to_bfloat16(value);
    uint_vector const number = round_number_to_bfloat16(value);
    for (std::size_t i = 0; i < 4; ++i) {
      double const got = value_of<brain>(rounded[i]);
      if (lanes[i] != lanes[i]) {
        wrong += got != got && (rounded[i] & 0x80400000U) ==
                                   ((bits_of(lanes[i]) & 0x80000000U) | 0x400000U)
                     ? 0
                     : 1;
      } else {
        double const expected = brain::round(lanes[i]);
        wrong += small_float::same(got, expected) ? 0 : 1;
        wrong += small_float::same(value_of<brain>(number[i]), expected) ? 0 : 1;
      }
    }
  };
  for_every_boundary<brain>(check);
  for_many_floats([&](float_vector, std::array<float, 4> const& lanes) { check(lanes); });
  check({std::bit_cast<float>(0x7f800001U), std::bit_cast<float>(0xff80ffffU),
         std::bit_cast<float>(0x7fffffffU), std::bit_cast<float>(0xffffffffU)});
  CHECK(wrong == 0);
}

TEST_CASE("float16 is the nearest one, ties to even, subnormal or not, and its NaN stays one") {
  long wrong = 0;
  auto const check = [&](std::array<float, 4> const& lanes) {
    uint_vector const rounded = round_to_float16(load_vector<float_vector>(lanes.data()));
    for (std::size_t i = 0; i < 4; ++i) {
      double const got = value_of<half>(rounded[i]);
      if (lanes[i] != lanes[i]) {
        wrong += got != got && (rounded[i] & 0x82000000U) ==
                                   ((bits_of(lanes[i]) & 0x80000000U) | 0x2000000U)
                     ? 0
                     : 1;
      } else {
        wrong += small_float::same(got, half::round(lanes[i])) ? 0 : 1;
      }
    }
  };
  for_every_boundary<half>(check);
  for_many_floats([&](float_vector, std::array<float, 4> const& lanes) { check(lanes); });
  check({std::bit_cast<float>(0x7f800001U), std::bit_cast<float>(0xff80ffffU),
         std::bit_cast<float>(0x7fffffffU), std::bit_cast<float>(0xffffffffU)});
  CHECK(wrong == 0);
}

TEST_CASE("every float16 is widened exactly") {
  long wrong = 0;
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    std::array<std::uint16_t, 4> memory{};
    memory[bits % 4] = static_cast<std::uint16_t>(bits);
    float const wide = widen_float16(load_high_halves(memory.data()))[bits % 4];
    bool const is_nan = (bits & 0x7fffU) > half::infinity;
    wrong += (is_nan ? wide != wide : small_float::same(wide, half::value(bits))) ? 0 : 1;
  }
  CHECK(wrong == 0);
}

TEST_CASE("a rounded product isn't fused with what follows") {
  // (1 + e)^2 is 1 + 2e + e^2, and e^2 is less than half an ulp.
  float volatile e = 0x1p-13F;  // the compiler must not know it
  double volatile d = 0x1p-27;
  float_vector const one_float = float_vector{} + (1 + e);
  double_vector const one_double = double_vector{} + (1 + d);
  CHECK((rounded(one_float * one_float) - (1 + 2 * e))[3] == 0);
  CHECK((rounded(one_double * one_double) - (1 + 2 * d))[1] == 0);
}
