// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/dtype.hpp>
#include <zero/core/error.hpp>
#include <zero/shard/layout.hpp>
#include <zero/shard/residency.hpp>
#include <zero/train/lease.hpp>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// @file
/// `loop_state`: where the engine's loop is (window, micro-batch or evaluation, pass, open leases),
/// and whether a call belongs there. It counts and checks; it holds no memory of a device.

namespace zero::inline v0::detail {

/// How the gradients of a micro-batch come.
enum class gradient_source : unsigned char { none, leases, parameters };

/// A check throws and changes nothing; every other member changes only this object.
/// @throws zero::usage_error  from checks: a call that doesn't belong there.
class loop_state {
 public:
  static constexpr std::size_t any_number = std::numeric_limits<std::size_t>::max();

  /// `of` outlives it. At most `most_live` units may be leased at once.
  loop_state(layout const& of, int rank, std::size_t most_live)
      : of_{&of}, rank_{rank}, most_live_{most_live}, units_(of.units().size()),
        writer_(of.parameters().size(), layout::none) {}

  // --- micro-batches and windows -----------------------------------------------------------------

  void check_microbatch(std::size_t index, std::size_t count) const {
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
  }

  /// Returns whether it is the window's last.
  bool begin_microbatch(std::size_t count) noexcept {
    announced_ = count;
    for (unit_state& u : units_) {
      u.forwards = 0;
      u.backwards = 0;
    }
    source_ = gradient_source::none;
    in_microbatch_ = true;
    return ran_ + 1 == count;
  }

  void end_microbatch() noexcept {
    in_microbatch_ = false;
    if (source_ != gradient_source::none) {
      ++ran_;
      unfinished_ = true;
    }
  }

  void begin_evaluation() noexcept { in_evaluation_ = true; }
  void end_evaluation() noexcept { in_evaluation_ = false; }

  /// No lease, micro-batch or evaluation is open.
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

  void check_step() const {
    check_idle("step");
    if (ran_ == 0) {
      throw usage_error{text("step: expected a micro-batch with a backward, actual none", here())};
    }
  }

  /// Every micro-batch of the window ran.
  void check_whole_window(std::string_view operation) const {
    check_idle(operation);
    if (ran_ == 0 || ran_ != announced_) {
      throw usage_error{text(operation,
                             ": expected to be asked between the window's last backward and step, ",
                             "actual after ", ran_, " of ", announced_, " micro-batches", here())};
    }
  }

  /// True once for each micro-batch with a backward, when it and its leases have ended.
  [[nodiscard]] bool finish_microbatch() noexcept {
    return !in_microbatch_ && live_ == 0 && std::exchange(unfinished_, false);
  }

  void end_window() noexcept { ran_ = 0; }

  /// Micro-batches with a backward, so far in this window.
  [[nodiscard]] std::size_t ran() const noexcept { return ran_; }
  [[nodiscard]] std::size_t announced() const noexcept { return announced_; }

  // --- passes and leases -------------------------------------------------------------------------

  void check_lease(std::size_t unit, lease_kind kind) const {
    if (unit >= units_.size()) {
      throw usage_error{
          text("lease: expected a unit below ", units_.size(), ", actual ", unit, here())};
    }
    if (units_[unit].live == 0 && live_ >= most_live_ && live_units() >= most_live_) {
      throw usage_error{text("lease of unit ", unit, ": expected at most ", most_live_,
                             " live units (max_live_units), actual also ", open_units(), here())};
    }
    if (kind == lease_kind::backward) {
      check_backward(unit);
    }
  }

  /// Whether a lease of this kind begins another pass, which is then the current one.
  [[nodiscard]] bool enter(lease_kind kind) noexcept {
    pass const wanted = kind == lease_kind::forward      ? pass::forward
                        : kind == lease_kind::evaluation ? pass::evaluation
                                                         : pass::backward;
    return std::exchange(pass_, wanted) != wanted;
  }
  [[nodiscard]] pass current() const noexcept { return pass_; }

  void begin_lease(std::size_t unit, lease_kind kind) noexcept {
    if (kind == lease_kind::backward) {
      of_->for_each_trainable(unit, [&](std::size_t id) { writer_[id] = unit; });
      source_ = gradient_source::leases;
    }
    units_[unit].forwards += kind == lease_kind::forward ? 1 : 0;
    ++units_[unit].live;
    ++live_;
  }

  void end_lease(std::size_t unit) noexcept {
    --units_[unit].live;
    --live_;
  }

  void end_backward(std::size_t unit) noexcept {
    of_->for_each_trainable(unit, [&](std::size_t id) { writer_[id] = layout::none; });
    ++units_[unit].backwards;
  }

  /// Whether the pass ends here: its micro-batch or evaluation, and every lease of it, has ended.
  [[nodiscard]] bool end_pass() noexcept {
    if (in_microbatch_ || in_evaluation_ || live_ != 0) {
      return false;
    }
    pass_ = pass::none;
    return true;
  }

  /// Every unit that uses bucket `b` has had as many backwards as forwards, or one.
  [[nodiscard]] bool users_finished(std::size_t b) const noexcept {
    auto const& users = of_->buckets()[b].users;
    return std::all_of(users.begin(), users.end(), [this](std::size_t user) {
      unit_state const& u = units_[user];
      return u.backwards >= std::max<std::size_t>(1, u.forwards);
    });
  }

  // --- gradients one by one ----------------------------------------------------------------------

  void check_source(gradient_source source) const {
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
  void use_source(gradient_source source) noexcept { source_ = source; }

  // --- arguments ---------------------------------------------------------------------------------

  /// Parameter `id` is one of `unit`'s, or tied to it.
  void check_member(std::size_t unit, std::size_t id) const {
    auto const& tied = of_->units()[unit].tied;
    if (id >= of_->parameters().size() || (of_->parameters()[id].unit != unit &&
                                           std::find(tied.begin(), tied.end(), id) == tied.end())) {
      throw usage_error{
          text("lease of unit ", unit, ": expected one of its parameters, actual id ", id, here())};
    }
  }

  void check_parameter(std::size_t id) const {
    if (id >= of_->parameters().size()) {
      throw usage_error{text("sharded_model: expected a parameter below ", of_->parameters().size(),
                             ", actual ", id, here())};
    }
  }

  void check_trainable(std::size_t id) const {
    check_parameter(id);
    if (!of_->parameters()[id].spec.trainable) {
      throw usage_error{text("gradient: expected a trainable parameter, actual '",
                             of_->parameters()[id].spec.name, "', which is frozen", here())};
    }
  }

  void check_dtype(std::size_t id, dtype actual, dtype asked) const {
    if (asked != actual) {
      throw usage_error{text("lease: expected parameter '", of_->parameters()[id].spec.name,
                             "' to be asked for as ", name(actual), ", actual ", name(asked),
                             here())};
    }
  }

 private:
  struct unit_state {
    std::size_t forwards = 0;  // leases in this micro-batch
    std::size_t backwards = 0;
    std::size_t live = 0;
  };

  [[nodiscard]] std::string here() const { return text(" (rank ", rank_, ")"); }

  [[nodiscard]] std::size_t live_units() const noexcept {
    return static_cast<std::size_t>(std::count_if(units_.begin(), units_.end(),
                                                  [](unit_state const& u) { return u.live != 0; }));
  }

  [[nodiscard]] std::string open_units() const {
    std::string out = "units";
    for (std::size_t u = 0; u < units_.size(); ++u) {
      out += units_[u].live != 0 ? text(" ", u) : "";
    }
    return out;
  }

  void check_backward(std::size_t unit) const {
    check_source(gradient_source::leases);
    unit_state const& u = units_[unit];
    if (u.backwards >= std::max<std::size_t>(1, u.forwards)) {
      throw usage_error{
          text("backward: expected unit ", unit, " ", std::max<std::size_t>(1, u.forwards),
               " time(s) in this micro-batch, as in forward, actual once more", here())};
    }
    of_->for_each_trainable(unit, [&](std::size_t id) {
      if (writer_[id] != layout::none) {
        throw usage_error{text("backward: expected unit ", unit, " after the lease of unit ",
                               writer_[id], " has ended, which writes the gradient of '",
                               of_->parameters()[id].spec.name, "', too, actual before", here())};
      }
    });
  }

  layout const* of_;
  int rank_;
  std::size_t most_live_;
  std::vector<unit_state> units_;
  std::vector<std::size_t> writer_;  // the unit whose open backward lease includes the parameter
  pass pass_ = pass::none;
  gradient_source source_ = gradient_source::none;
  std::size_t live_ = 0;       // leases
  std::size_t ran_ = 0;        // micro-batches with a backward in this window
  std::size_t announced_ = 0;  // by the window's micro-batches
  bool in_microbatch_ = false;
  bool in_evaluation_ = false;
  bool unfinished_ = false;  // the last micro-batch's gradients aren't all reduced
};

}  // namespace zero::inline v0::detail
