// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/config.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

/// @file
/// A hash of 64-bit words, or of bytes, in their order, with which ranks compare what they did and
/// hold.

namespace zero::inline v0::detail {

/// The hash of some words, 0 of none, and one more word: a step is a bijection of either. After one
/// round the sign bits of neighbours would cancel; hence two.
[[nodiscard]] constexpr std::uint64_t hash_next(std::uint64_t hash, std::uint64_t word) noexcept {
  hash = (hash ^ word) * 0x9e3779b97f4a7c15U + 1;  // + 1: a first word of 0 counts
  hash = (hash ^ (hash >> 32U)) * 0xbf58476d1ce4e5b9U;
  return hash ^ (hash >> 29U);
}

/// The hash of bytes, of which eight are a word, and of their number.
[[nodiscard]] inline std::uint64_t hash_bytes(std::span<std::byte const> bytes,
                                              std::uint64_t hash = 0) noexcept {
  hash = hash_next(hash, bytes.size());
  for (std::size_t i = 0; i < bytes.size(); i += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + i, std::min(sizeof word, bytes.size() - i));
    hash = hash_next(hash, word);
  }
  return hash;
}

}  // namespace zero::inline v0::detail
