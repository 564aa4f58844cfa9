// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/concept.hpp>
#include <zero/comm/metered.hpp>
#include <zero/comm/scratch.hpp>
#include <zero/device/host.hpp>
#include <zero/train/agreement.hpp>
#include <zero/train/lease.hpp>
#include <zero/train/model.hpp>
#include <zero/train/model_spec.hpp>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <iterator>
#include <memory>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>

/// @file
/// `sharded_model`: an engine's parameters under a ZeRO stage. The engine leases units for forward
/// and backward in a loop of its own; `step` updates. The loop is the same for every stage.

namespace zero::inline v0 {

namespace detail {

template <class Units>
using declared_type =
    std::remove_cvref_t<decltype(*std::begin(*std::begin(std::declval<Units const&>())))>;

/// Whether a parameter's tensor, if it has that one, is where the communicator works.
template <class Tensor, class Device>
inline constexpr bool is_on_device = std::is_same_v<typename tensor_traits<Tensor>::device, Device>;
template <class Device>
inline constexpr bool is_on_device<no_tensor, Device> = true;

/// What the compiler can check of a stage that is written as a type.
template <class Device, class Stage, class Parameter>
constexpr void check_tensors() {
  if constexpr (requires { typename Parameter::value_tensor; }) {
    using value = typename Parameter::value_tensor;
    using gradient = typename Parameter::gradient_tensor;
    static_assert(
        is_on_device<value, Device>,
        "the value tensor's elements are on another device than the communicator's: give "
        "its zero::tensor_traits `using device = zero::cuda;` and device pointers, or use "
        "a communicator of that device");
    static_assert(is_on_device<gradient, Device>,
                  "the gradient tensor's elements are on another device than the communicator's: "
                  "give its zero::tensor_traits `using device = zero::cuda;` and device pointers, "
                  "or use a communicator of that device");
    if constexpr (!std::is_same_v<Stage, stage>) {
      static_assert(
          Stage::placed.parameters == placement::replicated || value_can_be_sharded<value>,
          "this stage shards parameters: the value tensor must give up its storage. Add "
          "`static void rebind(tensor&, std::span<value_type>)` to its zero::tensor_traits, or "
          "declare "
          "the parameter without tensors: zero::parameter<T>(name, shape, initialiser)");
      static_assert(
          Stage::placed.gradients == placement::replicated || gradient_can_be_sharded<gradient>,
          "this stage shards gradients: the gradient tensor must give up its storage. Add "
          "`static void rebind(tensor&, std::span<value_type>)` to its zero::tensor_traits, or "
          "declare "
          "the parameter without a gradient tensor and hand gradients over with gradient_ready");
    }
  }
}

}  // namespace detail

/// What a step found; reading it waits for the step, which is else not waited for. The model
/// outlives it.
template <class Model>
class step_result {
 public:
  step_result(Model& model, std::uint64_t number, std::uint64_t const& latest, bool clips)
      : model_{&model}, number_{number}, latest_{&latest}, clips_{clips} {}

  /// The global norm of the mean gradient, before clipping.
  /// @throws zero::usage_error  without options::clip_norm (infinity measures and clips nothing),
  ///                            or after another step.
  [[nodiscard]] double norm() const {
    if (!clips_) {
      throw usage_error{detail::text(
          "step_result: expected options::clip_norm, actual none, so no norm was taken", " (rank ",
          model_->rank(), ")")};
    }
    return outcome().norm;
  }
  /// True where the gradient was not finite, with clipping: nothing was updated, on any rank.
  [[nodiscard]] bool skipped() const { return outcome().skipped; }

 private:
  [[nodiscard]] detail::step_outcome outcome() const {
    if (number_ != *latest_) {
      throw usage_error{
          detail::text("step_result: expected to be read before the next step, actual step ",
                       number_, " after step ", *latest_, " (rank ", model_->rank(), ")")};
    }
    return model_->outcome();
  }

  Model* model_;
  std::uint64_t number_;
  std::uint64_t const* latest_;
  bool clips_;
};

/// A rank's part of a parameter's reduced gradient.
struct gradient_part {
  any_span elements;
  std::size_t first;  ///< the index, in the parameter, of elements[0]
};

/// A model whose optimizer state, gradients and parameters are sharded as its stage says, for a
/// training loop that is the same in every stage.
///
/// Units: a list of lists of parameters, the same on every rank; tensors outlive the model. It
/// communicates through communicators split from the given one.
///
/// Collective: the constructor, `step`, `release`; backward leases that write gradients, in one
///             order; in stage 3 all leases. Every rank makes the same calls.
/// Errors:     a broken precondition on one rank is thrown there, and every peer's pending or next
///             call throws communication_error with its message; the model can't be used
///             afterwards, and its calls throw the same again. Before an update begins parameters
///             are unchanged; a failure inside one leaves the model broken, and it says so.
template <communicator Communicator, elementwise_optimizer Optimizer>
class sharded_model {
  using device = typename Communicator::device;
  using state = detail::model<Communicator, Optimizer>;

 public:
  /// Check that ranks agree, allocate one arena, take parameters over, unit by unit.
  ///
  /// @throws zero::usage_error          options, tensors or hyperparameters are wrong, ranks
  ///                                    disagree, one has too little memory, or an initialiser
  ///                                    threw: the same message on every rank, and nothing was
  ///                                    changed.
  /// @throws zero::communication_error  a peer failed or missed the deadline.
  template <unit_list Units, class Stage, class Policy>
  sharded_model(Communicator& comm, Units const& units, Stage at, Optimizer optimizer,
                Policy policy, options const& chosen = {})
      : comm_{comm.split(0, comm.rank())}, optimizer_{optimizer},
        clips_{chosen.clip_norm.has_value()}, exceptions_{std::uncaught_exceptions()} {
    detail::check_tensors<device, Stage, detail::declared_type<Units>>();
    stage const placed = at;
    accumulation const accumulates = policy;
    together([&] {
      spec_.emplace(std::type_identity<device>{}, units, placed, optimizer, accumulates, chosen,
                    static_cast<std::uint64_t>(comm_.size()),
                    static_cast<std::uint64_t>(comm_.rank()),
                    [&](reduction_shape const& of) { return scratch_for(of); });
      comm_.set_deadline(chosen.deadline);
    });
    detail::agree(comm_, "sharded_model", spec_->agreement());
    if (detail::reduces_apart<device>(placed, chosen)) {
      reductions_.emplace(comm_.split(0, comm_.rank()));
    }
    together([&] { model_.emplace(comm_, reductions(), *spec_, placed, accumulates, chosen); });
    try {
      hand_over_memory(chosen.memory.registration);
      model_->take_over(chosen.start);
    } catch (std::exception const& failure) {
      comm_.abort(failure.what());  // of this rank's alone: what concerns all was thrown by all
      model_->drain();
      take_back_memory();
      throw;
    }
  }

  sharded_model(sharded_model const&) = delete;
  sharded_model& operator=(sharded_model const&) = delete;

  /// Waits for the stream; leaves tensors that were rebound empty. Ended by an exception, it aborts
  /// the group.
  ~sharded_model() {
    if (std::uncaught_exceptions() > exceptions_) {
      comm_.abort(detail::text("an exception ended the model (rank ", comm_.rank(), ")"));
    }
    model_->drain();
    take_back_memory();
  }

  /// Micro-batch `index` of the `count` between two steps; `count` agrees over ranks and in the
  /// window.
  [[nodiscard]] zero::microbatch<state> microbatch(std::size_t index, std::size_t count) {
    note_capture();
    return {*model_, index, count};
  }
  /// Forward leases outside any window.
  [[nodiscard]] zero::evaluation<state> evaluation() {
    note_capture();
    return zero::evaluation<state>{*model_};
  }

  /// Reduce what is not reduced yet, update by the mean of the gradients over ranks and
  /// micro-batches, and make parameters whole where the stage keeps them so; all of it on the
  /// communication stream. The window is the micro-batches that ran.
  /// @throws zero::usage_error  a lease or micro-batch is open; no backward ran; a trainable
  ///                            parameter had neither gradient nor skip.
  step_result<state> step() {
    note_capture();
    model_->step(optimizer_);
    ++steps_;
    return {*model_, steps_, steps_, clips_};
  }

  /// Let the engine wait until the last step is done: its stream may read parameters in their
  /// tensors (stages 0 to 2). On the host that is the caller, which waits; on CUDA the host may
  /// read them after a synchronization of that stream.
  void wait() {
    note_capture();
    model_->wait();
  }

  /// Write the optimizer's hyperparameters to the device, in the order of the engine's stream: the
  /// steps of a captured graph read them there, whatever they were when it was captured.
  /// @throws zero::usage_error  in a capture, whose replays would all write them.
  void write_hyperparameters() { model_->write_hyperparameters(optimizer_); }

  /// A graph of whole steps, captured from the engine's stream, was launched there `n` times: count
  /// what it sent, and order what follows behind it. Before any other call after a launch.
  ///
  /// A capture begins with nothing in flight (after `wait` and a synchronization of the stream),
  /// ends after `wait`, and fixes who had gradients and how many micro-batches there are; what it
  /// can't hold, such as a read of a result, throws. Peers are not checked. Graphs are destroyed
  /// before the model.
  void replayed(std::uint64_t n) {
    note_capture();
    model_->replayed();
    for (std::size_t i = 0; i < traffic_count; ++i) {
      replayed_[static_cast<traffic>(i)] += n * captured_[static_cast<traffic>(i)];
    }
  }

  /// Give tensors their whole values back in storage of their own; the model can't be used
  /// afterwards.
  ///
  /// Collective: every rank calls it.
  /// @throws zero::usage_error  a tensor without tensor_traits::allocate; a capture is under way;
  ///                            ranks disagreed in the last step.
  void release() {
    note_capture();
    model_->release([this] { take_back_memory(); });
  }

  /// The optimizer of the next step; ranks must change it alike.
  [[nodiscard]] Optimizer& optimizer() noexcept { return optimizer_; }

  [[nodiscard]] std::size_t units() const noexcept { return spec_->of().units().size(); }
  [[nodiscard]] zero::layout const& layout() const noexcept { return spec_->of(); }

  /// The id of a parameter.
  /// @throws zero::usage_error  there is none of that name.
  [[nodiscard]] std::size_t find(std::string_view name) const {
    std::size_t const id = spec_->of().find(name);
    if (id == zero::layout::none) {
      throw usage_error{detail::text("find: expected a declared parameter, actual '", name,
                                     "' (rank ", comm_.rank(), ")")};
    }
    return id;
  }

  /// This rank's part of the reduced gradient (before 1/M), between a window's last backward and
  /// step. Waits for its reduction.
  [[nodiscard]] gradient_part gradient(std::size_t id) {
    auto const [elements, first] = model_->reduced_gradient(id);
    return {elements, first};
  }

  /// How many updates a parameter has had. Waits for the last step.
  /// @throws zero::usage_error  ranks disagreed in it.
  [[nodiscard]] std::int64_t steps(std::size_t id) { return model_->steps(id); }

  [[nodiscard]] zero::plan const& plan() const noexcept { return spec_->planned(); }
  /// The bytes really taken, by category.
  [[nodiscard]] memory_bytes ledger() const { return model_->bound().ledger(); }
  /// Payload bytes that left this rank since bind.
  [[nodiscard]] traffic_bytes sent() {
    note_capture();
    traffic_bytes out = enqueued();
    for (std::size_t i = 0; i < traffic_count; ++i) {
      out[static_cast<traffic>(i)] += replayed_[static_cast<traffic>(i)];
    }
    return out;
  }
  /// Gather slots in use, now and at most, and how often buckets were gathered and released.
  [[nodiscard]] residency_counts gathered() const { return model_->gathered(); }
  /// Gradient slots in use at most.
  [[nodiscard]] std::size_t gradient_high_water() const { return model_->gradient_high_water(); }

 private:
  [[nodiscard]] std::uint64_t scratch_for(reduction_shape const& of) const {
    if constexpr (borrows_scratch<Communicator>) {
      return comm_.inner().scratch_for(of);
    } else {
      return no_scratch::scratch_for(of, static_cast<std::uint64_t>(comm_.size()));
    }
  }

  /// Of the gradients' reductions.
  [[nodiscard]] metered<Communicator>& reductions() noexcept {
    return reductions_ ? *reductions_ : comm_;
  }

  /// Let the communicators use the arena, and know it where they register memory.
  void hand_over_memory(memory_registration as) {
    if constexpr (borrows_scratch<Communicator>) {
      if (auto const scratch = model_->bound().scratch(); !scratch.empty()) {
        reductions().inner().use_scratch(scratch);
      }
    }
    if constexpr (requires { comm_.inner().register_memory(nullptr, 0, 0); }) {
      auto const arena = model_->bound().memory();
      if (as != memory_registration::none && !arena.empty()) {
        comm_.inner().register_memory(
            arena.data(), arena.size(),
            as == memory_registration::window ? model_->bound().map().symmetric_bytes : 0);
      }
    }
  }

  /// Before the arena ends.
  void take_back_memory() noexcept {
    if constexpr (borrows_scratch<Communicator>) {
      reductions().inner().end_scratch();
    }
    if constexpr (requires { comm_.inner().end_registrations(); }) {
      comm_.inner().end_registrations();
    }
  }

  /// What was given to communicators, by a capture, too.
  [[nodiscard]] traffic_bytes enqueued() const {
    traffic_bytes out = comm_.sent();
    if (reductions_) {
      traffic_bytes const more = reductions_->sent();
      for (std::size_t i = 0; i < traffic_count; ++i) {
        out[static_cast<traffic>(i)] += more[static_cast<traffic>(i)];
      }
    }
    return out;
  }

  /// Notice where a capture begins and ends: what it records isn't sent, but by each replay.
  void note_capture() {
    if (model_->failed()) {
      return;  // each call says so
    }
    bool const now = model_->capturing();
    if (now == capturing_) {
      return;
    }
    if (now) {
      model_->begin_capture();
    }
    capturing_ = now;
    traffic_bytes const all = enqueued();
    for (std::size_t i = 0; i < traffic_count; ++i) {
      auto const kind = static_cast<traffic>(i);
      captured_[kind] = all[kind] - (now ? 0 : captured_[kind]);
      replayed_[kind] -= now ? 0 : captured_[kind];
    }
  }

  template <class Call>
  void together(Call call) {
    std::string failure;
    try {
      call();
    } catch (std::exception const& caught) {
      failure = caught.what();
    }
    detail::throw_together(comm_, "sharded_model", failure);
  }

  metered<Communicator> comm_;
  std::optional<metered<Communicator>> reductions_;  // beside gathers, in a thread of their own
  Optimizer optimizer_;
  bool clips_;
  int exceptions_;
  std::uint64_t steps_ = 0;
  bool capturing_ = false;
  traffic_bytes captured_;  // in one replay; while capturing, what was sent before
  traffic_bytes replayed_;  // in replays, less what only was captured
  std::optional<detail::model_spec> spec_;
  std::optional<state> model_;
};

/// The plan of a model on rank `rank` of `ranks`, before anything is allocated or communicated.
/// `reductions` says what scratch those of the communicator will take: `nccl_options` for `nccl`.
/// @throws zero::usage_error  as the constructor of `sharded_model`; no ranks, or no such rank.
template <device Device = host, unit_list Units, elementwise_optimizer Optimizer,
          scratch_rule Rule = no_scratch>
[[nodiscard]] plan make_plan(std::uint64_t ranks, std::uint64_t rank, Units const& units, stage at,
                             Optimizer const& optimizer, accumulation policy,
                             options const& chosen = {}, Rule const& reductions = {}) {
  if (rank >= ranks) {
    throw usage_error{detail::text("make_plan: expected a rank below ", ranks, ", actual ", rank)};
  }
  return detail::model_spec{
      std::type_identity<Device>{},
      units,
      at,
      optimizer,
      policy,
      chosen,
      ranks,
      rank,
      [&](reduction_shape const& of) { return reductions.scratch_for(of, ranks); }}
      .planned();
}

}  // namespace zero::inline v0
