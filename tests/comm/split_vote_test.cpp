// SPDX-License-Identifier: MIT
#include <zero/comm/split_vote.hpp>

#include <doctest/doctest.h>

#include <limits>
#include <span>
#include <vector>

namespace {

using ranks = std::vector<int>;
using zero::detail::ranks_of_color;
using zero::detail::split_vote;

}  // namespace

TEST_CASE("a part has the ranks of its color, in the order of their keys") {
  std::vector<split_vote> const votes{{0, 9}, {1, 3}, {0, 2}, {1, 5}, {0, 4}};
  CHECK(ranks_of_color(votes, 0) == ranks{2, 4, 0});
  CHECK(ranks_of_color(votes, 1) == ranks{1, 3});
  CHECK(ranks_of_color(votes, 2).empty());
  CHECK(ranks_of_color(std::span<split_vote const>{}, 0).empty());
}

TEST_CASE("ranks of one key stay in the order of ranks") {
  std::vector<split_vote> const votes{{7, 1}, {7, 0}, {7, 1}, {7, 0}, {7, 1}};
  CHECK(ranks_of_color(votes, 7) == ranks{1, 3, 0, 2, 4});
}

TEST_CASE("colors and keys are any integers") {
  constexpr int least = std::numeric_limits<int>::min();
  constexpr int most = std::numeric_limits<int>::max();
  std::vector<split_vote> const votes{{least, most}, {least, 0}, {least, least}, {most, -1}};
  CHECK(ranks_of_color(votes, least) == ranks{2, 1, 0});
  CHECK(ranks_of_color(votes, most) == ranks{3});
}
