// SPDX-License-Identifier: MIT
#include <zero/optim/adam.hpp>

#include <doctest/doctest.h>
#include <optim/conformance.hpp>
#include <optim/reference.hpp>

#include <zero/core/error.hpp>
#include <zero/optim/fused_update.hpp>

#include <array>
#include <limits>
#include <span>

namespace {

constexpr zero::adam plain{.learning_rate = 0.01, .beta1 = 0.9, .beta2 = 0.99};
constexpr zero::adam decayed{
    .learning_rate = 0.01, .beta1 = 0.9, .beta2 = 0.99, .weight_decay = 0.1};

}  // namespace

TEST_CASE("ten steps of adam are PyTorch's") {
  reference::check<float>(plain, "adam_float32");
  reference::check<double>(plain, "adam_float64");
}

TEST_CASE("ten steps of adam with weight decay are PyTorch's") {
  reference::check<float>(decayed, "adam_decay_float32");
  reference::check<double>(decayed, "adam_decay_float64");
}

TEST_CASE("adam does what every optimizer does") { optimizer_conformance::check(decayed); }

TEST_CASE("the first step of adam has number 1") {
  // With 2 in its place the bias correction is 0.19 and 0.001999, and the update 0.0744.
  float parameter = 0;
  float const gradient = 1;
  float m = 0;
  float v = 0;
  zero::fused_update(zero::adam{.learning_rate = 0.1, .weight_decay = 0.01}, 1, 1.0,
                     zero::update_piece<zero::adam>{.parameter = std::span{&parameter, 1},
                                                    .gradient = std::span{&gradient, 1},
                                                    .states = {&m, &v}});
  CHECK(parameter == doctest::Approx(-0.1).epsilon(1e-6));
  CHECK(m == doctest::Approx(0.1).epsilon(1e-6));    // (1 - beta1) g
  CHECK(v == doctest::Approx(0.001).epsilon(1e-6));  // (1 - beta2) g^2
}

TEST_CASE("adam names the hyperparameter that is out of its range") {
  CHECK_NOTHROW(zero::adam{}.validate());
  CHECK_THROWS_WITH_AS((zero::adam{.beta2 = 1}.validate()),
                       "adam.beta2: expected at least 0 and less than 1, actual 1",
                       zero::usage_error);
  CHECK_THROWS_WITH_AS(
      (zero::adam{.learning_rate = std::numeric_limits<double>::quiet_NaN()}.validate()),
      "adam.learning_rate: expected a finite number of at least 0, actual nan", zero::usage_error);
}
