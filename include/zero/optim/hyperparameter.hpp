// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/error.hpp>

#include <array>
#include <charconv>
#include <cmath>
#include <string_view>

/// @file
/// Checks for an optimizer's `validate`, ours or the user's own.

namespace zero::inline v0 {

namespace detail {

[[noreturn]] inline void refuse_hyperparameter(std::string_view optimizer, std::string_view field,
                                               std::string_view expected, double actual) {
  std::array<char, 32> digits{};
  char* const end = std::to_chars(digits.data(), digits.data() + digits.size(), actual).ptr;
  throw usage_error{text(optimizer, ".", field, ": expected ", expected, ", actual ",
                         std::string_view{digits.data(), end})};
}

}  // namespace detail

/// @throws zero::usage_error  `value` is negative, infinite or not a number.
inline void check_not_negative(std::string_view optimizer, std::string_view field, double value) {
  if (!(std::isfinite(value) && value >= 0)) {
    detail::refuse_hyperparameter(optimizer, field, "a finite number of at least 0", value);
  }
}

/// @throws zero::usage_error  `value` isn't in [0, 1): a moving average with it would never move.
inline void check_decay_rate(std::string_view optimizer, std::string_view field, double value) {
  if (!(value >= 0 && value < 1)) {
    detail::refuse_hyperparameter(optimizer, field, "at least 0 and less than 1", value);
  }
}

}  // namespace zero::inline v0
