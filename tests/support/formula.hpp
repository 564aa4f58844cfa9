// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <vector>

/// @file
/// What a model costs, derived from its parameter list and its settings in plain loops, element by
/// element where that is short, and by none of the library's code: the other side of every
/// comparison of bytes.
///
/// Memory of a rank, in bytes, for Psi elements over P ranks (p parameter, b gradient as the engine
/// writes it, which is also what is sent, g reduced gradient, o optimizer state with master
/// weights):
///
///                            parameters, state   gradients, local         reduced per micro-batch
///   stage 0                  p, o                b, and g if b != g       g
///   stage 1, all-reduce      p, o / P            b, and g if b != g       g
///   stage 1, 2               p, o / P            b, and g / P if b != g   g / P
///   stage 3                  p / P, o / P        b, and g / P if b != g   g / P
///
/// plus slots, each as large as the largest bucket, plus the staging bucket of tensors that can't
/// be rebound, plus the scratch that reductions go through.

namespace formula {

enum class type { f32, f64, f16, bf16 };

inline std::uint64_t width(type of) { return of == type::f64 ? 8 : of == type::f32 ? 4 : 2; }

struct parameter {
  std::uint64_t elements = 0;
  type value = type::f32;     ///< p
  type gradient = type::f32;  ///< b
  type reduced = type::f32;   ///< g
  bool frozen = false;
  bool value_stays = false;      ///< in a tensor that can't be rebound
  bool gradient_stays = false;   ///< the same
  std::uint64_t held_bytes = 0;  ///< by tensors that will be rebound, before bind
};

struct unit {
  std::vector<parameter> parameters;
  std::vector<std::size_t> uses;  ///< units whose tied parameter this one uses
};

using model = std::vector<unit>;

/// What reductions go through: nothing; a slot for each other rank's slice; or a slot for each
/// rank's, in the type on the wire, where the sum on the wire isn't the result. A slot is a
/// multiple of 256 bytes.
enum class reductions { in_place, other_ranks, all_ranks };

struct settings {
  int stage = 0;
  bool all_reduce = false;  ///< stage 1
  std::size_t prefetch = 0;
  bool keep_after_forward = false;
  bool keep_last = false;
  std::size_t max_live_units = 1;
  bool reduces_per_microbatch = false;
  std::size_t open_buckets = 2;
  std::uint64_t bucket_bytes = 0;
  std::uint64_t alignment = 0;  ///< elements; 0: the device's, of the bucket's narrowest type
  std::uint64_t states = 2;     ///< of the optimizer, per element
  std::uint64_t ranks = 1;
  std::uint64_t device_alignment = 64;  ///< bytes
  std::uint64_t sum_blocks = 0;         ///< of the device: sums of 16 bytes for a norm
  reductions through = reductions::in_place;
  std::uint64_t most_scratch = 0;  ///< bytes
};

struct memory {
  std::uint64_t parameters = 0;
  std::uint64_t gradients = 0;
  std::uint64_t optimizer_state = 0;
  std::uint64_t gathered_units = 0;
  std::uint64_t gradient_buckets = 0;
  std::uint64_t staging = 0;
  std::uint64_t engine = 0;
  std::uint64_t padding = 0;
  std::uint64_t bind_peak = 0;

  [[nodiscard]] std::uint64_t arena() const {
    return parameters + gradients + optimizer_state + gathered_units + gradient_buckets + staging +
           padding;
  }
  [[nodiscard]] std::uint64_t peak() const { return arena() + engine; }

  friend bool operator==(memory const&, memory const&) = default;
  friend std::ostream& operator<<(std::ostream& out, memory const& m) {
    return out << "{parameters " << m.parameters << ", gradients " << m.gradients
               << ", optimizer_state " << m.optimizer_state << ", gathered_units "
               << m.gathered_units << ", gradient_buckets " << m.gradient_buckets << ", staging "
               << m.staging << ", engine " << m.engine << ", padding " << m.padding
               << ", bind_peak " << m.bind_peak << "}";
  }
};

/// Bytes that leave a rank.
struct sent {
  std::uint64_t gradients = 0;
  std::uint64_t parameters = 0;

  [[nodiscard]] std::uint64_t total() const { return gradients + parameters; }
};

inline std::uint64_t up(std::uint64_t value, std::uint64_t multiple) {
  while (value % multiple != 0) {
    ++value;
  }
  return value;
}

/// Parameters of one bucket, one type and one trainability, packed and cut into P equal slices.
struct segment {
  type value;
  type gradient;
  type reduced;
  bool frozen;
  std::vector<parameter> parameters;
  std::uint64_t real = 0;                   ///< elements
  std::uint64_t slice = 0;                  ///< elements, padding included
  std::vector<std::uint64_t> real_of_rank;  ///< elements of each slice that are a parameter's

  [[nodiscard]] bool value_stays() const {
    return std::any_of(parameters.begin(), parameters.end(),
                       [](parameter const& p) { return p.value_stays && p.elements != 0; });
  }
  [[nodiscard]] bool gradient_stays() const {
    return std::any_of(parameters.begin(), parameters.end(),
                       [](parameter const& p) { return p.gradient_stays && p.elements != 0; });
  }
};

struct bucket {
  std::vector<std::size_t> units;
  bool tied = false;
  std::vector<segment> segments;

  [[nodiscard]] bool trainable() const {
    return std::any_of(segments.begin(), segments.end(),
                       [](segment const& s) { return !s.frozen; });
  }
};

class expectation {
 public:
  expectation(model units, settings run) : model_{std::move(units)}, run_{run} {
    join();
    for (bucket& b : buckets_) {
      collect(b);
      cut(b);
    }
  }

  [[nodiscard]] std::vector<bucket> const& buckets() const { return buckets_; }

  [[nodiscard]] memory of_rank(std::uint64_t rank) const {
    memory out;
    add_state(out, rank);
    add_gather_slots(out);
    add_gradient_slots(out);
    add_staging(out);
    add_scratch(out);
    add_control(out);
    std::uint64_t held = 0;
    for (unit const& u : model_) {
      for (parameter const& p : u.parameters) {
        out.engine += p.value_stays ? p.elements * width(p.value) : 0;
        out.engine += p.gradient_stays && !p.frozen ? p.elements * width(p.gradient) : 0;
        held += p.held_bytes;
      }
    }
    out.bind_peak = out.peak() + held;
    return out;
  }

  /// One gather of all parameters of a bucket.
  [[nodiscard]] std::uint64_t gather_bytes(std::size_t index) const {
    std::uint64_t bytes = 0;
    for (segment const& s : buckets_[index].segments) {
      bytes += (run_.ranks - 1) * s.slice * width(s.value);
    }
    return bytes;
  }

  /// One pass of stage 3.
  [[nodiscard]] std::uint64_t gather_bytes() const {
    std::uint64_t bytes = 0;
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      bytes += gather_bytes(b);
    }
    return bytes;
  }

  [[nodiscard]] sent of_step(std::uint64_t microbatches) const {
    sent out;
    std::uint64_t const reductions = run_.reduces_per_microbatch ? microbatches : 1;
    for (bucket const& b : buckets_) {
      for (segment const& s : b.segments) {
        std::uint64_t const elements = (run_.ranks - 1) * s.slice;  // f Psi
        if (!s.frozen) {
          out.gradients += reductions * elements * width(s.gradient);                       // r
          out.gradients += reduces_whole() ? reductions * elements * width(s.reduced) : 0;  // + g
          out.parameters +=
              run_.stage == 1 || run_.stage == 2 ? elements * width(s.value) : 0;  // p
        }
        if (run_.stage == 3) {
          bool const stays = run_.keep_after_forward || (run_.keep_last && &b == &buckets_.back());
          out.parameters += microbatches * (stays ? 1 : 2) * elements * width(s.value);
        }
      }
    }
    return out;
  }

 private:
  [[nodiscard]] bool reduces_whole() const {
    return run_.stage == 0 || (run_.stage == 1 && run_.all_reduce);
  }

  /// Consecutive units while their bytes fit; a unit whose parameter another one uses stays alone.
  void join() {
    std::uint64_t filled = 0;
    bool open = false;
    for (std::size_t u = 0; u < model_.size(); ++u) {
      std::uint64_t bytes = 0;
      for (parameter const& p : model_[u].parameters) {
        bytes += p.elements * width(p.value);
      }
      bool tied = false;
      for (unit const& other : model_) {
        tied = tied || std::find(other.uses.begin(), other.uses.end(), u) != other.uses.end();
      }
      if (!open || tied || run_.bucket_bytes == 0 || filled + bytes > run_.bucket_bytes) {
        buckets_.emplace_back();
        filled = 0;
      }
      buckets_.back().units.push_back(u);
      buckets_.back().tied = tied;
      filled += bytes;
      open = !tied;
    }
  }

  void collect(bucket& b) const {
    for (std::size_t const u : b.units) {
      for (parameter const& p : model_[u].parameters) {
        auto const same = [&](segment const& s) {
          return s.value == p.value && s.frozen == p.frozen &&
                 (p.frozen || (s.gradient == p.gradient && s.reduced == p.reduced));
        };
        auto found = std::find_if(b.segments.begin(), b.segments.end(), same);
        if (found == b.segments.end()) {
          b.segments.push_back({p.value, p.gradient, p.reduced, p.frozen, {}, 0, 0, {}});
          found = b.segments.end() - 1;
        }
        found->parameters.push_back(p);
      }
    }
  }

  void cut(bucket& b) const {
    std::uint64_t narrowest = 8;
    for (segment const& s : b.segments) {
      narrowest = std::min(narrowest, width(s.value));
      if (!s.frozen) {
        narrowest = std::min({narrowest, width(s.gradient), width(s.reduced)});
      }
    }
    std::uint64_t const alignment =
        run_.alignment != 0 ? run_.alignment : run_.device_alignment / narrowest;
    for (segment& s : b.segments) {
      std::vector<std::uint64_t> starts;
      std::uint64_t length = 0;
      for (parameter const& p : s.parameters) {
        starts.push_back(up(length, alignment));
        length = starts.back() + p.elements;
        s.real += p.elements;
      }
      s.slice = up((length + run_.ranks - 1) / run_.ranks, alignment);
      s.real_of_rank.assign(run_.ranks, 0);
      for (std::size_t i = 0; i < starts.size(); ++i) {
        for (std::uint64_t element = 0; element < s.parameters[i].elements; ++element) {
          ++s.real_of_rank[(starts[i] + element) / s.slice];
        }
      }
    }
  }

  /// A range of memory of its own, of which `real` bytes are elements. It starts at a multiple of
  /// the device's alignment.
  void range(memory& out, std::uint64_t memory::*category, std::uint64_t real,
             std::uint64_t total) const {
    out.*category += real;
    out.padding += up(total, run_.device_alignment) - real;
  }

  void whole(memory& out, std::uint64_t memory::*category, segment const& s,
             std::uint64_t bytes) const {
    range(out, category, s.real * bytes, s.slice * run_.ranks * bytes);
  }

  void own_slice(memory& out, std::uint64_t memory::*category, segment const& s, std::uint64_t rank,
                 std::uint64_t bytes) const {
    range(out, category, s.real_of_rank[rank] * bytes, s.slice * bytes);
  }

  void add_state(memory& out, std::uint64_t rank) const {
    for (bucket const& b : buckets_) {
      for (segment const& s : b.segments) {
        if (run_.stage == 3) {
          own_slice(out, &memory::parameters, s, rank, width(s.value));
        } else if (s.value_stays()) {  // those of the segment that don't stay have a place each
          for (parameter const& p : s.parameters) {
            std::uint64_t const bytes = p.value_stays ? 0 : p.elements * width(p.value);
            range(out, &memory::parameters, bytes, bytes);
          }
        } else {
          whole(out, &memory::parameters, s, width(s.value));
        }
        if (!s.frozen) {
          add_gradients(out, s, rank);
          add_optimizer_state(out, s, rank);
        }
      }
    }
  }

  void add_gradients(memory& out, segment const& s, std::uint64_t rank) const {
    if (!run_.reduces_per_microbatch) {
      if (s.gradient_stays()) {
        for (parameter const& p : s.parameters) {
          std::uint64_t const bytes = p.gradient_stays ? 0 : p.elements * width(p.gradient);
          range(out, &memory::gradients, bytes, bytes);
        }
      } else {
        whole(out, &memory::gradients, s, width(s.gradient));
      }
      if (s.gradient == s.reduced) {
        return;  // reduced in place
      }
    }
    if (reduces_whole()) {
      whole(out, &memory::gradients, s, width(s.reduced));
    } else {
      own_slice(out, &memory::gradients, s, rank, width(s.reduced));
    }
  }

  /// In float, or double for double parameters; 16-bit parameters have master weights.
  void add_optimizer_state(memory& out, segment const& s, std::uint64_t rank) const {
    std::uint64_t const each = s.value == type::f64 ? 8 : 4;
    std::uint64_t const count = run_.states + (width(s.value) == 2 ? 1 : 0);
    for (std::uint64_t i = 0; i < count; ++i) {
      if (run_.stage == 0) {
        whole(out, &memory::optimizer_state, s, each);
      } else {
        own_slice(out, &memory::optimizer_state, s, rank, each);
      }
    }
  }

  /// The bytes of a bucket's chosen segments, each at a multiple of the device's alignment.
  struct extent {
    std::uint64_t real = 0;
    std::uint64_t total = 0;

    void add(segment const& s, std::uint64_t bytes, settings const& run) {
      real += s.real * bytes;
      total += up(s.slice * run.ranks * bytes, run.device_alignment);
    }
    void widen(extent const& other) {
      real = std::max(real, other.real);
      total = std::max(total, other.total);
    }
  };

  void add_gather_slots(memory& out) const {
    if (run_.stage != 3) {
      return;
    }
    extent largest;
    std::uint64_t tied = 0;
    for (bucket const& b : buckets_) {
      extent here;
      for (segment const& s : b.segments) {
        here.add(s, width(s.value), run_);
      }
      if (run_.keep_after_forward) {
        range(out, &memory::gathered_units, here.real, here.total);
      }
      largest.widen(here);
      tied += b.tied ? 1 : 0;
    }
    std::uint64_t const slots =
        std::min<std::uint64_t>(buckets_.size(), run_.max_live_units + run_.prefetch + tied);
    for (std::uint64_t i = 0; i < slots && !run_.keep_after_forward; ++i) {
      range(out, &memory::gathered_units, largest.real, largest.total);
    }
  }

  void add_gradient_slots(memory& out) const {
    if (!run_.reduces_per_microbatch) {
      return;
    }
    extent largest;
    std::uint64_t tied = 0;
    std::uint64_t trainable = 0;
    for (bucket const& b : buckets_) {
      extent here;
      for (segment const& s : b.segments) {
        if (!s.frozen) {
          here.add(s, width(s.gradient), run_);
        }
      }
      largest.widen(here);
      trainable += b.trainable() ? 1 : 0;
      tied += b.tied && b.trainable() ? 1 : 0;
    }
    std::uint64_t const slots = std::min<std::uint64_t>(trainable, run_.open_buckets + tied);
    for (std::uint64_t i = 0; i < slots; ++i) {
      range(out, &memory::gradient_buckets, largest.real, largest.total);
    }
  }

  /// One bucket for what is reduced from, or gathered into, tensors that can't be rebound.
  void add_staging(memory& out) const {
    extent largest;
    for (bucket const& b : buckets_) {
      extent gradients;
      extent values;
      for (segment const& s : b.segments) {
        if (s.gradient_stays() && !s.frozen && !run_.reduces_per_microbatch) {
          gradients.add(s, width(s.gradient), run_);
        }
        if (s.value_stays() && !s.frozen && (run_.stage == 1 || run_.stage == 2)) {
          values.add(s, width(s.value), run_);
        }
      }
      largest.widen(gradients);
      largest.widen(values);
    }
    range(out, &memory::staging, largest.real, largest.total);
  }

  /// As much as the largest reduction needs, and no more than `most_scratch`.
  void add_scratch(memory& out) const {
    std::uint64_t most = 0;
    for (bucket const& b : buckets_) {
      for (segment const& s : b.segments) {
        if (s.frozen || run_.ranks == 1) {
          continue;
        }
        std::uint64_t slots = 0;
        std::uint64_t bytes = width(s.gradient);
        if (run_.through == reductions::other_ranks) {
          slots = run_.ranks - 1;
        } else if (run_.through == reductions::all_ranks) {
          bool const widens = s.gradient == type::f16;  // it would overflow on the way
          bool const is_result = !widens && s.gradient == s.reduced;
          slots = is_result && !run_.reduces_per_microbatch ? 0 : run_.ranks;
          bytes = widens ? 4 : bytes;
        }
        most = std::max(most, slots * up(s.slice * bytes, 256));
      }
    }
    most = std::min(most, run_.most_scratch);
    range(out, &memory::staging, most, most);
  }

  /// What a step keeps beside tensors. Everything in units of 16 bytes: 96 of state;
  /// hyperparameters; for each parameter what the optimizer derives from them, a count of 8 bytes
  /// and two of 1; a message of 40 bytes and a flag per parameter, of this rank and of all; a sum
  /// of 16 bytes alike.
  void add_control(memory& out) const {
    std::uint64_t parameters = 0;
    for (unit const& u : model_) {
      parameters += u.parameters.size();
    }
    // plain_sgd: 2 doubles, 2 vectors; sgd: 4 and 4 (with a flag); adam and adamw: 5 and 7.
    std::uint64_t const hyperparameters = run_.states == 0 ? 16 : run_.states == 1 ? 32 : 48;
    std::uint64_t const derived = run_.states == 0 ? 32 : run_.states == 1 ? 64 : 112;
    std::uint64_t const bytes = 96 + hyperparameters + parameters * derived +
                                up(parameters * 8, 16) + 2 * up(parameters, 16) +
                                (1 + run_.ranks) * (up(40 + parameters, 16) + 16) +
                                run_.sum_blocks * 16;
    out.padding += up(bytes, run_.device_alignment);
  }

  model model_;
  settings run_;
  std::vector<bucket> buckets_;
};

}  // namespace formula
