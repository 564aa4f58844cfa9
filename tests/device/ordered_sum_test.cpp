// SPDX-License-Identifier: MIT
#include <doctest/doctest.h>
#include <support/thrown.hpp>

#include <zero/device/ordered_sum.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

using zero::bfloat16;
using zero::float16;
using zero::detail::ordered_sum;

namespace {

template <class T>
using bits_of =
    std::conditional_t<sizeof(T) == 8, std::uint64_t,
                       std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint16_t>>;

/// The same bits, or both NaN.
template <class T>
bool same(T a, T b) {
  auto const x = static_cast<double>(a);
  auto const y = static_cast<double>(b);
  return std::bit_cast<bits_of<T>>(a) == std::bit_cast<bits_of<T>>(b) ||
         (std::isnan(x) && std::isnan(y));
}

/// Rounds one operation to T: float arithmetic through double, whose double rounding is harmless
/// for sums and products of floats; double arithmetic through a volatile, which nothing can fuse.
template <class T, class Operation>
T once(T a, T b, Operation operation) {
  double volatile out = operation(static_cast<double>(a), static_cast<double>(b));
  return static_cast<T>(out);
}

template <class Source, class Destination>
Destination expected(std::vector<std::vector<Source>> const& sources, std::size_t i, bool add,
                     Destination before, double scale) {
  using accumulate = zero::accumulate_type<Source>;
  auto const plus = [](double a, double b) { return a + b; };
  auto const times = [](double a, double b) { return a * b; };
  auto sum = static_cast<accumulate>(sources[0][i]);
  for (std::size_t s = 1; s < sources.size(); ++s) {
    sum = once(sum, static_cast<accumulate>(sources[s][i]), plus);
  }
  auto const rounded = static_cast<Destination>(once(sum, static_cast<accumulate>(scale), times));
  if (!add) {
    return rounded;
  }
  using own = zero::accumulate_type<Destination>;
  return static_cast<Destination>(once(static_cast<own>(before), static_cast<own>(rounded), plus));
}

/// Values of many magnitudes, some subnormal, infinite or NaN.
template <class T>
class generator {
 public:
  explicit generator(unsigned seed) : random_{seed} {}

  T operator()() {
    auto const kind = random_() % 64;
    auto const unit = static_cast<double>(random_()) / 4294967296.0 * 2 - 1;
    if (kind == 0) {
      return T(std::ldexp(static_cast<float>(unit), sizeof(T) == 2 ? -18 : -126));
    }
    if (kind == 1) {
      return T(INFINITY * static_cast<float>(unit));
    }
    if (kind == 2) {
      return T(NAN);
    }
    return T(static_cast<zero::accumulate_type<T>>(
        std::ldexp(unit, static_cast<int>(random_() % 12) - 4)));
  }

  std::vector<T> vector(std::size_t n) {
    std::vector<T> out(n);
    for (T& value : out) {
      value = (*this)();
    }
    return out;
  }

 private:
  std::mt19937 random_;
};

template <class Source>
std::vector<void const*> pointers(std::vector<std::vector<Source>> const& sources,
                                  std::size_t first = 0) {
  std::vector<void const*> out;
  for (auto const& source : sources) {
    out.push_back(source.data() + first);
  }
  return out;
}

template <class Source, class Destination>
struct pair {
  using source = Source;
  using destination = Destination;
};

}  // namespace

#define ALL_PAIRS                                                                         \
  pair<float, float>, pair<double, double>, pair<float16, float16>, pair<float16, float>, \
      pair<bfloat16, bfloat16>, pair<bfloat16, float>, pair<float, float16>, pair<float, bfloat16>

TEST_CASE_TEMPLATE("every element is the sum in order, scaled, rounded once, and added", Pair,
                   ALL_PAIRS) {
  using source_type = typename Pair::source;
  using destination_type = typename Pair::destination;
  generator<source_type> values{1};
  generator<destination_type> befores{2};
  for (std::size_t const p : {1U, 2U, 3U, 4U, 5U, 6U, 7U, 8U, 9U, 13U}) {
    for (std::size_t const n : {0U, 1U, 2U, 7U, 16U, 33U, 1023U, 1024U, 2100U}) {
      std::vector<std::vector<source_type>> sources(p);
      for (auto& source : sources) {
        source = values.vector(n);
      }
      for (bool const add : {false, true}) {
        for (double const scale : {1.0, 1.0 / static_cast<double>(p), 0.3}) {
          std::vector<destination_type> const before = befores.vector(n);
          std::vector<destination_type> result = before;
          ordered_sum(pointers(sources), zero::dtype_of<source_type>, std::span{result}, add,
                      scale);
          std::size_t right = 0;
          for (std::size_t i = 0; i < n; ++i) {
            right += same(result[i], expected(sources, i, add, before[i], scale)) ? 1U : 0U;
          }
          CHECK(right == n);
        }
      }
    }
  }
}

TEST_CASE_TEMPLATE("an element has the same bits wherever the spans are cut and start", Pair,
                   ALL_PAIRS) {
  using source_type = typename Pair::source;
  using destination_type = typename Pair::destination;
  constexpr std::size_t n = 3001;
  std::mt19937 random{3};
  for (std::size_t const p : {1U, 2U, 3U, 4U, 5U, 8U, 11U}) {
    generator<source_type> values{static_cast<unsigned>(p)};
    std::vector<std::vector<source_type>> sources(p);
    for (auto& source : sources) {
      source = values.vector(n);
    }
    double const scale = 1.0 / static_cast<double>(p);
    for (bool const add : {false, true}) {
      std::vector<destination_type> const before = generator<destination_type>{4}.vector(n);
      std::vector<destination_type> whole = before;
      ordered_sum(pointers(sources), zero::dtype_of<source_type>, std::span{whole}, add, scale);
      for (int repeat = 0; repeat < 30; ++repeat) {
        std::vector<destination_type> cut = before;
        std::size_t const largest = repeat % 2 == 0 ? 40 : 1500;
        for (std::size_t first = 0; first < n;) {
          std::size_t const count = std::min<std::size_t>(n - first, random() % largest);
          ordered_sum(pointers(sources, first), zero::dtype_of<source_type>,
                      std::span{cut}.subspan(first, count), add, scale);
          first += count;
        }
        bool equal = true;
        for (std::size_t i = 0; i < n; ++i) {
          equal = equal && same(whole[i], cut[i]);
        }
        CHECK(equal);
      }
    }
  }
}

TEST_CASE_TEMPLATE("the destination may be any one of the sources", Type, float, double, float16,
                   bfloat16) {
  generator<Type> values{5};
  for (std::size_t const p : {1U, 2U, 3U, 4U, 6U, 8U}) {
    for (std::size_t const own : {std::size_t{0}, p / 2, p - 1}) {
      for (bool const add : {false, true}) {
        std::vector<std::vector<Type>> sources(p);
        for (auto& source : sources) {
          source = values.vector(2077);
        }
        auto const before = sources;
        ordered_sum(pointers(sources), zero::dtype_of<Type>, std::span{sources[own]}, add, 0.7);
        bool right = true;
        for (std::size_t i = 0; i < before[0].size(); ++i) {
          right =
              right && same(sources[own][i], expected<Type>(before, i, add, before[own][i], 0.7));
        }
        CHECK(right);
        for (std::size_t s = 0; s < p; ++s) {
          CHECK((s == own || std::equal(before[s].begin(), before[s].end(), sources[s].begin(),
                                        [](Type a, Type b) { return same(a, b); })));
        }
      }
    }
  }
}

TEST_CASE("nothing outside the destination is written") {
  for (std::size_t const p : {1U, 2U, 5U}) {
    for (std::size_t const n : {0U, 1U, 3U, 16U, 1030U}) {
      std::vector<std::vector<float>> const sources(p, std::vector<float>(n, 1.0F));
      std::vector<float> result(n + 2, -5.0F);
      ordered_sum(pointers(sources), zero::dtype::float32, std::span{result}.subspan(1, n), false,
                  2);
      CHECK(result[0] == -5.0F);
      CHECK(std::count(result.begin(), result.end(), 2.0F * static_cast<float>(p)) ==
            static_cast<std::ptrdiff_t>(n));
      CHECK(result[n + 1] == -5.0F);
    }
  }
}

TEST_CASE("the order of the sources is the order of the sum") {
  float const large = 1e8F;  // has an ulp of 8
  std::vector<std::vector<float>> const sources{{large, 1.0F}, {1.0F, large}, {-large, -large}};
  std::vector<float> result(2);
  ordered_sum(pointers(sources), zero::dtype::float32, std::span{result}, false, 1);
  CHECK(result[0] == 0.0F);
  CHECK(result[1] == 0.0F);
  std::vector<std::vector<float>> const better{{large}, {-large}, {1.0F}};
  ordered_sum(pointers(better), zero::dtype::float32, std::span{result}.first(1), false, 1);
  CHECK(result[0] == 1.0F);
}

TEST_CASE("16-bit sums neither overflow, underflow nor round on the way") {
  std::vector<std::vector<float16>> const sources(4, {float16{20000.0F}, float16{0x1p-24F}});
  std::vector<float16> half(2);
  ordered_sum(pointers(sources), zero::dtype::float16, std::span{half}, false, 0.25);
  CHECK(half[0] == 20000.0F);
  CHECK(half[1] == 0x1p-24F);
  // 256 + 1 isn't a bfloat16, 256 + 1 + 1 is one.
  std::vector<std::vector<bfloat16>> const brains{
      {bfloat16{256.0F}}, {bfloat16{1.0F}}, {bfloat16{1.0F}}};
  std::vector<bfloat16> brain(1);
  ordered_sum(pointers(brains), zero::dtype::bfloat16, std::span{brain}, false, 1);
  CHECK(brain[0] == 258.0F);
}

TEST_CASE("with add the rounded sum is added in the destination's arithmetic") {
  // 1.25 rounds to itself, and 256 + 1.25 to 258; with 0.75 it is 256.
  std::vector<std::vector<bfloat16>> const sources{{bfloat16{1.0F}, bfloat16{0.5F}},
                                                   {bfloat16{0.25F}, bfloat16{0.25F}}};
  std::vector<bfloat16> brain{bfloat16{256.0F}, bfloat16{256.0F}};
  ordered_sum(pointers(sources), zero::dtype::bfloat16, std::span{brain}, true, 1);
  CHECK(brain[0] == 258.0F);
  CHECK(brain[1] == 256.0F);
  std::vector<float> single{256.0F, 256.0F};
  ordered_sum(pointers(sources), zero::dtype::bfloat16, std::span{single}, true, 1);
  CHECK(single[0] == 257.25F);
  CHECK(single[1] == 256.75F);
}

TEST_CASE("a product isn't fused with the addition to the destination") {
  // (1 + 2^-12)^2 is 1 + 2^-11 + 2^-24, and rounds to 1 + 2^-11.
  std::vector<std::vector<float>> const sources{std::vector<float>(40, 1 + 0x1p-12F)};
  std::vector<float> result(40, -1 - 0x1p-11F);
  ordered_sum(pointers(sources), zero::dtype::float32, std::span{result}, true, 1 + 0x1p-12);
  CHECK(std::count(result.begin(), result.end(), 0.0F) == 40);
}

TEST_CASE("what can't be summed is refused by name") {
  std::vector<double> a(3);
  std::vector<void const*> const sources{a.data()};
  CHECK(test::message_of([&] {
          ordered_sum(sources, zero::dtype::float32, std::span{a}, false, 1.0);
        }) == "ordered_sum: expected a destination of float32, actual float64");
  std::vector<bfloat16> b(3);
  CHECK(test::message_of([&] {
          ordered_sum(sources, zero::dtype::float16, std::span{b}, false, 1.0);
        }) == "ordered_sum: expected a destination of float16, actual bfloat16");
  CHECK(test::message_of([&] {
          ordered_sum(std::vector<void const*>{}, zero::dtype::float64, std::span{a}, false, 1.0);
        }) == "ordered_sum: expected at least 1 source, actual 0");
}

#ifdef ZERO_WIDE_SUM
TEST_CASE_TEMPLATE("wider instructions give the same bits", Pair, pair<float16, float16>,
                   pair<float16, float>, pair<bfloat16, bfloat16>, pair<float, float16>) {
  using source_type = typename Pair::source;
  using destination_type = typename Pair::destination;
  if (!zero::detail::has_wide_sum()) {
    return;
  }
  constexpr std::size_t n = 1 << 16U;
  std::vector<std::vector<source_type>> sources(3);
  for (unsigned s = 0; s < 3; ++s) {
    sources[s] = generator<source_type>{s}.vector(n);
  }
  if constexpr (sizeof(source_type) == 2) {  // every number once
    for (std::size_t i = 0; i < n; ++i) {
      sources[0][i] = source_type::from_bits(static_cast<std::uint16_t>(i));
    }
  }
  std::array<source_type const*, 3> const from{sources[0].data(), sources[1].data(),
                                               sources[2].data()};
  auto const check = [&](auto count, float scale, bool add) {
    std::vector<destination_type> narrow = generator<destination_type>{9}.vector(n);
    std::vector<destination_type> wide = narrow;
    zero::detail::sum_steps<false, count()>(nullptr, from.data(), narrow.data(), n,
                                            zero::detail::sum_end<float>{scale, add});
    zero::detail::wide_sum_steps<false, count()>(nullptr, from.data(), wide.data(), n, scale, add);
    CHECK(std::equal(narrow.begin(), narrow.end(), wide.begin(),
                     [](auto a, auto b) { return same(a, b); }));
  };
  for (bool const add : {false, true}) {
    for (float const scale : {1.0F, 0.3F, 0x1p-9F}) {
      check(std::integral_constant<std::size_t, 1>{}, scale, add);
      check(std::integral_constant<std::size_t, 3>{}, scale, add);
    }
  }
}
#endif
