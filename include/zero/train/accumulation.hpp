// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>

/// @file
/// Accumulation policies: where the gradients of a window's micro-batches are added up.

namespace zero::inline v0 {

/// A policy as data.
struct accumulation {
  bool per_microbatch = false;
  std::size_t open_buckets = 2;  ///< gradient slots; only per micro-batch
};

/// The engine adds micro-batches up in the whole gradient, which is kept; one reduction per window.
/// The policy that fits stages 0 and 1.
struct local_accumulate {
  constexpr operator accumulation() const { return {}; }  // NOLINT(google-explicit-constructor)
};

/// Each micro-batch is reduced and added to what is kept: all of it in stage 0 and in stage 1 with
/// all_reduce, else a shard. The policy that fits stages 2 and 3.
struct reduce_per_microbatch {
  /// Buckets with gradients that aren't reduced yet, at most; each has a slot of memory.
  std::size_t open_buckets = 2;

  constexpr operator accumulation() const {  // NOLINT(google-explicit-constructor)
    return {.per_microbatch = true, .open_buckets = open_buckets};
  }
};

}  // namespace zero::inline v0
