// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/concept.hpp>
#include <zero/comm/metered.hpp>
#include <zero/shard/residency.hpp>
#include <zero/train/gradient_reducer.hpp>
#include <zero/train/lease.hpp>
#include <zero/train/update.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

/// @file
/// `model`: the state of a `sharded_model` between calls: the current micro-batch, the open leases,
/// and what each call does to residency, gradients and update.

namespace zero::inline v0::detail {

template <communicator Communicator, elementwise_optimizer Optimizer>
class model {
  using device = typename Communicator::device;

 public:
  using stream = typename device::stream;

  /// Collective; `spec` must be agreed on. `reductions` is `comm`, or where parameters are sharded
  /// and communication overlaps another communicator.
  model(metered<Communicator>& comm, metered<Communicator>& reductions, model_spec const& spec,
        stage at, accumulation policy, options const& chosen)
      : comm_{&comm}, bound_{spec, at, static_cast<std::uint64_t>(comm.rank()), chosen.memory},
        per_microbatch_{policy.per_microbatch},
        reducer_{bound_, reductions, stream_, engine_, policy, chosen},
        update_{bound_, comm, stream_, engine_, chosen.clip_norm}, units_(of().units().size()),
        value_uses_(of().parameters().size(), 0), skipped_(of().parameters().size(), false),
        writer_(of().parameters().size(), layout::none),
        engine_(device::engine_stream(chosen.stream)),
        stream_(device::communication_stream(chosen.overlap, chosen.stream)) {
    if (at.shards_parameters()) {
      make_residency(at);
    }
  }

  void take_over(start how) {
    bound_.take_over(*comm_, how, !per_microbatch_);
    update_.initialise();
  }

  [[nodiscard]] layout const& of() const noexcept { return bound_.of(); }
  [[nodiscard]] binding<device> const& bound() const noexcept { return bound_; }
  [[nodiscard]] std::size_t gradient_high_water() const noexcept { return reducer_.high_water(); }
  [[nodiscard]] residency_counts gathered() const noexcept {
    return residency_ ? residency_->counts() : residency_counts{};
  }

  // --- micro-batches -----------------------------------------------------------------------------

  void begin_microbatch(std::size_t index, std::size_t count) {
    guarded([&] {
      flush();
      check_idle("microbatch");
      if (index >= count) {
        throw usage_error{
            text("microbatch: expected an index below ", count, ", actual ", index, here())};
      }
      if (ran_ != 0 && count != announced_) {
        throw usage_error{text("microbatch: expected a window of ", announced_,
                               " micro-batches as announced, actual ", count, here())};
      }
      if (ran_ >= count) {
        throw usage_error{text("microbatch: expected at most ", count,
                               " in a window, actual one more", here(), "; call step first")};
      }
      announced_ = count;
      reducer_.begin_microbatch(ran_ + 1 == count);
      for (unit_state& u : units_) {
        u.forwards = 0;
        u.backwards = 0;
      }
      source_ = gradient_source::none;
      in_microbatch_ = true;
    });
  }

  void end_microbatch(bool unwinding) noexcept {
    in_microbatch_ = false;
    if (unwinding) {
      fail(text("an exception ended the micro-batch", here()));
    }
    if (source_ != gradient_source::none) {
      ++ran_;
      unfinished_ = true;
    }
    end_pass();
  }

  void begin_evaluation() {
    guarded([&] {
      flush();
      check_idle("evaluation");
      in_evaluation_ = true;
    });
  }

  void end_evaluation(bool unwinding) noexcept {
    in_evaluation_ = false;
    if (unwinding) {
      fail(text("an exception ended the evaluation", here()));
    }
    end_pass();
  }

  // --- leases ------------------------------------------------------------------------------------

  void begin_lease(std::size_t unit, lease_kind kind) {
    guarded([&] {
      flush();
      if (unit >= units_.size()) {
        throw usage_error{
            text("lease: expected a unit below ", units_.size(), ", actual ", unit, here())};
      }
      check_live(unit);
      if (kind == lease_kind::backward) {
        begin_backward(unit);
      }
      enter(kind);
      layout::unit const& leased = of().units()[unit];
      if (kind == lease_kind::by_parameter) {
        for (std::size_t const b : leased.buckets) {
          reducer_.admit(b);
        }
      }
      for (std::size_t const b : leased.buckets) {
        if (!residency_) {
          update_.wait(b);
        } else if (kind == lease_kind::recomputation) {
          residency_->open_for_recomputation(b);
        } else {
          residency_->open(b);
        }
      }
      for_each_value(unit, [&](std::size_t id) {
        if (residency_ && ++value_uses_[id] == 1) {
          bound_.rebind(bound_.declared(id).value, whole_value(id));
        }
      });
      if (kind == lease_kind::backward) {
        for (std::size_t const b : leased.buckets) {
          reducer_.open(b);
        }
        for_each_trainable(unit, [&](std::size_t id) { writer_[id] = unit; });
        source_ = gradient_source::leases;
      }
      units_[unit].forwards += kind == lease_kind::forward ? 1 : 0;
      ++units_[unit].live;
      ++live_;
    });
  }

  void end_lease(std::size_t unit, lease_kind kind, bool unwinding) noexcept {
    --units_[unit].live;
    --live_;
    if (unwinding) {
      fail(text("an exception ended the lease of unit ", unit, here()));
      return;
    }
    for_each_value(unit, [&](std::size_t id) {
      if (residency_ && --value_uses_[id] == 0) {
        bound_.rebind(bound_.declared(id).value, {nullptr, 0, of().parameters()[id].spec.value});
      }
    });
    for (std::size_t const b : of().units()[unit].buckets) {
      if (residency_ && kind == lease_kind::recomputation) {
        residency_->close_recomputation(b);
      } else if (residency_) {
        residency_->close(b, unit);
      }
    }
    if (kind == lease_kind::backward) {
      end_backward(unit);
    }
    end_pass();
  }

  [[nodiscard]] any_span leased_value(std::size_t unit, std::size_t id, dtype asked) {
    return guarded([&] {
      check_member(unit, id, false);
      check_dtype(id, of().parameters()[id].spec.value, asked);
      return whole_value(id);
    });
  }

  [[nodiscard]] any_span leased_gradient(std::size_t unit, std::size_t id, dtype asked) {
    return guarded([&] {
      check_member(unit, id, true);
      check_dtype(id, of().parameters()[id].spec.gradient, asked);
      return reducer_.leased_place(id);
    });
  }

  [[nodiscard]] bool accumulates(std::size_t unit, std::size_t id) {
    return guarded([&] {
      check_member(unit, id, true);
      return reducer_.present(id);
    });
  }

  [[nodiscard]] bool accumulates(std::size_t unit) {
    return guarded([&] {
      std::size_t trainable = 0;
      std::size_t present = 0;
      for_each_trainable(unit, [&](std::size_t id) {
        ++trainable;
        present += reducer_.present(id) ? 1 : 0;
      });
      if (present != 0 && present != trainable) {
        throw usage_error{text("accumulate: expected one answer for unit ", unit, ", actual ",
                               present, " of ", trainable, " parameters accumulate", here(),
                               "; ask with accumulate(id)")};
      }
      return present != 0;
    });
  }

  void skip_leased(std::size_t unit, std::size_t id) {
    guarded([&] {
      check_member(unit, id, true);
      reducer_.skip(id);
      skipped_[id] = true;
    });
  }

  // --- gradients one by one ----------------------------------------------------------------------

  [[nodiscard]] gradient_place gradient_of(std::size_t id) {
    return guarded([&] {
      open_parameter(id);
      reducer_.give(id);
      return gradient_place{reducer_.place(id), reducer_.present(id)};
    });
  }

  void gradient_ready(std::size_t id, const_any_span gradient) {
    guarded([&] {
      open_parameter(id);
      reducer_.add(id, gradient);
      finish_parameter(id);
    });
  }

  void gradient_ready(std::size_t id, const_any_span gradient, stream& producer) {
    guarded([&] {
      let_wait(engine_, producer);
      gradient_ready(id, gradient);
      let_wait(producer, engine_);
    });
  }

  void gradient_ready(std::size_t id) {
    guarded([&] {
      open_parameter(id);
      reducer_.check_given(id);
      finish_parameter(id);
    });
  }

  void skip(std::size_t id) {
    guarded([&] {
      open_parameter(id);
      reducer_.skip(id);
      reducer_.ready(id);
      reducer_.reduce_in_order();
    });
  }

  // --- steps -------------------------------------------------------------------------------------

  void step(Optimizer const& optimizer) {
    guarded([&] {
      optimizer.validate();
      flush();
      check_idle("step");
      if (ran_ == 0) {
        throw usage_error{
            text("step: expected a micro-batch with a backward, actual none", here())};
      }
      check_gradients();
      finish_microbatch();
      reducer_.finish_window();
      reducer_.let_wait(stream_);
      std::uint64_t const gathers = residency_ ? residency_->order() : 0;
      std::uint64_t const order =
          hash_order(hash_order(reducer_.order(), 0), gathers);  // equal ones differ
      update_.enqueue(optimizer, window{ran_, announced_, order},
                      [this](std::size_t id) { return reducer_.had_gradient(id); });
      reducer_.begin_window();
      ran_ = 0;
    });
  }

  void wait() {
    guarded([&] {
      flush();
      update_.wait();
    });
  }

  void write_hyperparameters(Optimizer const& optimizer) {
    guarded([&] {
      optimizer.validate();
      flush();
      check_idle("write_hyperparameters");
      update_.write_hyperparameters(optimizer);
    });
  }

  void replayed() {
    guarded([&] {
      check_idle("replayed");
      if (engine_.capturing()) {
        throw usage_error{text("replayed: expected a graph that was launched, actual a capture ",
                               "under way", here())};
      }
      update_.replayed();
    });
  }

  [[nodiscard]] bool capturing() const { return engine_.capturing(); }

  [[nodiscard]] step_outcome outcome() {
    return guarded([&] { return update_.outcome(); });
  }
  [[nodiscard]] std::int64_t steps(std::size_t id) {
    return guarded([&] {
      check_parameter(id);
      return update_.steps(id);
    });
  }

  /// This rank's part of a parameter's reduced gradient, and the index of its first element.
  [[nodiscard]] std::pair<any_span, std::size_t> reduced_gradient(std::size_t id) {
    return guarded([&] {
      flush();
      check_idle("gradient");
      check_trainable(id);
      if (ran_ == 0 || ran_ != announced_) {
        throw usage_error{
            text("gradient: expected to be asked between the window's last backward and step, ",
                 "actual after ", ran_, " of ", announced_, " micro-batches", here())};
      }
      finish_microbatch();
      reducer_.finish_window();
      reducer_.synchronize();
      layout::parameter const& p = of().parameters()[id];
      layout::segment const& segment = of().segments()[p.segment];
      bool const whole = bound_.at().reduces_whole();
      std::uint64_t const begin = whole ? 0 : segment.cut.offset(bound_.rank());
      std::uint64_t const end = whole ? segment.cut.padded() : begin + segment.cut.slice();
      std::pair<any_span, std::size_t> out{any_span{nullptr, 0, p.spec.reduced}, 0};
      of().for_each_piece(
          segment, begin, end,
          [&](std::size_t other, std::uint64_t first, std::uint64_t offset, std::uint64_t n) {
            if (other == id) {
              out = {bound_.reduced_piece(id, first, offset, n), first};
            }
          });
      return out;
    });
  }

  /// Give every tensor its whole value in storage of its own; afterwards the model is empty.
  /// `before_end` is called before the arena ends.
  template <class Call>
  void release(Call before_end) {
    guarded([&] {
      flush();
      check_idle("release");
      for (std::size_t id = 0; id < of().parameters().size(); ++id) {
        any_tensor const& value = bound_.declared(id).value;
        if (value && value.rebindable() && !value.allocatable()) {
          throw usage_error{text("release: parameter '", bound_.declared(id).name,
                                 "': expected a tensor that ", "can own storage again, actual none",
                                 here(), "; add allocate to its zero::tensor_traits")};
        }
      }
      update_.wait();
      pass_ = pass::evaluation;
      for (std::size_t u = 0; u < units_.size(); ++u) {
        give_back(u);
      }
      before_end();
      bound_.drop();
      released_ = true;
    });
  }

 private:
  enum class gradient_source : unsigned char { none, leases, parameters };

  struct unit_state {
    std::size_t forwards = 0;  // leases in this micro-batch
    std::size_t backwards = 0;
    std::size_t live = 0;
  };

  [[nodiscard]] std::string here() const { return text(" (rank ", comm_->rank(), ")"); }

  /// Run a call. What it throws is every rank's error, so that no peer waits for this one, and
  /// every later call's.
  template <class Call>
  auto guarded(Call call) {
    if (failure_) {
      if (!released_) {
        refuse_broken();
      }
      std::rethrow_exception(failure_);
    }
    try {
      raise_if_failed();
      if constexpr (std::is_void_v<decltype(call())>) {
        call();
        raise_if_failed();
      } else {
        auto const result = call();
        raise_if_failed();
        return result;
      }
    } catch (std::exception const& failure) {
      comm_->abort(failure.what());
      failure_ = std::current_exception();
      uncertain_ = uncertain_ || update_.in_flight();
      throw;
    }
  }

  /// Where streams can't throw: what went wrong in one.
  void raise_if_failed() const {
    if constexpr (requires { comm_->inner().raise_if_failed(); }) {
      comm_->inner().raise_if_failed();
    }
  }

  /// The same where nothing can be thrown: the next call does.
  void fail(std::string const& reason) noexcept {
    comm_->abort(reason);
    uncertain_ = uncertain_ || update_.in_flight();
    if (!failure_) {
      failure_ = std::make_exception_ptr(error{text("sharded_model: ", reason)});
    }
  }

  /// What lease ends left behind: reductions, the end of a micro-batch.
  void flush() {
    if (released_) {
      throw usage_error{
          text("sharded_model: expected a bound model, actual one that was released", here())};
    }
    refuse_broken();
    update_.check();
    reducer_.reduce_pending();
    if (!in_microbatch_ && live_ == 0) {
      finish_microbatch();
    }
  }

  void refuse_broken() {
    if (uncertain_) {
      throw error{text("sharded_model: expected a whole update, actual one that may have failed ",
                       "midway, so that parameters may be neither old nor new", here())};
    }
    if (update_.broken()) {
      std::string reason;
      try {
        stream_.synchronize();
      } catch (std::exception const& failure) {
        reason = text(": ", std::string_view{failure.what()});
      }
      throw error{
          text("sharded_model: expected a whole update, actual one that failed midway, so that ",
               "parameters are neither old nor new", here(), reason)};
    }
  }

  /// Release what is still whole when its micro-batch or evaluation, and every lease of it, has
  /// ended.
  void end_pass() noexcept {
    if (in_microbatch_ || in_evaluation_ || live_ != 0) {
      return;
    }
    if (residency_) {
      residency_->release_all();
    }
    pass_ = pass::none;
  }

  void finish_microbatch() {
    if (std::exchange(unfinished_, false)) {
      reducer_.finish_microbatch();
    }
  }

  void check_idle(std::string_view operation) const {
    if (live_ != 0) {
      throw usage_error{text(operation, ": expected no open lease, actual ", open_units(), here())};
    }
    if (in_microbatch_ || in_evaluation_) {
      throw usage_error{text(operation, ": expected no open ",
                             in_microbatch_ ? "micro-batch" : "evaluation", ", actual one",
                             here())};
    }
  }

  [[nodiscard]] std::string open_units() const {
    std::string out = "units";
    for (std::size_t u = 0; u < units_.size(); ++u) {
      out += units_[u].live != 0 ? text(" ", u) : "";
    }
    return out;
  }

  void check_live(std::size_t unit) const {
    if (!residency_ || units_[unit].live != 0) {
      return;
    }
    auto const live = static_cast<std::size_t>(std::count_if(
        units_.begin(), units_.end(), [](unit_state const& u) { return u.live != 0; }));
    if (live >= bound_.at().max_live_units) {
      throw usage_error{text("lease of unit ", unit, ": expected at most ",
                             bound_.at().max_live_units,
                             " live units (max_live_units), actual also ", open_units(), here())};
    }
  }

  void check_member(std::size_t unit, std::size_t id, bool trainable) const {
    layout::unit const& u = of().units()[unit];
    bool const tied = std::find(u.tied.begin(), u.tied.end(), id) != u.tied.end();
    if (id >= of().parameters().size() || (of().parameters()[id].unit != unit && !tied)) {
      throw usage_error{
          text("lease of unit ", unit, ": expected one of its parameters, actual id ", id, here())};
    }
    if (trainable) {
      check_trainable(id);
    }
  }

  void check_parameter(std::size_t id) const {
    if (id >= of().parameters().size()) {
      throw usage_error{text("sharded_model: expected a parameter below ", of().parameters().size(),
                             ", actual ", id, here())};
    }
  }

  void check_trainable(std::size_t id) const {
    check_parameter(id);
    if (!of().parameters()[id].spec.trainable) {
      throw usage_error{text("gradient: expected a trainable parameter, actual '",
                             of().parameters()[id].spec.name, "', which is frozen", here())};
    }
  }

  void check_dtype(std::size_t id, dtype actual, dtype asked) const {
    if (asked != actual) {
      throw usage_error{text("lease: expected parameter '", of().parameters()[id].spec.name,
                             "' to be asked for as ", name(actual), ", actual ", name(asked),
                             here())};
    }
  }

  /// Every trainable parameter had a gradient, or was skipped, in this window.
  void check_gradients() const {
    std::string missing;
    for (std::size_t id = 0; id < of().parameters().size(); ++id) {
      parameter_spec const& spec = of().parameters()[id].spec;
      if (spec.trainable && !reducer_.touched(id)) {
        missing += text(missing.empty() ? "'" : ", '", spec.name, "'");
      }
    }
    if (!missing.empty()) {
      throw usage_error{
          text("step: expected a gradient or skip for every trainable parameter, actual none for ",
               missing, here())};
    }
  }

  /// Call visit(id) for each parameter that a lease of `unit` includes.
  template <class Visit>
  void for_each_value(std::size_t unit, Visit visit) const {
    for (auto const* list : {&of().units()[unit].parameters, &of().units()[unit].tied}) {
      for (std::size_t const id : *list) {
        visit(id);
      }
    }
  }

  template <class Visit>
  void for_each_trainable(std::size_t unit, Visit visit) const {
    for_each_value(unit, [&](std::size_t id) {
      if (of().parameters()[id].spec.trainable) {
        visit(id);
      }
    });
  }

  [[nodiscard]] any_span whole_value(std::size_t id) const {
    if (!residency_) {
      return bound_.value(id);
    }
    layout::parameter const& p = of().parameters()[id];
    return any_span{residency_->address(p.segment), of().segments()[p.segment].cut.padded(),
                    p.spec.value}
        .subspan(p.offset, p.spec.size);
  }

  /// The pass that a lease belongs to; another one ends.
  void enter(lease_kind kind) {
    pass const wanted = kind == lease_kind::forward      ? pass::forward
                        : kind == lease_kind::evaluation ? pass::evaluation
                                                         : pass::backward;
    if (pass_ != wanted && residency_) {
      residency_->begin(wanted);
    }
    pass_ = wanted;
  }

  void begin_backward(std::size_t unit) {
    use_source(gradient_source::leases);
    unit_state& u = units_[unit];
    if (u.backwards >= std::max<std::size_t>(1, u.forwards)) {
      throw usage_error{
          text("backward: expected unit ", unit, " ", std::max<std::size_t>(1, u.forwards),
               " time(s) in this micro-batch, as in forward, actual once more", here())};
    }
    for_each_trainable(unit, [&](std::size_t id) {
      if (writer_[id] != layout::none) {
        throw usage_error{text("backward: expected unit ", unit, " after the lease of unit ",
                               writer_[id], " has ended, which writes the gradient of '",
                               of().parameters()[id].spec.name, "', too, actual before", here())};
      }
    });
  }

  void end_backward(std::size_t unit) noexcept {
    try {
      for_each_trainable(unit, [&](std::size_t id) {
        writer_[id] = layout::none;
        if (skipped_[id]) {
          skipped_[id] = false;
        } else {
          reducer_.written(id);
        }
      });
      ++units_[unit].backwards;
      for (std::size_t const b : of().units()[unit].buckets) {
        if (users_finished(b)) {
          reducer_.complete(b);
        }
      }
      if (stream_.threaded()) {
        reducer_.reduce_pending();
      }
    } catch (std::exception const& failure) {
      comm_->abort(failure.what());
      failure_ = std::current_exception();
    }
  }

  [[nodiscard]] bool users_finished(std::size_t b) const noexcept {
    auto const& users = of().buckets()[b].users;
    return std::all_of(users.begin(), users.end(), [this](std::size_t user) {
      unit_state const& u = units_[user];
      return u.backwards >= std::max<std::size_t>(1, u.forwards);
    });
  }

  void use_source(gradient_source source) {
    if (!in_microbatch_) {
      throw usage_error{text("gradient: expected an open micro-batch, actual none", here())};
    }
    if (source_ != gradient_source::none && source_ != source) {
      throw usage_error{
          text("gradient: expected one way of delivering gradients in a micro-batch, actual ",
               "both backward leases and gradient_ready", here(),
               "; lease with backward(u, zero::by_parameter)")};
    }
  }

  void open_parameter(std::size_t id) {
    flush();
    use_source(gradient_source::parameters);
    check_trainable(id);
    std::size_t const b = of().parameters()[id].bucket;
    update_.wait(b);
    reducer_.open(b);
    source_ = gradient_source::parameters;
  }

  void finish_parameter(std::size_t id) {
    reducer_.mark(id);
    reducer_.ready(id);
    reducer_.reduce_in_order();
  }

  /// Let later work of `waits` wait for what `on` has been given so far.
  void let_wait(stream& waits, stream& on) {
    on.record(handed_over_);
    waits.wait(handed_over_);
  }

  /// Copy a unit's values into storage that its tensors own.
  void give_back(std::size_t unit) {
    layout::unit const& u = of().units()[unit];
    if (residency_) {
      if (unit == 0) {
        residency_->begin(pass::evaluation);
      }
      residency_->open(u.buckets.front());
    }
    for (std::size_t const id : u.parameters) {
      any_tensor const& tensor = bound_.declared(id).value;
      if (tensor && tensor.rebindable()) {
        tensor.allocate(of().parameters()[id].spec.size);
        device::copy(engine_, whole_value(id), tensor.elements());
      }
    }
    engine_.synchronize();
    if (residency_) {
      residency_->close(u.buckets.front(), unit);
    }
  }

  void make_residency(stage const& at) {
    residency_memory memory;
    for (std::size_t s = 0; s < of().segments().size(); ++s) {
      memory.shards.push_back(bound_.value_shard(s));
      memory.segment_offsets.push_back(bound_.map().segments[s].gather_offset);
    }
    for (std::uint64_t const slot : bound_.map().gather_slots) {
      memory.slots.push_back(bound_.at_offset(slot));
    }
    residency_options const chosen{.slots = memory.slots.size(),
                                   .prefetch = at.prefetch,
                                   .keep_after_forward = at.keep_after_forward};
    residency_.emplace(of(), *comm_, stream_, engine_, chosen, std::move(memory));
  }

  metered<Communicator>* comm_;
  binding<device> bound_;
  bool per_microbatch_;
  std::optional<residency<Communicator>> residency_;
  gradient_reducer<Communicator> reducer_;
  update<Communicator, Optimizer> update_;
  std::vector<unit_state> units_;
  std::vector<std::size_t> value_uses_;  // leases that bind each parameter's tensor (stage 3)
  std::vector<bool> skipped_;            // in the open lease
  std::vector<std::size_t> writer_;      // the unit whose open backward lease includes it
  std::exception_ptr failure_;           // thrown by every later call
  pass pass_ = pass::none;
  gradient_source source_ = gradient_source::none;
  std::size_t live_ = 0;  // leases
  std::size_t ran_ = 0;   // micro-batches with a backward in this window
  std::size_t announced_ = 0;
  typename device::event handed_over_;
  bool uncertain_ = false;  // the group failed while an update was in flight
  bool in_microbatch_ = false;
  bool in_evaluation_ = false;
  bool unfinished_ = false;  // the last micro-batch's gradients aren't all reduced
  bool released_ = false;
  stream engine_;  // what the engine does
  stream stream_;  // last: destroyed first, when its work has run
};

}  // namespace zero::inline v0::detail
