// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/config.hpp>

#include <bit>
#include <cstdint>
#include <type_traits>

/// @file
/// `bfloat16`: a storage type of 16 bits with float's exponent and 8 bits of significand,
/// layout-compatible with CUDA's `__nv_bfloat16`. Arithmetic is done in float.

namespace zero::inline v0 {

class bfloat16 {
 public:
  bfloat16() = default;

  /// Round to nearest, ties to even. Overflow gives infinity; a NaN stays a (quiet) NaN with its
  /// sign.
  constexpr explicit bfloat16(float value) noexcept {
    auto const bits = std::bit_cast<std::uint32_t>(value);
    bool const is_nan = (bits & 0x7fffffffU) > 0x7f800000U;
    auto const rounded = (bits + 0x7fffU + ((bits >> 16U) & 1U)) >> 16U;
    bits_ = static_cast<std::uint16_t>(is_nan ? (bits >> 16U) | 0x40U : rounded);
  }

  /// Exact.
  // NOLINTNEXTLINE(google-explicit-constructor): widening loses nothing
  constexpr operator float() const noexcept {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits_) << 16U);
  }

  [[nodiscard]] static constexpr bfloat16 from_bits(std::uint16_t bits) noexcept {
    bfloat16 out{};
    out.bits_ = bits;
    return out;
  }
  [[nodiscard]] constexpr std::uint16_t bits() const noexcept { return bits_; }

 private:
  std::uint16_t bits_;
};

static_assert(sizeof(bfloat16) == 2 && std::is_trivial_v<bfloat16>);

}  // namespace zero::inline v0
