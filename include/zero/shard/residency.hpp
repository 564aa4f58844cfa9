// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/concept.hpp>
#include <zero/comm/metered.hpp>
#include <zero/core/hash.hpp>
#include <zero/shard/bucketed.hpp>
#include <zero/shard/layout.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

/// @file
/// `residency`: which buckets of sharded parameters are whole on this rank, and where. A bucket is
/// gathered at its first use in a pass, or ahead of it as the last pass's order predicts, into one
/// of a fixed number of slots; it is released when each of its users has used it and none is open,
/// or when the pass ends. Every decision follows from the order of calls alone, so ranks that make
/// the same calls gather in the same order.

namespace zero::inline v0 {

/// One walk over the units. A recomputation is part of the backward pass around it.
enum class pass : std::uint8_t { none, forward, backward, evaluation };

struct residency_options {
  std::size_t slots = 1;            ///< buckets that can be whole at once
  std::size_t prefetch = 0;         ///< buckets gathered ahead of their use
  bool keep_after_forward = false;  ///< forward releases nothing; slots must equal buckets
  bool keep_last = false;           ///< forward releases all but its last bucket
};

/// Where the elements are: the residency owns no memory.
struct residency_memory {
  std::vector<std::byte*> shards;  ///< per segment: this rank's slice
  std::vector<std::byte*> slots;   ///< per slot
  std::vector<std::uint64_t>
      segment_offsets;  ///< per segment: bytes from the start of its bucket's slot
};

/// What the residency did so far; `occupied` and its high-water mark count slots.
struct residency_counts {
  std::size_t occupied = 0;
  std::size_t high_water = 0;
  std::uint64_t gathers = 0;
  std::uint64_t releases = 0;
};

template <communicator Communicator>
class residency {
  using device = typename Communicator::device;
  using stream = typename device::stream;
  using event = typename device::event;

 public:
  /// The layout, communicator and streams must outlive the residency. Gathers are enqueued on `on`;
  /// whole values are used in the order of `engine`.
  residency(layout const& of, metered<Communicator>& comm, stream& on, stream& engine,
            residency_options options, residency_memory memory)
      : layout_{&of}, comm_{&comm}, stream_{&on}, engine_{&engine}, options_{options},
        memory_{std::move(memory)}, buckets_(of.buckets().size()),
        slots_(options.slots, layout::none) {
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      buckets_[b].used.assign(of.buckets()[b].users.size(), false);
      forward_order_.push_back(b);
    }
    order_.reserve(buckets_.size());
    predicted_ = forward_order_;
  }

  /// Begin a pass; the one before ends.
  void begin(pass next) {
    end();
    pass_ = next;
    predicted_ = forward_order_;
    if (next == pass::backward) {
      std::reverse(predicted_.begin(), predicted_.end());
    }
  }

  /// End the pass: whatever is still whole is released (after a forward that keeps, nothing is).
  void end() noexcept {
    if (pass_ == pass::none) {
      return;
    }
    if (pass_ == pass::forward) {
      remember_order();
    }
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      state& s = buckets_[b];
      if (s.slot != layout::none && s.live == 0 && !keeps(b)) {
        if (s.gathered && !s.opened) {  // ahead of a use that never came
          comm_->move(s.gathered_as, traffic::mispredicted, gather_bytes(b));
        }
        drop(b);
      }
      s.opened = false;
      s.gathered = false;
      std::fill(s.used.begin(), s.used.end(), false);
    }
    order_.clear();
    cursor_ = 0;
    pass_ = pass::none;
  }

  /// Release everything, also what a forward pass kept: the values are stale or no longer wanted.
  void release_all() noexcept {
    end();
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      if (buckets_[b].slot != layout::none && buckets_[b].live == 0) {
        drop(b);
      }
    }
  }

  /// Make bucket `b` whole for a use in the current pass, start the gathers ahead of it, and let
  /// the engine wait.
  ///
  /// Collective: every rank opens the same buckets in the same order.
  /// @throws zero::usage_error  every slot is open; lists the buckets.
  void open(std::size_t b) {
    state& s = buckets_[b];
    if (!s.opened) {
      s.opened = true;
      order_.push_back(b);
      advance(b);
    }
    if (s.slot == layout::none) {
      gather(b, take_slot(b), s.gathered ? traffic::mispredicted : label());
    } else if (
        s.recomputing) {  // the recomputation that is open around this use gathered for it, too
      comm_->move(s.gathered_as, label(), gather_bytes(b));
      s.gathered_as = label();
      s.recomputing = false;
      s.gathered = true;
    }
    ++s.live;
    prefetch();
    engine_->wait(s.ready);
  }

  /// Like open, for a recomputation inside a backward pass: metered by that name, and not a use.
  void open_for_recomputation(std::size_t b) {
    state& s = buckets_[b];
    if (s.slot == layout::none) {
      gather(b, take_slot(b), traffic::recomputation);
      s.recomputing = true;
      s.gathered = false;
    }
    ++s.live;
    engine_->wait(s.ready);
  }

  void close_recomputation(std::size_t b) noexcept {
    state& s = buckets_[b];
    --s.live;
    if (s.live == 0 && (s.recomputing || is_used_up(b))) {
      drop(b);
    }
  }

  /// End a use of bucket `b` by unit `u`; the last one releases it.
  void close(std::size_t b, std::size_t u) noexcept {
    state& s = buckets_[b];
    auto const& users = layout_->buckets()[b].users;
    auto const user = std::find(users.begin(), users.end(), u);
    s.used[static_cast<std::size_t>(user - users.begin())] = true;
    --s.live;
    if (s.live == 0 && is_used_up(b)) {
      drop(b);
    }
  }

  /// The whole segment, valid while its bucket is open.
  [[nodiscard]] std::byte* address(std::size_t segment) const noexcept {
    std::size_t const slot = buckets_[layout_->segments()[segment].bucket].slot;
    return memory_.slots[slot] + memory_.segment_offsets[segment];
  }

  [[nodiscard]] bool resident(std::size_t b) const noexcept {
    return buckets_[b].slot != layout::none;
  }
  /// A hash of the buckets gathered so far, in order: the same on all ranks, or they mix buckets
  /// up.
  [[nodiscard]] std::uint64_t order() const noexcept { return hash_; }
  [[nodiscard]] residency_counts const& counts() const noexcept { return counts_; }

 private:
  struct state {
    std::size_t slot = layout::none;
    std::size_t live = 0;
    bool opened = false;       // used in this pass
    bool gathered = false;     // gathered in this pass
    bool recomputing = false;  // gathered for a recomputation only
    traffic gathered_as = traffic::parameters;
    std::vector<bool> used;  // which of its users have used it in this pass
    event ready;
  };

  /// Backward wants it as it is.
  [[nodiscard]] bool keeps(std::size_t b) const noexcept {
    return pass_ == pass::forward &&
           (options_.keep_after_forward || (options_.keep_last && b == predicted_.back()));
  }

  /// Each of its users has used it in this pass, and it isn't kept for the next one.
  [[nodiscard]] bool is_used_up(std::size_t b) const noexcept {
    std::vector<bool> const& used = buckets_[b].used;
    return !keeps(b) && std::find(used.begin(), used.end(), false) == used.end();
  }

  [[nodiscard]] traffic label() const noexcept {
    return pass_ == pass::evaluation ? traffic::evaluation : traffic::parameters;
  }

  /// What this pass used, then what it didn't, in the old order: the next prediction.
  void remember_order() noexcept {
    if (order_.empty()) {
      return;
    }
    for (std::size_t const b : forward_order_) {
      if (!buckets_[b].opened) {
        order_.push_back(b);
      }
    }
    std::copy(order_.begin(), order_.end(), forward_order_.begin());
  }

  /// Move the cursor past `b`, wherever the prediction has it.
  void advance(std::size_t b) noexcept {
    auto const at = std::find(predicted_.begin(), predicted_.end(), b);
    cursor_ = static_cast<std::size_t>(at - predicted_.begin()) + 1;
  }

  void prefetch() {
    std::size_t ahead = options_.prefetch;
    for (std::size_t i = cursor_; i < predicted_.size() && ahead > 0; ++i) {
      std::size_t const b = predicted_[i];
      if (buckets_[b].opened) {
        continue;
      }
      --ahead;
      if (buckets_[b].slot == layout::none) {
        std::size_t const slot = free_slot(b);
        if (slot == layout::none) {
          return;
        }
        gather(b, slot, label());
      }
    }
  }

  [[nodiscard]] std::size_t free_slot(std::size_t b) const noexcept {
    std::size_t const own = b % slots_.size();
    if (slots_[own] == layout::none) {
      return own;
    }
    auto const any = std::find(slots_.begin(), slots_.end(), layout::none);
    return any == slots_.end() ? layout::none : static_cast<std::size_t>(any - slots_.begin());
  }

  /// A slot for a bucket that is needed now: a free one, or one that can be freed.
  std::size_t take_slot(std::size_t b) {
    std::size_t slot = free_slot(b);
    if (slot == layout::none) {
      slot = evict();
    }
    if (slot == layout::none) {
      std::string open;
      for (std::size_t const other : slots_) {
        open += detail::text(open.empty() ? "" : ", ", other);
      }
      throw usage_error{detail::text("gather of bucket ", b, ": expected a free slot of ",
                                     slots_.size(), ", actual all in use by buckets ", open,
                                     " (rank ", comm_->rank(),
                                     "); end a lease first or raise max_live_units")};
    }
    return slot;
  }

  /// Free the slot of the gather that is needed last, or else of a bucket that only some of its
  /// users have used so far, which is gathered again for the others.
  std::size_t evict() noexcept {
    std::size_t victim = layout::none;
    for (std::size_t i = predicted_.size(); victim == layout::none && i-- > 0;) {
      state const& s = buckets_[predicted_[i]];
      if (s.slot != layout::none && s.live == 0 && !s.opened) {
        victim = predicted_[i];
        comm_->move(s.gathered_as, traffic::mispredicted, gather_bytes(victim));
        buckets_[victim].gathered = false;
      }
    }
    for (std::size_t i = 0; victim == layout::none && i < slots_.size(); ++i) {
      if (buckets_[slots_[i]].live == 0) {
        victim = slots_[i];
      }
    }
    if (victim == layout::none) {
      return layout::none;
    }
    std::size_t const slot = buckets_[victim].slot;
    drop(victim);
    return slot;
  }

  void gather(std::size_t b, std::size_t slot, traffic as) {
    comm_->label(as);
    engine_->record(released_);  // it has read what was in the slot before
    stream_->wait(released_);
    all_gather_bucket(
        *comm_, *layout_, b, [this](std::size_t index) { return memory_.shards[index]; },
        [this, slot](std::size_t index) {
          return memory_.slots[slot] + memory_.segment_offsets[index];
        },
        segments::all, *stream_);
    state& s = buckets_[b];  // changed by a gather that was enqueued only
    stream_->record(s.ready);
    s.slot = slot;
    s.gathered = true;
    s.gathered_as = as;
    slots_[slot] = b;
    ++counts_.gathers;
    ++counts_.occupied;
    counts_.high_water = std::max(counts_.high_water, counts_.occupied);
    hash_ = detail::hash_next(hash_, b);
  }

  void drop(std::size_t b) noexcept {
    state& s = buckets_[b];
    slots_[s.slot] = layout::none;
    s.slot = layout::none;
    s.recomputing = false;
    --counts_.occupied;
    ++counts_.releases;
  }

  [[nodiscard]] std::uint64_t gather_bytes(std::size_t b) const noexcept {
    std::uint64_t bytes = 0;
    for (std::size_t const index : layout_->buckets()[b].segments) {
      layout::segment const& segment = layout_->segments()[index];
      bytes += (layout_->ranks() - 1) * segment.cut.slice() * size_bytes(segment.value);
    }
    return bytes;
  }

  layout const* layout_;
  metered<Communicator>* comm_;
  stream* stream_;
  stream* engine_;
  residency_options options_;
  residency_memory memory_;
  std::vector<state> buckets_;
  std::vector<std::size_t> slots_;          // the bucket in each, or none
  event released_;                          // what the engine did before a gather
  std::vector<std::size_t> forward_order_;  // the prediction
  std::vector<std::size_t> predicted_;      // for this pass
  std::vector<std::size_t> order_;          // first uses in this pass
  std::size_t cursor_ = 0;                  // in predicted_
  pass pass_ = pass::none;
  std::uint64_t hash_ = 0;
  residency_counts counts_;
};

}  // namespace zero::inline v0
