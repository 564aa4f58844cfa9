// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

/// @file
/// What ranks tell each other in a split, and who is in a part. Nothing here is for users.

namespace zero::inline v0::detail {

struct split_vote {
  int color;
  int key;
};

/// The ranks that gave `color`, in the order of (key, rank).
template <class = void>
[[nodiscard]] std::vector<int> ranks_of_color(std::span<split_vote const> votes, int color) {
  auto const of = [&](int rank) { return votes[static_cast<std::size_t>(rank)]; };
  std::vector<int> ranks;
  for (int rank = 0; rank < static_cast<int>(votes.size()); ++rank) {
    if (of(rank).color == color) {
      ranks.push_back(rank);
    }
  }
  std::stable_sort(ranks.begin(), ranks.end(), [&](int a, int b) { return of(a).key < of(b).key; });
  return ranks;
}

}  // namespace zero::inline v0::detail
