// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/dtype.hpp>
#include <zero/device/vector.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

// nvcc's front end doesn't know the conversions.
#if defined(__x86_64__) && !defined(__CUDACC__)
#define ZERO_WIDE_SUM 1
#include <cpuid.h>
#endif

/// @file
/// Sums of 16-bit floats with wider instructions, where the processor has them: their conversions
/// cost more than memory at 16 bytes at a time. The bits are the same, so ranks needn't agree on
/// the choice.

#ifdef ZERO_WIDE_SUM
#define ZERO_WIDE [[gnu::target("avx2,f16c")]] inline

namespace zero::inline v0::detail {

[[nodiscard]] inline bool has_wide_sum() noexcept {
  static bool const has = [] {
    unsigned a = 0;
    unsigned b = 0;
    unsigned c = 0;
    unsigned d = 0;
    return __builtin_cpu_supports("avx2") != 0 && __get_cpuid(1, &a, &b, &c, &d) != 0 &&
           (c & bit_F16C) != 0;
  }();
  return has;
}

/// What `wide_sum_steps` is for: the other sums are fast enough.
template <bool HasPartial, element Source, element Destination>
inline constexpr bool prefers_wide =
    std::is_same_v<Source, float16> || std::is_same_v<Destination, float16> ||
    (!HasPartial && std::is_same_v<Source, bfloat16> && std::is_same_v<Destination, bfloat16>);

using wide_float [[gnu::vector_size(32)]] = float;
using wide_uint [[gnu::vector_size(32)]] = std::uint32_t;
using wide_half [[gnu::vector_size(16)]] = short;

/// Sixteen elements as float. Those of bfloat16 are the even ones and the odd ones, which costs no
/// shuffle; the others are the first eight and the last eight.
struct wide {
  wide_float a;
  wide_float b;
};

template <class To, class From>
ZERO_WIDE void wide_move(To& to, From const& from) noexcept {
  static_assert(sizeof(To) == sizeof(From));
  std::memcpy(&to, &from, sizeof to);
}

template <class E>
ZERO_WIDE void load_wide(wide& to, E const* from) noexcept {
  if constexpr (std::is_same_v<E, float>) {
    std::memcpy(&to.a, from, sizeof to.a);
    std::memcpy(&to.b, from + 8, sizeof to.b);
  } else if constexpr (std::is_same_v<E, float16>) {
    wide_half first;
    wide_half last;
    std::memcpy(&first, from, sizeof first);
    std::memcpy(&last, from + 8, sizeof last);
    to.a = __builtin_ia32_vcvtph2ps256(first);
    to.b = __builtin_ia32_vcvtph2ps256(last);
  } else {
    wide_uint both;
    std::memcpy(&both, from, sizeof both);
    wide_move(to.a, both << 16U);
    wide_move(to.b, both & 0xffff0000U);
  }
}

/// In the high halves; the low halves are to be ignored.
ZERO_WIDE void round_wide(wide_uint& to, wide_float value) noexcept {
  wide_uint bits;
  wide_uint number;
  wide_move(bits, value);
  wide_move(number, value == value);
  to = (bits + ((((bits >> 16U) & 1U) + 0x7fffU) & number)) | (~number & 0x400000U);
}

template <class E>
ZERO_WIDE void store_wide(E* to, wide const& value) noexcept {
  if constexpr (std::is_same_v<E, float>) {
    std::memcpy(to, &value.a, sizeof value.a);
    std::memcpy(to + 8, &value.b, sizeof value.b);
  } else if constexpr (std::is_same_v<E, float16>) {
    wide_half const first = __builtin_ia32_vcvtps2ph256(value.a, 0);
    wide_half const last = __builtin_ia32_vcvtps2ph256(value.b, 0);
    std::memcpy(static_cast<void*>(to), &first, sizeof first);
    std::memcpy(static_cast<void*>(to + 8), &last, sizeof last);
  } else {
    wide_uint even;
    wide_uint odd;
    round_wide(even, value.a);
    round_wide(odd, value.b);
    wide_uint const both = (even >> 16U) | (odd & 0xffff0000U);
    std::memcpy(static_cast<void*>(to), &both, sizeof both);
  }
}

template <class E>
ZERO_WIDE void add_wide(wide& sum, E const* from) noexcept {
  wide next;
  load_wide(next, from);
  sum.a += next.a;
  sum.b += next.b;
}

/// As `sum_steps`. A lambda over the sources would not have the function's target.
template <bool HasPartial, std::size_t Count, element Source, element Destination>
[[gnu::target("avx2,f16c"), gnu::noinline]] void wide_sum_steps(float const* partial,
                                                                Source const* const* from,
                                                                Destination* to, std::size_t size,
                                                                float scale, bool add) noexcept {
  static_assert(Count >= 1 && Count <= 4);
  constexpr std::size_t ahead = 4096 / sizeof(Source);
  Source const* sources[Count];
  for (std::size_t s = 0; s < Count; ++s) {
    sources[s] = from[s];
  }
  for (std::size_t i = 0; i < size; i += 16) {
    for (std::size_t s = 0; s < Count; ++s) {
      __builtin_prefetch(sources[s] + i + ahead);
    }
    wide sum;
    if constexpr (HasPartial) {
      load_wide(sum, partial + i);
      add_wide(sum, sources[0] + i);
    } else {
      load_wide(sum, sources[0] + i);
    }
    if constexpr (Count > 1) {
      add_wide(sum, sources[1] + i);
    }
    if constexpr (Count > 2) {
      add_wide(sum, sources[2] + i);
    }
    if constexpr (Count > 3) {
      add_wide(sum, sources[3] + i);
    }
    sum.a *= scale;
    sum.b *= scale;
    asm("" : "+x"(sum.a), "+x"(sum.b));  // as `rounded` does
    if (add) {
      Destination written[16];
      store_wide(written, sum);
      load_wide(sum, written);
      add_wide(sum, to + i);
    }
    store_wide(to + i, sum);
  }
}

}  // namespace zero::inline v0::detail

#undef ZERO_WIDE
#endif
