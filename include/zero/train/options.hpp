// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/error.hpp>
#include <zero/device/memory_resource.hpp>
#include <zero/train/accumulation.hpp>
#include <zero/train/precision.hpp>
#include <zero/train/stage.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>

/// @file
/// What a user may set about a `sharded_model` beside stage, optimizer and policy.

namespace zero::inline v0 {

/// What to do where ranks bind values that already exist.
enum class start : std::uint8_t {
  broadcast,      ///< every rank starts from rank 0's
  require_equal,  ///< every rank's must be the same; an error names the first that differs
};

/// Stage, optimizer and policy are arguments of their own.
struct options {
  /// The largest global norm of the mean gradient, which is scaled down to it; infinity only
  /// measures.
  std::optional<double> clip_norm = {};

  /// Consecutive units share a bucket of at most so much. Default: 16 MiB in stages 0 to 2, 0 in
  /// stage 3, where each unit has its own.
  std::optional<std::uint64_t> bucket_bytes = {};

  /// Each parameter and slice starts at a multiple of so many elements. Default: of 64 bytes on the
  /// host and 256 on CUDA, in a bucket's narrowest type.
  std::optional<std::uint64_t> alignment = {};

  bool overlap = true;               ///< communicate on a thread or stream of the model's own
  void* stream = nullptr;            ///< the engine's cudaStream_t; null: CUDA's default one
  memory_resource memory = {};       ///< where the arena is taken from
  zero::precision precision = fp32;  ///< of parameters and of reduced gradients
  zero::start start = zero::start::broadcast;  ///< whose values ranks start from
  bool engine_adds = false;  ///< the engine always adds to gradients: they are cleared for it

  /// How long a rank may wait for another, in each of the model's collectives.
  std::chrono::milliseconds deadline = std::chrono::minutes{10};

  /// @throws zero::usage_error  names the option, what was expected, and the actual value.
  void validate(stage const& at, accumulation const& policy) const {
    if (clip_norm && !(*clip_norm > 0)) {
      throw usage_error{detail::text("options: expected clip_norm above 0, actual ", *clip_norm)};
    }
    if (alignment && *alignment == 0) {
      throw usage_error{"options: expected an alignment of at least 1 element, actual 0"};
    }
    if (deadline.count() <= 0) {
      throw usage_error{detail::text("options: expected a deadline above 0 ms, actual ",
                                     deadline.count(), " ms")};
    }
    if (at.max_live_units == 0) {
      throw usage_error{"options: expected max_live_units of at least 1, actual 0"};
    }
    if (policy.per_microbatch && policy.open_buckets == 0) {
      throw usage_error{"options: expected open_buckets of at least 1, actual 0"};
    }
  }

  [[nodiscard]] std::uint64_t bucket_bytes_in(stage const& at) const noexcept {
    return bucket_bytes.value_or(at.shards_parameters() ? 0 : std::uint64_t{16} << 20U);
  }
};

}  // namespace zero::inline v0
