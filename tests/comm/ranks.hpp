// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/run_threads.hpp>

#include <support/watchdog.hpp>

#include <utility>

/// @file
/// Ranks with a limit on their time.

namespace test {

/// `zero::run_threads` under a watchdog.
template <class Function>
void run_ranks(int ranks, Function&& function, zero::thread_options options = {}) {
  watchdog const limit;
  zero::run_threads(ranks, std::forward<Function>(function), options);
}

}  // namespace test
