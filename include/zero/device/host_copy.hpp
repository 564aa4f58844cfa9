// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/config.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>

// The sanitizers of g++ don't see non-temporal stores.
#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define ZERO_STREAMING_COPY 1
#include <emmintrin.h>
#endif

/// @file
/// Copies on the host at the speed of its memory: large ones by non-temporal stores, which don't
/// read the lines that they overwrite.

namespace zero::inline v0::detail {

/// From this size on, a copy that is read again right after it is faster with non-temporal stores.
inline constexpr std::size_t streaming_copy_bytes = std::size_t{1} << 20U;

#ifdef ZERO_STREAMING_COPY
/// Copy by non-temporal stores; the ranges don't overlap.
inline void streaming_copy(std::byte* to, std::byte const* from, std::size_t bytes) noexcept {
  constexpr std::size_t line = 64;
  std::size_t const head = (line - reinterpret_cast<std::uintptr_t>(to) % line) % line;
  std::memcpy(to, from, head);
  std::size_t first = head;
  for (; first + line <= bytes; first += line) {
    auto const* const source = reinterpret_cast<__m128i const*>(from + first);
    auto* const target = reinterpret_cast<__m128i*>(to + first);
    __m128i const a = _mm_loadu_si128(source);
    __m128i const b = _mm_loadu_si128(source + 1);
    __m128i const c = _mm_loadu_si128(source + 2);
    __m128i const d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  std::memcpy(to + first, from + first, bytes - first);
  _mm_sfence();  // non-temporal stores are not ordered with the release that tells others of them
}
#endif

/// Copy `bytes` bytes. The ranges don't overlap, or are the same.
inline void host_copy(void* to, void const* from, std::size_t bytes) noexcept {
  if (bytes == 0 || to == from) {
    return;
  }
#ifdef ZERO_STREAMING_COPY
  if (bytes >= streaming_copy_bytes) {
    streaming_copy(static_cast<std::byte*>(to), static_cast<std::byte const*>(from), bytes);
    return;
  }
#endif
  std::memcpy(to, from, bytes);
}

}  // namespace zero::inline v0::detail

#undef ZERO_STREAMING_COPY
