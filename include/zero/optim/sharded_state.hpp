// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/any_span.hpp>
#include <zero/core/error.hpp>
#include <zero/device/arena.hpp>
#include <zero/device/host.hpp>
#include <zero/device/ledger.hpp>
#include <zero/optim/concept.hpp>
#include <zero/optim/fused_update.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

/// @file
/// `sharded_optimizer_state`: an optimizer's states for one shard of a parameter, for those who
/// shard on their own and want nothing of `train/`.

namespace zero::inline v0 {

/// Shapes:   a shard of n elements has K states of n elements in the accumulate type, all zero at
///           first, and, if the parameter is a 16-bit float, a master of n elements with the
///           shard's values.
/// Ordering: runs in the caller.
template <elementwise_optimizer Optimizer>
class sharded_optimizer_state {
 public:
  /// Takes size, type and initial values from `shard`; `step` gets the same shard.
  /// @throws zero::usage_error  what `Optimizer::validate` finds.
  /// @throws zero::error        there is not enough memory.
  sharded_optimizer_state(Optimizer const& optimizer, const_any_span shard)
      : optimizer_{optimizer}, size_{shard.size()}, type_{shard.dtype()} {
    optimizer_.validate();
    bool const has_master = size_bytes(type_) == 2;
    std::size_t const arrays = state_count<Optimizer> + (has_master ? 1 : 0);
    std::uint64_t const bytes = size_ * size_bytes(accumulate_dtype(type_));
    arena_ = arena<host>{static_cast<std::size_t>(arrays * arena<host>::taken_bytes(bytes))};
    auto const take = [&] { return arena_.take(category::optimizer_state, bytes, bytes); };
    host_stream stream;
    for (std::size_t k = 0; k < state_count<Optimizer>; ++k) {
      states_[k] = take();
      host::fill_zero(stream, span(states_[k]));
    }
    if (has_master) {
      master_ = take();
      host::convert(stream, shard, span(master_));
    }
  }

  /// Update `shard` with `multiplier * gradient` (see `fused_update`).
  /// @throws zero::usage_error  another size or type than at construction, or the optimizer was
  ///                            changed to one that isn't valid. Nothing was changed.
  void step(any_span shard, const_any_span gradient, double multiplier = 1) {
    if (shard.size() != size_ || shard.dtype() != type_) {
      throw usage_error{detail::text("sharded_optimizer_state::step: expected ", size_,
                                     " elements of ", name(type_), ", actual ", shard.size(),
                                     " of ", name(shard.dtype()))};
    }
    optimizer_.validate();
    fused_update(optimizer_, steps_ + 1, multiplier,
                 update_piece<Optimizer>{shard, master_, gradient, states_});
    ++steps_;
  }

  /// How many steps were taken.
  [[nodiscard]] std::int64_t steps() const noexcept { return steps_; }
  /// The hyperparameters, to be changed between steps.
  [[nodiscard]] Optimizer& optimizer() noexcept { return optimizer_; }
  [[nodiscard]] Optimizer const& optimizer() const noexcept { return optimizer_; }

  /// One of `Optimizer::states`, in the accumulate type.
  /// @throws zero::usage_error  the optimizer has no such state.
  [[nodiscard]] any_span state(std::string_view state_name) const {
    std::string names;
    for (std::size_t k = 0; k < state_count<Optimizer>; ++k) {
      if (Optimizer::states[k] == state_name) {
        return span(states_[k]);
      }
      names += detail::text(k == 0 ? "" : ", ", Optimizer::states[k]);
    }
    throw usage_error{detail::text("sharded_optimizer_state::state: expected one of {", names,
                                   "}, actual ", state_name)};
  }
  /// The full-precision copy of a shard of 16-bit floats; else empty.
  [[nodiscard]] any_span master() const noexcept {
    return master_ == nullptr ? any_span{nullptr, 0, accumulate_dtype(type_)} : span(master_);
  }

  /// The bytes of all states and the master, without what aligns them.
  [[nodiscard]] std::uint64_t bytes() const noexcept {
    return arena_.ledger()[category::optimizer_state];
  }

 private:
  [[nodiscard]] any_span span(void* data) const noexcept {
    return {data, size_, accumulate_dtype(type_)};
  }

  Optimizer optimizer_;
  std::size_t size_;
  dtype type_;
  arena<host> arena_;
  std::array<void*, state_count<Optimizer>> states_{};
  void* master_ = nullptr;
  std::int64_t steps_ = 0;
};

}  // namespace zero::inline v0
