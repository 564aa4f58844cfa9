// SPDX-License-Identifier: MIT
#include <zero/core/hash.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <span>
#include <string_view>

using zero::detail::hash_bytes;
using zero::detail::hash_next;

TEST_CASE("a hash of words depends on each, on their order and on their number") {
  // h = (h ^ w) * 0x9e3779b97f4a7c15 + 1 mod 2^64, then h ^ (h >> 32), in Python's integers.
  CHECK(hash_next(0, 0) == 0x1);
  CHECK(hash_next(0, 1) == 0x9e3779b9e17d05af);
  CHECK(hash_next(hash_next(0, 1), 2) == 0x494e1871cc4d5b43);
  CHECK(hash_next(hash_next(0, 2), 1) == 0xd6e2c15bdd934f62);
  CHECK(hash_next(0, ~std::uint64_t{0}) == 0x61c88646e17d05aa);
}

TEST_CASE(
    "a hash of bytes is one of their number and of little-endian words, the last one filled up") {
  auto const hash = [](std::string_view text) {
    return hash_bytes(std::as_bytes(std::span{text}));
  };
  // By the same program.
  CHECK(hash("") == 0x1);
  CHECK(hash("zero") == 0xc823f3bec3a2a42d);
  CHECK(hash("sharded state") == 0x9073f7ea720bc1f8);
}
