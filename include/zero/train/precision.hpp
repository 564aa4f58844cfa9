// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/dtype.hpp>

#include <string_view>

/// @file
/// Precision: which types parameters may have, and the type of the reduced gradient. A 16-bit
/// parameter has float32 master weights, which count as optimizer state; any other is its own
/// master.

namespace zero::inline v0 {

struct precision {
  dtype parameters = dtype::float32;  ///< float32 and float64 are accepted beside it
  dtype reduced = dtype::float32;     ///< the reduced gradient of a 16-bit parameter

  [[nodiscard]] constexpr bool accepts(dtype value) const noexcept {
    return value == parameters || value == dtype::float32 || value == dtype::float64;
  }
  /// g of a parameter of type `value`.
  [[nodiscard]] constexpr dtype reduced_of(dtype value) const noexcept {
    return size_bytes(value) == 2 ? reduced : value;
  }

  friend constexpr bool operator==(precision const&, precision const&) = default;
};

/// p = b = g = r = 4: 16 bytes an element with Adam.
inline constexpr precision fp32{};
/// p = b = r = 2, g = 4: 18 bytes an element with Adam.
inline constexpr precision bf16{.parameters = dtype::bfloat16, .reduced = dtype::float32};
/// p = b = g = r = 2: 16 bytes an element with Adam.
inline constexpr precision bf16_reduced{.parameters = dtype::bfloat16, .reduced = dtype::bfloat16};

/// True where the update keeps float32 master weights beside the parameter.
[[nodiscard]] constexpr bool has_master(dtype value) noexcept {
  return accumulate_dtype(value) != value;
}

}  // namespace zero::inline v0
