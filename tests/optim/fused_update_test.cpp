// SPDX-License-Identifier: MIT
#include <zero/optim/fused_update.hpp>

#include <doctest/doctest.h>
#include <support/thrown.hpp>

#include <zero/core/dtype.hpp>
#include <zero/core/error.hpp>
#include <zero/optim/adamw.hpp>
#include <zero/optim/sgd.hpp>

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <type_traits>

namespace {

using zero::dtype;

/// One element of each type, for `plain_sgd` with learning rate 1.
struct element {
  std::array<std::byte, 8> parameter{};
  std::array<std::byte, 8> gradient{};
  std::array<std::byte, 8> master{};

  std::string update(dtype parameter_type, dtype gradient_type, bool with_master) {
    return test::message_of([&] {
      zero::fused_update(
          zero::plain_sgd{.learning_rate = 1}, 1, 1.0,
          zero::update_piece<zero::plain_sgd>{.parameter = {parameter.data(), 1, parameter_type},
                                              .master = with_master ? master.data() : nullptr,
                                              .gradient = {gradient.data(), 1, gradient_type}});
    });
  }
};

}  // namespace

TEST_CASE("six pairs of types are updated, and every other one is refused by name") {
  constexpr std::array types{dtype::float32, dtype::float64, dtype::float16, dtype::bfloat16};
  for (dtype const parameter : types) {
    for (dtype const gradient : types) {
      bool const is_half = parameter == dtype::float16 || parameter == dtype::bfloat16;
      bool const works = parameter == gradient || (is_half && gradient == dtype::float32);
      std::string const expected =
          works ? ""
                : "fused_update: expected a gradient of " + std::string{name(parameter)} +
                      (is_half ? " or float32" : "") + ", actual " + std::string{name(gradient)};
      CHECK(element{}.update(parameter, gradient, is_half) == expected);
    }
  }
}

TEST_CASE("a master is for 16-bit parameters, and for those alone") {
  CHECK(element{}.update(dtype::bfloat16, dtype::float32, false) ==
        "fused_update: expected a master for bfloat16, actual none");
  CHECK(element{}.update(dtype::float16, dtype::float16, false) ==
        "fused_update: expected a master for float16, actual none");
  CHECK(element{}.update(dtype::float32, dtype::float32, true) ==
        "fused_update: expected no master for float32, actual one");
  CHECK(element{}.update(dtype::float64, dtype::float64, true) ==
        "fused_update: expected no master for float64, actual one");
}

TEST_CASE("a bad argument is refused before anything is changed") {
  std::array<float, 3> parameter{1, 2, 3};
  std::array<float, 3> const gradient{1, 1, 1};
  std::array<float, 3> m{};
  std::array<float, 3> v{};
  zero::update_piece<zero::adamw> const good{.parameter = std::span{parameter},
                                             .gradient = std::span{gradient},
                                             .states = {m.data(), v.data()}};
  auto const message = [](std::int64_t step, zero::update_piece<zero::adamw> const& piece) {
    return test::message_of([&] { zero::fused_update(zero::adamw{}, step, 1.0, piece); });
  };
  CHECK(message(0, good) == "fused_update: expected a step of at least 1, actual 0");
  CHECK(message(-7, good) == "fused_update: expected a step of at least 1, actual -7");
  auto bad = good;
  bad.gradient = std::span{gradient}.first(2);
  CHECK(message(1, bad) == "fused_update: expected a gradient of 3 elements, actual 2");
  bad = good;
  bad.states[1] = nullptr;
  CHECK(message(1, bad) == "fused_update: expected a state v, actual none");
  CHECK(parameter == std::array<float, 3>{1, 2, 3});
  CHECK(m == std::array<float, 3>{});
  CHECK(message(1, good) == "");
}

TEST_CASE("nothing is updated where there are no elements") {
  zero::update_piece<zero::adamw> piece{};
  CHECK_NOTHROW(zero::fused_update(zero::adamw{}, 1, 1.0, piece));
  piece.parameter = {nullptr, 0, dtype::bfloat16};
  piece.gradient = {nullptr, 0, dtype::bfloat16};
  CHECK_NOTHROW(zero::fused_update(zero::adamw{}, 1, 1.0, piece));
}

TEST_CASE("the multiplier is applied to the gradient in the accumulate type") {
  // A float16 gradient of 2^-24, the smallest, times 2^-10 is 0 in float16, but not in float.
  auto parameter = zero::float16(0.0F);
  float master = 0;
  auto const gradient = zero::float16::from_bits(1);
  zero::fused_update(zero::plain_sgd{.learning_rate = 1}, 1, 0x1p-10,
                     zero::update_piece<zero::plain_sgd>{.parameter = std::span{&parameter, 1},
                                                         .master = &master,
                                                         .gradient = std::span{&gradient, 1}});
  CHECK(master == -0x1p-34F);
  CHECK(parameter.bits() == 0x8000);  // which rounds to -0
}

TEST_CASE("a master holds what the parameter's type would round away") {
  // 256 steps of 2^-9 from 1: a bfloat16 alone would stay at 1, whose neighbour is 1 + 2^-7.
  std::array<zero::bfloat16, 11> parameter{};
  std::array<float, 11> master{};
  std::array<zero::bfloat16, 11> gradient{};
  for (std::size_t i = 0; i < parameter.size(); ++i) {
    parameter[i] = zero::bfloat16(1.0F);
    master[i] = 1.0F;
    gradient[i] = zero::bfloat16(-0x1p-9F);
  }
  for (std::int64_t step = 1; step <= 256; ++step) {
    zero::fused_update(zero::plain_sgd{.learning_rate = 1}, step, 1.0,
                       zero::update_piece<zero::plain_sgd>{.parameter = std::span{parameter},
                                                           .master = master.data(),
                                                           .gradient = std::span{gradient}});
    if (step == 2) {  // 1 + 2^-8 is a tie: to even, which is 1
      CHECK(static_cast<float>(parameter[0]) == 1.0F);
    }
    if (step == 3) {
      CHECK(static_cast<float>(parameter[0]) == 1.0F + 0x1p-7F);
    }
  }
  for (std::size_t i = 0; i < parameter.size(); ++i) {
    CHECK(master[i] == 1.5F);
    CHECK(static_cast<float>(parameter[i]) == 1.5F);
  }
}

TEST_CASE_TEMPLATE("NaN and infinity stay in their element", T, float, double, zero::bfloat16,
                   zero::float16) {
  using real = zero::accumulate_type<T>;
  constexpr std::size_t size = 23;
  constexpr real infinity = std::numeric_limits<real>::infinity();
  std::array<T, size> parameter{};
  std::array<real, size> master{};
  std::array<T, size> gradient{};
  auto const make = [](float value) { return T(value); };
  for (std::size_t i = 0; i < size; ++i) {
    parameter[i] = make(1.0F);
    master[i] = 1;
    gradient[i] = make(1.0F);
  }
  gradient[2] = make(std::numeric_limits<float>::quiet_NaN());
  gradient[9] = make(std::numeric_limits<float>::infinity());
  gradient[21] = make(-std::numeric_limits<float>::infinity());
  gradient[22] = make(-std::numeric_limits<float>::quiet_NaN());
  zero::fused_update(
      zero::plain_sgd{.learning_rate = 0.5}, 1, 1.0,
      zero::update_piece<zero::plain_sgd>{.parameter = std::span{parameter},
                                          .master = sizeof(T) == 2 ? master.data() : nullptr,
                                          .gradient = std::span{gradient}});
  for (std::size_t i = 0; i < size; ++i) {
    CAPTURE(i);
    auto const value = static_cast<real>(parameter[i]);
    if (i == 2 || i == 22) {
      CHECK(std::isnan(value));
    } else if (i == 9 || i == 21) {
      CHECK(value == (i == 9 ? -infinity : infinity));
    } else {
      CHECK(value == real(0.5));
    }
  }
}
