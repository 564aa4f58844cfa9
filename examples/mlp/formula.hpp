// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

/// @file
/// What a run must cost by the theory (Rajbhandari et al., ZeRO, 2020), from nothing but the list
/// of parameters and the settings. It includes nothing of `zero`, so that agreeing with what `zero`
/// plans, allocates and sends says something.
///
/// Words: P ranks; a unit is the parameters of one layer; consecutive units that fit `bucket_bytes`
/// together are one bucket. Bytes per element: p parameter, b gradient as backward writes it, r
/// gradient on the wire, g reduced gradient, o optimizer state with master weights.

namespace mlp {

/// Bytes of one rank. The categories count elements that exist; `padding` is all the rest:
/// alignment, and what a step keeps beside tensors.
struct byte_counts {
  std::uint64_t parameters = 0;
  std::uint64_t gradients = 0;
  std::uint64_t optimizer_state = 0;
  std::uint64_t gathered_units = 0;
  std::uint64_t gradient_buckets = 0;
  std::uint64_t staging = 0;
  std::uint64_t engine = 0;
  std::uint64_t padding = 0;

  [[nodiscard]] std::uint64_t peak() const {
    return parameters + gradients + optimizer_state + gathered_units + gradient_buckets + staging +
           engine + padding;
  }

  /// Names and numbers, in the order of the table.
  [[nodiscard]] std::array<std::pair<std::string_view, std::uint64_t>, 9> named() const {
    return {{{"parameters", parameters},
             {"gradients", gradients},
             {"optimizer_state", optimizer_state},
             {"gathered_units", gathered_units},
             {"gradient_buckets", gradient_buckets},
             {"staging", staging},
             {"engine", engine},
             {"padding", padding},
             {"peak", peak()}}};
  }

  friend bool operator==(byte_counts const&, byte_counts const&) = default;
};

/// All that the formulas need to know.
struct formula {
  std::vector<std::vector<std::uint64_t>>
      units;  ///< elements of every parameter, in declaration order
  std::uint64_t ranks = 1;
  std::uint64_t rank = 0;
  int stage = 0;
  bool all_reduce = false;             ///< stage 1 with an all-reduce instead of a reduce-scatter
  bool reduce_per_microbatch = false;  ///< else gradients are added up locally and reduced once
  bool keep_after_forward = false;     ///< stage 3 keeps what forward has gathered for backward
  std::uint64_t prefetch = 0;
  std::uint64_t microbatches = 1;
  std::uint64_t bucket_bytes = 0;
  std::uint64_t p = 4;
  std::uint64_t b = 4;
  std::uint64_t r = 4;
  std::uint64_t g = 4;
  std::uint64_t o = 8;
  std::uint64_t alignment_bytes = 64;       ///< of the device: of parameters, slices and categories
  std::uint64_t sum_scratch_bytes = 0;      ///< of the device: for sums over a whole array
  std::uint64_t scratch_slots = 0;          ///< ranks' slices that a reduction goes through at once
  std::uint64_t most_scratch_bytes = 0;     ///< of them; a slot is a multiple of 256 bytes
  std::uint64_t hyperparameter_bytes = 40;  ///< of the optimizer
  std::uint64_t derived_bytes = 112;        ///< what it derives from them for a parameter

  [[nodiscard]] byte_counts bytes() const {
    byte_counts out;
    sizes whole;    // every bucket
    sizes shard;    // what this rank owns of every bucket
    sizes largest;  // the largest bucket: what a slot must hold
    auto const all = buckets();
    std::uint64_t scratch = 0;
    for (auto const& each : all) {
      scratch = std::max(scratch, scratch_slots * round_up(each.shard.padded * b, 256));
      whole += each.whole;
      shard += each.shard;
      largest.real = std::max(largest.real, each.whole.real);
      largest.padded = std::max(largest.padded, each.whole.padded);
    }
    auto const add = [&out](std::uint64_t& category, sizes elements, std::uint64_t bytes) {
      category += elements.real * bytes;
      out.padding += (elements.padded - elements.real) * bytes;
    };
    // Persistent state: replicated up to the stage that shards it.
    bool const whole_reduced_gradient = stage == 0 || (stage == 1 && all_reduce);
    sizes const reduced = whole_reduced_gradient ? whole : shard;
    add(out.parameters, stage < 3 ? whole : shard, p);
    add(out.optimizer_state, stage < 1 ? whole : shard, o);
    if (reduce_per_microbatch) {
      add(out.gradients, reduced, g);
    } else {
      add(out.gradients, whole, b);  // reduced in place ...
      if (b != g) {
        add(out.gradients, reduced, g);  // ... where the type allows it
      }
    }
    // Slots, each as large as the largest bucket.
    auto const count = static_cast<std::uint64_t>(all.size());
    if (reduce_per_microbatch) {
      add(out.gradient_buckets, largest * std::min<std::uint64_t>(count, 2), b);
    }
    if (stage == 3) {
      add(out.gathered_units, keep_after_forward ? whole : largest * std::min(count, 1 + prefetch),
          p);
    }
    out.staging = std::min(scratch, most_scratch_bytes);
    // What a step keeps beside tensors, in units of 16 bytes.
    std::uint64_t n = 0;
    for (auto const& unit : units) {
      n += unit.size();
    }
    std::uint64_t const beside = 96 + round_up(hyperparameter_bytes, 16) + n * derived_bytes +
                                 round_up(8 * n, 16) + 2 * round_up(n, 16) +
                                 (1 + ranks) * (round_up(40 + n, 16) + 16) + sum_scratch_bytes;
    out.padding += round_up(beside, alignment_bytes);
    return out;
  }

  /// Payload that must leave a rank in one step: (P - 1) / P of what a collective is about, and an
  /// all-reduce is a reduce-scatter and an all-gather.
  [[nodiscard]] std::uint64_t sent_bytes_per_step() const {
    std::uint64_t slices = 0;
    for (auto const& each : buckets()) {
      slices += each.shard.padded;
    }
    std::uint64_t const reductions = reduce_per_microbatch ? microbatches : 1;
    std::uint64_t per_element = r * reductions;
    if (stage == 0 || (stage == 1 && all_reduce)) {
      per_element += g * reductions;
    }
    if (stage == 1 || stage == 2) {
      per_element += p;
    }
    if (stage == 3) {
      per_element += p * microbatches * (keep_after_forward ? 1 : 2);
    }
    return (ranks - 1) * slices * per_element;
  }

 private:
  /// Elements, without and with padding.
  struct sizes {
    std::uint64_t real = 0;
    std::uint64_t padded = 0;

    sizes& operator+=(sizes other) {
      real += other.real;
      padded += other.padded;
      return *this;
    }
    friend sizes operator*(sizes one, std::uint64_t n) { return {one.real * n, one.padded * n}; }
  };

  struct bucket {
    sizes whole;
    sizes shard;
  };

  static std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
  }

  /// A bucket's parameters one after another, each at a multiple of `alignment`, cut into P equal
  /// slices that start at such multiples, too.
  [[nodiscard]] bucket cut(std::vector<std::uint64_t> const& parameters) const {
    std::uint64_t const alignment = alignment_bytes / std::min({p, b, g});  // the narrowest type's
    std::uint64_t length = 0;
    for (auto const elements : parameters) {
      length = round_up(length, alignment) + elements;
    }
    std::uint64_t const slice = round_up((length + ranks - 1) / ranks, alignment);
    std::uint64_t const first = rank * slice;
    std::uint64_t const last = first + slice;
    bucket out{{0, slice * ranks}, {0, slice}};
    std::uint64_t start = 0;
    for (auto const elements : parameters) {
      start = round_up(start, alignment);
      std::uint64_t const end = start + elements;
      out.whole.real += elements;
      out.shard.real +=
          std::max(std::min(end, last), std::max(start, first)) - std::max(start, first);
      start = end;
    }
    return out;
  }

  /// Consecutive units are joined while their parameters' bytes fit `bucket_bytes`.
  [[nodiscard]] std::vector<bucket> buckets() const {
    std::vector<bucket> out;
    std::vector<std::uint64_t> joined;
    std::uint64_t joined_bytes = 0;
    for (auto const& unit : units) {
      std::uint64_t unit_bytes = 0;
      for (auto const elements : unit) {
        unit_bytes += elements * p;
      }
      if (!joined.empty() && (bucket_bytes == 0 || joined_bytes + unit_bytes > bucket_bytes)) {
        out.push_back(cut(joined));
        joined.clear();
        joined_bytes = 0;
      }
      joined.insert(joined.end(), unit.begin(), unit.end());
      joined_bytes += unit_bytes;
    }
    out.push_back(cut(joined));
    return out;
  }
};

}  // namespace mlp
