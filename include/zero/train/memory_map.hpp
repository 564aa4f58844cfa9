// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/error.hpp>
#include <zero/core/partition.hpp>
#include <zero/device/ledger.hpp>
#include <zero/shard/layout.hpp>
#include <zero/train/accumulation.hpp>
#include <zero/train/precision.hpp>
#include <zero/train/stage.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

/// @file
/// `memory_map`: the offset of everything that a model keeps in its arena, and the bytes of each
/// category. Arithmetic only; the arena is laid out by it, so what is planned is what is taken.

namespace zero::inline v0 {

struct memory_map_options {
  zero::stage stage;
  accumulation policy;
  std::uint64_t rank = 0;
  std::size_t states = 0;  ///< per-element optimizer states, master weights not counted
  std::vector<std::uint64_t>
      value_stays;  ///< per parameter: bytes of a value tensor that can't be rebound
  std::vector<std::uint64_t> gradient_stays;  ///< the same for its gradient tensor
  std::uint64_t alignment_bytes = 64;         ///< of every region's start
  std::uint64_t control_bytes = 0;            ///< of `control_map`
  std::uint64_t scratch_bytes = 0;            ///< that reductions go through
};

class memory_map {
 public:
  static constexpr std::uint64_t none = std::numeric_limits<std::uint64_t>::max();

  /// One `arena::take`, in order.
  struct region {
    zero::category category;
    std::uint64_t real_bytes;
    std::uint64_t total_bytes;
  };

  /// Byte offsets in the arena; `none` where the segment has no such thing.
  struct segment {
    std::uint64_t values = none;        ///< the whole segment, or in stage 3 this rank's slice
    std::uint64_t gradients = none;     ///< whole, as the engine writes them (local_accumulate)
    std::uint64_t reduced = none;       ///< whole or slice; may lie inside `gradients`
    std::vector<std::uint64_t> states;  ///< master first where there is one; whole or slice
    bool staged_values = false;         ///< values stay in tensors: collectives go through staging
    bool staged_gradients = false;
    std::uint64_t gather_offset = 0;    ///< in its bucket's gather slot
    std::uint64_t gradient_offset = 0;  ///< in its bucket's gradient slot
    std::uint64_t value_staging = 0;    ///< in the staging bucket
    std::uint64_t gradient_staging = 0;
  };

  std::vector<segment> segments;
  std::vector<std::uint64_t> value_homes;     ///< per parameter, only in staged segments
  std::vector<std::uint64_t> gradient_homes;  ///< the same
  std::vector<std::uint64_t> gather_slots;
  std::vector<std::uint64_t> gradient_slots;
  std::uint64_t staging = none;
  std::uint64_t scratch = none;     ///< what reductions go through, counted as staging
  std::uint64_t scratch_bytes = 0;  ///< of it
  std::uint64_t control = none;     ///< what a step keeps beside tensors, counted as padding
  /// From the start: what collectives use at the same offset on every rank, which is all but the
  /// gradient slots. Which slot a bucket gets depends on the order in which gradients come.
  std::uint64_t symmetric_bytes = 0;
  std::vector<region> regions;
  memory_bytes bytes;

  memory_map(layout const& of, memory_map_options options)
      : segments(of.segments().size()), value_homes(of.parameters().size(), none),
        gradient_homes(of.parameters().size(), none), layout_{&of}, options_{std::move(options)} {
    for (std::size_t s = 0; s < segments.size(); ++s) {
      for (std::size_t const id : of.segments()[s].parameters) {
        segments[s].staged_values = segments[s].staged_values || options_.value_stays[id] != 0;
        segments[s].staged_gradients =
            segments[s].staged_gradients || options_.gradient_stays[id] != 0;
      }
      segments[s].staged_gradients =
          segments[s].staged_gradients && !options_.policy.per_microbatch;
      add_values(s);
      if (of.segments()[s].trainable) {
        add_gradients(s);
        add_states(s);
      }
    }
    add_gather_slots();
    add_staging();
    if (options_.scratch_bytes != 0) {
      scratch_bytes = options_.scratch_bytes;
      scratch = take(category::staging, scratch_bytes, scratch_bytes);
    }
    if (options_.control_bytes != 0) {
      control = take(category::staging, 0, options_.control_bytes);  // no elements: padding
    }
    symmetric_bytes = next_;
    add_gradient_slots();
    for (std::size_t id = 0; id < of.parameters().size(); ++id) {
      bytes[category::engine] += options_.value_stays[id] + options_.gradient_stays[id];
    }
  }

 private:
  std::uint64_t take(category as, std::uint64_t real_bytes, std::uint64_t padded_bytes) {
    std::uint64_t const total = round_up(padded_bytes, options_.alignment_bytes);
    std::uint64_t const offset = next_;
    if (total > std::numeric_limits<std::uint64_t>::max() - next_) {
      throw usage_error{
          detail::text("memory_map: expected a total of bytes that fits 64 bits, actual ", next_,
                       " and ", total, " of ", name(as))};
    }
    next_ += total;
    regions.push_back({as, real_bytes, total});
    bytes[as] += real_bytes;
    bytes.padding += total - real_bytes;
    return offset;
  }

  [[nodiscard]] layout::segment const& of(std::size_t s) const { return layout_->segments()[s]; }

  /// A place of its own for each parameter of a staged segment that has no tensor to stay in.
  void add_homes(std::size_t s, category as, dtype type, std::vector<std::uint64_t> const& stays,
                 std::vector<std::uint64_t>& homes) {
    for (std::size_t const id : of(s).parameters) {
      std::uint64_t const size_in_bytes = layout_->parameters()[id].spec.size * size_bytes(type);
      if (stays[id] == 0 && size_in_bytes != 0) {
        homes[id] = take(as, size_in_bytes, size_in_bytes);
      }
    }
  }

  void add_values(std::size_t s) {
    layout::segment const& within = of(s);
    std::uint64_t const width = size_bytes(within.value);
    if (options_.stage.shards_parameters()) {
      segments[s].values =
          take(category::parameters, layout_->real_in_slice(within, options_.rank) * width,
               within.cut.slice() * width);
    } else if (segments[s].staged_values) {
      add_homes(s, category::parameters, within.value, options_.value_stays, value_homes);
    } else {
      segments[s].values =
          take(category::parameters, within.real * width, within.cut.padded() * width);
    }
  }

  void add_gradients(std::size_t s) {
    layout::segment const& within = of(s);
    std::uint64_t const width = size_bytes(within.gradient);
    bool const whole = options_.stage.reduces_whole();
    bool const in_place = !options_.policy.per_microbatch && within.gradient == within.reduced;
    if (!options_.policy.per_microbatch) {
      if (segments[s].staged_gradients) {
        add_homes(s, category::gradients, within.gradient, options_.gradient_stays, gradient_homes);
        if (in_place) {
          return;  // the average is copied back to where the engine wrote
        }
      } else {
        segments[s].gradients =
            take(category::gradients, within.real * width, within.cut.padded() * width);
        if (in_place) {
          segments[s].reduced =
              segments[s].gradients + (whole ? 0 : options_.rank * within.cut.slice() * width);
          return;
        }
      }
    }
    std::uint64_t const reduced_width = size_bytes(within.reduced);
    segments[s].reduced = whole
                              ? take(category::gradients, within.real * reduced_width,
                                     within.cut.padded() * reduced_width)
                              : take(category::gradients,
                                     layout_->real_in_slice(within, options_.rank) * reduced_width,
                                     within.cut.slice() * reduced_width);
  }

  void add_states(std::size_t s) {
    layout::segment const& within = of(s);
    std::uint64_t const width = size_bytes(accumulate_dtype(within.value));
    bool const whole = options_.stage.replicates_updates();
    std::uint64_t const real = whole ? within.real : layout_->real_in_slice(within, options_.rank);
    std::uint64_t const padded = whole ? within.cut.padded() : within.cut.slice();
    std::size_t const count = options_.states + (has_master(within.value) ? 1 : 0);
    for (std::size_t i = 0; i < count; ++i) {
      segments[s].states.push_back(take(category::optimizer_state, real * width, padded * width));
    }
  }

  struct extent {
    std::uint64_t real_bytes = 0;
    std::uint64_t total_bytes = 0;
  };

  /// The bytes of a bucket's segments in one slot; sets each segment's offset there.
  template <class Wanted, class Type>
  extent place(layout::bucket const& bucket, std::uint64_t segment::*offset, Wanted wanted,
               Type type) {
    extent sum;
    for (std::size_t const s : bucket.segments) {
      if (wanted(s)) {
        segments[s].*offset = sum.total_bytes;
        std::uint64_t const width = size_bytes(type(of(s)));
        sum.real_bytes += of(s).real * width;
        sum.total_bytes += round_up(of(s).cut.padded() * width, options_.alignment_bytes);
      }
    }
    return sum;
  }

  static void widen(extent& largest, extent const& other) {
    largest.real_bytes = std::max(largest.real_bytes, other.real_bytes);
    largest.total_bytes = std::max(largest.total_bytes, other.total_bytes);
  }

  void add_gather_slots() {
    if (!options_.stage.shards_parameters()) {
      return;
    }
    auto const& buckets = layout_->buckets();
    extent largest;
    std::size_t tied = 0;
    for (layout::bucket const& bucket : buckets) {
      extent const here = place(
          bucket, &segment::gather_offset, [](std::size_t) { return true; },
          [](layout::segment const& s) { return s.value; });
      if (options_.stage.keep_after_forward) {
        gather_slots.push_back(take(category::gathered_units, here.real_bytes, here.total_bytes));
      }
      widen(largest, here);
      tied += bucket.tied ? 1 : 0;
    }
    if (!options_.stage.keep_after_forward) {
      std::size_t const ahead = std::min(options_.stage.prefetch, buckets.size());
      std::size_t const live = std::min(options_.stage.max_live_units, buckets.size());
      std::size_t const count = std::min(buckets.size(), live + ahead + tied);
      for (std::size_t slot = 0; slot < count; ++slot) {
        gather_slots.push_back(
            take(category::gathered_units, largest.real_bytes, largest.total_bytes));
      }
    }
  }

  void add_gradient_slots() {
    if (!options_.policy.per_microbatch) {
      return;
    }
    extent largest;
    std::size_t tied = 0;
    std::size_t trainable = 0;
    for (layout::bucket const& bucket : layout_->buckets()) {
      if (bucket.trainable) {
        widen(largest, place(
                           bucket, &segment::gradient_offset,
                           [this](std::size_t s) { return of(s).trainable; },
                           [](layout::segment const& s) { return s.gradient; }));
        ++trainable;
        tied += bucket.tied ? 1 : 0;
      }
    }
    std::size_t const count =
        std::min(trainable, std::min(options_.policy.open_buckets, trainable) + tied);
    for (std::size_t slot = 0; slot < count; ++slot) {
      gradient_slots.push_back(
          take(category::gradient_buckets, largest.real_bytes, largest.total_bytes));
    }
  }

  void add_staging() {
    bool const gathers_values =
        !options_.stage.replicates_updates() && !options_.stage.shards_parameters();
    extent largest;
    for (layout::bucket const& bucket : layout_->buckets()) {
      widen(largest, place(
                         bucket, &segment::gradient_staging,
                         [this](std::size_t s) { return segments[s].staged_gradients; },
                         [](layout::segment const& s) { return s.gradient; }));
      widen(largest, place(
                         bucket, &segment::value_staging,
                         [&](std::size_t s) {
                           return gathers_values && segments[s].staged_values && of(s).trainable;
                         },
                         [](layout::segment const& s) { return s.value; }));
    }
    if (largest.total_bytes != 0) {
      staging = take(category::staging, largest.real_bytes, largest.total_bytes);
    }
  }

  layout const* layout_;
  memory_map_options options_;
  std::uint64_t next_ = 0;
};

}  // namespace zero::inline v0
