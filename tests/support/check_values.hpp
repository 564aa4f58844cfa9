// SPDX-License-Identifier: MIT
#pragma once

#include <doctest/doctest.h>
#include <support/mock_model.hpp>
#include <support/settings.hpp>

/// @file
/// The check that a model's parameters have the values that a test expects.

namespace test {

/// Collective in stage 3.
template <class Sharded, class Tensor>
void check_values(Sharded& sharded, basic_model<Tensor>& engine, whole_values const& expected,
                  setting const& how) {
  whole_values const actual = read(sharded, engine);
  for (auto const& each : expected) {
    CHECK_MESSAGE(actual.at(each.first) == each.second, how.name, ", parameter ", each.first);
  }
}

}  // namespace test
