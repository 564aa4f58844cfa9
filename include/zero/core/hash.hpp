// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/config.hpp>

#include <cstdint>

/// @file
/// A hash of 64-bit words in their order, with which ranks compare what they did and hold.

namespace zero::inline v0::detail {

/// The hash of some words, 0 of none, and one more word: a step is a bijection of either.
[[nodiscard]] constexpr std::uint64_t hash_next(std::uint64_t hash, std::uint64_t word) noexcept {
  hash = (hash ^ word) * 0x9e3779b97f4a7c15U + 1;  // + 1: a first word of 0 counts
  return hash ^ (hash >> 32U);
}

}  // namespace zero::inline v0::detail
