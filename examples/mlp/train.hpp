// SPDX-License-Identifier: MIT
#pragma once

#include "formula.hpp"
#include "settings.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

/// @file
/// Training in one stage.

namespace mlp {

/// What one rank has learnt and what it has cost.
struct outcome {
  double test_accuracy = 0;              ///< share of the test set
  std::uint64_t parameter_checksum = 0;  ///< of the bits of all parameters, in order of declaration
  std::uint64_t parameters = 0;          ///< elements
  byte_counts planned;
  byte_counts allocated;
  byte_counts formula;
  std::uint64_t bind_peak_bytes = 0;
  std::uint64_t sent_bytes_per_step = 0;  ///< metered
  std::uint64_t formula_sent_bytes_per_step = 0;
  std::uint64_t steps = 0;
  double seconds_per_step = 0;
  double loss = 0;  ///< mean of this rank's last micro-batch
};

/// Called by rank 0 after the step that completes another per cent of the steps.
using step_observer = std::function<void(std::size_t step, std::size_t steps, double loss)>;

/// Train on `settings.ranks` ranks, on the device and with the communicator that `settings` name.
/// @return  every rank's outcome.
/// @throws std::exception  the device isn't there, the data can't be read, or whatever went wrong
///                         first on any rank.
[[nodiscard]] std::vector<outcome> train(settings const& settings, int stage,
                                         step_observer const& after_step);
[[nodiscard]] std::vector<outcome> train_on_host(settings const& settings, int stage,
                                                 step_observer const& after_step);
[[nodiscard]] std::vector<outcome> train_on_cuda(settings const& settings, int stage,
                                                 step_observer const& after_step);

}  // namespace mlp
