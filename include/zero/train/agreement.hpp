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
#include <cstring>
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

/// The line that starts at `begin`.
[[nodiscard]] inline std::string_view line_at(std::string_view of, std::size_t begin) {
  return of.substr(begin, std::min(of.find('\n', begin), of.size()) - begin);
}

/// Check that every rank has the same text, made of lines.
///
/// Collective: every rank calls it.
/// @throws zero::usage_error  the first line in which a rank differs from rank 0, on every rank
///                            alike.
template <communicator Communicator>
void agree(Communicator& comm, std::string_view what, std::string const& mine) {
  std::vector<std::uint64_t> lengths(static_cast<std::size_t>(comm.size()));
  std::uint64_t const length = mine.size();
  comm.exchange(std::as_bytes(std::span{&length, 1}), std::as_writable_bytes(std::span{lengths}));
  std::size_t const longest = *std::max_element(lengths.begin(), lengths.end());
  std::string padded = mine;
  padded.resize(longest);
  std::string all(longest * lengths.size(), '\0');
  comm.exchange(std::as_bytes(std::span{padded}), std::as_writable_bytes(std::span{all}));
  std::string_view const expected{all.data(), lengths[0]};
  for (std::size_t rank = 1; rank < lengths.size(); ++rank) {
    std::string_view const actual{all.data() + rank * longest, lengths[rank]};
    if (actual == expected) {
      continue;
    }
    std::size_t at = 0;
    while (line_at(expected, at) == line_at(actual, at)) {
      at += line_at(expected, at).size() + 1;
    }
    throw usage_error{text(what, ": expected ", line_at(expected, at), " (as rank 0), actual ",
                           line_at(actual, at), " (rank ", rank, ")")};
  }
}

}  // namespace zero::inline v0::detail
