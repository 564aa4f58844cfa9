// SPDX-License-Identifier: MIT
#pragma once

#include <zero/device/ledger.hpp>
#include <zero/shard/layout.hpp>
#include <zero/train/memory_map.hpp>

#include <cstddef>
#include <cstdint>
#include <string>

/// @file
/// `plan`: the bytes and the traffic of a run, known before anything is allocated.

namespace zero::inline v0 {

struct plan {
  memory_bytes bytes;  ///< of this rank, from bind to the end
  std::uint64_t bind_peak_bytes =
      0;  ///< while binding: beside `bytes`, what tensors hold until taken over
  std::uint64_t reduction_bytes = 0;  ///< sent by one reduction of all gradients
  std::uint64_t update_bytes =
      0;  ///< sent by the all-gather that follows an update (stages 1 and 2)
  std::uint64_t gather_bytes = 0;  ///< sent by the gathers of a micro-batch (stage 3)
  bool reduces_per_microbatch = false;
  std::string notes;  ///< what stage and policy cost together, in words

  /// Payload bytes that leave this rank in a step of `microbatches`, units leased in order.
  [[nodiscard]] std::uint64_t sent_bytes_per_step(std::size_t microbatches = 1) const noexcept {
    std::uint64_t const reductions = reduces_per_microbatch ? microbatches : 1;
    return reductions * reduction_bytes + update_bytes + microbatches * gather_bytes;
  }

  /// One line per category, then padding, peak and notes.
  [[nodiscard]] std::string describe() const {
    std::string out;
    for (std::size_t i = 0; i < category_count; ++i) {
      auto const each = static_cast<category>(i);
      out += detail::text(name(each), ": ", bytes[each], " bytes\n");
    }
    out += detail::text("padding: ", bytes.padding, " bytes\npeak: ", bytes.peak(),
                        " bytes\npeak while binding: ", bind_peak_bytes, " bytes\n");
    return out + notes;
  }
};

namespace detail {

[[nodiscard]] inline std::string plan_notes(stage const& at, accumulation const& policy) {
  std::string notes;
  if (at.placed.gradients == placement::sharded && !policy.per_microbatch) {
    notes += "local_accumulate keeps the whole gradient: gradient memory is that of stage 1\n";
  }
  if (at.placed.gradients == placement::replicated && !at.reduces_whole() &&
      policy.per_microbatch) {
    notes +=
        "reduce_per_microbatch keeps a shard of the gradient: gradient memory is that of stage 2\n";
  }
  if (at.shards_parameters() && at.keep_after_forward) {
    notes += "parameters kept after forward reserve all parameters for the model's life\n";
  }
  return notes;
}

/// @param bound_bytes  what tensors that will be rebound hold before bind.
[[nodiscard]] inline plan make_plan(layout const& of, memory_map const& map, stage const& at,
                                    accumulation const& policy, std::uint64_t bound_bytes) {
  plan out;
  out.bytes = map.bytes;
  out.bind_peak_bytes = map.bytes.peak() + bound_bytes;
  out.reduces_per_microbatch = policy.per_microbatch;
  out.notes = plan_notes(at, policy);
  std::uint64_t const peers = of.ranks() - 1;
  for (layout::segment const& segment : of.segments()) {
    std::uint64_t const sent =
        peers * segment.cut.slice();  // elements, each way through a collective
    if (segment.trainable) {
      out.reduction_bytes += sent * size_bytes(segment.gradient);
      out.reduction_bytes += at.reduces_whole() ? sent * size_bytes(segment.reduced) : 0;
      if (!at.replicates_updates() && !at.shards_parameters()) {
        out.update_bytes += sent * size_bytes(segment.value);
      }
    }
    if (at.shards_parameters()) {
      bool const stays =
          at.keep_after_forward || (at.keep_last && segment.bucket + 1 == of.buckets().size());
      out.gather_bytes += (stays ? 1 : 2) * sent * size_bytes(segment.value);
    }
  }
  return out;
}

}  // namespace detail
}  // namespace zero::inline v0
