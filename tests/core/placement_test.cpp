// SPDX-License-Identifier: MIT
#include <zero/core/placement.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <span>
#include <vector>

using zero::gradient_can_be_sharded;
using zero::no_tensor;
using zero::placement;
using zero::placements;
using zero::value_can_be_sharded;

namespace {

struct view {
  std::span<float> elements;
};

}  // namespace

template <>
struct zero::tensor_traits<view> {
  using value_type = float;
  using device = zero::host;
  static std::span<float> elements(view& t) { return t.elements; }
  static void rebind(view& t, std::span<float> storage) { t.elements = storage; }
};

// What each placement needs from a tensor.
static_assert(value_can_be_sharded<view> && value_can_be_sharded<no_tensor>);
static_assert(!value_can_be_sharded<std::vector<float>>);
static_assert(gradient_can_be_sharded<view> && gradient_can_be_sharded<no_tensor>);
static_assert(!gradient_can_be_sharded<std::vector<float>>);

TEST_CASE("everything is replicated unless said otherwise") {
  CHECK(placements{} ==
        placements{placement::replicated, placement::replicated, placement::replicated});
  CHECK_FALSE(placements{.optimizer_state = placement::sharded} == placements{});
}
