// SPDX-License-Identifier: MIT
#pragma once

#include <doctest/doctest.h>

#include <zero/core/dtype.hpp>
#include <zero/optim/fused_update.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <span>
#include <string>
#include <vector>

/// @file
/// Ten steps of an optimizer beside PyTorch's (data/make_reference.py wrote the files).

namespace reference {

/// Numbers and words in the order of the file.
class file {
 public:
  explicit file(std::string const& name) : in_{ZERO_TEST_DIR "/optim/data/" + name + ".txt"} {
    REQUIRE_MESSAGE(in_, "can't open ", name);
  }

  void expect(std::string const& word) {
    std::string actual;
    in_ >> actual;
    REQUIRE(actual == word);
  }
  std::size_t count(std::string const& word) {
    expect(word);
    std::size_t value = 0;
    in_ >> value;
    REQUIRE(in_);
    return value;
  }
  std::vector<double> numbers(std::string const& word, std::size_t size) {
    expect(word);
    std::vector<double> values(size);
    for (double& value : values) {
      in_ >> value;
    }
    REQUIRE(in_);
    return values;
  }

 private:
  std::ifstream in_;
};

template <class T>
T rounded(double value) {
  if constexpr (sizeof(T) == 2) {
    return T(static_cast<float>(value));  // the files' numbers are exact in T
  } else {
    return static_cast<T>(value);
  }
}

/// Compare `optimizer`, whose states are the file's last ones, with the file `name`, for parameters
/// and gradients of `T`.
///
/// Both programs round each operation of a step, in orders of their own: that is a few roundings,
/// of 6e-8 in float and 1e-16 in double, of the largest value that the number has had, in each of
/// the ten steps. So a number may be 1e-6 (2e-15) of that largest value away.
template <class T, class Optimizer>
void check(Optimizer const& optimizer, std::string const& name) {
  using real = zero::accumulate_type<T>;
  constexpr double tolerance = sizeof(real) == 8 ? 2e-15 : 1e-6;
  constexpr std::size_t states = zero::state_count<Optimizer>;
  file in{name};
  std::size_t const elements = in.count("elements");
  std::size_t const steps = in.count("steps");
  REQUIRE(in.count("states") == states);
  REQUIRE(steps == 10);

  std::vector<T> parameter;
  std::vector<real> master;
  std::vector<double> largest;
  for (double const value : in.numbers("initial", elements)) {
    parameter.push_back(rounded<T>(value));
    master.push_back(static_cast<real>(value));
    largest.push_back(std::abs(value));
  }
  std::array<std::vector<real>, states> state;
  std::array<std::vector<double>, states> largest_state;
  for (std::size_t k = 0; k < states; ++k) {
    state[k].resize(elements);
    largest_state[k].resize(elements);
  }

  for (std::size_t step = 1; step <= steps; ++step) {
    std::vector<T> gradient;
    for (double const value : in.numbers("gradient", elements)) {
      gradient.push_back(rounded<T>(value));
    }
    zero::update_piece<Optimizer> piece{.parameter = std::span{parameter},
                                        .master = sizeof(T) == 2 ? master.data() : nullptr,
                                        .gradient = std::span{gradient}};
    for (std::size_t k = 0; k < states; ++k) {
      piece.states[k] = state[k].data();
    }
    zero::fused_update(optimizer, static_cast<std::int64_t>(step), 1.0, piece);

    CAPTURE(name);
    CAPTURE(step);
    auto const expected = in.numbers("parameter", elements);
    for (std::size_t i = 0; i < elements; ++i) {
      CAPTURE(i);
      if constexpr (sizeof(T) == 2) {  // the masters agree, so they round to the same
        CHECK(parameter[i].bits() == rounded<T>(expected[i]).bits());
      } else {
        largest[i] = std::max(largest[i], std::abs(expected[i]));
        CHECK(std::abs(static_cast<double>(parameter[i]) - expected[i]) <= tolerance * largest[i]);
      }
    }
    for (std::size_t k = 0; k < states; ++k) {
      auto const expected_state = in.numbers("state", elements);
      for (std::size_t i = 0; i < elements; ++i) {
        CAPTURE(i);
        largest_state[k][i] = std::max(largest_state[k][i], std::abs(expected_state[i]));
        CHECK(std::abs(static_cast<double>(state[k][i]) - expected_state[i]) <=
              tolerance * largest_state[k][i]);
      }
    }
  }
}

}  // namespace reference
