// SPDX-License-Identifier: MIT
#pragma once

#include <benchmark/benchmark.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

/// @file
/// Contenders and their limit within each iteration, so that they see the same memory within a
/// second; medians and quartiles over the pairs.

namespace paired {

/// Pairs in a benchmark.
inline constexpr int pairs = 25;

/// Threads that run the same work at the same time.
class team {
 public:
  explicit team(std::size_t size) : barrier_{static_cast<std::ptrdiff_t>(size)} {
    for (std::size_t rank = 1; rank < size; ++rank) {
      threads_.emplace_back([this, rank] { serve(rank); });
    }
  }
  team(team const&) = delete;
  team& operator=(team const&) = delete;
  ~team() {
    work_ = nullptr;
    barrier_.arrive_and_wait();
    for (auto& thread : threads_) {
      thread.join();
    }
  }

  /// Seconds until all of them have done `work(rank)`.
  double seconds(std::function<void(std::size_t)> work) {
    work_ = std::move(work);
    barrier_.arrive_and_wait();
    auto const start = std::chrono::steady_clock::now();
    work_(0);
    barrier_.arrive_and_wait();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

 private:
  void serve(std::size_t rank) {
    for (;;) {
      barrier_.arrive_and_wait();
      if (!work_) {
        return;
      }
      work_(rank);
      barrier_.arrive_and_wait();
    }
  }

  std::barrier<> barrier_;
  std::function<void(std::size_t)> work_;
  std::vector<std::thread> threads_;
};

[[nodiscard]] inline double quantile(std::vector<double> values, double part) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(part * static_cast<double>(values.size() - 1) + 0.5)];
}

/// What pairs of runs of the library and of one other took.
class comparison {
 public:
  void add(double library_seconds, double other_seconds) {
    library_.push_back(library_seconds);
    other_.push_back(other_seconds);
    ratios_.push_back(other_seconds / library_seconds);
  }

  /// `<name>_ratio` is the median of other / library, above 1 where the library is faster, between
  /// its quartiles; `<name>_ms` the other's median.
  void report(benchmark::State& state, std::string const& name) const {
    state.counters[name + "_ratio"] = quantile(ratios_, 0.5);
    state.counters[name + "_ratio_low"] = quantile(ratios_, 0.25);
    state.counters[name + "_ratio_high"] = quantile(ratios_, 0.75);
    state.counters["ms"] = quantile(library_, 0.5) * 1e3;
    state.counters[name + "_ms"] = quantile(other_, 0.5) * 1e3;
  }

  [[nodiscard]] double library_seconds() const { return quantile(library_, 0.5); }
  [[nodiscard]] double other_seconds() const { return quantile(other_, 0.5); }

 private:
  std::vector<double> library_;
  std::vector<double> other_;
  std::vector<double> ratios_;
};

}  // namespace paired
