// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string_view>
#include <utility>
#include <vector>

/// @file
/// Random numbers that depend on a key and an index only: the same on every rank, at every world
/// size, and whichever part of a parameter is asked for first.

namespace mlp {

/// Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators (2014).
[[nodiscard]] constexpr std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27U)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31U);
}

/// FNV-1a: `hash` continued over `bytes`.
/// Source: Fowler, Noll, Vo; RFC 9923.
[[nodiscard]] constexpr std::uint64_t fnv1a(std::string_view bytes,
                                            std::uint64_t hash = 0xcbf29ce484222325U) {
  for (char const c : bytes) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  }
  return hash;
}

/// Number `index` of the sequence `key`, uniform in [-1, 1).
[[nodiscard]] constexpr float uniform(std::uint64_t key, std::uint64_t index) {
  auto const bits = static_cast<std::int32_t>(mix(key ^ mix(index)) >> 40U);  // 24 bits
  return static_cast<float>(bits) * 0x1p-23F - 1.0F;
}

/// 0 to n - 1 in the random order `key`.
[[nodiscard]] inline std::vector<std::size_t> permutation(std::size_t n, std::uint64_t key) {
  std::vector<std::size_t> order(n);
  std::iota(order.begin(), order.end(), std::size_t{0});
  for (std::size_t i = n; i > 1; --i) {
    std::swap(order[i - 1], order[mix(key ^ mix(i)) % i]);
  }
  return order;
}

}  // namespace mlp
