// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/run_threads.hpp>

#include <support/thrown.hpp>
#include <support/watchdog.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <exception>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

/// @file
/// What every rank throws when one of them does something wrong.

namespace test {

/// What each rank threw, and how long all of them took.
struct failures {
  std::vector<thrown> ranks;
  std::chrono::milliseconds took{};

  /// Every rank failed, and its message has every part.
  [[nodiscard]] bool all_say(std::initializer_list<std::string_view> parts) const {
    return std::all_of(ranks.begin(), ranks.end(), [&](thrown const& each) {
      return each.kind != kind::nothing && each.says(parts);
    });
  }
  /// All messages, for a failed check.
  [[nodiscard]] std::string text() const {
    std::string out;
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      out += "rank " + std::to_string(rank) + ": " +
             (ranks[rank].kind == kind::nothing ? "threw nothing" : ranks[rank].message) + "\n";
    }
    return out;
  }
};

/// Threads as ranks, for `run_failing`.
struct on_threads {
  template <class Function>
  void operator()(int ranks, Function const& function) const {
    zero::run_threads(ranks, function, {.deadline = std::chrono::seconds{3}});
  }
};

/// What each of `ranks` ranks throws from `body(comm)`; `run(ranks, function)` calls the function
/// on each of them.
template <class Body, class Run = on_threads>
[[nodiscard]] failures run_failing(int ranks, Body body, Run run = {}) {
  watchdog const limit;
  failures out;
  out.ranks.resize(static_cast<std::size_t>(ranks));
  auto const on_rank = [&](auto& comm) {
    std::exception_ptr caught;
    out.ranks[static_cast<std::size_t>(comm.rank())] = what_throws([&] {
      try {
        body(comm);
      } catch (...) {
        caught = std::current_exception();
        throw;
      }
    });
    if (caught) {
      std::rethrow_exception(caught);
    }
  };
  out.took = what_throws([&] { run(ranks, on_rank); }).after;
  return out;
}

}  // namespace test
