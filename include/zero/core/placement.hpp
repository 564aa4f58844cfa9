// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/parameter.hpp>

#include <cstdint>
#include <type_traits>

/// @file
/// Placements of model state, and the table of what each needs from a tensor:
///
/// | sharded    | value tensor              | gradient tensor           |
/// |------------|---------------------------|---------------------------|
/// | neither    | contiguous                | contiguous                |
/// | gradients  | contiguous                | rebindable, or none       |
/// | parameters | rebindable, or none       | rebindable, or none       |

namespace zero::inline v0 {

enum class placement : std::uint8_t { replicated, sharded };

/// One placement each for optimizer state, gradients and parameters.
struct placements {
  placement optimizer_state = placement::replicated;
  placement gradients = placement::replicated;
  placement parameters = placement::replicated;

  friend constexpr bool operator==(placements const&, placements const&) = default;
};

template <class Value>
inline constexpr bool value_can_be_sharded =
    std::is_same_v<Value, no_tensor> || rebindable_tensor<Value>;

template <class Gradient>
inline constexpr bool gradient_can_be_sharded =
    std::is_same_v<Gradient, no_tensor> || rebindable_tensor<Gradient>;

}  // namespace zero::inline v0
