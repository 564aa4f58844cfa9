// SPDX-License-Identifier: MIT
#pragma once

#include <zero/optim/concept.hpp>
#include <zero/optim/hyperparameter.hpp>

#include <array>
#include <cmath>
#include <cstdint>
#include <string_view>

/// @file
/// `adam`: steps of the size of the learning rate, from averages of the gradient and of its square.

namespace zero::inline v0 {

namespace detail {

/// What depends on the step alone, with the corrections of both averages.
template <class Value>
struct adam_constants {
  Value beta1, beta2;
  Value gain1, gain2;  // 1 - beta
  Value step_size;     // learning rate * sqrt(1 - beta2^t) / (1 - beta1^t)
  Value epsilon;       // epsilon * sqrt(1 - beta2^t)
  Value decay;         // adam: of the parameter, into the gradient; adamw: what the parameter keeps
};

template <class Value, class Optimizer>
[[nodiscard]] ZERO_HOST_DEVICE adam_constants<Value> adam_constants_at(Optimizer const& o,
                                                                       std::int64_t step,
                                                                       double decay) {
  auto const t = static_cast<double>(step);
  double const correction1 = 1 - std::pow(o.beta1, t);
  double const correction2 = std::sqrt(1 - std::pow(o.beta2, t));
  return {Value(o.beta1),
          Value(o.beta2),
          Value(1 - o.beta1),
          Value(1 - o.beta2),
          Value(o.learning_rate * correction2 / correction1),
          Value(o.epsilon * correction2),
          Value(decay)};
}

/// Update both averages; returns what to subtract from the parameter.
template <class Value>
[[nodiscard]] ZERO_HOST_DEVICE Value adam_change(adam_constants<Value> const& c, Value gradient,
                                                 std::array<Value, 2>& state) {
  auto& [m, v] = state;
  m = c.beta1 * m + c.gain1 * gradient;
  v = c.beta2 * v + c.gain2 * (gradient * gradient);
  return c.step_size * m / (zero::sqrt(v) + c.epsilon);
}

inline void check_adam(std::string_view optimizer, auto const& o) {
  check_not_negative(optimizer, "learning_rate", o.learning_rate);
  check_decay_rate(optimizer, "beta1", o.beta1);
  check_decay_rate(optimizer, "beta2", o.beta2);
  check_not_negative(optimizer, "epsilon", o.epsilon);
  check_not_negative(optimizer, "weight_decay", o.weight_decay);
}

}  // namespace detail

/// Adam, its weight decay being added to the gradient (L2 regularization), as in PyTorch:
///
///   g += weight_decay p;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
///   p -= learning_rate (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon)
///
/// Source: Kingma and Ba, Adam (2015).
struct adam {
  double learning_rate = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 0;

  static constexpr std::array<std::string_view, 2> states{"m", "v"};

  /// @throws zero::usage_error  a number is negative or not finite, or a beta is 1 or more.
  void validate() const { detail::check_adam("adam", *this); }

  template <class Value>
  [[nodiscard]] ZERO_HOST_DEVICE detail::adam_constants<Value> at(std::int64_t step) const {
    return detail::adam_constants_at<Value>(*this, step, weight_decay);
  }

  template <class Value>
  ZERO_HOST_DEVICE static void update(detail::adam_constants<Value> const& c, Value& parameter,
                                      Value gradient, std::array<Value, 2>& state) {
    parameter = parameter - detail::adam_change(c, gradient + c.decay * parameter, state);
  }
};

static_assert(elementwise_optimizer<adam>);

}  // namespace zero::inline v0
