// SPDX-License-Identifier: MIT
#include <doctest/doctest.h>

#include <zero/device/host_convert.hpp>

#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

using zero::bfloat16;
using zero::float16;
using zero::detail::host_convert;

namespace {

template <class To, class From>
std::vector<To> converted(std::vector<From> const& from) {
  std::vector<To> to(from.size());
  host_convert(std::span{from}, std::span{to});
  return to;
}

/// A double rounded to a multiple of a power of two, ties to even, with magnitudes in double's
/// range.
double round_bits(double value, int bits, int smallest_exponent) {
  int exponent = 0;
  std::frexp(value, &exponent);
  int const ulp = std::max(exponent - bits, smallest_exponent);
  return std::ldexp(std::nearbyint(std::ldexp(value, -ulp)), ulp);
}

}  // namespace

TEST_CASE_TEMPLATE("small whole numbers are the same in every type", From, float, double, float16,
                   bfloat16) {
  for (std::size_t const n : {0U, 1U, 3U, 4U, 7U, 100U}) {
    std::vector<From> from(n);
    for (std::size_t i = 0; i < n; ++i) {
      from[i] = From(static_cast<float>(i) - 40.0F);
    }
    auto const right = [&](auto const& to) {
      std::size_t count = 0;
      for (std::size_t i = 0; i < n; ++i) {
        count += static_cast<float>(to[i]) == static_cast<float>(i) - 40.0F ? 1U : 0U;
      }
      return count == n;
    };
    CHECK(right(converted<float>(from)));
    CHECK(right(converted<double>(from)));
    CHECK(right(converted<float16>(from)));
    CHECK(right(converted<bfloat16>(from)));
  }
}

TEST_CASE("double is rounded once to 16 bits, not first to float") {
  // A tie but for 2^-40: through float it would go to the even neighbour.
  std::vector<double> const ties{1 + 0x1p-8 + 0x1p-40, 1 + 0x1p-8 - 0x1p-40, 1 + 0x1p-8,
                                 -1 - 0x1p-8 - 0x1p-40};
  auto const brain = converted<bfloat16>(ties);
  CHECK(brain[0] == 1 + 0x1p-7F);
  CHECK(brain[1] == 1.0F);
  CHECK(brain[2] == 1.0F);
  CHECK(brain[3] == -1 - 0x1p-7F);
  std::vector<double> const halves{1 + 0x1p-11 + 0x1p-40, 1 + 0x1p-11, 0x1p-25 + 0x1p-60, 0x1p-25};
  auto const half = converted<float16>(halves);
  CHECK(half[0] == 1 + 0x1p-10F);
  CHECK(half[1] == 1.0F);
  CHECK(half[2] == 0x1p-24F);
  CHECK(half[3] == 0.0F);
}

TEST_CASE("doubles of every magnitude are rounded to the nearest, ties to even") {
  std::mt19937_64 random{7};
  std::vector<double> from(20000);
  for (double& value : from) {
    value = std::ldexp(static_cast<double>(random()) * 0x1p-63 - 1,
                       static_cast<int>(random() % 40) - 25);
  }
  auto const single = converted<float>(from);
  auto const brain = converted<bfloat16>(from);
  auto const half = converted<float16>(from);
  std::size_t right = 0;
  for (std::size_t i = 0; i < from.size(); ++i) {
    right += single[i] == round_bits(from[i], 24, -149) ? 1U : 0U;
    right += double{brain[i]} == round_bits(from[i], 8, -133) ? 1U : 0U;
    right += double{half[i]} == round_bits(from[i], 11, -24) ? 1U : 0U;
  }
  CHECK(right == 60000);
}

TEST_CASE("values past the largest become infinite, and NaN stays NaN") {
  double const infinity = std::numeric_limits<double>::infinity();
  std::vector<double> const from{1e300, -1e300, infinity, -infinity, std::nan("")};
  auto const check = [](auto const& to) {
    CHECK(static_cast<float>(to[0]) == std::numeric_limits<float>::infinity());
    CHECK(static_cast<float>(to[1]) == -std::numeric_limits<float>::infinity());
    CHECK(static_cast<float>(to[2]) == std::numeric_limits<float>::infinity());
    CHECK(static_cast<float>(to[3]) == -std::numeric_limits<float>::infinity());
    CHECK(std::isnan(static_cast<float>(to[4])));
  };
  check(converted<float>(from));
  check(converted<bfloat16>(from));
  check(converted<float16>(from));
  check(converted<float16>(converted<float>(from)));
  check(converted<bfloat16>(converted<float16>(from)));
  CHECK(converted<float16>(std::vector<double>{65519.999, 65520.0})[0] == 65504.0F);
  CHECK(converted<float16>(std::vector<double>{65519.999, 65520.0})[1] ==
        std::numeric_limits<float>::infinity());
}

TEST_CASE("a span of one dtype may be converted to itself") {
  std::vector<float> a{1.0F, 2.0F};
  host_convert(std::span{a}, std::span{a});
  CHECK(a == std::vector<float>{1.0F, 2.0F});
}
