// SPDX-License-Identifier: MIT
#include <zero/comm/traffic.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <set>
#include <string_view>

namespace {

using zero::traffic;
using zero::traffic_bytes;
using zero::traffic_count;

}  // namespace

TEST_CASE("each kind of traffic has a name of its own, and what is no kind has none") {
  std::set<std::string_view> names;
  for (std::size_t i = 0; i < traffic_count; ++i) {
    names.insert(name(static_cast<traffic>(i)));
  }
  CHECK(names.size() == traffic_count);
  CHECK(names.count("unknown") == 0);
  CHECK(name(static_cast<traffic>(traffic_count)) == "unknown");
}

TEST_CASE("bytes begin at zero, are counted apart, and add up past 32 bits") {
  constexpr std::uint64_t large = 5'000'000'000;
  traffic_bytes bytes;
  CHECK(bytes.total() == 0);
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < traffic_count; ++i) {
    CHECK(bytes[static_cast<traffic>(i)] == 0);
    bytes[static_cast<traffic>(i)] = large + i;
    sum += large + i;
    CHECK(bytes.total() == sum);
  }
  for (std::size_t i = 0; i < traffic_count; ++i) {
    CHECK(bytes[static_cast<traffic>(i)] == large + i);
  }
}

TEST_CASE("bytes are equal where each kind is, not where their sums are") {
  traffic_bytes one;
  traffic_bytes other;
  CHECK(one == other);
  one[traffic::gradients] = 4;
  other[traffic::parameters] = 4;
  CHECK(one != other);
  CHECK(one.total() == other.total());
}
