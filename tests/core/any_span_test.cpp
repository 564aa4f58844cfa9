// SPDX-License-Identifier: MIT
#include <zero/core/any_span.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

namespace stranger {
struct half {
  std::uint16_t bits;
};
}  // namespace stranger

template <>
struct zero::dtype_traits<stranger::half> {
  static constexpr zero::dtype value = zero::dtype::float16;
};

using zero::any_span;
using zero::const_any_span;
using zero::dtype;

static_assert(std::is_convertible_v<std::span<float>, any_span>);
static_assert(std::is_convertible_v<std::span<float, 3>, any_span>);
static_assert(std::is_convertible_v<std::span<float const>, const_any_span>);
static_assert(std::is_convertible_v<std::span<float>, const_any_span>);
static_assert(std::is_convertible_v<any_span, const_any_span>);
static_assert(!std::is_constructible_v<any_span, std::span<float const>>);
static_assert(!std::is_constructible_v<any_span, const_any_span>);
static_assert(!std::is_constructible_v<const_any_span, std::span<int>>);
static_assert(std::is_trivially_copyable_v<any_span>);

TEST_CASE("a span of elements becomes an any_span of the same elements") {
  std::vector<double> values{1.0, 2.0, 3.0};
  any_span const any{std::span{values}};
  CHECK(any.data() == values.data());
  CHECK(any.size() == 3);
  CHECK(any.bytes() == 24);
  CHECK(any.dtype() == dtype::float64);
  CHECK(!any.empty());
  any.as<double>()[1] = 5.0;
  CHECK(values[1] == 5.0);
}

TEST_CASE("a const any_span reads what a mutable one writes") {
  std::array<float, 2> values{1.0F, 2.0F};
  any_span const writable{std::span{values}};
  const_any_span const readable = writable;
  writable.as<float>()[0] = 7.0F;
  CHECK(readable.as<float const>()[0] == 7.0F);
  CHECK(readable.size() == 2);
  CHECK(readable.dtype() == dtype::float32);
}

TEST_CASE("a subspan starts at an element, and may be empty at the end") {
  std::array<zero::bfloat16, 4> values{};
  any_span const any{std::span{values}};
  any_span const tail = any.subspan(1, 3);
  CHECK(tail.data() == &values[1]);
  CHECK(tail.size() == 3);
  CHECK(tail.bytes() == 6);
  CHECK(any.subspan(4, 0).empty());
}

TEST_CASE("an any_span without elements needs no memory") {
  any_span const none;
  CHECK(none.empty());
  CHECK(none.data() == nullptr);
  CHECK(none.bytes() == 0);
  CHECK(none.subspan(0, 0).data() == nullptr);
  any_span const typed{nullptr, 0, dtype::float16};
  CHECK(typed.as<zero::float16>().empty());
}

TEST_CASE("a foreign element type takes part by its dtype") {
  std::array<stranger::half, 2> values{stranger::half{0x3c00U}, stranger::half{0xc000U}};
  any_span const any{std::span{values}};
  CHECK(any.dtype() == dtype::float16);
  CHECK(any.bytes() == 4);
  CHECK(any.as<stranger::half>()[1].bits == 0xc000U);
}

TEST_CASE("elements of another type are refused with both names") {
  std::array<float, 1> values{};
  any_span const any{std::span{values}};
  CHECK_THROWS_WITH_AS(static_cast<void>(any.as<double>()),
                       "any_span: expected float32, actual float64", zero::usage_error);
  CHECK_THROWS_WITH_AS(static_cast<void>(const_any_span{any}.as<zero::float16 const>()),
                       "any_span: expected float32, actual float16", zero::usage_error);
}
