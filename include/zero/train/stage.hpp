// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/placement.hpp>

#include <cstddef>
#include <cstdint>

/// @file
/// Stages: names for three placements. A stage is written as a type, so that tensors it can't serve
/// are refused by the compiler, and held as data.

namespace zero::inline v0 {

/// How stage 1 reduces gradients.
enum class gradient_collective : std::uint8_t {
  reduce_scatter,  ///< each rank has its slice of the average; off-shard gradients are not reduced
  all_reduce,      ///< every rank has the whole averaged gradient, which is sent once more
};

/// A stage as data.
struct stage {
  placements placed;
  gradient_collective gradients = gradient_collective::reduce_scatter;
  std::size_t prefetch = 0;         ///< of stage 3, as the next: buckets gathered ahead
  bool keep_after_forward = false;  ///< parameters stay whole from forward to backward
  bool keep_last = false;           ///< the last bucket does, which backward needs first
  std::size_t max_live_units = 1;   ///< units leased at once

  /// 0 to 3.
  [[nodiscard]] constexpr int number() const noexcept {
    return static_cast<int>(placed.optimizer_state) + static_cast<int>(placed.gradients) +
           static_cast<int>(placed.parameters);
  }
  /// Every rank updates, and holds, the whole of parameters and optimizer state.
  [[nodiscard]] constexpr bool replicates_updates() const noexcept {
    return placed.optimizer_state == placement::replicated;
  }
  /// Every rank has the whole reduced gradient.
  [[nodiscard]] constexpr bool reduces_whole() const noexcept {
    return replicates_updates() || (placed.gradients == placement::replicated &&
                                    gradients == gradient_collective::all_reduce);
  }
  [[nodiscard]] constexpr bool shards_parameters() const noexcept {
    return placed.parameters == placement::sharded;
  }
};

/// Everything replicated: plain data parallelism.
struct stage0 {
  static constexpr placements placed{};
  constexpr operator stage() const {
    return {.placed = placed};
  }  // NOLINT(google-explicit-constructor)
};

/// Optimizer state sharded.
struct stage1 {
  gradient_collective gradients = gradient_collective::reduce_scatter;

  static constexpr placements placed{.optimizer_state = placement::sharded};
  constexpr operator stage() const {  // NOLINT(google-explicit-constructor)
    return {.placed = placed, .gradients = gradients};
  }
};

/// Optimizer state and gradients sharded.
struct stage2 {
  static constexpr placements placed{.optimizer_state = placement::sharded,
                                     .gradients = placement::sharded};
  constexpr operator stage() const {
    return {.placed = placed};
  }  // NOLINT(google-explicit-constructor)
};

/// Optimizer state, gradients and parameters sharded.
struct stage3 {
  std::size_t prefetch = 1;
  bool keep_after_forward = false;
  bool keep_last = false;
  std::size_t max_live_units = 1;

  static constexpr placements placed{placement::sharded, placement::sharded, placement::sharded};
  constexpr operator stage() const {  // NOLINT(google-explicit-constructor)
    return {.placed = placed,
            .prefetch = prefetch,
            .keep_after_forward = keep_after_forward,
            .keep_last = keep_last,
            .max_live_units = max_live_units};
  }
};

static_assert(static_cast<stage>(stage0{}).number() == 0 &&
              static_cast<stage>(stage3{}).number() == 3);

}  // namespace zero::inline v0
