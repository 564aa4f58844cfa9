// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <span>
#include <vector>

/// @file
/// Equality bit for bit: zeros have signs, and a NaN equals itself.

namespace test {

template <class T>
[[nodiscard]] bool same_bits(std::vector<T> const& a, std::vector<T> const& b) {
  return std::ranges::equal(std::as_bytes(std::span{a}), std::as_bytes(std::span{b}));
}

}  // namespace test
