// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/error.hpp>
#include <zero/optim/concept.hpp>
#include <zero/optim/hyperparameter.hpp>

#include <array>
#include <cstdint>
#include <string_view>

/// @file
/// Stochastic gradient descent: `sgd` with a momentum buffer, `plain_sgd` with no state at all.

namespace zero::inline v0 {

/// Momentum as in PyTorch, with dampening 0:
///
///   g += weight_decay p;  b = momentum b + g;  p -= learning_rate (nesterov ? g + momentum b : b)
///
/// The buffer b is kept with `momentum` 0, too: `plain_sgd` saves it.
/// Source: Sutskever et al., On the importance of initialization and momentum (2013).
struct sgd {
  double learning_rate = 1e-3;
  double momentum = 0;
  bool nesterov = false;
  double weight_decay = 0;

  static constexpr std::array<std::string_view, 1> states{"momentum"};

  /// @throws zero::usage_error  a number is negative or not finite, or Nesterov has no momentum.
  void validate() const {
    check_not_negative("sgd", "learning_rate", learning_rate);
    check_not_negative("sgd", "momentum", momentum);
    check_not_negative("sgd", "weight_decay", weight_decay);
    if (nesterov && momentum == 0) {
      throw usage_error{"sgd.momentum: expected more than 0 with nesterov, actual 0"};
    }
  }

  template <class Value>
  struct constants {
    Value learning_rate, momentum, weight_decay;
    bool nesterov;
  };

  template <class Value>
  [[nodiscard]] ZERO_HOST_DEVICE constants<Value> at(std::int64_t /*step*/) const {
    return {Value(learning_rate), Value(momentum), Value(weight_decay), nesterov};
  }

  template <class Value>
  ZERO_HOST_DEVICE static void update(constants<Value> const& c, Value& parameter, Value gradient,
                                      std::array<Value, 1>& state) {
    gradient = gradient + c.weight_decay * parameter;
    state[0] = c.momentum * state[0] + gradient;
    Value const direction = c.nesterov ? gradient + c.momentum * state[0] : state[0];
    parameter = parameter - c.learning_rate * direction;
  }
};

/// p -= learning_rate (g + weight_decay p), which needs no memory beside parameter and gradient.
struct plain_sgd {
  double learning_rate = 1e-3;
  double weight_decay = 0;

  static constexpr std::array<std::string_view, 0> states{};

  /// @throws zero::usage_error  a number is negative or not finite.
  void validate() const {
    check_not_negative("plain_sgd", "learning_rate", learning_rate);
    check_not_negative("plain_sgd", "weight_decay", weight_decay);
  }

  template <class Value>
  struct constants {
    Value learning_rate, weight_decay;
  };

  template <class Value>
  [[nodiscard]] ZERO_HOST_DEVICE constants<Value> at(std::int64_t /*step*/) const {
    return {Value(learning_rate), Value(weight_decay)};
  }

  template <class Value>
  ZERO_HOST_DEVICE static void update(constants<Value> const& c, Value& parameter, Value gradient,
                                      std::array<Value, 0>& /*state*/) {
    parameter = parameter - c.learning_rate * (gradient + c.weight_decay * parameter);
  }
};

static_assert(elementwise_optimizer<sgd> && elementwise_optimizer<plain_sgd>);

}  // namespace zero::inline v0
