// SPDX-License-Identifier: MIT
#include <zero/optim/adamw.hpp>

#include <doctest/doctest.h>
#include <optim/conformance.hpp>
#include <optim/reference.hpp>
#include <support/thrown.hpp>

#include <zero/core/error.hpp>
#include <zero/optim/fused_update.hpp>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>

namespace {

constexpr zero::adamw reference_optimizer{
    .learning_rate = 0.01, .beta1 = 0.9, .beta2 = 0.99, .weight_decay = 0.1};

}  // namespace

TEST_CASE("ten steps of adamw are PyTorch's") {
  reference::check<float>(reference_optimizer, "adamw_float32");
  reference::check<double>(reference_optimizer, "adamw_float64");
  reference::check<zero::bfloat16>(reference_optimizer, "adamw_bfloat16");
  reference::check<zero::float16>(reference_optimizer, "adamw_float16");
}

TEST_CASE("adamw does what every optimizer does") {
  optimizer_conformance::check(reference_optimizer);
}

TEST_CASE("adamw decays the master of the parameters that have a decay, and those alone") {
  // w0[3], b0[2], w1[2], b1[1], cut between two ranks at element 4, within b0. The decay is 0.1 for
  // w and 0 for b, the learning rate 1, the gradient 0: after ten steps w is 0.9^10, b is 1.
  struct range {
    std::size_t first;
    std::size_t count;
    double decay;
  };
  constexpr std::array<range, 5> pieces{
      {{0, 3, 0.1}, {3, 1, 0.0}, {4, 1, 0.0}, {5, 2, 0.1}, {7, 1, 0.0}}};
  std::array<zero::float16, 9> half{};
  std::array<float, 9> master{};
  std::array<float, 9> single{};
  std::array<float, 9> m{};
  std::array<float, 9> v{};
  std::array<float, 9> const gradient{};
  for (std::size_t i = 0; i < 8; ++i) {  // the last element is padding
    half[i] = zero::float16(1.0F);
    master[i] = 1.0F;
    single[i] = 1.0F;
  }
  for (std::int64_t step = 1; step <= 10; ++step) {
    for (auto const [first, count, decay] : pieces) {
      zero::adamw const optimizer{.learning_rate = 1.0, .weight_decay = decay};
      auto const g = std::span{gradient}.subspan(first, count);
      zero::fused_update(
          optimizer, step, 1.0,
          zero::update_piece<zero::adamw>{.parameter = std::span{half}.subspan(first, count),
                                          .master = master.data() + first,
                                          .gradient = g,
                                          .states = {m.data() + first, v.data() + first}});
      zero::fused_update(
          optimizer, step, 1.0,
          zero::update_piece<zero::adamw>{.parameter = std::span{single}.subspan(first, count),
                                          .gradient = g,
                                          .states = {m.data() + first, v.data() + first}});
    }
  }
  double const tenth_power = 0.3486784401;  // 0.9^10
  for (std::size_t const i : {0U, 1U, 2U, 5U, 6U}) {
    CAPTURE(i);
    // Ten roundings of float at most; ten of float16 would be off by up to 5e-3.
    CHECK(std::abs(static_cast<double>(master[i]) - tenth_power) < 10 * 6e-8 * tenth_power);
    CHECK(std::abs(static_cast<double>(single[i]) - tenth_power) < 10 * 6e-8 * tenth_power);
    CHECK(half[i].bits() == zero::float16(0.3486784401F).bits());
  }
  for (std::size_t const i : {3U, 4U, 7U}) {
    CAPTURE(i);
    CHECK(master[i] == 1.0F);
    CHECK(single[i] == 1.0F);
    CHECK(half[i].bits() == zero::float16(1.0F).bits());
  }
  CHECK(half[8].bits() == 0);
  CHECK(master[8] == 0.0F);
  CHECK(single[8] == 0.0F);
}

TEST_CASE("the first step of adamw is as long as the learning rate") {
  // m / (1 - beta1) = g and v / (1 - beta2) = g^2, so the step is 0.1 in the gradient's direction,
  // after a decay of 0.1 * 0.01 of the parameter.
  std::array<double, 3> parameter{0.0, 0.0, 5.0};
  std::array<double, 3> const gradient{1.0, -250.0, 1.0};
  std::array<double, 3> m{};
  std::array<double, 3> v{};
  zero::fused_update(zero::adamw{.learning_rate = 0.1, .weight_decay = 0.01}, 1, 1.0,
                     zero::update_piece<zero::adamw>{.parameter = std::span{parameter},
                                                     .gradient = std::span{gradient},
                                                     .states = {m.data(), v.data()}});
  CHECK(parameter[0] == doctest::Approx(-0.1).epsilon(2e-8));  // epsilon is 1e-8 of the gradient
  CHECK(parameter[1] == doctest::Approx(0.1).epsilon(2e-8));
  CHECK(parameter[2] == doctest::Approx(5.0 - 0.005 - 0.1).epsilon(2e-8));
}

TEST_CASE("adamw names the hyperparameter that is out of its range") {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  constexpr double infinity = std::numeric_limits<double>::infinity();
  auto const message = [](zero::adamw const& optimizer) {
    return test::message_of([&] { optimizer.validate(); });
  };
  std::string const finite = ": expected a finite number of at least 0, actual ";
  std::string const rate = ": expected at least 0 and less than 1, actual ";
  CHECK(message({}) == "");
  CHECK(message({.learning_rate = 0, .beta1 = 0, .beta2 = 0, .epsilon = 0, .weight_decay = 0}) ==
        "");
  CHECK(message({.learning_rate = nan}) == "adamw.learning_rate" + finite + "nan");
  CHECK(message({.learning_rate = -1e-10}) == "adamw.learning_rate" + finite + "-1e-10");
  CHECK(message({.learning_rate = infinity}) == "adamw.learning_rate" + finite + "inf");
  CHECK(message({.beta1 = 1.0}) == "adamw.beta1" + rate + "1");
  CHECK(message({.beta1 = -0.1}) == "adamw.beta1" + rate + "-0.1");
  CHECK(message({.beta1 = nan}) == "adamw.beta1" + rate + "nan");
  CHECK(message({.beta2 = 1.5}) == "adamw.beta2" + rate + "1.5");
  CHECK(message({.beta2 = nan}) == "adamw.beta2" + rate + "nan");
  CHECK(message({.epsilon = -1e-8}) == "adamw.epsilon" + finite + "-1e-08");
  CHECK(message({.epsilon = infinity}) == "adamw.epsilon" + finite + "inf");
  CHECK(message({.weight_decay = -0.01}) == "adamw.weight_decay" + finite + "-0.01");
  CHECK(message({.weight_decay = nan}) == "adamw.weight_decay" + finite + "nan");
}
