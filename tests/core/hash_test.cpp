// SPDX-License-Identifier: MIT
#include <zero/core/hash.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <string_view>
#include <vector>

using zero::detail::hash_bytes;
using zero::detail::hash_next;

TEST_CASE("a hash of words depends on each, on their order and on their number") {
  // Computed in Python's integers:
  //   h = (h ^ w) * 0x9e3779b97f4a7c15 + 1; h = (h ^ h >> 32) * 0xbf58476d1ce4e5b9; h ^ h >> 29
  CHECK(hash_next(0, 0) == 0xbf584768e626ded1);
  CHECK(hash_next(0, 1) == 0xe827b284bc773268);
  CHECK(hash_next(hash_next(0, 1), 2) == 0x6ca0464aed5a8fa9);
  CHECK(hash_next(hash_next(0, 2), 1) == 0x3b419b0d88ecddb5);
  CHECK(hash_next(0, ~std::uint64_t{0}) == 0xd90e8041a4a62be1);
}

TEST_CASE(
    "a hash of bytes is one of their number and of little-endian words, the last one filled up") {
  auto const hash = [](std::string_view text) {
    return hash_bytes(std::as_bytes(std::span{text}));
  };
  // By the same program.
  CHECK(hash("") == 0xbf584768e626ded1);
  CHECK(hash("zero") == 0x894dc59710737088);
  CHECK(hash("sharded state") == 0x45a679f6f8923aa1);
}

TEST_CASE("other signs of a tensor's elements are another hash") {
  std::set<std::uint64_t> seen;
  for (std::uint32_t signs = 0; signs < 4096; ++signs) {
    std::vector<float> tensor(12);
    for (std::size_t i = 0; i < tensor.size(); ++i) {
      float const magnitude = 0.3F * static_cast<float>(i) + 0.1F;
      tensor[i] = (signs >> i & 1U) != 0 ? -magnitude : magnitude;
    }
    seen.insert(hash_bytes(std::as_bytes(std::span{tensor})));
  }
  CHECK(seen.size() == 4096);
}
