// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/collective.hpp>
#include <zero/comm/concept.hpp>
#include <zero/comm/metered.hpp>
#include <zero/shard/bucketed.hpp>
#include <zero/train/accumulation.hpp>
#include <zero/train/binding.hpp>
#include <zero/train/options.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

/// @file
/// `gradient_reducer`: where the engine writes gradients, which of them are ready, and their
/// reduction, a bucket at a time, on a communication stream. Where parameters are sharded and
/// communication overlaps, reductions have a communicator and a stream of their own: ranks may
/// finish gradients in different orders, and so reduce at different moments between the gathers.

namespace zero::inline v0::detail {

/// Whether reductions have a communicator and a stream of their own.
template <device Device>
[[nodiscard]] constexpr bool reduces_apart(stage const& at, options const& chosen) noexcept {
  return at.shards_parameters() && chosen.overlap && Device::any_collective_order;
}

template <communicator Communicator>
class gradient_reducer {
  using device = typename Communicator::device;
  using stream = typename device::stream;
  using event = typename device::event;

 public:
  /// Where the reductions have a stream of their own, `comm` is not the communicator of the
  /// gathers.
  gradient_reducer(binding<device>& bound, metered<Communicator>& comm, stream& communication,
                   stream& engine, accumulation policy, options const& chosen)
      : bound_{&bound}, comm_{&comm}, policy_{policy}, engine_adds_{chosen.engine_adds},
        in_turns_{bound.at().shards_parameters() && !reduces_apart<device>(bound.at(), chosen)},
        own_stream_{reduces_apart<device>(bound.at(), chosen)
                        ? new stream(device::communication_stream(true, nullptr))
                        : nullptr},
        stream_{own_stream_ ? own_stream_.get() : &communication}, engine_{&engine},
        parameters_(bound.of().parameters().size()), buckets_(bound.of().buckets().size()),
        slots_(bound.map().gradient_slots.size()) {
    std::size_t ordinal = 0;
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      if (bound.of().buckets()[b].trainable) {
        buckets_[b].ordinal = ordinal++;
        trainable_.push_back(b);
      }
    }
    pending_.reserve(buckets_.size());
  }

  /// Forget the last window's gradients.
  void begin_window() noexcept {
    for (parameter_state& p : parameters_) {
      p = {};
    }
    for (bucket_state& b : buckets_) {
      b.reductions = 0;
      b.cleared = false;
    }
  }

  /// `last`: buckets may be reduced as they get complete although gradients accumulate locally.
  void begin_microbatch(bool last) noexcept {
    last_ = last;
    in_order_ = trainable_.size();
    for (bucket_state& b : buckets_) {
      b.complete = false;
      b.enqueued = false;
      b.admitted = false;
      b.ready = 0;
    }
    for (parameter_state& p : parameters_) {
      p.ready = false;
      p.given = false;
      p.present = p.present && !policy_.per_microbatch;
    }
  }

  /// Make the place where bucket `b`'s gradients are written usable; waits for a slot's last
  /// reduction.
  /// @throws zero::usage_error  its gradients were already reduced, or every slot is taken.
  void open(std::size_t b) {
    bucket_state& state = buckets_[b];
    if (!bound_->of().buckets()[b].trainable) {
      return;
    }
    if (state.enqueued) {
      throw usage_error{text("backward: expected gradients of bucket ", b,
                             " before its reduction, actual after (rank ", comm_->rank(), ")")};
    }
    if (policy_.per_microbatch) {
      if (state.slot == layout::none) {
        take_slot(b);
      }
    } else if (engine_adds_ && !state.cleared) {
      for_each_parameter(b, [&](std::size_t id) { clear(id); });
      state.cleared = true;
    }
  }

  /// Where a parameter's gradient is accumulated; its bucket must be open.
  [[nodiscard]] any_span place(std::size_t id) const {
    layout::parameter const& p = bound_->of().parameters()[id];
    if (!policy_.per_microbatch) {
      return bound_->gradient(id);
    }
    return any_span{slot_address(p.segment), bound_->of().segments()[p.segment].cut.padded(),
                    p.spec.gradient}
        .subspan(p.offset, p.spec.size);
  }

  /// Whether the engine must add to `place(id)`: false where it holds nothing yet.
  [[nodiscard]] bool present(std::size_t id) const noexcept { return parameters_[id].present; }
  /// The parameter's gradient, or zero for it, came in this window.
  [[nodiscard]] bool touched(std::size_t id) const noexcept { return parameters_[id].touched; }
  [[nodiscard]] bool had_gradient(std::size_t id) const noexcept { return parameters_[id].had; }

  /// Where the engine writes, or adds to, a parameter's gradient under a lease: in its place, or
  /// into a tensor that can't be rebound.
  [[nodiscard]] any_span leased_place(std::size_t id) const {
    return stays(id) ? bound_->declared(id).gradient.elements() : place(id);
  }

  /// The engine wrote the gradient of `id` there; a tensor that can't be rebound holds what the
  /// leases of this micro-batch added up.
  void written(std::size_t id) {
    if (policy_.per_microbatch && stays(id)) {
      device::copy(*engine_, bound_->declared(id).gradient.elements(), place(id));
    }
    mark(id);
  }

  /// The parameter had a gradient, which is in its place.
  void mark(std::size_t id) noexcept {
    parameters_[id].present = true;
    parameters_[id].touched = true;
    parameters_[id].had = true;
  }

  /// The engine was told where the gradient goes.
  void give(std::size_t id) noexcept { parameters_[id].given = true; }

  /// @throws zero::usage_error  it wasn't, in this micro-batch: what lies there may be anything.
  void check_given(std::size_t id) const {
    if (!parameters_[id].given) {
      throw usage_error{text("gradient_ready: expected gradient(id) before for parameter '",
                             parameter_name(id), "', actual none in this micro-batch (rank ",
                             comm_->rank(), ")")};
    }
  }

  /// Copy or add a gradient that the engine keeps elsewhere.
  /// @throws zero::usage_error  another size or type; the elements are those of its place.
  void add(std::size_t id, const_any_span gradient) {
    any_span const to = place(id);
    if (gradient.size() != to.size() || gradient.dtype() != to.dtype()) {
      throw usage_error{text("gradient_ready: expected ", to.size(), " elements of ",
                             name(to.dtype()), " for parameter '", parameter_name(id), "', actual ",
                             gradient.size(), " of ", name(gradient.dtype()), " (rank ",
                             comm_->rank(), ")")};
    }
    if (overlap(gradient.data(), gradient.bytes(), to.data(), to.bytes())) {
      throw usage_error{
          text("gradient_ready: expected elements apart from the place of parameter '",
               parameter_name(id), "', actual the same (rank ", comm_->rank(),
               "); ask gradient(id) whether to add, and call gradient_ready(id)")};
    }
    if (parameters_[id].present) {
      device::add(*engine_, gradient, to);
    } else {
      device::copy(*engine_, gradient, to);
    }
  }

  /// The parameter takes no part in this micro-batch: zero, unless something was accumulated.
  void skip(std::size_t id) {
    clear_if_absent(id);
    parameters_[id].touched = true;
  }

  /// Mark one parameter ready; with all of its bucket's it is reduced.
  /// @throws zero::usage_error  it was ready already in this micro-batch.
  void ready(std::size_t id) {
    if (parameters_[id].ready) {
      throw usage_error{text("gradient_ready: expected parameter '", parameter_name(id),
                             "' once a micro-batch, actual twice (rank ", comm_->rank(), ")")};
    }
    parameters_[id].ready = true;
    std::size_t const b = bound_->of().parameters()[id].bucket;
    std::size_t total = 0;
    for_each_parameter(b, [&](std::size_t) { ++total; });
    if (++buckets_[b].ready == total) {
      buckets_[b].complete = true;
    }
  }

  /// Every unit that uses bucket `b` has finished its backward.
  void complete(std::size_t b) noexcept {
    if (bound_->of().buckets()[b].trainable && !buckets_[b].complete) {
      buckets_[b].complete = true;
      if (reduces_now()) {
        pending_.push_back(b);
      }
    }
  }

  /// Enqueue the reductions of buckets that units completed, in the order in which they did.
  void reduce_pending() {
    for (std::size_t const b : pending_) {
      enqueue(b);
    }
    pending_.clear();
  }

  /// A unit whose gradients come one by one is leased, before its parameters are gathered. Without
  /// a stream of their own, reductions have fixed places between the gathers: here, where slots
  /// must be free for the unit.
  /// @throws zero::usage_error  the bucket whose turn it is has parameters that aren't ready.
  void admit(std::size_t b) {
    if (!in_turns_ || !policy_.per_microbatch || !bound_->of().buckets()[b].trainable) {
      return;
    }
    buckets_[b].admitted = true;
    auto open = std::count_if(buckets_.begin(), buckets_.end(), [](bucket_state const& each) {
      return each.admitted && !each.enqueued;
    });
    for (; open > static_cast<std::ptrdiff_t>(slots_.size()) && in_order_ > 0; --open) {
      std::size_t const next = trainable_[in_order_ - 1];
      if (!buckets_[next].admitted) {
        return;
      }
      if (!buckets_[next].complete) {
        throw usage_error{text("backward: expected the gradients of bucket ", next,
                               " before the lease of bucket ", b, ", actual not all of them (rank ",
                               comm_->rank(), "); raise open_buckets, or overlap")};
      }
      enqueue(next);
      --in_order_;
    }
  }

  /// Enqueue the reductions of buckets whose parameters are all ready: the last bucket first on
  /// every rank, whatever order they got ready in.
  void reduce_in_order() {
    while (!in_turns_ && reduces_now() && in_order_ > 0 &&
           buckets_[trainable_[in_order_ - 1]].complete) {
      enqueue(trainable_[--in_order_]);
    }
  }

  /// End a micro-batch that had a backward: what is not reduced yet is, absent gradients being
  /// zero.
  void finish_microbatch() {
    reduce_pending();
    if (policy_.per_microbatch) {
      reduce_rest();
    }
  }

  /// End the window: every gradient is reduced when the stream has run.
  void finish_window() {
    reduce_pending();
    if (!policy_.per_microbatch) {
      reduce_rest();
    }
  }

  /// Let all later work of `on` wait for the reductions enqueued so far.
  void let_wait(stream& on) {
    if (stream_ != &on) {
      stream_->record(reduced_);
      on.wait(reduced_);
    }
  }

  void synchronize() { stream_->synchronize(); }

  /// A hash of the buckets reduced so far, in order.
  [[nodiscard]] std::uint64_t order() const noexcept { return order_; }

  /// Gradient slots that hold a bucket, or one whose reduction still runs, at most so far.
  [[nodiscard]] std::size_t high_water() const noexcept { return high_water_; }

 private:
  struct parameter_state {
    bool present = false;  // its place holds something to add to
    bool touched = false;
    bool had = false;
    bool ready = false;
    bool given = false;  // the engine knows its place
  };

  struct bucket_state {
    std::size_t ordinal = 0;  // among trainable buckets
    std::size_t slot = layout::none;
    std::size_t ready = 0;  // parameters, in this micro-batch
    std::size_t reductions = 0;
    bool complete = false;
    bool enqueued = false;
    bool admitted = false;  // leased for gradients one by one, in this micro-batch
    bool cleared = false;
  };

  struct slot_state {
    std::size_t bucket = layout::none;
    event free;
  };

  [[nodiscard]] bool reduces_now() const noexcept { return policy_.per_microbatch || last_; }

  /// Call visit(id) for each trainable parameter of a bucket.
  template <class Visit>
  void for_each_parameter(std::size_t b, Visit visit) const {
    for (std::size_t const s : bound_->of().buckets()[b].segments) {
      if (bound_->of().segments()[s].trainable) {
        for (std::size_t const id : bound_->of().segments()[s].parameters) {
          visit(id);
        }
      }
    }
  }

  [[nodiscard]] std::byte* slot_address(std::size_t s) const noexcept {
    std::size_t const slot = buckets_[bound_->of().segments()[s].bucket].slot;
    return bound_->at_offset(bound_->map().gradient_slots[slot] +
                             bound_->map().segments[s].gradient_offset);
  }

  [[nodiscard]] std::string const& parameter_name(std::size_t id) const {
    return bound_->of().parameters()[id].spec.name;
  }

  /// The parameter's gradient is in a tensor that can't be rebound.
  [[nodiscard]] bool stays(std::size_t id) const noexcept {
    any_tensor const& tensor = bound_->declared(id).gradient;
    return tensor && !tensor.rebindable();
  }

  void clear(std::size_t id) {
    device::fill_zero(*engine_, place(id));
    if (stays(id)) {
      device::fill_zero(*engine_, bound_->declared(id).gradient.elements());
    }
    parameters_[id].present = true;
  }

  void clear_if_absent(std::size_t id) {
    if (!parameters_[id].present) {
      clear(id);
    }
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
    for_each_parameter(b, [&](std::size_t id) {
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
                           " buckets with unreduced gradients, actual all open: ", open, " (rank ",
                           comm_->rank(),
                           "); finish one of them, the last first, or raise open_buckets")};
  }

  /// What lies between and behind the parameters in a slot must reduce to zero.
  void clear_padding(std::size_t b) {
    for (std::size_t const s : bound_->of().buckets()[b].segments) {
      layout::segment const& segment = bound_->of().segments()[s];
      if (!segment.trainable) {
        continue;
      }
      any_span const all{slot_address(s), segment.cut.padded(), segment.gradient};
      std::uint64_t end = 0;
      for (std::size_t const id : segment.parameters) {
        layout::parameter const& p = bound_->of().parameters()[id];
        if (p.offset > end) {
          device::fill_zero(*engine_, all.subspan(end, p.offset - end));
        }
        end = p.offset + p.spec.size;
      }
      if (all.size() > end) {
        device::fill_zero(*engine_, all.subspan(end, all.size() - end));
      }
    }
  }

  void reduce_rest() {
    for (std::size_t i = trainable_.size(); i-- > 0;) {
      std::size_t const b = trainable_[i];
      if (!buckets_[b].enqueued) {
        open(b);
        enqueue(b);
      }
    }
  }

  void enqueue(std::size_t b) {
    bucket_state& state = buckets_[b];
    for_each_parameter(b, [&](std::size_t id) {
      clear_if_absent(id);
      if (policy_.per_microbatch) {
        bound_->rebind(bound_->declared(id).gradient,
                       {nullptr, 0, bound_->of().parameters()[id].spec.gradient});
      }
    });
    engine_->record(written_);
    stream_->wait(written_);
    comm_->label(traffic::gradients);
    order_ = hash_order(order_, b);
    combine const how =
        policy_.per_microbatch && state.reductions > 0 ? combine::add : combine::overwrite;
    stage_gradients(b);
    auto const full = [this](std::size_t s) { return full_gradients(s); };
    if (bound_->at().reduces_whole()) {
      all_reduce_bucket(
          *comm_, bound_->of(), b, full, [this](std::size_t s) { return reduced(s); }, how,
          *stream_);
    } else {
      reduce_scatter_bucket(
          *comm_, bound_->of(), b, full, [this](std::size_t s) { return reduced(s); }, how,
          *stream_);
    }
    unstage_gradients(b);
    ++state.reductions;
    state.enqueued = true;
    if (state.slot != layout::none) {
      slots_[state.slot].bucket = layout::none;
      stream_->record(slots_[state.slot].free);
      state.slot = layout::none;
    }
  }

  [[nodiscard]] std::byte* staging(std::size_t s) const noexcept {
    return bound_->at_offset(bound_->map().staging + bound_->map().segments[s].gradient_staging);
  }

  [[nodiscard]] std::byte* full_gradients(std::size_t s) const noexcept {
    if (policy_.per_microbatch) {
      return slot_address(s);
    }
    return bound_->map().segments[s].staged_gradients ? staging(s) : bound_->gradients(s);
  }

  [[nodiscard]] std::byte* reduced(std::size_t s) const noexcept {
    if (bound_->map().segments[s].reduced != memory_map::none) {
      return bound_->reduced(s);
    }
    layout::segment const& segment = bound_->of().segments()[s];
    return staging(s) + reduced_range(segment).first * size_bytes(segment.gradient);
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

  /// Copy gradients that stay in their tensors into the staging bucket, in stream order.
  void stage_gradients(std::size_t b) {
    for_each_segment(bound_->of(), b, true, [&](std::size_t s, layout::segment const& segment) {
      if (bound_->map().segments[s].staged_gradients) {
        any_span const all{staging(s), segment.cut.padded(), segment.gradient};
        device::fill_zero(*stream_, all);
        for (std::size_t const id : segment.parameters) {
          any_span const from = bound_->gradient(id);
          device::copy(*stream_, from,
                       all.subspan(bound_->of().parameters()[id].offset, from.size()));
        }
      }
    });
  }

  /// Copy the average back where the engine's gradients are the reduced ones.
  void unstage_gradients(std::size_t b) {
    for_each_segment(bound_->of(), b, true, [&](std::size_t s, layout::segment const& segment) {
      if (bound_->map().segments[s].reduced == memory_map::none) {
        any_span const all{staging(s), segment.cut.padded(), segment.gradient};
        auto const [begin, end] = reduced_range(segment);
        bound_->of().for_each_piece(
            segment, begin, end,
            [&](std::size_t id, std::uint64_t first, std::uint64_t offset, std::uint64_t count) {
              device::copy(*stream_, all.subspan(offset, count),
                           bound_->gradient(id).subspan(first, count));
            });
      }
    });
  }

  binding<device>* bound_;
  metered<Communicator>* comm_;
  accumulation policy_;
  bool engine_adds_;
  bool in_turns_;  // between gathers, at places that all ranks share
  std::unique_ptr<stream> own_stream_;
  stream* stream_;  // of the reductions
  stream* engine_;  // of the gradients
  event written_;   // what the engine did before a reduction
  event reduced_;
  std::vector<parameter_state> parameters_;
  std::vector<bucket_state> buckets_;
  std::vector<slot_state> slots_;
  std::vector<std::size_t> trainable_;  // buckets
  std::vector<std::size_t> pending_;
  std::size_t in_order_ = 0;  // trainable buckets not yet reduced in the fixed order
  std::size_t high_water_ = 0;
  std::uint64_t order_ = 0;
  bool last_ = false;
};

}  // namespace zero::inline v0::detail
