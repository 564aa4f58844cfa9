// SPDX-License-Identifier: MIT
#pragma once

#include "settings.hpp"
#include "train.hpp"

#include <cstddef>
#include <string>
#include <vector>

/// @file
/// What a person sees (progress bar and table) and what a program reads (JSON).

namespace mlp {

/// One stage's outcome: of rank 0, whose shard is the fullest.
struct result {
  int stage;
  outcome of_rank0;
};

/// A line on standard error that is drawn over itself; nothing where that is no terminal.
class progress_bar {
 public:
  explicit progress_bar(int stage);
  ~progress_bar();
  progress_bar(progress_bar const&) = delete;
  progress_bar& operator=(progress_bar const&) = delete;

  void show(std::size_t step, std::size_t steps, double loss);

 private:
  int stage_;
  bool terminal_;
  std::size_t drawn_ = 0;  // per cent
};

/// Where any rank's plan, allocation, traffic and formulas, or any two ranks' parameters, disagree;
/// empty where none do.
[[nodiscard]] std::string disagreement(int stage, std::vector<outcome> const& ranks);

/// One column a stage.
[[nodiscard]] std::string table(settings const& settings, std::vector<result> const& results);

/// An array with one object a stage.
[[nodiscard]] std::string json(settings const& settings, std::vector<result> const& results);

}  // namespace mlp
