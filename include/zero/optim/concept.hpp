// SPDX-License-Identifier: MIT
#pragma once

#include <zero/device/pack.hpp>

#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

/// @file
/// What an optimizer is: a plain aggregate of hyperparameters, the names of its states per element,
/// and one update. A type of the user's own that models the concept is sharded like `adamw`.

namespace zero::inline v0 {

namespace detail {

/// The types that an update is compiled for: numbers, or 16 bytes of them.
template <class Value>
concept update_value = std::same_as<Value, float> || std::same_as<Value, double> ||
                       std::same_as<Value, pack<float>> || std::same_as<Value, pack<double>>;

}  // namespace detail

/// Square root, correctly rounded: the one to call in an optimizer's `update`, where a `std::sqrt`
/// would keep plain `-O2` from using vectors.
template <detail::update_value Value>
[[nodiscard]] ZERO_HOST_DEVICE Value sqrt(Value value) noexcept {
  if constexpr (std::floating_point<Value>) {
    return std::sqrt(value);
  } else {
    return detail::square_root_of(value);
  }
}

namespace detail {

/// What `at` and `update` must accept.
template <class Optimizer, class Value>
concept updates = requires(Optimizer const& optimizer, std::int64_t step, Value& parameter,
                           Value gradient, std::array<Value, Optimizer::states.size()>& state) {
  requires std::is_trivially_copyable_v<decltype(optimizer.template at<Value>(step))>;
  {
    Optimizer::update(optimizer.template at<Value>(step), parameter, gradient, state)
  } -> std::same_as<void>;
};

template <class States>
inline constexpr bool is_state_list = false;
template <std::size_t Count>
inline constexpr bool is_state_list<std::array<std::string_view, Count>> = true;

}  // namespace detail

/// A plain aggregate with
///
///   static constexpr std::array<std::string_view, K> states   an element's states, zero at first
///   void validate() const                                     throws `usage_error`
///   Constants at<Value>(std::int64_t step) const              step 1 is the first update
///   static void update(Constants, Value& parameter, Value gradient, std::array<Value, K>& state)
///
/// `Value` is float, double or a pack of them, with + - * / and `zero::sqrt`; it is made from a
/// double. What depends on the step alone is computed in `at`, in double, and rounded once.
///
/// `sgd` is one. A class that keeps its states in a member is not: the states live in the shard.
template <class Optimizer>
concept elementwise_optimizer =
    std::is_aggregate_v<Optimizer> && std::is_trivially_copyable_v<Optimizer> &&
    detail::is_state_list<std::remove_cvref_t<decltype(Optimizer::states)>> &&
    requires(Optimizer const& optimizer) {
      { optimizer.validate() } -> std::same_as<void>;
    } && detail::updates<Optimizer, float> && detail::updates<Optimizer, detail::pack<double>>;

/// How many states an optimizer keeps for each element, in the accumulate type.
template <elementwise_optimizer Optimizer>
inline constexpr std::size_t state_count = Optimizer::states.size();

}  // namespace zero::inline v0
