// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/concept.hpp>
#include <zero/comm/metered.hpp>
#include <zero/core/hash.hpp>
#include <zero/train/gradient_reducer.hpp>
#include <zero/train/lease.hpp>
#include <zero/train/leased_values.hpp>
#include <zero/train/loop_state.hpp>
#include <zero/train/update.hpp>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

/// @file
/// `model`: what each call of a `sharded_model` does to the loop's state, to values, gradients and
/// update, and what becomes of a call that fails.

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
        loop_{of(), comm.rank(),
              at.shards_parameters() ? at.max_live_units : loop_state::any_number},
        values_{bound_, comm, stream_, engine_},
        reducer_{bound_, reductions, stream_, engine_, policy, chosen},
        update_{bound_, comm, stream_, engine_, chosen.clip_norm},
        skipped_(of().parameters().size(), false), engine_(device::engine_stream(chosen.stream)),
        stream_(device::communication_stream(chosen.overlap, chosen.stream)) {}

  /// Values are those that the engine's stream has made so far.
  void take_over(start how) {
    engine_.synchronize();
    bound_.take_over(*comm_, how, !per_microbatch_);
    update_.initialise();
  }

  [[nodiscard]] layout const& of() const noexcept { return bound_.of(); }
  [[nodiscard]] binding<device> const& bound() const noexcept { return bound_; }
  [[nodiscard]] std::size_t gradient_high_water() const noexcept {
    return reducer_.places().high_water();
  }
  [[nodiscard]] int rank() const noexcept { return comm_->rank(); }
  [[nodiscard]] residency_counts gathered() const noexcept { return values_.counts(); }

  // --- micro-batches -----------------------------------------------------------------------------

  void begin_microbatch(std::size_t index, std::size_t count) {
    guarded([&] {
      flush();
      loop_.check_microbatch(index, count);
      reducer_.begin_microbatch(loop_.begin_microbatch(count));
    });
  }

  void end_microbatch(bool unwinding) noexcept {
    loop_.end_microbatch();
    if (unwinding) {
      fail(text("an exception ended the micro-batch", here()));
    }
    end_pass();
  }

  void begin_evaluation() {
    guarded([&] {
      flush();
      loop_.check_idle("evaluation");
      loop_.begin_evaluation();
    });
  }

  void end_evaluation(bool unwinding) noexcept {
    loop_.end_evaluation();
    if (unwinding) {
      fail(text("an exception ended the evaluation", here()));
    }
    end_pass();
  }

  // --- leases ------------------------------------------------------------------------------------

  void begin_lease(std::size_t unit, lease_kind kind) {
    guarded([&] {
      flush();
      loop_.check_lease(unit, kind);
      if (loop_.enter(kind)) {
        values_.begin(loop_.current());
      }
      auto const& buckets = of().units()[unit].buckets;
      if (kind == lease_kind::by_parameter) {
        for (std::size_t const b : buckets) {
          reducer_.admit(b);
        }
      }
      if (!values_.sharded()) {
        for (std::size_t const b : buckets) {
          update_.wait(b);
        }
      }
      values_.open(unit, kind);
      if (kind == lease_kind::backward) {
        for (std::size_t const b : buckets) {
          reducer_.open(b);
        }
      }
      loop_.begin_lease(unit, kind);
    });
  }

  void end_lease(std::size_t unit, lease_kind kind, bool unwinding) noexcept {
    loop_.end_lease(unit);
    if (unwinding) {
      fail(text("an exception ended the lease of unit ", unit, here()));
      return;
    }
    values_.close(unit, kind);
    if (kind == lease_kind::backward) {
      end_backward(unit);
    }
    end_pass();
  }

  [[nodiscard]] any_span leased_value(std::size_t unit, std::size_t id, dtype asked) {
    return guarded([&] {
      loop_.check_member(unit, id);
      loop_.check_dtype(id, of().parameters()[id].spec.value, asked);
      return values_.whole(id);
    });
  }

  [[nodiscard]] any_span leased_gradient(std::size_t unit, std::size_t id, dtype asked) {
    return guarded([&] {
      check_trainable_member(unit, id);
      loop_.check_dtype(id, of().parameters()[id].spec.gradient, asked);
      return reducer_.places().leased_place(id);
    });
  }

  [[nodiscard]] bool accumulates(std::size_t unit, std::size_t id) {
    return guarded([&] {
      check_trainable_member(unit, id);
      return reducer_.places().present(id);
    });
  }

  [[nodiscard]] bool accumulates(std::size_t unit) {
    return guarded([&] {
      std::size_t trainable = 0;
      std::size_t present = 0;
      of().for_each_trainable(unit, [&](std::size_t id) {
        ++trainable;
        present += reducer_.places().present(id) ? 1 : 0;
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
      check_trainable_member(unit, id);
      reducer_.skip(id);
      skipped_[id] = true;
    });
  }

  // --- gradients one by one ----------------------------------------------------------------------

  [[nodiscard]] gradient_place gradient_of(std::size_t id) {
    return guarded([&] {
      open_parameter(id);
      reducer_.give(id);
      return gradient_place{reducer_.places().place(id), reducer_.places().present(id)};
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
      check_hyperparameters("step", optimizer);
      flush();
      loop_.check_step();
      reducer_.check_window();
      reducer_.finish_window();
      reducer_.let_wait(stream_);
      let_wait(stream_, engine_);  // which may still read parameters, for an evaluation
      std::uint64_t const order = hash_next(hash_next(0, reducer_.order()), values_.order());
      update_.enqueue(optimizer, window{loop_.ran(), loop_.announced(), order},
                      [this](std::size_t id) { return reducer_.had_gradient(id); });
      reducer_.begin_window();
      loop_.end_window();
    });
  }

  void wait() {
    guarded([&] {
      flush();
      update_.wait();
    });
  }

  /// Wait for all of the streams, whatever becomes of it: then nothing uses the arena.
  void drain() noexcept {
    device::clean_up([this] { stream_.synchronize(); });
    device::clean_up([this] { reducer_.synchronize(); });
    device::clean_up([this] { engine_.synchronize(); });
  }

  void write_hyperparameters(Optimizer const& optimizer) {
    guarded([&] {
      check_hyperparameters("write_hyperparameters", optimizer);
      flush();
      loop_.check_idle("write_hyperparameters");
      check_no_capture("write_hyperparameters");
      update_.write_hyperparameters(optimizer);
    });
  }

  void replayed() {
    guarded([&] {
      loop_.check_idle("replayed");
      check_no_capture("replayed");
      update_.replayed();
    });
  }

  [[nodiscard]] bool failed() const noexcept { return failure_ != nullptr; }
  [[nodiscard]] bool capturing() {
    return guarded([&] { return engine_.capturing(); });
  }

  /// The engine's stream began to record a graph, which must be one of whole steps.
  void begin_capture() {
    guarded([&] {
      loop_.check_idle("capture");
      if (loop_.ran() != 0) {
        throw usage_error{text("capture: expected to begin before a window's first micro-batch, ",
                               "actual after ", loop_.ran(), " of ", loop_.announced(), here())};
      }
      if (!update_.done()) {
        throw usage_error{
            text("capture: expected nothing in flight where a capture begins, actual ", "a step",
                 here(), "; synchronize first")};
      }
    });
  }

  [[nodiscard]] step_outcome outcome() {
    return guarded([&] { return update_.outcome(); });
  }
  [[nodiscard]] std::int64_t steps(std::size_t id) {
    return guarded([&] {
      loop_.check_parameter(id);
      return update_.steps(id);
    });
  }

  /// This rank's part of a parameter's reduced gradient, and the index of its first element.
  [[nodiscard]] std::pair<any_span, std::size_t> reduced_gradient(std::size_t id) {
    return guarded([&] {
      flush();
      loop_.check_trainable(id);
      loop_.check_whole_window("gradient");
      reducer_.finish_window();
      reducer_.synchronize();
      return reducer_.places().reduced_part(id);
    });
  }

  /// Give every tensor its whole value in storage of its own; afterwards the model is empty.
  /// `before_end` is called before the arena ends.
  template <class Call>
  void release(Call before_end) {
    guarded([&] {
      flush();
      loop_.check_idle("release");
      check_no_capture("release");
      for (std::size_t id = 0; id < of().parameters().size(); ++id) {
        any_tensor const& value = bound_.declared(id).value;
        if (value && value.rebindable() && !value.allocatable()) {
          throw usage_error{text("release: parameter '", bound_.declared(id).name,
                                 "': expected a tensor that ", "can own storage again, actual none",
                                 here(), "; add allocate to its zero::tensor_traits")};
        }
      }
      static_cast<void>(update_.outcome());  // the host waits
      values_.begin(pass::evaluation);
      for (std::size_t u = 0; u < of().units().size(); ++u) {
        values_.give_back(u, engine_);
      }
      before_end();
      bound_.drop();
      released_ = true;
    });
  }

 private:
  [[nodiscard]] std::string here() const { return text(" (rank ", rank(), ")"); }

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
    if (loop_.finish_microbatch()) {
      reducer_.finish_microbatch();
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
    if (loop_.end_pass()) {
      values_.release_all();
    }
  }

  void check_hyperparameters(std::string_view operation, Optimizer const& optimizer) const {
    try {
      optimizer.validate();
    } catch (usage_error const& cause) {
      throw usage_error{text(operation, ": ", std::string_view{cause.what()}, here())};
    }
  }

  void check_no_capture(std::string_view operation) const {
    if (engine_.capturing()) {
      throw usage_error{text(operation, ": expected no capture, actual one under way", here())};
    }
  }

  void check_trainable_member(std::size_t unit, std::size_t id) const {
    loop_.check_member(unit, id);
    loop_.check_trainable(id);
  }

  void end_backward(std::size_t unit) noexcept {
    try {
      of().for_each_trainable(unit, [&](std::size_t id) {
        if (skipped_[id]) {
          skipped_[id] = false;
        } else {
          reducer_.written(id);
        }
      });
      loop_.end_backward(unit);
      for (std::size_t const b : of().units()[unit].buckets) {
        if (loop_.users_finished(b)) {
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

  void open_parameter(std::size_t id) {
    flush();
    loop_.check_source(gradient_source::parameters);
    loop_.check_trainable(id);
    std::size_t const b = of().parameters()[id].bucket;
    update_.wait(b);
    reducer_.open(b);
    loop_.use_source(gradient_source::parameters);
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

  metered<Communicator>* comm_;
  binding<device> bound_;
  bool per_microbatch_;
  loop_state loop_;
  leased_values<Communicator> values_;
  gradient_reducer<Communicator> reducer_;
  update<Communicator, Optimizer> update_;
  std::vector<bool> skipped_;   // in the open lease
  std::exception_ptr failure_;  // thrown by every later call
  typename device::event handed_over_;
  bool uncertain_ = false;  // the group failed while an update was in flight
  bool released_ = false;
  stream engine_;  // what the engine does
  stream stream_;  // last: destroyed first, when its work has run
};

}  // namespace zero::inline v0::detail
