// SPDX-License-Identifier: MIT
#pragma once

#include <core/small_float.hpp>
#include <zero/core/dtype.hpp>

#include <type_traits>

/// @file
/// What a computation that is exact in double gives in an element type.

namespace test {

/// The nearest value of T, ties to even, to a number that double holds exactly.
template <zero::element T>
[[nodiscard]] double nearest(double exact) {
  if constexpr (std::is_same_v<T, zero::float16>) {
    return small_float::format<5>::round(exact);
  } else if constexpr (std::is_same_v<T, zero::bfloat16>) {
    return small_float::format<8>::round(exact);
  } else {
    return static_cast<double>(static_cast<T>(exact));
  }
}

/// An element's value.
template <zero::element T>
[[nodiscard]] double value_of(T element) {
  return static_cast<double>(static_cast<zero::accumulate_type<T>>(element));
}

}  // namespace test
