// SPDX-License-Identifier: MIT
#include <zero/optim/hyperparameter.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <limits>

namespace {
constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();
}  // namespace

TEST_CASE("what must not be negative may be zero and must be finite") {
  CHECK_NOTHROW(zero::check_not_negative("o", "f", 0.0));
  CHECK_NOTHROW(zero::check_not_negative("o", "f", -0.0));
  CHECK_NOTHROW(zero::check_not_negative("o", "f", 5e-324));
  CHECK_NOTHROW(zero::check_not_negative("o", "f", 1e308));
  for (double const bad : {-5e-324, -1.0, nan_value, infinity, -infinity}) {
    CHECK_THROWS_AS(zero::check_not_negative("o", "f", bad), zero::usage_error);
  }
}

TEST_CASE("a decay rate is in [0, 1)") {
  CHECK_NOTHROW(zero::check_decay_rate("o", "f", 0.0));
  CHECK_NOTHROW(zero::check_decay_rate("o", "f", std::nextafter(1.0, 0.0)));
  for (double const bad : {-5e-324, 1.0, 2.0, nan_value, infinity, -infinity}) {
    CHECK_THROWS_AS(zero::check_decay_rate("o", "f", bad), zero::usage_error);
  }
}

TEST_CASE(
    "the message names optimizer, field, what was expected and every digit of what was found") {
  CHECK_THROWS_WITH_AS(zero::check_decay_rate("mine", "beta", 1.0000000000000002),
                       "mine.beta: expected at least 0 and less than 1, actual 1.0000000000000002",
                       zero::usage_error);
  CHECK_THROWS_WITH_AS(zero::check_not_negative("mine", "rate", -1.5e-300),
                       "mine.rate: expected a finite number of at least 0, actual -1.5e-300",
                       zero::usage_error);
}
