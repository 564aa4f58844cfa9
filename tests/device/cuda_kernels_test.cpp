// SPDX-License-Identifier: MIT
// The kernels as a GPU's threads call them, each for a range of its own; what a launch over the
// fake of the runtime runs is one range.
#include <zero/device/cuda_kernels.hpp>

#include <doctest/doctest.h>
#include <core/small_float.hpp>
#include <support/by_grain.hpp>
#include <support/nearest.hpp>
#include <support/thrown.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <type_traits>
#include <vector>

namespace {

using zero::bfloat16;
using zero::dtype;
using zero::float16;
using zero::detail::check_sum;
using zero::detail::convert_elements;
using zero::detail::sum_elements;

/// Integers that every type holds exactly, other ones for each seed.
template <class T>
std::vector<T> integers(std::size_t n, std::size_t seed) {
  std::vector<T> out;
  for (std::size_t i = 0; i < n; ++i) {
    out.push_back(static_cast<T>(static_cast<float>((i * 37 + seed * 101) % 509) - 254.0F));
  }
  return out;
}

/// Values with bits that the other types lose: thirds of many magnitudes.
template <class T>
std::vector<T> thirds(std::size_t n) {
  std::vector<T> out;
  for (std::size_t i = 0; i < n; ++i) {
    double const exact = std::ldexp(static_cast<double>(i + 1) / 3, static_cast<int>(i % 40) - 28);
    out.push_back(
        static_cast<T>(static_cast<zero::accumulate_type<T>>(i % 2 == 0 ? exact : -exact)));
  }
  return out;
}

/// Memory whose elements start at any address, with one before and one behind them.
template <class T>
struct fenced {
  explicit fenced(std::vector<T> const& values) : all(values.size() + 2, fence) {
    std::copy(values.begin(), values.end(), all.begin() + 1);
  }
  T* data() { return all.data() + 1; }
  [[nodiscard]] bool intact() const {
    return test::value_of(all.front()) == test::value_of(fence) &&
           test::value_of(all.back()) == test::value_of(fence);
  }

  static inline T const fence = static_cast<T>(77.0F);
  std::vector<T> all;
};

template <class T>
void check_conversions_from() {
  auto const check = []<class To>(std::type_identity<To>) {
    for (std::size_t const n : {1U, 7U, 8U, 9U, 203U}) {
      fenced<T> from{thirds<T>(n)};
      fenced<To> to{std::vector<To>(n)};
      test::by_grain(convert_elements<T, To>{from.data(), to.data()}, n);
      long wrong = 0;
      for (std::size_t i = 0; i < n; ++i) {
        wrong += small_float::same(test::value_of(to.data()[i]),
                                   test::nearest<To>(test::value_of(from.data()[i])))
                     ? 0
                     : 1;
      }
      CHECK(wrong == 0);
      CHECK(to.intact());
    }
  };
  check(std::type_identity<float>{});
  check(std::type_identity<double>{});
  check(std::type_identity<float16>{});
  check(std::type_identity<bfloat16>{});
}

template <class Source, class To>
void check_sums() {
  using kernel = sum_elements<Source, To>;
  for (std::size_t const n : {1U, 3U, 4U, 7U, 8U, 9U, 203U}) {
    for (std::size_t const count : {1U, 2U, 3U, 8U, 256U}) {
      for (bool const add : {false, true}) {
        std::vector<fenced<Source>> sources;
        kernel sum{};
        fenced<To> to{integers<To>(n, 1000)};
        fenced<To> const before = to;
        sum.to = to.data();
        sum.scale = 0.25F;
        sum.add = add;
        sum.count = static_cast<unsigned>(count);
        sources.reserve(count);
        for (std::size_t s = 0; s < count; ++s) {
          sources.emplace_back(integers<Source>(n, s));
          sum.sources[s] = sources.back().data();
        }
        test::by_grain(sum, n);
        long wrong = 0;
        for (std::size_t i = 0; i < n; ++i) {
          double exact = 0;
          for (auto& source : sources) {
            exact += test::value_of(source.data()[i]);
          }
          double expected = test::nearest<To>(exact / 4);
          expected =
              add ? test::nearest<To>(test::value_of(before.all[i + 1]) + expected) : expected;
          wrong += test::value_of(to.data()[i]) == expected ? 0 : 1;
        }
        CHECK_MESSAGE(wrong == 0, n, " ", count, " ", add);
        CHECK(to.intact());
      }
    }
  }
}

}  // namespace

TEST_CASE_TEMPLATE("conversions by threads are to the nearest value, and stay in their ranges",
                   From, float, double, float16, bfloat16) {
  check_conversions_from<From>();
}

TEST_CASE("a double becomes 16 bits in one rounding") {
  // Just above a tie, and below the next float: a float on the way would be the tie, and then even.
  std::array<double, 2> const from{1 + 0x1p-11 + 0x1p-40, -1 - 0x1p-8 - 0x1p-40};
  std::array<float16, 2> half{};
  std::array<bfloat16, 2> brain{};
  test::by_grain(convert_elements<double, float16>{from.data(), half.data()}, 2);
  test::by_grain(convert_elements<double, bfloat16>{from.data(), brain.data()}, 2);
  CHECK(test::value_of(half[0]) == 1 + 0x1p-10);
  CHECK(test::value_of(brain[1]) == -1 - 0x1p-7);
}

TEST_CASE("sums by threads are the exact ones, rounded once, and stay in their ranges") {
  check_sums<float, float>();
  check_sums<double, double>();
  check_sums<float16, float16>();
  check_sums<bfloat16, bfloat16>();
  check_sums<float16, float>();
  check_sums<bfloat16, float>();
  check_sums<float, float16>();
  check_sums<float, bfloat16>();
}

TEST_CASE("the sources are added in their order") {
  constexpr float large = 0x1p24F;  // has an ulp of 2, and 1 is a tie that goes to it
  std::vector<float> const plus(9, large);
  std::vector<float> const minus(9, -large);
  std::vector<float> const one(9, 1.0F);
  std::vector<float> to(9);
  auto const sum = [&](std::array<float const*, 3> const& sources) {
    sum_elements<float, float> kernel{to.data(), 1.0F, false, 3, {}};
    std::copy(sources.begin(), sources.end(), kernel.sources);
    test::by_grain(kernel, 9);
    CHECK(to.front() == to.back());
    return to.back();
  };
  CHECK(sum({plus.data(), one.data(), minus.data()}) == 0.0F);
  CHECK(sum({plus.data(), minus.data(), one.data()}) == 1.0F);
}

TEST_CASE("the destination may be a source") {
  std::vector<float16> own(29, float16{3.0F});
  std::vector<float16> const other(29, float16{5.0F});
  sum_elements<float16, float16> kernel{own.data(), 0.5F, false, 2, {}};
  kernel.sources[0] = other.data();
  kernel.sources[1] = own.data();
  test::by_grain(kernel, 29);
  CHECK(
      std::all_of(own.begin(), own.end(), [](float16 each) { return test::value_of(each) == 4; }));
}

TEST_CASE("what can't be summed is refused with the operation, expected, actual and the rank") {
  auto const refusal = [](std::size_t sources, dtype from, dtype to) {
    return test::message_of([&] { check_sum("all_reduce", sources, from, to); });
  };
  CHECK(refusal(1, dtype::float32, dtype::float32).empty());
  CHECK(refusal(256, dtype::bfloat16, dtype::float32).empty());
  CHECK(refusal(0, dtype::float32, dtype::float32) ==
        "all_reduce: expected 1 to 256 sources, actual 0");
  zero::detail::rank_of_thread = 3;
  CHECK(refusal(257, dtype::float32, dtype::float32) ==
        "all_reduce: expected 1 to 256 sources, actual 257 (rank 3)");
  CHECK(refusal(2, dtype::float16, dtype::bfloat16) ==
        "all_reduce: expected a destination of float16, actual bfloat16 (rank 3)");
  zero::detail::rank_of_thread = -1;
}
