// SPDX-License-Identifier: MIT
#include <doctest/doctest.h>

#include <zero/device/host_copy.hpp>

#include <algorithm>
#include <random>
#include <vector>

using zero::detail::host_copy;

TEST_CASE("a copy of any size, from and to any address, is whole and touches nothing else") {
  std::mt19937 random{1};
  std::vector<unsigned char> from((std::size_t{3} << 20U) + 200);
  std::generate(from.begin(), from.end(), [&] { return static_cast<unsigned char>(random()); });
  std::vector<std::size_t> sizes{0, 1, 15, 64, 4096, 65537};
  for (std::size_t const limit : {std::size_t{1} << 20U, std::size_t{3} << 20U}) {
    for (std::size_t const more : {0U, 1U, 63U, 64U, 65U}) {
      sizes.push_back(limit + more);
      sizes.push_back(limit - more);
    }
  }
  std::vector<unsigned char> to(from.size());
  for (std::size_t const size : sizes) {
    std::size_t const start = random() % 67;
    std::size_t const target = 1 + random() % 67;
    std::fill(to.begin(), to.end(), static_cast<unsigned char>(0xA5));
    host_copy(to.data() + target, from.data() + start, size);
    auto const first = to.begin() + static_cast<std::ptrdiff_t>(target);
    auto const last = first + static_cast<std::ptrdiff_t>(size);
    auto const untouched = [](unsigned char byte) { return byte == 0xA5; };
    CHECK(std::all_of(to.begin(), first, untouched));
    CHECK(std::equal(first, last, from.begin() + static_cast<std::ptrdiff_t>(start)));
    CHECK(std::all_of(last, to.end(), untouched));
  }
}

TEST_CASE("a range may be copied to itself, and nothing from nowhere") {
  std::vector<int> a(1 << 20U, 3);
  host_copy(a.data(), a.data(), a.size() * sizeof(int));
  CHECK(std::count(a.begin(), a.end(), 3) == 1 << 20U);
  host_copy(nullptr, nullptr, 0);
}
