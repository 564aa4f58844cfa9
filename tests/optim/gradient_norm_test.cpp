// SPDX-License-Identifier: MIT
#include <zero/optim/gradient_norm.hpp>

#include <doctest/doctest.h>

#include <zero/core/any_span.hpp>
#include <zero/core/dtype.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

namespace {

using int128 = zero::detail::int128;

template <class T>
zero::const_any_span view(std::vector<T> const& values) {
  return std::span{values};
}

template <class T>
double norm_of(std::vector<T> const& values) {
  double const anchor = zero::largest_magnitude(view(values));
  return zero::norm(zero::sum_of_squares(view(values), anchor), anchor);
}

/// The last bit may differ: the sum and its root are each rounded once.
bool near(double actual, double exact) {
  return actual == exact || actual == std::nextafter(exact, 0.0) ||
         actual == std::nextafter(exact, std::numeric_limits<double>::infinity());
}

template <class T>
T make(float value) {
  return T(value);
}

/// Values over many magnitudes; a quarter of them zero.
template <class T>
std::vector<T> random_values(std::size_t size, unsigned seed, int lowest, int highest) {
  std::mt19937 random{seed};
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<int> exponent{lowest, highest};
  std::vector<T> values;
  for (std::size_t i = 0; i < size; ++i) {
    values.push_back(
        make<T>(random() % 4 == 0 ? 0.0F : std::ldexp(normal(random), exponent(random))));
  }
  return values;
}

/// value^2 / 2^unit_exponent to the nearest integer, in integers. The square has 48 bits; it never
/// lies halfway, as its last set bit has an even exponent.
int128 square_in_units(float value, int unit_exponent) {
  int exponent = 0;
  auto const significand = static_cast<std::int64_t>(std::ldexp(std::frexp(value, &exponent), 24));
  int const shift = 2 * (exponent - 24) - unit_exponent;
  int128 const square = int128{significand} * significand;
  if (shift >= 0) {
    return square << shift;
  }
  if (shift < -60) {
    return 0;
  }
  int128 const floor = square >> -shift;
  int128 const rest = square - (floor << -shift);
  int128 const half = int128{1} << (-shift - 1);
  return floor + (rest > half ? 1 : 0);
}

}  // namespace

TEST_CASE("the norm of integers is exact") {
  CHECK(norm_of(std::vector<float>{3, 4}) == 5.0);
  CHECK(norm_of(std::vector<double>{-3, 0, 4}) == 5.0);
  CHECK(norm_of(std::vector<float>{-12}) == 12.0);
  CHECK(norm_of(std::vector<float>{1, 2, 2, 4, 4, 4, 4, 4, 4, -4}) == 11.0);  // 1 + 8 + 112 = 121
}

TEST_CASE("averaged gradients of 2 in four elements have norm 4, and are clipped to 0.5") {
  // Rank 0 has gradients 1, rank 1 has 3; each owns two of the averages. Buffers before the
  // reduction would give sqrt(10) and sqrt(26).
  std::vector<float> const shard{2, 2};
  double const anchor =
      std::max(zero::largest_magnitude(view(shard)), zero::largest_magnitude(view(shard)));
  auto sum = zero::sum_of_squares(view(shard), anchor);
  sum += zero::sum_of_squares(view(shard), anchor);
  double const norm = zero::norm(sum, anchor);
  CHECK(norm == 4.0);
  CHECK(zero::clip_factor(norm, 1.0) * 2 == 0.5);
}

TEST_CASE("a gradient that is used twice counts once: four elements of 2 have norm 4") {
  CHECK(norm_of(std::vector<float>(4, 2.0F)) == 4.0);
  CHECK(norm_of(std::vector<zero::bfloat16>(4, zero::bfloat16(2.0F))) == 4.0);
}

TEST_CASE("the norm of no elements, or of zeros, is 0") {
  CHECK(norm_of(std::vector<float>{}) == 0.0);
  CHECK(norm_of(std::vector<double>{}) == 0.0);
  CHECK(norm_of(std::vector<float>{0.0F, -0.0F, 0.0F}) == 0.0);
  CHECK(norm_of(std::vector<zero::float16>(9, zero::float16(-0.0F))) == 0.0);
  CHECK(zero::largest_magnitude({}) == 0.0);
  // A rank with nothing, or with zeros, beside one with something.
  CHECK(zero::sum_of_squares({}, 3.0) == zero::norm_sum{});
  CHECK(zero::sum_of_squares(view(std::vector<float>(5)), 3.0) == zero::norm_sum{});
}

TEST_CASE("the norm is the exact one, rounded, over float's whole range") {
  // The expected values are square roots of Python's fractions.Fraction.
  CHECK(near(norm_of(std::vector<float>{1e20F, 1e-20F}), 0x1.5af1d8p+66));
  CHECK(near(norm_of(std::vector<float>{1e20F, 3e13F, -2e6F, 7.0F}), 0x1.5af1d80000113p+66));
  CHECK(near(norm_of(std::vector<float>(10, 0.1F)), 0x1.43d1367578de7p-2));
  CHECK(near(norm_of(std::vector<float>{1e-20F, -1e-20F, 1e-20F, 1e-20F, 1e-20F, 1e-20F, 1e-20F,
                                        1e-38F, 1e-45F}),
             0x1.f3c4adc7baba6p-66));
  std::vector<float> sevenths;
  for (int i = 1; i < 24; ++i) {
    sevenths.push_back(static_cast<float>(i / 7.0));
  }
  CHECK(near(norm_of(sevenths), 0x1.2c9aa0f03634ap+3));
  constexpr float tiny = std::numeric_limits<float>::denorm_min();
  CHECK(near(norm_of(std::vector<float>{tiny, 2 * tiny, 3 * tiny, 5 * tiny}),
             0x1.8fae0c15ad38ap-147));
  CHECK(norm_of(std::vector<float>(9, tiny)) == 3 * double{tiny});
  constexpr float largest = std::numeric_limits<float>::max();
  CHECK(near(norm_of(std::vector<float>(3, -largest)), 0x1.bb67acca1d1c2p+128));
  CHECK(norm_of(std::vector<float>(4, largest)) == 2 * double{largest});
}

TEST_CASE("the norm of doubles doesn't overflow or vanish where the squares would") {
  CHECK(near(norm_of(std::vector<double>{1e300, 1e300, -3e299}), 0x1.14511fab64302p+997));
  CHECK(norm_of(std::vector<double>(4, 0x1p+1022)) == 0x1p+1023);
  CHECK(norm_of(std::vector<double>(4, 0x1p-1073)) == 0x1p-1072);
  constexpr double tiny = std::numeric_limits<double>::denorm_min();
  CHECK(norm_of(std::vector<double>(9, tiny)) == 3 * tiny);
  CHECK(norm_of(std::vector<double>{0x1p+1023, tiny}) == 0x1p+1023);
}

TEST_CASE("every square counts as the nearest multiple of the unit") {
  for (unsigned seed = 1; seed <= 200; ++seed) {
    int const lowest = -static_cast<int>(seed % 60);
    auto const values = random_values<float>(1 + seed % 40, seed, lowest, 3);
    double const anchor = zero::largest_magnitude(view(values));
    if (anchor == 0) {
      continue;
    }
    int const unit_exponent = 2 * (std::ilogb(anchor) + 1) - 80;
    int128 expected = 0;
    for (float const value : values) {
      expected += square_in_units(value, unit_exponent);
    }
    CAPTURE(seed);
    CHECK((zero::sum_of_squares(view(values), anchor).units() == expected));
  }
}

TEST_CASE("a small square counts as the nearest multiple of the unit") {
  // The anchor is 1, below 2^1, so the unit is 2^-78, and (n * 2^-40)^2 is n^2 / 4 units.
  auto const units = [](float value) {
    return static_cast<long long>(
        zero::sum_of_squares(view(std::vector<float>{value}), 1.0).units());
  };
  CHECK(units(1 * 0x1p-40F) == 0);
  CHECK(units(2 * 0x1p-40F) == 1);
  CHECK(units(3 * 0x1p-40F) == 2);
  CHECK(units(4 * 0x1p-40F) == 4);
  CHECK(units(5 * 0x1p-40F) == 6);
  CHECK(units(5 * 0x1p-41F) == 2);  // 25/16
  CHECK(units(0x1p-20F) == 1LL << 38);
  CHECK(units(0x1p-149F) == 0);
}

TEST_CASE_TEMPLATE("every cut and every order of the sums gives the same bits", T, float, double,
                   zero::float16, zero::bfloat16) {
  std::mt19937 random{11};
  for (std::size_t const size : {1U, 2U, 3U, 5U, 64U, 1000U, 4099U}) {
    auto const values = random_values<T>(size, static_cast<unsigned>(size), -12, 3);
    double const anchor = zero::largest_magnitude(view(values));
    auto const whole = zero::sum_of_squares(view(values), anchor);
    double const norm = zero::norm(whole, anchor);
    for (int round = 0; round < 30; ++round) {
      std::vector<zero::norm_sum> parts;
      double largest = 0;
      for (std::size_t first = 0; first < size;) {
        std::size_t const longest = round % 2 == 0 ? 9 : size;
        std::size_t const count =
            std::min(size - first, std::uniform_int_distribution<std::size_t>{0, longest}(random));
        auto const part = view(values).subspan(first, count);
        largest = std::max(largest, zero::largest_magnitude(part));
        parts.push_back(zero::sum_of_squares(part, anchor));
        first += count;
      }
      std::shuffle(parts.begin(), parts.end(), random);
      while (parts.size() > 1) {  // as a tree, not only from left to right
        std::size_t const at =
            std::uniform_int_distribution<std::size_t>{0, parts.size() - 2}(random);
        parts[at] += parts.back();
        parts.pop_back();
      }
      CHECK(largest == anchor);
      CHECK(parts.front() == whole);
      CHECK(std::bit_cast<std::uint64_t>(zero::norm(parts.front(), largest)) ==
            std::bit_cast<std::uint64_t>(norm));
    }
  }
}

TEST_CASE_TEMPLATE("the largest magnitude is exact, wherever it is", T, float, double,
                   zero::float16, zero::bfloat16) {
  for (std::size_t size = 1; size < 40; ++size) {
    for (std::size_t at = 0; at < size; ++at) {
      std::vector<T> values(size, make<T>(0.25F));
      values[at] = make<T>(at % 2 == 0 ? -3.5F : 3.5F);
      CHECK(zero::largest_magnitude(view(values)) == 3.5);
      CHECK(zero::largest_magnitude(view(values).subspan(0, at)) == (at == 0 ? 0.0 : 0.25));
    }
  }
}

TEST_CASE_TEMPLATE("an infinity or a NaN of either sign makes magnitude and norm infinite", T,
                   float, double, zero::float16, zero::bfloat16) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  for (float const bad : {nan, -nan, std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    for (std::size_t const at : {0U, 1U, 7U, 8U, 16U, 18U}) {
      std::vector<T> values(19, make<T>(1.0F));
      values[at] = make<T>(bad);
      CHECK(zero::largest_magnitude(view(values)) == infinity);
      values[(at + 5) % 19] = make<T>(nan);  // a larger number after a NaN must not hide it
      values[(at + 9) % 19] = make<T>(60000.0F);
      CHECK(zero::largest_magnitude(view(values)) == infinity);
      CHECK(norm_of(values) == infinity);
    }
  }
}

TEST_CASE("the largest finite numbers are not taken for infinity") {
  CHECK(zero::largest_magnitude(view(std::vector{-std::numeric_limits<float>::max()})) ==
        double{std::numeric_limits<float>::max()});
  CHECK(zero::largest_magnitude(view(std::vector{std::numeric_limits<double>::max()})) ==
        std::numeric_limits<double>::max());
  CHECK(zero::largest_magnitude(view(std::vector{zero::float16(-65504.0F)})) == 65504.0);
  CHECK(zero::largest_magnitude(view(std::vector{zero::bfloat16::from_bits(0x7f7f)})) ==
        0x1.fep+127);
  CHECK(zero::largest_magnitude(view(std::vector{zero::float16::from_bits(0x8001)})) == 0x1p-24);
}

TEST_CASE("a long gradient is added without overflow") {
  // The squares are the largest that the anchor allows: 2^24 of them overflow two lanes of 64 bits.
  std::size_t const size = (std::size_t{1} << 24U) + (std::size_t{1} << 20U) + 5;
  float const value = std::nextafter(1.0F, 0.0F);
  std::vector<float> const values(size, value);
  double const anchor = double{value};
  auto const sum = zero::sum_of_squares(view(values), anchor);
  CHECK((sum.units() == static_cast<int128>(size) * square_in_units(value, -80)));
  // The reverse: long stretches of what rounds down, and up, in the high part.
  std::vector<float> small(size, 0x1.8p-20F);
  small[0] = 1.0F;
  CHECK((zero::sum_of_squares(view(small), 1.0).units() ==
         static_cast<int128>(size - 1) * square_in_units(0x1.8p-20F, -78) +
             square_in_units(1.0F, -78)));
}

TEST_CASE("the clip factor is 1 unless the norm is larger than asked") {
  CHECK(zero::clip_factor(0.0, 1.0) == 1.0);
  CHECK(zero::clip_factor(1.0, 1.0) == 1.0);
  CHECK(zero::clip_factor(4.0, 1.0) == 0.25);
  CHECK(zero::clip_factor(0.5, 0.125) == 0.25);
}
