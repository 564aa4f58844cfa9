// SPDX-License-Identifier: MIT
#include <zero/core/parameter.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

using zero::any_parameter;
using zero::parameter;
using zero::typed_parameter;

namespace {

struct half {
  std::uint16_t bits;
};

using vector = std::vector<float>;

}  // namespace

template <>
struct zero::dtype_traits<half> {
  static constexpr dtype value = dtype::float16;
};

TEST_CASE("a parameter with tensors has both, by pointer, and the value's type") {
  std::vector<double> value(3);
  vector gradient(3);
  auto const p = parameter("w", value, gradient);
  static_assert(std::is_same_v<decltype(p), typed_parameter<std::vector<double>, vector> const>);
  CHECK(p.name == "w");
  CHECK(p.dtype == zero::dtype::float64);
  CHECK(p.value.elements().data() == value.data());
  CHECK(p.gradient.elements().data() == gradient.data());
  CHECK_FALSE(p.initialiser);
  CHECK_FALSE(p.is_frozen);
  CHECK_FALSE(p.is_tied);
}

TEST_CASE("a parameter without a gradient tensor says so") {
  vector value(1);
  auto const p = parameter("w", value);
  static_assert(std::is_same_v<decltype(p)::gradient_tensor, zero::no_tensor>);
  CHECK(p.value);
  CHECK_FALSE(p.gradient);
}

TEST_CASE("a parameter from a shape has an initialiser, called with its own type and an index") {
  vector value;
  vector gradient;
  auto const p =
      parameter("w", value, gradient, {2, 3}, [](std::span<float> out, std::size_t first) {
        for (std::size_t i = 0; i < out.size(); ++i) {
          out[i] = static_cast<float>(first + i);
        }
      });
  CHECK(p.shape == zero::shape{2, 3});
  vector part(2);
  p.initialiser(zero::any_span{std::span{part}}, 4);
  CHECK(part == vector{4, 5});
}

TEST_CASE("a parameter without tensors keeps its element type, also a stranger's") {
  auto const p = parameter<half>("w", {}, [](std::span<half> out, std::size_t first) {
    out[0].bits = static_cast<std::uint16_t>(first + 1);
  });
  static_assert(std::is_same_v<decltype(p)::value_tensor, zero::no_tensor>);
  CHECK(p.dtype == zero::dtype::float16);
  CHECK_FALSE(p.value);
  CHECK_FALSE(p.gradient);
  std::vector<half> one(1);
  p.initialiser(zero::any_span{std::span{one}}, 8);
  CHECK(one[0].bits == 9);
}

TEST_CASE("an initialiser may have a state of its own") {
  auto const p = parameter<float>("w", {4}, [calls = 0](std::span<float> out, std::size_t) mutable {
    out[0] = static_cast<float>(++calls);
  });
  vector one(1);
  p.initialiser(zero::any_span{std::span{one}}, 0);
  p.initialiser(zero::any_span{std::span{one}}, 0);
  CHECK(one[0] == 2);
}

TEST_CASE("frozen marks a copy, which keeps its tensors' types") {
  vector value(1);
  vector gradient(1);
  auto const p = parameter("w", value, gradient);
  auto const q = p.frozen();
  static_assert(std::is_same_v<decltype(p), decltype(q)>);
  CHECK_FALSE(p.is_frozen);
  CHECK(q.is_frozen);
  CHECK(q.name == "w");
  CHECK(any_parameter{p}.frozen().is_frozen);
}

TEST_CASE("a tied use has a name and nothing else") {
  auto const use = zero::tied("embedding");
  CHECK(use.name == "embedding");
  CHECK(use.is_tied);
  CHECK_FALSE(use.value);
  CHECK_FALSE(use.initialiser);
}

TEST_CASE("a unit of mixed types is a list of any_parameter") {
  vector value(2);
  std::vector<zero::bfloat16> narrow(2);
  vector gradient(2);
  std::vector<any_parameter> const unit{
      parameter("w", value, gradient), parameter("n", narrow).frozen(), zero::tied("e"),
      parameter<double>("d", {1}, [](std::span<double>, std::size_t) {})};
  CHECK(unit[0].dtype == zero::dtype::float32);
  CHECK(unit[1].dtype == zero::dtype::bfloat16);
  CHECK(unit[1].is_frozen);
  CHECK(unit[2].is_tied);
  CHECK(unit[3].dtype == zero::dtype::float64);
}

TEST_CASE("a shape's elements are the product of its extents") {
  using zero::detail::element_count;
  CHECK(element_count("p", {}) == 1);  // a scalar
  CHECK(element_count("p", {7}) == 7);
  CHECK(element_count("p", {2, 3, 4}) == 24);
  CHECK(element_count("p", {0, 8}) == 0);
  CHECK(element_count("p", {8, 0}) == 0);
  CHECK(element_count("p", {std::size_t{1} << 20U, std::size_t{1} << 20U}) == std::size_t{1}
                                                                                  << 40U);
  std::size_t const big = std::size_t{1} << 33U;
  CHECK_THROWS_WITH_AS((void)element_count("p", {big, 1, big}),
                       "parameter 'p': expected a shape of fewer than 2^64 elements, actual "
                       "[8589934592, 1, 8589934592]",
                       zero::usage_error);
  CHECK(element_count("p", {big, big, 0}) == 0);
  CHECK(element_count("p", {0, big, big}) == 0);
}
