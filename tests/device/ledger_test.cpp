// SPDX-License-Identifier: MIT
#include <doctest/doctest.h>

#include <zero/device/ledger.hpp>

#include <set>
#include <string_view>

TEST_CASE("every category has a name of its own") {
  std::set<std::string_view> names;
  for (std::size_t i = 0; i < zero::category_count; ++i) {
    names.insert(zero::name(static_cast<zero::category>(i)));
  }
  CHECK(names.size() == 7);
  CHECK(zero::name(zero::category::parameters) == "parameters");
  CHECK(zero::name(zero::category::engine) == "engine");
}

TEST_CASE("the peak is every category and the padding, the arena all but the engine's bytes") {
  zero::memory_bytes bytes;
  CHECK(bytes.peak() == 0);
  bytes[zero::category::parameters] = 1;
  bytes[zero::category::gradients] = 20;
  bytes[zero::category::optimizer_state] = 300;
  bytes[zero::category::gathered_units] = 4000;
  bytes[zero::category::gradient_buckets] = 50000;
  bytes[zero::category::staging] = 600000;
  bytes[zero::category::engine] = 7000000;
  bytes.padding = 80000000;
  CHECK(bytes.peak() == 87654321);
  CHECK(bytes.arena() == 80654321);
}

TEST_CASE("bytes are equal when every category and the padding are") {
  zero::memory_bytes a;
  zero::memory_bytes b;
  a[zero::category::staging] = 5;
  CHECK_FALSE(a == b);
  b[zero::category::staging] = 5;
  CHECK(a == b);
  b.padding = 1;
  CHECK_FALSE(a == b);
}
