// SPDX-License-Identifier: MIT
#include <doctest/doctest.h>

#include <zero/device/pack.hpp>

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

using zero::bfloat16;
using zero::float16;
using zero::detail::pack;

namespace {

template <class T>
std::array<T, pack<T>::size> lanes(pack<T> value) {
  std::array<T, pack<T>::size> out;
  value.store(out.data());
  return out;
}

/// Calls `check(float)` for values of every exponent, around every rounding boundary of 16-bit
/// floats.
template <class Check>
void for_many_floats(Check check) {
  for (std::uint64_t bits = 0; bits < (std::uint64_t{1} << 32U); bits += 251 * 31) {
    check(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
  }
  for (std::uint32_t high = 0; high < 0x10000U; ++high) {
    for (std::uint32_t const low :
         {0U, 1U, 0xfffU, 0x1000U, 0x1001U, 0x7fffU, 0x8000U, 0x8001U, 0xffffU}) {
      check(std::bit_cast<float>(high << 16U | low));
    }
  }
}

}  // namespace

TEST_CASE_TEMPLATE("arithmetic is lane by lane", T, float, double) {
  std::array<T, 5> const memory{T(9), T(1.5), T(-2), T(4), T(0.25)};
  auto const a = pack<T>::load(memory.data() + 1);
  auto const b = pack<T>::load(memory.data());
  for (std::size_t i = 0; i < pack<T>::size; ++i) {
    T const x = memory[i + 1];
    T const y = memory[i];
    CHECK(a[i] == x);
    CHECK((a + b)[i] == x + y);
    CHECK((a - b)[i] == x - y);
    CHECK((a * b)[i] == x * y);
    CHECK((a / b)[i] == x / y);
    CHECK((-a)[i] == -x);
    CHECK(abs(a)[i] == std::abs(x));
    CHECK(max(a, b)[i] == std::max(x, y));
    CHECK(select(a < b, a, b)[i] == std::min(x, y));
    CHECK(select(a >= b, a, b)[i] == std::max(x, y));
    CHECK(select(a == pack<T>{T(1.5)}, T(1), a)[i] == (x == T(1.5) ? T(1) : x));
    CHECK((T(2) * a + 1)[i] == 2 * x + 1);
    CHECK(sqrt(abs(a))[i] == std::sqrt(std::abs(x)));
    auto c = a;
    c += b;
    c -= T(3);
    c *= b;
    c /= T(2);
    CHECK(c[i] == (x + y - 3) * y / 2);
  }
}

TEST_CASE_TEMPLATE("signs of zero, infinities and NaN are kept", T, float, double) {
  T const infinity = std::numeric_limits<T>::infinity();
  CHECK(std::signbit(lanes(pack<T>{-T(0)})[0]));
  CHECK(std::signbit(lanes(-pack<T>{T(0)})[0]));
  CHECK_FALSE(std::signbit(lanes(abs(pack<T>{-T(0)}))[1]));
  CHECK(lanes(pack<T>{infinity} - pack<T>{T(1)})[0] == infinity);
  CHECK(std::isnan(lanes(pack<T>{infinity} - pack<T>{infinity})[1]));
  CHECK(std::isnan(lanes(sqrt(pack<T>{T(-1)}))[0]));
  T const nan = std::numeric_limits<T>::quiet_NaN();
  CHECK(std::isnan(lanes(max(pack<T>{T(1)}, pack<T>{nan}))[0]));
  CHECK(lanes(max(pack<T>{nan}, pack<T>{T(1)}))[0] == T(1));
}

TEST_CASE_TEMPLATE("a product is rounded before it is added", T, float, double) {
  // (1 + e)^2 is 1 + 2e + e^2, and e^2 is less than half an ulp.
  T volatile e =
      std::is_same_v<T, float> ? T(0x1p-13) : T(0x1p-27);  // the compiler must not know it
  pack<T> const factor{1 + e};
  pack<T> const negative{-1 - 2 * e};
  CHECK(lanes(factor * factor + negative)[0] == 0);
  CHECK(lanes(negative + factor * factor)[1] == 0);
  CHECK(lanes(factor * factor - -negative)[0] == 0);
}

TEST_CASE("what is stored as 16 bits is what the element types' own conversions give") {
  std::array<float, 4> in{};
  std::size_t lane = 0;
  long wrong = 0;
  for_many_floats([&](float value) {
    in[lane] = value;
    lane = (lane + 1) % 4;
    if (lane != 0) {
      return;
    }
    auto const p = pack<float>::load(in.data());
    std::array<float16, 4> half;
    std::array<bfloat16, 4> brain;
    p.store(half.data());
    p.store(brain.data());
    auto const as_half = p.rounded_to<float16>();
    auto const as_brain = p.rounded_to<bfloat16>();
    for (std::size_t i = 0; i < 4; ++i) {
      float16 const h{in[i]};
      bfloat16 const b{in[i]};
      bool const right =
          half[i].bits() == h.bits() && brain[i].bits() == b.bits() &&
          std::bit_cast<std::uint32_t>(as_half[i]) == std::bit_cast<std::uint32_t>(float{h}) &&
          std::bit_cast<std::uint32_t>(as_brain[i]) == std::bit_cast<std::uint32_t>(float{b});
      wrong += right ? 0 : 1;
    }
  });
  CHECK(wrong == 0);
}

TEST_CASE("every 16-bit number is loaded exactly") {
  long wrong = 0;
  for (std::uint32_t first = 0; first < 0x10000U; first += 4) {
    std::array<float16, 4> half;
    std::array<bfloat16, 4> brain;
    for (std::uint32_t i = 0; i < 4; ++i) {
      half[i] = float16::from_bits(static_cast<std::uint16_t>(first + i));
      brain[i] = bfloat16::from_bits(static_cast<std::uint16_t>(first + i));
    }
    auto const h = pack<float>::load(half.data());
    auto const b = pack<float>::load(brain.data());
    for (std::size_t i = 0; i < 4; ++i) {
      bool const right =
          std::bit_cast<std::uint32_t>(h[i]) == std::bit_cast<std::uint32_t>(float{half[i]}) &&
          std::bit_cast<std::uint32_t>(b[i]) == std::bit_cast<std::uint32_t>(float{brain[i]});
      wrong += right ? 0 : 1;
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("packs convert between float and double") {
  std::array<float, 4> const singles{0.1F, -2.5F, 1e30F, 0.0F};
  std::array<double, 4> const doubles{0.1, -2.5, 1e300, 1 + 0x1p-24 + 0x1p-50};
  auto const wide = pack<double>::load(singles.data());
  CHECK(wide[0] == double{0.1F});
  CHECK(wide[1] == -2.5);
  auto const narrow = pack<float>::load(doubles.data());
  CHECK(narrow[0] == 0.1F);
  CHECK(narrow[1] == -2.5F);
  CHECK(narrow[2] == std::numeric_limits<float>::infinity());
  CHECK(narrow[3] == 1 + 0x1p-23F);
  auto const both = widen(pack<float>::load(singles.data()));
  CHECK(both[0][0] == double{0.1F});
  CHECK(both[0][1] == -2.5);
  CHECK(both[1][0] == double{1e30F});
  CHECK(both[1][1] == 0.0);
  std::array<double, 4> stored{};
  pack<float>::load(singles.data()).store(stored.data());
  CHECK(stored[2] == double{1e30F});
  std::array<float, 2> few{};
  pack<double>::load(doubles.data()).store(few.data());
  CHECK(few[0] == 0.1F);
  std::array<bfloat16, 2> const brain{bfloat16{1.5F}, bfloat16{-3.0F}};
  CHECK(pack<double>::load(brain.data())[1] == -3.0);
  CHECK(lanes(pack<float>{0.1})[3] == 0.1F);
}

TEST_CASE_TEMPLATE("two packs are loaded and stored as one and one are", T, float, double, float16,
                   bfloat16) {
  using real = zero::accumulate_type<T>;
  constexpr std::size_t size = pack<real>::size;
  std::array<T, 2 * size> elements;
  std::array<T, 2 * size> both;
  auto const check = [&](float value, std::size_t lane) {
    elements.fill(static_cast<T>(1.0F));
    elements[lane] = static_cast<T>(value);
    auto loaded = zero::detail::load_two<real>(elements.data());
    bool same = true;
    for (std::size_t i = 0; i < 2 * size; ++i) {
      auto const one = static_cast<real>(elements[i]);
      same = same && std::memcmp(&one, &lanes(loaded[i / size])[i % size], sizeof one) == 0;
    }
    std::array<T, 2 * size> apart;
    loaded[lane / size] = pack<real>{static_cast<real>(value)};  // not rounded to T yet
    loaded[0].store(apart.data());
    loaded[1].store(apart.data() + size);
    zero::detail::store_two(loaded, both.data());
    return same && std::memcmp(both.data(), apart.data(), sizeof both) == 0;
  };
  std::size_t lane = 0;
  bool all = true;
  for_many_floats([&](float value) {
    if (value == value ||
        sizeof(T) == 2) {  // what a NaN's bits become in a cast isn't the packs' matter
      all = check(value, lane) && all;
    }
    lane = (lane + 1) % (2 * size);
  });
  CHECK(all);
}
