// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/config.hpp>

#include <array>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

/// @file
/// Vectors of 16 bytes, by the compilers' vector extensions, with what those lack: square roots,
/// and conversions from and to 16-bit floats. Every lane gets the bits that the scalar operation
/// gives.

namespace zero::inline v0::detail {

using float_vector [[gnu::vector_size(16)]] = float;
using double_vector [[gnu::vector_size(16)]] = double;
using short_vector [[gnu::vector_size(16)]] = std::int16_t;
using int_vector [[gnu::vector_size(16)]] = std::int32_t;
using long_vector [[gnu::vector_size(16)]] = std::int64_t;
using uint_vector [[gnu::vector_size(16)]] = std::uint32_t;

/// A vector from memory of any alignment.
template <class Vector>
[[nodiscard]] inline Vector load_vector(void const* from) noexcept {
  Vector out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

/// The same bits as another vector type.
template <class To, class From>
[[nodiscard]] inline To vector_cast(From from) noexcept {
  static_assert(sizeof(To) == sizeof(From));
  return (To)from;  // NOLINT: vectors have no other cast
}

/// `value`, in a way that keeps the compiler from fusing the operation that gave it with the next
/// one. Without this a product that is added to something is rounded or not as the compiler's flags
/// have it.
template <class Vector>
[[nodiscard]] inline Vector rounded(Vector value) noexcept {
#if defined(__SSE2__)
  asm("" : "+x"(value));
#elif defined(__aarch64__)
  asm("" : "+w"(value));
#else
  asm("" : "+m"(value));
#endif
  return value;
}

/// `when_true` in the lanes where all bits of `mask` are set, `when_false` where none is.
template <class Mask, class Vector>
[[nodiscard]] inline Vector select(Mask mask, Vector when_true, Vector when_false) noexcept {
  return vector_cast<Vector>((mask & vector_cast<Mask>(when_true)) |
                             (~mask & vector_cast<Mask>(when_false)));
}

[[nodiscard]] inline float_vector square_root(float_vector value) noexcept {
#if defined(__SSE2__)
  return _mm_sqrt_ps(value);
#elif defined(__aarch64__)
  return vsqrtq_f32(value);
#else
  return float_vector{__builtin_sqrtf(value[0]), __builtin_sqrtf(value[1]),
                      __builtin_sqrtf(value[2]), __builtin_sqrtf(value[3])};
#endif
}

[[nodiscard]] inline double_vector square_root(double_vector value) noexcept {
#if defined(__SSE2__)
  return _mm_sqrt_pd(value);
#elif defined(__aarch64__)
  return vsqrtq_f64(value);
#else
  return double_vector{__builtin_sqrt(value[0]), __builtin_sqrt(value[1])};
#endif
}

/// The first two lanes as double.
[[nodiscard]] inline double_vector widen_low(float_vector value) noexcept {
#if defined(__SSE2__)
  return _mm_cvtps_pd(value);
#else
  return double_vector{double{value[0]}, double{value[1]}};
#endif
}

/// The last two lanes as double.
[[nodiscard]] inline double_vector widen_high(float_vector value) noexcept {
#if defined(__SSE2__)
  return _mm_cvtps_pd(_mm_movehl_ps(value, value));
#else
  return double_vector{double{value[2]}, double{value[3]}};
#endif
}

/// Two floats from memory as double.
[[nodiscard]] inline double_vector load_widened(float const* from) noexcept {
#if defined(__SSE2__)
  return _mm_cvtps_pd(_mm_castsi128_ps(_mm_loadl_epi64(reinterpret_cast<__m128i const*>(from))));
#else
  return double_vector{double{from[0]}, double{from[1]}};
#endif
}

/// Four 16-bit numbers from memory, each in the high half of its lane.
[[nodiscard]] inline uint_vector load_high_halves(void const* from) noexcept {
#if defined(__SSE2__)
  auto const halves = _mm_loadl_epi64(static_cast<__m128i const*>(from));
  return vector_cast<uint_vector>(_mm_unpacklo_epi16(_mm_setzero_si128(), halves));
#else
  using half_vector [[gnu::vector_size(8)]] = std::uint16_t;
  return __builtin_convertvector(load_vector<half_vector>(from), uint_vector) << 16U;
#endif
}

/// Write the high half of each lane.
inline void store_high_halves(void* to, uint_vector value) noexcept {
#if defined(__SSE2__)
  auto const halves = _mm_srai_epi32(vector_cast<__m128i>(value), 16);
  _mm_storel_epi64(static_cast<__m128i*>(to), _mm_packs_epi32(halves, halves));
#else
  using half_vector [[gnu::vector_size(8)]] = std::uint16_t;
  auto const halves = __builtin_convertvector(value >> 16U, half_vector);
  std::memcpy(to, &halves, sizeof halves);
#endif
}

/// The same from eight 16-bit numbers, in order.
[[nodiscard]] inline std::array<uint_vector, 2> load_two_high_halves(void const* from) noexcept {
#if defined(__SSE2__)
  auto const halves = _mm_loadu_si128(static_cast<__m128i const*>(from));
  return {vector_cast<uint_vector>(_mm_unpacklo_epi16(_mm_setzero_si128(), halves)),
          vector_cast<uint_vector>(_mm_unpackhi_epi16(_mm_setzero_si128(), halves))};
#else
  return {load_high_halves(from), load_high_halves(static_cast<std::uint16_t const*>(from) + 4)};
#endif
}

/// Write the high half of each lane of both, in order.
inline void store_two_high_halves(void* to, uint_vector first, uint_vector second) noexcept {
#if defined(__SSE2__)
  auto const low = _mm_srai_epi32(vector_cast<__m128i>(first), 16);
  auto const high = _mm_srai_epi32(vector_cast<__m128i>(second), 16);
  _mm_storeu_si128(static_cast<__m128i*>(to), _mm_packs_epi32(low, high));
#else
  store_high_halves(to, first);
  store_high_halves(static_cast<std::uint16_t*>(to) + 4, second);
#endif
}

/// Whether any lane of either is NaN.
[[nodiscard]] inline bool any_nan(float_vector a, float_vector b) noexcept {
#if defined(__SSE2__)
  return _mm_movemask_ps(_mm_cmpunord_ps(a, b)) != 0;
#else
  auto const numbers = vector_cast<long_vector>((a == a) & (b == b));
  return (numbers[0] & numbers[1]) != -1;
#endif
}

/// `round_to_bfloat16` for what isn't NaN.
[[nodiscard]] inline uint_vector round_number_to_bfloat16(float_vector value) noexcept {
  auto const bits = vector_cast<uint_vector>(value);
  return bits + 0x7fffU + ((bits >> 16U) & 1U);
}

/// A bfloat16 in the high halves, rounded as `bfloat16` does it; the low halves are to be ignored.
[[nodiscard]] inline uint_vector round_to_bfloat16(float_vector value) noexcept {
  auto const bits = vector_cast<uint_vector>(value);
  auto const number = vector_cast<uint_vector>(value == value);  // NaN is unequal to itself
  uint_vector const half_ulp = ((bits >> 16U) & 1U) + 0x7fffU;
  return (bits + (half_ulp & number)) | (~number & 0x400000U);
}

/// A float16 in the high halves, rounded as `float16` does it.
[[nodiscard]] inline uint_vector round_to_float16(float_vector value) noexcept {
  auto const bits = vector_cast<uint_vector>(value);
  uint_vector const magnitude = bits & 0x7fffffffU;
  auto const above = [ordered = vector_cast<int_vector>(magnitude)](std::int32_t limit) {
    return vector_cast<uint_vector>(ordered > limit);
  };
  uint_vector const normal = (magnitude - 0x37fff001U + ((magnitude >> 13U) & 1U)) >> 13U;
  // The sum with 1/2 has an ulp of 2^-24, the unit of float16's subnormal numbers.
  uint_vector const subnormal =
      vector_cast<uint_vector>(vector_cast<float_vector>(magnitude) + 0.5F) - 0x3f000000U;
  uint_vector const nan = 0x200U | ((magnitude >> 13U) & 0x1ffU);
  uint_vector const infinity_or_nan = 0x7c00U | (above(0x7f800000) & nan);
  uint_vector const finite = select(above(0x387fffff), normal, subnormal);
  return (bits & 0x80000000U) | (select(above(0x477fefff), infinity_or_nan, finite) << 16U);
}

/// The exact values of the float16 in the high halves; the low halves are zero.
[[nodiscard]] inline float_vector widen_float16(uint_vector halves) noexcept {
  uint_vector const magnitude =
      (halves & 0x7fff0000U) >> 3U;  // all but the sign, in float's places
  auto const ordered = vector_cast<int_vector>(magnitude);
  // Rebias the exponent; for infinity and NaN, twice.
  auto const special = vector_cast<uint_vector>(ordered > 0x0f7fffff);
  uint_vector const normal = magnitude + 0x38000000U + (special & 0x38000000U);
  // 2^-14 is put in front of a subnormal significand, and subtracted.
  auto const two_to_minus_14 = vector_cast<float_vector>(uint_vector{} + 0x38800000U);
  auto const subnormal = vector_cast<uint_vector>(
      vector_cast<float_vector>(magnitude + 0x38800000U) - two_to_minus_14);
  auto const is_normal = vector_cast<uint_vector>(ordered > 0x007fffff);
  return vector_cast<float_vector>((halves & 0x80000000U) | select(is_normal, normal, subnormal));
}

}  // namespace zero::inline v0::detail
