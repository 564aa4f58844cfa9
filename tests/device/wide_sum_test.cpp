// SPDX-License-Identifier: MIT
#include <zero/device/wide_sum.hpp>

#include <doctest/doctest.h>
#include <support/nearest.hpp>

#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#ifdef ZERO_WIDE_SUM

using zero::bfloat16;
using zero::float16;
using zero::detail::wide_sum_steps;

namespace {

template <class Source, class Destination>
struct pair {
  using source = Source;
  using destination = Destination;
};

/// The pairs whose sums are wide; that of bfloat16 only without a partial sum.
#define WIDE_PAIRS \
  pair<float16, float16>, pair<float16, float>, pair<float, float16>, pair<bfloat16, bfloat16>

/// Integers that E holds exactly.
template <class E>
std::vector<E> integers(std::mt19937& random, std::size_t n) {
  int const most = std::is_same_v<E, bfloat16> ? 255 : 2047;
  std::vector<E> out;
  for (std::size_t i = 0; i < n; ++i) {
    out.push_back(static_cast<E>(static_cast<float>(static_cast<int>(random()) % (most + 1))));
  }
  return out;
}

/// Calls `visit(has_partial, count)`, as types, for every form of the pair's sum.
template <class Pair, class Visit>
void for_each_form(Visit visit) {
  using source = typename Pair::source;
  using destination = typename Pair::destination;
  auto const visit_counts = [&]<std::size_t... Count>(auto has_partial,
                                                      std::index_sequence<Count...>) {
    if constexpr (zero::detail::prefers_wide<has_partial(), source, destination>) {
      (visit(has_partial, std::integral_constant<std::size_t, Count + 1>{}), ...);
    }
  };
  visit_counts(std::false_type{}, std::make_index_sequence<4>{});
  visit_counts(std::true_type{}, std::make_index_sequence<4>{});
}

bool can_run() {
  bool const can = zero::detail::has_wide_sum();
  if (!can) {
    MESSAGE("skipped: the processor has no AVX2 and F16C");
  }
  return can;
}

}  // namespace

TEST_CASE_TEMPLATE("a sum of integers is the exact one, rounded once, for every number of sources",
                   Pair, WIDE_PAIRS) {
  using source = typename Pair::source;
  using destination = typename Pair::destination;
  if (!can_run()) {
    return;
  }
  constexpr std::size_t n = 4096;
  std::mt19937 random{11};
  auto const partial = integers<float>(random, n);
  std::array<std::vector<source>, 4> sources;
  std::array<source const*, 4> from{};
  for (std::size_t s = 0; s < 4; ++s) {
    sources[s] = integers<source>(random, n);
    from[s] = sources[s].data();
  }
  auto const before = integers<destination>(random, n);
  for_each_form<Pair>([&](auto has_partial, auto count) {
    for (bool const add : {false, true}) {
      for (float const scale : {1.0F, 0.25F, 3.0F}) {
        auto result = before;
        result.insert(result.end(), 16, destination{7.0F});
        wide_sum_steps<has_partial(), count()>(partial.data(), from.data(), result.data(), n, scale,
                                               add);
        long wrong = 0;
        for (std::size_t i = 0; i < n; ++i) {
          double sum = has_partial() ? double{partial[i]} : 0.0;
          for (std::size_t s = 0; s < count(); ++s) {
            sum += test::value_of(sources[s][i]);
          }
          double expected = test::nearest<destination>(sum * double{scale});
          expected =
              add ? test::nearest<destination>(test::value_of(before[i]) + expected) : expected;
          wrong += test::value_of(result[i]) == expected ? 0 : 1;
        }
        for (std::size_t i = n; i < n + 16; ++i) {
          wrong += test::value_of(result[i]) == 7.0 ? 0 : 1;  // nothing behind the range is written
        }
        CHECK_MESSAGE(wrong == 0, has_partial(), " ", count(), " ", add, " ", scale);
      }
    }
  });
}

TEST_CASE("what was summed before comes first, then the sources in their order") {
  if (!can_run()) {
    return;
  }
  constexpr float large = 0x1p24F;  // has an ulp of 2, and 1 is a tie that goes to it
  std::vector<float> const partial(16, large);
  std::vector<float16> const one(16, float16{1.0F});
  std::array<float16 const*, 4> const ones{one.data(), one.data(), one.data(), one.data()};
  std::vector<float> result(16);
  wide_sum_steps<true, 4>(partial.data(), ones.data(), result.data(), 16, 1, false);
  CHECK(result == partial);

  std::vector<float> const plus(16, large);
  std::vector<float> const minus(16, -large);
  std::vector<float> const small(16, 1.0F);
  std::vector<float16> rounded(16);
  auto const sum = [&](std::array<float const*, 4> const& sources) {
    wide_sum_steps<false, 4>(nullptr, sources.data(), rounded.data(), 16, 1, false);
    return rounded[15];
  };
  CHECK(sum({plus.data(), small.data(), minus.data(), small.data()}) == 1.0F);
  CHECK(sum({plus.data(), minus.data(), small.data(), small.data()}) == 2.0F);
  CHECK(sum({small.data(), small.data(), plus.data(), minus.data()}) == 2.0F);
  CHECK(sum({small.data(), plus.data(), small.data(), minus.data()}) == 0.0F);
}

TEST_CASE("huge 16-bit numbers don't overflow before the scale, nor tiny ones vanish") {
  if (!can_run()) {
    return;
  }
  std::vector<float16> huge(16, float16{65504.0F});
  std::vector<float16> tiny(16, float16{0x1p-24F});
  std::vector<float16> result(16);
  std::array<float16 const*, 2> sources{huge.data(), huge.data()};
  wide_sum_steps<false, 2>(nullptr, sources.data(), result.data(), 16, 0.5F, false);
  CHECK(test::value_of(result[0]) == 65504.0);
  wide_sum_steps<false, 2>(nullptr, sources.data(), result.data(), 16, 1.0F, false);
  CHECK(test::value_of(result[8]) == std::numeric_limits<double>::infinity());
  sources = {tiny.data(), tiny.data()};
  wide_sum_steps<false, 2>(nullptr, sources.data(), result.data(), 16, 0.5F, false);
  CHECK(test::value_of(result[15]) == 0x1p-24);
}

TEST_CASE_TEMPLATE("an infinity stays one, two of them and a NaN are NaN, in their lanes alone",
                   Pair, WIDE_PAIRS) {
  using source = typename Pair::source;
  using destination = typename Pair::destination;
  if (!can_run()) {
    return;
  }
  constexpr float infinity = std::numeric_limits<float>::infinity();
  for (std::size_t lane = 0; lane < 16; ++lane) {
    for (bool const add : {false, true}) {
      std::vector<source> first(48, static_cast<source>(1.0F));
      std::vector<source> second = first;
      first[lane] = static_cast<source>(infinity);
      first[16 + lane] = static_cast<source>(-infinity);
      second[16 + lane] = static_cast<source>(infinity);
      second[32 + lane] = static_cast<source>(std::numeric_limits<float>::quiet_NaN());
      std::array<source const*, 2> const sources{first.data(), second.data()};
      std::vector<destination> result(48, static_cast<destination>(1.0F));
      wide_sum_steps<false, 2>(nullptr, sources.data(), result.data(), 48, 1, add);
      long wrong = 0;
      for (std::size_t i = 0; i < 48; ++i) {
        double const got = test::value_of(result[i]);
        bool const right = i == lane        ? got == double{infinity}
                           : i % 16 == lane ? std::isnan(got)
                                            : got == (add ? 3.0 : 2.0);
        wrong += right ? 0 : 1;
      }
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("the destination may be any one of the sources") {
  if (!can_run()) {
    return;
  }
  for (std::size_t const own : {0U, 1U, 2U}) {
    std::array<std::vector<float16>, 3> memory;
    std::array<float16 const*, 3> sources{};
    for (std::size_t s = 0; s < 3; ++s) {
      memory[s].assign(64, float16{static_cast<float>(1U << (2 * s))});
      sources[s] = memory[s].data();
    }
    wide_sum_steps<false, 3>(nullptr, sources.data(), memory[own].data(), 64, 1, false);
    for (float16 const each : memory[own]) {
      CHECK(test::value_of(each) == 21.0);
    }
  }
}

#endif
