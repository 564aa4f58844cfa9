// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/collective.hpp>
#include <zero/core/any_span.hpp>
#include <zero/core/any_tensor.hpp>
#include <zero/core/error.hpp>
#include <zero/device/concept.hpp>
#include <zero/shard/bucketed.hpp>
#include <zero/train/accumulation.hpp>
#include <zero/train/binding.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

/// @file
/// `gradient_places`: where gradients lie while a window accumulates them (whole, in the arena or
/// their tensors, with local_accumulate; in slots that buckets take and free with
/// reduce_per_microbatch), and what of them is zero, present, or padding.

namespace zero::inline v0::detail {

template <device Device>
class gradient_places {
  using stream = typename Device::stream;
  using event = typename Device::event;

 public:
  /// `bound` and `engine`, the stream of the gradients, outlive it. With `engine_adds`, the engine
  /// adds to every place, which is cleared first.
  gradient_places(binding<Device>& bound, stream& engine, accumulation policy, bool engine_adds)
      : bound_{&bound}, engine_{&engine}, in_slots_{policy.per_microbatch},
        engine_adds_{engine_adds}, present_(bound.of().parameters().size(), false),
        buckets_(bound.of().buckets().size()), slots_(bound.map().gradient_slots.size()) {
    std::size_t ordinal = 0;
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      if (bound.of().buckets()[b].trainable) {
        buckets_[b].ordinal = ordinal++;
      }
    }
  }

  /// Forget the last window's gradients.
  void begin_window() noexcept {
    std::fill(present_.begin(), present_.end(), false);
    for (bucket_state& b : buckets_) {
      b.cleared = false;
    }
  }

  void begin_microbatch() noexcept {
    if (in_slots_) {
      std::fill(present_.begin(), present_.end(), false);
    }
  }

  /// Make the places of a trainable bucket's gradients usable; the engine waits for the last
  /// reduction out of a slot.
  /// @throws zero::usage_error  every slot is taken.
  void open(std::size_t b) {
    if (in_slots_) {
      if (buckets_[b].slot == layout::none) {
        take_slot(b);
      }
    } else if (engine_adds_ && !buckets_[b].cleared) {
      bound_->of().for_each_gradient(b, [&](std::size_t id) { clear(id); });
      buckets_[b].cleared = true;
    }
  }

  /// Where a parameter's gradient is accumulated; its bucket must be open.
  [[nodiscard]] any_span place(std::size_t id) const {
    layout::parameter const& p = bound_->of().parameters()[id];
    if (!in_slots_) {
      return bound_->gradient(id);
    }
    return any_span{slot_address(p.segment), bound_->of().segments()[p.segment].cut.padded(),
                    p.spec.gradient}
        .subspan(p.offset, p.spec.size);
  }

  /// Where the engine writes, or adds to, it under a lease: there, or into a tensor that can't be
  /// rebound.
  [[nodiscard]] any_span leased_place(std::size_t id) const {
    return stays(id) ? bound_->declared(id).gradient.elements() : place(id);
  }

  /// Whether the engine must add to the place: false where it holds nothing yet.
  [[nodiscard]] bool present(std::size_t id) const noexcept { return present_[id]; }
  void mark_present(std::size_t id) noexcept { present_[id] = true; }

  /// The engine wrote to `leased_place(id)`; a tensor that can't be rebound holds what this
  /// micro-batch's leases added up.
  void written(std::size_t id) {
    if (in_slots_ && stays(id)) {
      Device::copy(*engine_, bound_->declared(id).gradient.elements(), place(id));
    }
  }

  /// Copy or add a gradient that the engine keeps elsewhere.
  /// @throws zero::usage_error  another size or type; the elements are those of its place.
  void add(std::size_t id, const_any_span gradient) {
    any_span const to = place(id);
    if (gradient.size() != to.size() || gradient.dtype() != to.dtype()) {
      throw usage_error{text("gradient_ready: expected ", to.size(), " elements of ",
                             name(to.dtype()), " for parameter '", parameter_name(id), "', actual ",
                             gradient.size(), " of ", name(gradient.dtype()), here())};
    }
    if (overlap(gradient.data(), gradient.bytes(), to.data(), to.bytes())) {
      throw usage_error{
          text("gradient_ready: expected elements apart from the place of parameter '",
               parameter_name(id), "', actual the same", here(),
               "; ask gradient(id) whether to add, and call gradient_ready(id)")};
    }
    if (present_[id]) {
      Device::add(*engine_, gradient, to);
    } else {
      Device::copy(*engine_, gradient, to);
    }
  }

  void clear_if_absent(std::size_t id) {
    if (!present_[id]) {
      clear(id);
    }
  }

  // --- a bucket's reduction ----------------------------------------------------------------------

  /// The engine's part is over: what is absent becomes zero, and tensors let go of a slot.
  void close(std::size_t b) {
    bound_->of().for_each_gradient(b, [&](std::size_t id) {
      clear_if_absent(id);
      if (in_slots_) {
        bound_->rebind(bound_->declared(id).gradient,
                       {nullptr, 0, bound_->of().parameters()[id].spec.gradient});
      }
    });
  }

  /// Copy gradients that stay in their tensors into the staging bucket, in the order of `on`.
  void stage(std::size_t b, stream& on) {
    for_each_segment(bound_->of(), b, true, [&](std::size_t s, layout::segment const& segment) {
      if (bound_->map().segments[s].staged_gradients) {
        any_span const all{staging(s), segment.cut.padded(), segment.gradient};
        Device::fill_zero(on, all);
        for (std::size_t const id : segment.parameters) {
          any_span const from = bound_->gradient(id);
          Device::copy(on, from, all.subspan(bound_->of().parameters()[id].offset, from.size()));
        }
      }
    });
  }

  /// All of a segment's gradients, staged or not.
  [[nodiscard]] std::byte* full(std::size_t s) const noexcept {
    if (in_slots_) {
      return slot_address(s);
    }
    return bound_->map().segments[s].staged_gradients ? staging(s) : bound_->gradients(s);
  }

  /// Where their average goes: this rank's slice, or all of it.
  [[nodiscard]] std::byte* reduced(std::size_t s) const noexcept {
    if (bound_->map().segments[s].reduced != memory_map::none) {
      return bound_->reduced(s);
    }
    layout::segment const& segment = bound_->of().segments()[s];
    return staging(s) + reduced_range(segment).first * size_bytes(segment.gradient);
  }

  /// Copy the average back where the engine's gradients are the reduced ones.
  void unstage(std::size_t b, stream& on) {
    for_each_segment(bound_->of(), b, true, [&](std::size_t s, layout::segment const& segment) {
      if (bound_->map().segments[s].reduced == memory_map::none) {
        any_span const all{staging(s), segment.cut.padded(), segment.gradient};
        auto const [begin, end] = reduced_range(segment);
        bound_->of().for_each_piece(
            segment, begin, end,
            [&](std::size_t id, std::uint64_t first, std::uint64_t offset, std::uint64_t count) {
              Device::copy(on, all.subspan(offset, count),
                           bound_->gradient(id).subspan(first, count));
            });
      }
    });
  }

  /// The bucket's slot is free when `on` has come here.
  void free_slot(std::size_t b, stream& on) {
    if (std::size_t const slot = std::exchange(buckets_[b].slot, layout::none);
        slot != layout::none) {
      slots_[slot].bucket = layout::none;
      on.record(slots_[slot].free);
    }
  }

  // --- what came of it ---------------------------------------------------------------------------

  /// This rank's part of a parameter's average, and the index of its first element.
  [[nodiscard]] std::pair<any_span, std::size_t> reduced_part(std::size_t id) const {
    layout::parameter const& p = bound_->of().parameters()[id];
    layout::segment const& segment = bound_->of().segments()[p.segment];
    std::pair<any_span, std::size_t> out{any_span{nullptr, 0, p.spec.reduced}, 0};
    auto const [begin, end] = reduced_range(segment);
    bound_->of().for_each_piece(
        segment, begin, end,
        [&](std::size_t other, std::uint64_t first, std::uint64_t offset, std::uint64_t count) {
          if (other == id) {
            out = {bound_->reduced_piece(id, first, offset, count), first};
          }
        });
    return out;
  }

  [[nodiscard]] std::size_t slots() const noexcept { return slots_.size(); }

  /// Slots that hold a bucket, or one whose reduction still runs, at most so far.
  [[nodiscard]] std::size_t high_water() const noexcept { return high_water_; }

 private:
  struct bucket_state {
    std::size_t ordinal = 0;  // among trainable buckets
    std::size_t slot = layout::none;
    bool cleared = false;
  };

  struct slot_state {
    std::size_t bucket = layout::none;
    event free;
  };

  [[nodiscard]] std::string here() const { return text(" (rank ", bound_->rank(), ")"); }

  [[nodiscard]] std::string const& parameter_name(std::size_t id) const {
    return bound_->of().parameters()[id].spec.name;
  }

  [[nodiscard]] std::byte* slot_address(std::size_t s) const noexcept {
    std::size_t const slot = buckets_[bound_->of().segments()[s].bucket].slot;
    return bound_->at_offset(bound_->map().gradient_slots[slot] +
                             bound_->map().segments[s].gradient_offset);
  }

  [[nodiscard]] std::byte* staging(std::size_t s) const noexcept {
    return bound_->at_offset(bound_->map().staging + bound_->map().segments[s].gradient_staging);
  }

  /// The parameter's gradient is in a tensor that can't be rebound.
  [[nodiscard]] bool stays(std::size_t id) const noexcept {
    any_tensor const& tensor = bound_->declared(id).gradient;
    return tensor && !tensor.rebindable();
  }

  /// The elements [first, second) of a segment whose average this rank has.
  [[nodiscard]] std::pair<std::uint64_t, std::uint64_t> reduced_range(
      layout::segment const& segment) const noexcept {
    if (bound_->at().reduces_whole()) {
      return {0, segment.cut.padded()};
    }
    std::uint64_t const begin = segment.cut.offset(bound_->rank());
    return {begin, begin + segment.cut.slice()};
  }

  void clear(std::size_t id) {
    Device::fill_zero(*engine_, place(id));
    if (stays(id)) {
      Device::fill_zero(*engine_, bound_->declared(id).gradient.elements());
    }
    present_[id] = true;
  }

  void take_slot(std::size_t b) {
    std::size_t slot = buckets_[b].ordinal % slots_.size();
    if (slots_[slot].bucket != layout::none) {
      auto const any = std::find_if(slots_.begin(), slots_.end(),
                                    [](slot_state const& s) { return s.bucket == layout::none; });
      if (any == slots_.end()) {
        throw_no_slot(b);
      }
      slot = static_cast<std::size_t>(any - slots_.begin());
    }
    engine_->wait(slots_[slot].free);
    slots_[slot].bucket = b;
    buckets_[b].slot = slot;
    std::size_t occupied = 0;
    for (slot_state const& each : slots_) {
      occupied += each.bucket != layout::none || !each.free.ready() ? 1 : 0;
    }
    high_water_ = std::max(high_water_, occupied);
    clear_padding(b);
    bound_->of().for_each_gradient(b, [&](std::size_t id) {
      bound_->rebind(bound_->declared(id).gradient, place(id));
      if (engine_adds_) {
        clear(id);
      }
    });
  }

  [[noreturn]] void throw_no_slot(std::size_t b) const {
    std::string open;
    for (slot_state const& each : slots_) {
      open += text(open.empty() ? "" : ", ", each.bucket);
    }
    throw usage_error{text("gradients of bucket ", b, ": expected at most ", slots_.size(),
                           " buckets with unreduced gradients, actual all open: ", open, here(),
                           "; finish one of them, the last first, or raise open_buckets")};
  }

  /// What lies between and behind the parameters in a slot must reduce to zero.
  void clear_padding(std::size_t b) {
    for_each_segment(bound_->of(), b, true, [&](std::size_t s, layout::segment const& segment) {
      any_span const all{slot_address(s), segment.cut.padded(), segment.gradient};
      std::uint64_t end = 0;
      for (std::size_t const id : segment.parameters) {
        layout::parameter const& p = bound_->of().parameters()[id];
        if (p.offset > end) {
          Device::fill_zero(*engine_, all.subspan(end, p.offset - end));
        }
        end = p.offset + p.spec.size;
      }
      if (all.size() > end) {
        Device::fill_zero(*engine_, all.subspan(end, all.size() - end));
      }
    });
  }

  binding<Device>* bound_;
  stream* engine_;
  bool in_slots_;
  bool engine_adds_;
  std::vector<bool> present_;  // the place holds something to add to
  std::vector<bucket_state> buckets_;
  std::vector<slot_state> slots_;
  std::size_t high_water_ = 0;
};

}  // namespace zero::inline v0::detail
