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
struct local_accumulate {
  constexpr operator accumulation() const { return {}; }  // NOLINT(google-explicit-constructor)
};

/// Each micro-batch is reduced and added to what is kept, a shard where gradients are sharded.
struct reduce_per_microbatch {
  std::size_t open_buckets = 2;  ///< buckets that may hold a gradient slot at once

  constexpr operator accumulation() const {  // NOLINT(google-explicit-constructor)
    return {.per_microbatch = true, .open_buckets = open_buckets};
  }
};

}  // namespace zero::inline v0
