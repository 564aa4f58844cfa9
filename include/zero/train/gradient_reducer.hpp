// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/concept.hpp>
#include <zero/comm/metered.hpp>
#include <zero/core/hash.hpp>
#include <zero/shard/bucketed.hpp>
#include <zero/train/accumulation.hpp>
#include <zero/train/binding.hpp>
#include <zero/train/gradient_places.hpp>
#include <zero/train/options.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

/// @file
/// `gradient_reducer`: which gradients are ready, and their reduction, a bucket at a time, on a
/// communication stream. Where parameters are sharded and communication overlaps, reductions have a
/// communicator and a stream of their own: ranks may finish gradients in different orders, and so
/// reduce at different moments between the gathers.

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
      : bound_{&bound}, comm_{&comm}, per_microbatch_{policy.per_microbatch},
        in_turns_{bound.at().shards_parameters() && !reduces_apart<device>(bound.at(), chosen)},
        own_stream_{reduces_apart<device>(bound.at(), chosen)
                        ? new stream(device::communication_stream(true, nullptr))
                        : nullptr},
        stream_{own_stream_ ? own_stream_.get() : &communication}, engine_{&engine},
        places_{bound, engine, policy, chosen.engine_adds},
        parameters_(bound.of().parameters().size()), buckets_(bound.of().buckets().size()) {
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      if (bound.of().buckets()[b].trainable) {
        trainable_.push_back(b);
      }
    }
    pending_.reserve(buckets_.size());
  }

  [[nodiscard]] gradient_places<device> const& places() const noexcept { return places_; }

  /// Forget the last window's gradients.
  void begin_window() noexcept {
    for (parameter_state& p : parameters_) {
      p = {};
    }
    for (bucket_state& b : buckets_) {
      b.reductions = 0;
    }
    places_.begin_window();
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
    }
    places_.begin_microbatch();
  }

  /// Make the places of bucket `b`'s gradients usable.
  /// @throws zero::usage_error  its gradients were already reduced, or every slot is taken.
  void open(std::size_t b) {
    if (!bound_->of().buckets()[b].trainable) {
      return;
    }
    if (buckets_[b].enqueued) {
      throw usage_error{text("backward: expected gradients of bucket ", b,
                             " before its reduction, actual after", here())};
    }
    places_.open(b);
  }

  /// A lease of this parameter ended, in which the engine wrote its gradient.
  void written(std::size_t id) {
    places_.written(id);
    mark(id);
  }

  /// The parameter had a gradient, which is in its place.
  void mark(std::size_t id) noexcept {
    places_.mark_present(id);
    parameters_[id].touched = true;
    parameters_[id].had = true;
  }

  [[nodiscard]] bool had_gradient(std::size_t id) const noexcept { return parameters_[id].had; }

  /// Every trainable parameter had a gradient, or was skipped, in this window.
  /// @throws zero::usage_error  one hadn't; lists them.
  void check_window() const {
    std::string missing;
    for (std::size_t id = 0; id < parameters_.size(); ++id) {
      if (bound_->of().parameters()[id].spec.trainable && !parameters_[id].touched) {
        missing += text(missing.empty() ? "'" : ", '", parameter_name(id), "'");
      }
    }
    if (!missing.empty()) {
      throw usage_error{
          text("step: expected a gradient or skip for every trainable parameter, actual none for ",
               missing, here())};
    }
  }

  /// The engine was told where the gradient goes.
  void give(std::size_t id) noexcept { parameters_[id].given = true; }

  /// @throws zero::usage_error  it wasn't, in this micro-batch: what lies there may be anything.
  void check_given(std::size_t id) const {
    if (!parameters_[id].given) {
      throw usage_error{text("gradient_ready: expected gradient(id) before for parameter '",
                             parameter_name(id), "', actual none in this micro-batch", here())};
    }
  }

  /// Take over a gradient that the engine keeps elsewhere.
  void add(std::size_t id, const_any_span gradient) { places_.add(id, gradient); }

  /// The parameter takes no part in this micro-batch: zero, unless something was accumulated.
  void skip(std::size_t id) {
    places_.clear_if_absent(id);
    parameters_[id].touched = true;
  }

  /// Mark one parameter ready; with all of its bucket's it is reduced.
  /// @throws zero::usage_error  it was ready already in this micro-batch.
  void ready(std::size_t id) {
    if (parameters_[id].ready) {
      throw usage_error{text("gradient_ready: expected parameter '", parameter_name(id),
                             "' once a micro-batch, actual twice", here())};
    }
    parameters_[id].ready = true;
    std::size_t const b = bound_->of().parameters()[id].bucket;
    std::size_t total = 0;
    bound_->of().for_each_gradient(b, [&](std::size_t) { ++total; });
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
    if (!in_turns_ || !per_microbatch_ || !bound_->of().buckets()[b].trainable) {
      return;
    }
    buckets_[b].admitted = true;
    auto open = std::count_if(buckets_.begin(), buckets_.end(), [](bucket_state const& each) {
      return each.admitted && !each.enqueued;
    });
    for (; open > static_cast<std::ptrdiff_t>(places_.slots()) && in_order_ > 0; --open) {
      std::size_t const next = trainable_[in_order_ - 1];
      if (!buckets_[next].admitted) {
        return;
      }
      if (!buckets_[next].complete) {
        throw usage_error{text("backward: expected the gradients of bucket ", next,
                               " before the lease of bucket ", b, ", actual not all of them",
                               here(), "; raise open_buckets, or overlap")};
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
    if (per_microbatch_) {
      reduce_rest();
    }
  }

  /// End the window: every gradient is reduced when the stream has run.
  void finish_window() {
    reduce_pending();
    if (!per_microbatch_) {
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

 private:
  struct parameter_state {
    bool touched = false;  // in this window
    bool had = false;
    bool ready = false;  // in this micro-batch
    bool given = false;  // the engine knows its place
  };

  struct bucket_state {
    std::size_t ready = 0;  // parameters, in this micro-batch
    std::size_t reductions = 0;
    bool complete = false;
    bool enqueued = false;
    bool admitted = false;  // leased for gradients one by one, in this micro-batch
  };

  [[nodiscard]] std::string here() const { return text(" (rank ", comm_->rank(), ")"); }

  [[nodiscard]] bool reduces_now() const noexcept { return per_microbatch_ || last_; }

  [[nodiscard]] std::string const& parameter_name(std::size_t id) const {
    return bound_->of().parameters()[id].spec.name;
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
    places_.close(b);
    engine_->record(written_);
    stream_->wait(written_);
    comm_->label(traffic::gradients);
    order_ = hash_next(order_, b);
    combine const how = per_microbatch_ && state.reductions > 0 ? combine::add : combine::overwrite;
    places_.stage(b, *stream_);
    auto const full = [this](std::size_t s) { return places_.full(s); };
    auto const reduced = [this](std::size_t s) { return places_.reduced(s); };
    if (bound_->at().reduces_whole()) {
      all_reduce_bucket(*comm_, bound_->of(), b, full, reduced, how, *stream_);
    } else {
      reduce_scatter_bucket(*comm_, bound_->of(), b, full, reduced, how, *stream_);
    }
    places_.unstage(b, *stream_);
    places_.free_slot(b, *stream_);
    ++state.reductions;
    state.enqueued = true;
  }

  binding<device>* bound_;
  metered<Communicator>* comm_;
  bool per_microbatch_;
  bool in_turns_;  // between gathers, at places that all ranks share
  std::unique_ptr<stream> own_stream_;
  stream* stream_;  // of the reductions
  stream* engine_;  // of the gradients
  event written_;   // what the engine did before a reduction
  event reduced_;
  gradient_places<device> places_;
  std::vector<parameter_state> parameters_;
  std::vector<bucket_state> buckets_;
  std::vector<std::size_t> trainable_;  // buckets
  std::vector<std::size_t> pending_;
  std::size_t in_order_ = 0;  // trainable buckets not yet reduced in the fixed order
  std::uint64_t order_ = 0;
  bool last_ = false;
};

}  // namespace zero::inline v0::detail
