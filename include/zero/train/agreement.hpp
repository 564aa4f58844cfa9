// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/concept.hpp>
#include <zero/core/error.hpp>
#include <zero/core/hash.hpp>
#include <zero/optim/concept.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

/// @file
/// Agreement before anything is built: an error of one rank is thrown by all, and a text that
/// differs between ranks is an error that shows the first difference.

namespace zero::inline v0::detail {

/// Let every rank throw what any rank failed with in `operation`. `failure` is empty where this
/// rank has none.
///
/// Collective: every rank calls it.
/// @throws zero::usage_error  the message of the first rank that has one.
template <communicator Communicator>
void throw_together(Communicator& comm, std::string_view operation, std::string_view failure) {
  constexpr std::size_t longest = 480;
  std::array<char, longest + 1> mine{};
  std::copy_n(failure.begin(), std::min(failure.size(), longest), mine.begin());
  std::vector<char> all(mine.size() * static_cast<std::size_t>(comm.size()));
  comm.exchange(std::as_bytes(std::span{mine}), std::as_writable_bytes(std::span{all}));
  for (int rank = 0; rank < comm.size(); ++rank) {
    char const* const message = all.data() + static_cast<std::size_t>(rank) * mine.size();
    if (*message != '\0') {
      throw usage_error{text(operation, ": ", message, " (rank ", rank, ")")};
    }
  }
}

/// Hyperparameters as what they do: a hash of one element, and its states, in two updates.
template <elementwise_optimizer Optimizer>
[[nodiscard]] std::uint64_t fingerprint(Optimizer const& optimizer) {
  std::uint64_t hash = 0;
  auto const add = [&hash](double number) {
    hash = hash_next(hash, std::bit_cast<std::uint64_t>(number));
  };
  double value = 1;
  std::array<double, state_count<Optimizer>> states{};
  for (std::int64_t step = 1; step <= 2; ++step) {
    Optimizer::update(optimizer.template at<double>(step), value, 0.5, states);
    add(value);
    std::for_each(states.begin(), states.end(), add);
  }
  return hash;
}

/// Each rank's number, by rank.
///
/// Collective: every rank calls it.
template <communicator Communicator>
[[nodiscard]] std::vector<std::uint64_t> gathered(Communicator& comm, std::uint64_t mine) {
  std::vector<std::uint64_t> all(static_cast<std::size_t>(comm.size()));
  comm.exchange(std::as_bytes(std::span{&mine, 1}), std::as_writable_bytes(std::span{all}));
  return all;
}

/// The first item of a list in which ranks differ, if any. `hash_of(n)` is of the first n items, or
/// of all where there are fewer: a few bytes are exchanged, however long the list is.
///
/// Collective: every rank calls it.
template <communicator Communicator, class Hash>
[[nodiscard]] std::optional<std::size_t> first_difference(Communicator& comm, Hash hash_of) {
  auto const differ = [&](std::size_t n) {
    std::vector<std::uint64_t> const all = gathered(comm, hash_of(n));
    return std::adjacent_find(all.begin(), all.end(), std::not_equal_to<>{}) != all.end();
  };
  if (!differ(std::numeric_limits<std::size_t>::max())) {
    return std::nullopt;
  }
  std::size_t most = 1;
  while (!differ(most)) {
    most *= 2;
  }
  std::size_t least = most / 2;  // so many are the same
  while (most - least > 1) {
    std::size_t const middle = least + (most - least) / 2;
    (differ(middle) ? most : least) = middle;
  }
  return least;
}

/// The first `n` lines.
[[nodiscard]] inline std::string_view first_lines(std::string_view of, std::size_t n) {
  std::size_t end = 0;
  for (; n > 0 && end < of.size(); --n) {
    end = std::min(of.find('\n', end), of.size() - 1) + 1;
  }
  return of.substr(0, end);
}

/// Line `n`, without its end.
[[nodiscard]] inline std::string line(std::string_view of, std::size_t n) {
  of.remove_prefix(first_lines(of, n).size());
  return std::string{of.substr(0, of.find('\n'))};
}

/// Check that every rank has the same text, made of lines.
///
/// Collective: every rank calls it.
/// @throws zero::usage_error  the first line that is not the same on all ranks, as rank 0 has it
///                            and as the first other does, on every rank alike.
template <communicator Communicator>
void agree(Communicator& comm, std::string_view what, std::string_view mine) {
  auto const different = first_difference(comm, [&](std::size_t n) {
    return hash_bytes(std::as_bytes(std::span{first_lines(mine, n)}));
  });
  if (!different) {
    return;
  }
  std::string here = line(mine, *different);
  std::vector<std::uint64_t> const sizes = gathered(comm, here.size());
  std::size_t const longest = *std::max_element(sizes.begin(), sizes.end());
  here.resize(longest);
  std::string all(longest * sizes.size(), '\0');
  comm.exchange(std::as_bytes(std::span{here}), std::as_writable_bytes(std::span{all}));
  auto const of_rank = [&](std::size_t rank) {
    return std::string_view{all}.substr(rank * longest, sizes[rank]);
  };
  std::size_t rank = 1;
  while (rank + 1 < sizes.size() && of_rank(rank) == of_rank(0)) {
    ++rank;
  }
  throw usage_error{text(what, ": expected ", of_rank(0), " (as rank 0), actual ", of_rank(rank),
                         " (rank ", rank, ")")};
}

}  // namespace zero::inline v0::detail
