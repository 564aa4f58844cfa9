// SPDX-License-Identifier: MIT
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

/// @file
/// Numbers whose sums are rounded.

namespace test {

/// Values of many magnitudes and both signs, other ones on every rank; not a NaN.
template <class T>
[[nodiscard]] std::vector<T> noise(int rank, std::size_t count) {
  std::vector<T> out(count);
  auto state = static_cast<std::uint32_t>(rank) * 2654435761U + 12345U;
  for (T& value : out) {
    state = state * 1664525U + 1013904223U;
    auto const significand = static_cast<float>(static_cast<std::int32_t>(state)) / 2147483648.0F;
    value = static_cast<T>(std::ldexp(significand, static_cast<int>(state % 7U) - 3));
  }
  return out;
}

}  // namespace test
