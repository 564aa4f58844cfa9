// SPDX-License-Identifier: MIT
#pragma once

#include <zero/optim/adam.hpp>
#include <zero/optim/concept.hpp>

#include <array>
#include <cstdint>
#include <string_view>

/// @file
/// `adamw`: Adam whose weight decay doesn't pass through the averages.

namespace zero::inline v0 {

/// Adam with decoupled weight decay, as in PyTorch:
///
///   m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
///   p = (1 - learning_rate weight_decay) p
///       - learning_rate (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon)
///
/// Source: Loshchilov and Hutter, Decoupled weight decay regularization (2019).
struct adamw {
  double learning_rate = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 0.01;

  static constexpr std::array<std::string_view, 2> states{"m", "v"};

  /// @throws zero::usage_error  a number is negative or not finite, or a beta is 1 or more.
  void validate() const { detail::check_adam("adamw", *this); }

  template <class Value>
  [[nodiscard]] ZERO_HOST_DEVICE detail::adam_constants<Value> at(std::int64_t step) const {
    return detail::adam_constants_at<Value>(*this, step, 1 - learning_rate * weight_decay);
  }

  template <class Value>
  ZERO_HOST_DEVICE static void update(detail::adam_constants<Value> const& c, Value& parameter,
                                      Value gradient, std::array<Value, 2>& state) {
    parameter = c.decay * parameter - detail::adam_change(c, gradient, state);
  }
};

static_assert(elementwise_optimizer<adamw>);

}  // namespace zero::inline v0
