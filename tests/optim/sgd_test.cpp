// SPDX-License-Identifier: MIT
#include <zero/optim/sgd.hpp>

#include <doctest/doctest.h>
#include <optim/conformance.hpp>
#include <optim/reference.hpp>

#include <zero/core/error.hpp>
#include <zero/optim/fused_update.hpp>

#include <cstdint>
#include <limits>
#include <span>
#include <string>

namespace {

template <class Optimizer>
void check_both(Optimizer const& optimizer, std::string const& name) {
  reference::check<float>(optimizer, name + "_float32");
  reference::check<double>(optimizer, name + "_float64");
}

}  // namespace

TEST_CASE("ten steps of sgd are PyTorch's") {
  check_both(zero::sgd{.learning_rate = 0.1, .momentum = 0.9}, "sgd_momentum");
  check_both(zero::sgd{.learning_rate = 0.1, .momentum = 0.9, .nesterov = true}, "sgd_nesterov");
  check_both(
      zero::sgd{.learning_rate = 0.1, .momentum = 0.9, .nesterov = true, .weight_decay = 0.01},
      "sgd_decay");
}

TEST_CASE("ten steps of plain_sgd are PyTorch's, with no momentum") {
  check_both(zero::plain_sgd{.learning_rate = 0.1}, "sgd_plain");
  check_both(zero::plain_sgd{.learning_rate = 0.1, .weight_decay = 0.01}, "sgd_plain_decay");
}

TEST_CASE("sgd does what every optimizer does, with momentum or without") {
  optimizer_conformance::check(zero::sgd{.learning_rate = 0.1, .weight_decay = 0.01});
  optimizer_conformance::check(
      zero::sgd{.learning_rate = 0.1, .momentum = 0.9, .nesterov = true, .weight_decay = 0.01});
  optimizer_conformance::check(zero::plain_sgd{.learning_rate = 0.1, .weight_decay = 0.01});
}

TEST_CASE("sgd with momentum 0 steps as plain_sgd does") {
  // Learning rate 1, gradient 1: 10, 9, 8; the buffer is the gradient.
  float with_buffer = 10;
  float without = 10;
  float buffer = 0;
  float const gradient = 1;
  for (std::int64_t step = 1; step <= 2; ++step) {
    zero::fused_update(zero::sgd{.learning_rate = 1}, step, 1.0,
                       zero::update_piece<zero::sgd>{.parameter = std::span{&with_buffer, 1},
                                                     .gradient = std::span{&gradient, 1},
                                                     .states = {&buffer}});
    zero::fused_update(zero::plain_sgd{.learning_rate = 1}, step, 1.0,
                       zero::update_piece<zero::plain_sgd>{.parameter = std::span{&without, 1},
                                                           .gradient = std::span{&gradient, 1}});
    CHECK(with_buffer == static_cast<float>(10 - step));
    CHECK(without == static_cast<float>(10 - step));
    CHECK(buffer == 1.0F);
  }
}

TEST_CASE("plain_sgd keeps no state") { CHECK(zero::state_count<zero::plain_sgd> == 0); }

TEST_CASE("sgd names the hyperparameter that is out of its range") {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  CHECK_NOTHROW(zero::sgd{}.validate());
  CHECK_NOTHROW(zero::sgd{.learning_rate = 0, .momentum = 1.5, .nesterov = true}.validate());
  CHECK_NOTHROW(zero::plain_sgd{}.validate());
  CHECK_THROWS_WITH_AS((zero::sgd{.learning_rate = -1}.validate()),
                       "sgd.learning_rate: expected a finite number of at least 0, actual -1",
                       zero::usage_error);
  CHECK_THROWS_WITH_AS((zero::sgd{.momentum = nan}.validate()),
                       "sgd.momentum: expected a finite number of at least 0, actual nan",
                       zero::usage_error);
  CHECK_THROWS_WITH_AS((zero::sgd{.weight_decay = -0.5}.validate()),
                       "sgd.weight_decay: expected a finite number of at least 0, actual -0.5",
                       zero::usage_error);
  CHECK_THROWS_WITH_AS((zero::sgd{.nesterov = true}.validate()),
                       "sgd.momentum: expected more than 0 with nesterov, actual 0",
                       zero::usage_error);
  CHECK_THROWS_WITH_AS(
      (zero::plain_sgd{.learning_rate = nan}.validate()),
      "plain_sgd.learning_rate: expected a finite number of at least 0, actual nan",
      zero::usage_error);
  CHECK_THROWS_WITH_AS((zero::plain_sgd{.weight_decay = -1}.validate()),
                       "plain_sgd.weight_decay: expected a finite number of at least 0, actual -1",
                       zero::usage_error);
}
