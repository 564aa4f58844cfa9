// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/any_span.hpp>
#include <zero/core/dtype.hpp>
#include <zero/core/error.hpp>

#include <cstddef>
#include <exception>
#include <span>
#include <utility>

/// @file
/// Leases: move-only objects that keep a unit's parameters whole, and its gradient bucket open,
/// while they live. A lease's end doesn't wait for the device and never throws (over `loopback` and
/// `nccl` it may wait for peers' calls, until the deadline); one that an exception ends aborts the
/// group.

namespace zero::inline v0 {

namespace detail {

enum class lease_kind : unsigned char {
  forward,
  evaluation,
  recomputation,
  backward,
  by_parameter
};

}  // namespace detail

/// Whole parameters of one unit, to be read: what is written there is lost, or differs over ranks.
template <class Model>
class forward_lease {
 public:
  forward_lease(Model& model, std::size_t unit, detail::lease_kind kind)
      : model_{&model}, unit_{unit}, rank_{model.rank()}, kind_{kind},
        exceptions_{std::uncaught_exceptions()} {
    model_->begin_lease(unit, kind);
  }
  forward_lease(forward_lease&& other) noexcept
      : model_{std::exchange(other.model_, nullptr)}, unit_{other.unit_}, rank_{other.rank_},
        kind_{other.kind_}, exceptions_{other.exceptions_} {}
  forward_lease& operator=(forward_lease&& other) noexcept {
    if (this != &other) {
      end();
      model_ = std::exchange(other.model_, nullptr);
      unit_ = other.unit_;
      rank_ = other.rank_;
      kind_ = other.kind_;
      exceptions_ = other.exceptions_;
    }
    return *this;
  }
  ~forward_lease() { end(); }

  /// End the lease before its object's end. What it gave access to is no longer valid.
  void end() noexcept {
    if (Model* const model = std::exchange(model_, nullptr); model != nullptr) {
      model->end_lease(unit_, kind_, std::uncaught_exceptions() > exceptions_);
    }
  }

  [[nodiscard]] std::size_t unit() const noexcept { return unit_; }

  /// The elements of a parameter of this unit, or tied to it.
  /// @throws zero::usage_error  another unit's parameter, or another type; the lease has ended.
  template <class T>
  [[nodiscard]] std::span<T> parameter(std::size_t id) const {
    return model().leased_value(unit_, id, dtype_of<T>).template as<T>();
  }

 protected:
  [[nodiscard]] Model& model() const {
    if (model_ == nullptr) {
      throw usage_error{detail::text("lease of unit ", unit_,
                                     ": expected to be used before its end, actual after (rank ",
                                     rank_, ")")};
    }
    return *model_;
  }

 private:
  Model* model_;
  std::size_t unit_;
  int rank_;
  detail::lease_kind kind_;
  int exceptions_;
};

/// Whole parameters of one unit, and the place of its gradients. Its end marks the gradients ready.
template <class Model>
class backward_lease : public forward_lease<Model> {
 public:
  backward_lease(Model& model, std::size_t unit)
      : forward_lease<Model>{model, unit, detail::lease_kind::backward} {}

  /// Whether to add to the unit's gradients (true) or to overwrite them.
  /// @throws zero::usage_error  its parameters don't agree: ask for each.
  [[nodiscard]] bool accumulate() const { return this->model().accumulates(this->unit()); }
  [[nodiscard]] bool accumulate(std::size_t id) const {
    return this->model().accumulates(this->unit(), id);
  }

  /// Where the engine writes, or adds to, the gradient of a parameter of this unit, or tied to it.
  /// @throws zero::usage_error  another unit's parameter, a frozen one, or another type.
  template <class T>
  [[nodiscard]] std::span<T> gradient(std::size_t id) const {
    return this->model().leased_gradient(this->unit(), id, dtype_of<T>).template as<T>();
  }

  /// The parameter gets no gradient here: zero, unless earlier ones were accumulated. One that had
  /// a gradient on no rank in a window isn't updated, and its steps don't count; one with neither
  /// gradient nor skip is an error in `step`.
  void skip(std::size_t id) const { this->model().skip_leased(this->unit(), id); }
};

/// Chooses `micro.backward(u, by_parameter)`: gradients come one by one through `gradient_ready`,
/// and the lease only keeps parameters whole.
struct by_parameter_t {};
inline constexpr by_parameter_t by_parameter{};

/// Where one parameter's gradient goes: the engine adds where `accumulate`, else it overwrites.
struct gradient_place {
  any_span span;
  bool accumulate;
};

/// One forward and backward. Its end releases what is still whole; ended by an exception, it aborts
/// the group, as a lease does. It moves nowhere.
template <class Model>
class microbatch {
 public:
  microbatch(Model& model, std::size_t index, std::size_t count)
      : model_{&model}, exceptions_{std::uncaught_exceptions()} {
    model.begin_microbatch(index, count);
  }
  microbatch(microbatch const&) = delete;
  microbatch& operator=(microbatch const&) = delete;
  ~microbatch() { model_->end_microbatch(std::uncaught_exceptions() > exceptions_); }

  /// Collective in stage 3: every rank leases the same units in the same order.
  [[nodiscard]] forward_lease<Model> forward(std::size_t unit) {
    return {*model_, unit, detail::lease_kind::forward};
  }
  [[nodiscard]] backward_lease<Model> backward(std::size_t unit) { return {*model_, unit}; }
  [[nodiscard]] forward_lease<Model> backward(std::size_t unit, by_parameter_t /*how*/) {
    return {*model_, unit, detail::lease_kind::by_parameter};
  }
  /// Parameters for a forward that backward repeats; metered as recomputation.
  [[nodiscard]] forward_lease<Model> recompute(std::size_t unit) {
    return {*model_, unit, detail::lease_kind::recomputation};
  }

  /// Copy or add a finished gradient into its bucket; the engine may free it at once, on CUDA in
  /// the order of its stream.
  ///
  /// Shapes:   as many elements as the parameter has, in the same order as they lie there.
  /// Ordering: in any order, which may differ between ranks; a bucket is reduced when all its
  ///           parameters are ready or skipped, the last bucket first on every rank.
  /// @throws zero::usage_error  twice in a micro-batch; another size or type; the elements are
  ///                            those of its place; too many open buckets; mixed with backward
  ///                            leases that write gradients.
  void gradient_ready(std::size_t id, const_any_span gradient) {
    model_->gradient_ready(id, gradient);
  }
  /// The same, once `producer` has computed it, which may then write there again.
  void gradient_ready(std::size_t id, const_any_span gradient, typename Model::stream& producer) {
    model_->gradient_ready(id, gradient, producer);
  }

  /// Where to write a gradient; `gradient_ready(id)` follows.
  [[nodiscard]] gradient_place gradient(std::size_t id) { return model_->gradient_of(id); }
  /// @throws zero::usage_error  twice in a micro-batch, or without `gradient(id)` before.
  void gradient_ready(std::size_t id) { model_->gradient_ready(id); }

  /// The parameter gets no gradient in this micro-batch; as `backward_lease::skip`.
  void skip(std::size_t id) { model_->skip(id); }

 private:
  Model* model_;
  int exceptions_;
};

/// Forward passes outside any window; parameters are always released, at its end or that of a lease
/// that outlives it. Ended by an exception, it aborts the group.
template <class Model>
class evaluation {
 public:
  explicit evaluation(Model& model) : model_{&model}, exceptions_{std::uncaught_exceptions()} {
    model.begin_evaluation();
  }
  evaluation(evaluation const&) = delete;
  evaluation& operator=(evaluation const&) = delete;
  ~evaluation() { model_->end_evaluation(std::uncaught_exceptions() > exceptions_); }

  [[nodiscard]] forward_lease<Model> forward(std::size_t unit) {
    return {*model_, unit, detail::lease_kind::evaluation};
  }

 private:
  Model* model_;
  int exceptions_;
};

}  // namespace zero::inline v0
