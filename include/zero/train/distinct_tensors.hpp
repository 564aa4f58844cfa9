// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/any_tensor.hpp>
#include <zero/core/error.hpp>
#include <zero/core/parameter.hpp>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <string_view>
#include <utility>
#include <vector>

/// @file
/// `check_distinct`: no two parameters share a tensor or its elements. Bound to places of their
/// own, they would come apart without a word.

namespace zero::inline v0::detail {

/// Bytes that belong to one tensor of a parameter.
struct tensor_range {
  std::byte const* begin;
  std::byte const* end;
  any_parameter const* parameter;
  std::string_view what;
};

/// @throws zero::usage_error  two ranges overlap.
inline void check_apart(std::vector<tensor_range> ranges) {
  std::erase_if(ranges, [](tensor_range const& each) { return each.begin == each.end; });
  std::sort(ranges.begin(), ranges.end(), [](tensor_range const& a, tensor_range const& b) {
    return std::less<>{}(a.begin,
                         b.begin);  // a total order over pointers into different arrays, too
  });
  for (std::size_t i = 1; i < ranges.size(); ++i) {
    tensor_range const& first = ranges[i - 1];
    tensor_range const& second = ranges[i];
    if (std::less<>{}(second.begin, first.end)) {
      throw usage_error{text("parameter '", second.parameter->name, "': expected a ", second.what,
                             " of its own, actual one that shares elements with the ", first.what,
                             " of '", first.parameter->name,
                             "'; declare the second use of a parameter as zero::tied")};
    }
  }
}

/// Check the values, and the gradients of what is trained. Elements of a gradient tensor that can
/// be rebound don't count: they are given up.
/// @throws zero::usage_error  two parameters share a tensor, or elements; or a value and a
///                            gradient.
inline void check_distinct(std::vector<any_parameter> const& declared) {
  std::vector<tensor_range> tensors;
  std::vector<tensor_range> elements;
  auto const add = [&](any_parameter const& of, any_tensor const& tensor, std::string_view what,
                       bool stays) {
    if (!tensor) {
      return;
    }
    auto const* const handle = static_cast<std::byte const*>(tensor.address());
    tensors.push_back({handle, handle + 1, &of, what});
    if (stays) {
      any_span const held = tensor.elements();
      auto const* const data = static_cast<std::byte const*>(held.data());
      elements.push_back({data, data + held.bytes(), &of, what});
    }
  };
  for (any_parameter const& each : declared) {
    add(each, each.value, "value", true);
    if (!each.is_frozen) {
      add(each, each.gradient, "gradient", each.gradient && !each.gradient.rebindable());
    }
  }
  check_apart(std::move(tensors));
  check_apart(std::move(elements));
}

}  // namespace zero::inline v0::detail
