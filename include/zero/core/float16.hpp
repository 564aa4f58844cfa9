// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/config.hpp>

#include <bit>
#include <cstdint>
#include <type_traits>

/// @file
/// `float16`: IEEE 754 binary16 as a storage type, layout-compatible with CUDA's `__half`.
/// Arithmetic is done in float.

namespace zero::inline v0 {

class float16 {
 public:
  float16() = default;

  /// Round to nearest, ties to even. Overflow gives infinity, tiny values become subnormal or zero;
  /// a NaN stays a (quiet) NaN with its sign.
  constexpr explicit float16(float value) noexcept {
    auto const bits = std::bit_cast<std::uint32_t>(value);
    auto const sign = static_cast<std::uint16_t>((bits >> 16U) & 0x8000U);
    auto const magnitude = bits & 0x7fffffffU;
    std::uint32_t half = 0;
    if (magnitude > 0x7f800000U) {  // NaN: keep the high bits of its payload
      half = 0x7e00U | ((magnitude >> 13U) & 0x1ffU);
    } else if (magnitude >= 0x477ff000U) {  // rounds past 65504, or is infinite
      half = 0x7c00U;
    } else if (magnitude >= 0x38800000U) {  // normal: rebias the exponent, round 13 bits away
      half = (magnitude - 0x38000000U + 0xfffU + ((magnitude >> 13U) & 1U)) >> 13U;
    } else if (magnitude > 0x33000000U) {  // subnormal: a multiple of 2^-24
      auto const exponent = magnitude >> 23U;
      auto const significand = (magnitude & 0x7fffffU) | 0x800000U;
      auto const shift = 126U - exponent;  // 14 to 24
      half = significand >> shift;
      auto const rest = significand & ((1U << shift) - 1U);
      auto const tie = 1U << (shift - 1U);
      half += static_cast<std::uint32_t>(rest > tie || (rest == tie && (half & 1U) != 0U));
    }
    bits_ = static_cast<std::uint16_t>(sign | half);
  }

  /// Exact.
  // NOLINTNEXTLINE(google-explicit-constructor): widening loses nothing
  constexpr operator float() const noexcept {
    auto const sign = static_cast<std::uint32_t>(bits_ & 0x8000U) << 16U;
    auto const exponent = (bits_ >> 10U) & 0x1fU;
    auto const significand = static_cast<std::uint32_t>(bits_ & 0x3ffU);
    if (exponent == 0x1fU) {
      return std::bit_cast<float>(sign | 0x7f800000U | (significand << 13U));
    }
    if (exponent != 0) {
      return std::bit_cast<float>(sign | ((exponent + 112U) << 23U) | (significand << 13U));
    }
    float const value = static_cast<float>(significand) * 0x1p-24F;
    return sign != 0 ? -value : value;
  }

  [[nodiscard]] static constexpr float16 from_bits(std::uint16_t bits) noexcept {
    float16 out{};
    out.bits_ = bits;
    return out;
  }
  [[nodiscard]] constexpr std::uint16_t bits() const noexcept { return bits_; }

 private:
  std::uint16_t bits_;
};

static_assert(sizeof(float16) == 2 && std::is_trivial_v<float16>);

}  // namespace zero::inline v0
