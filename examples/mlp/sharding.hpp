// SPDX-License-Identifier: MIT
#pragma once

#include "settings.hpp"

#include <zero/train/accumulation.hpp>
#include <zero/train/options.hpp>
#include <zero/train/stage.hpp>

/// @file
/// What the command line says, in `zero`'s words.

namespace mlp {

[[nodiscard]] zero::stage stage_of(settings const& settings, int stage);
[[nodiscard]] zero::accumulation policy_of(settings const& settings, int stage);
/// All but the engine's stream.
[[nodiscard]] zero::options options_of(settings const& settings);

}  // namespace mlp
