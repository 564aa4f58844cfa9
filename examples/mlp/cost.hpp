// SPDX-License-Identifier: MIT
#pragma once

#include "formula.hpp"
#include "settings.hpp"

#include <zero/comm/traffic.hpp>
#include <zero/device/ledger.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

/// @file
/// What is compared: what the theory is told, and what `zero` has planned, taken and sent.

namespace mlp {

/// Of the input, of every hidden layer, of the output.
[[nodiscard]] std::vector<std::size_t> widths(settings const& settings);

/// What the theory is told: sizes and settings.
[[nodiscard]] formula formula_of(settings const& settings, int stage, int rank);

[[nodiscard]] byte_counts counts(zero::memory_bytes const& bytes);

/// All that a step sends, whether the theory knows of it or not.
[[nodiscard]] std::uint64_t training_bytes(zero::traffic_bytes const& sent);

}  // namespace mlp
