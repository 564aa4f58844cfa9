// SPDX-License-Identifier: MIT
#include <zero/optim/concept.hpp>

#include <doctest/doctest.h>
#include <optim/conformance.hpp>

#include <zero/optim/fused_update.hpp>
#include <zero/optim/hyperparameter.hpp>
#include <zero/optim/sharded_state.hpp>

#include <array>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace {

// A user's own optimizer.
// [adagrad]
struct adagrad {
  double learning_rate = 0.01;

  static constexpr std::array<std::string_view, 1> states{"sum"};
  void validate() const { zero::check_not_negative("adagrad", "learning_rate", learning_rate); }

  template <class Value>
  Value at(std::int64_t /*step*/) const {
    return Value(learning_rate);
  }
  template <class Value>
  static void update(Value rate, Value& parameter, Value gradient, std::array<Value, 1>& state) {
    state[0] = state[0] + gradient * gradient;
    parameter = parameter - rate * gradient / zero::sqrt(state[0]);
  }
};
// [adagrad]

static_assert(zero::elementwise_optimizer<adagrad>);

// Each of these differs from adagrad in one point, and is no optimizer.
struct with_constructor : adagrad {
  explicit with_constructor(double rate) : adagrad{rate} {}
};
struct with_text : adagrad {
  std::string_view name;
  std::string owned;
};
struct without_states {
  void validate() const;
  template <class Value>
  Value at(std::int64_t) const;
  template <class Value>
  static void update(Value, Value&, Value, std::array<Value, 0>&);
};
struct with_states_of_another_type : adagrad {
  static constexpr std::array<char const*, 1> states{"sum"};
};
struct without_validate {
  static constexpr std::array<std::string_view, 0> states{};
  template <class Value>
  Value at(std::int64_t) const;
  template <class Value>
  static void update(Value, Value&, Value, std::array<Value, 0>&);
};
struct with_a_validate_that_answers : adagrad {
  bool validate() const;
};
struct with_a_validate_that_changes : adagrad {
  void validate();
};
struct without_at {
  static constexpr std::array<std::string_view, 0> states{};
  void validate() const;
  template <class Value>
  static void update(Value, Value&, Value, std::array<Value, 0>&);
};
struct with_another_number_of_states : adagrad {
  static constexpr std::array<std::string_view, 2> states{"sum", "other"};
};
struct for_floats_only : adagrad {
  float at(std::int64_t) const;
  static void update(float, float&, float, std::array<float, 1>&);
};
struct with_an_update_that_returns {
  static constexpr std::array<std::string_view, 0> states{};
  void validate() const;
  template <class Value>
  Value at(std::int64_t) const;
  template <class Value>
  static Value update(Value, Value, Value, std::array<Value, 0>&);
};
struct with_an_update_of_an_object {
  static constexpr std::array<std::string_view, 0> states{};
  void validate() const;
  template <class Value>
  Value at(std::int64_t) const;
  template <class Value>
  void update(Value, Value&, Value, std::array<Value, 0>&) const;
};
struct with_constants_that_own_memory {
  static constexpr std::array<std::string_view, 0> states{};
  void validate() const;
  template <class Value>
  std::vector<Value> at(std::int64_t) const;
  template <class Value>
  static void update(std::vector<Value> const&, Value&, Value, std::array<Value, 0>&);
};

static_assert(!zero::elementwise_optimizer<int>);
static_assert(!zero::elementwise_optimizer<with_constructor>);
static_assert(!zero::elementwise_optimizer<with_text>);
static_assert(!zero::elementwise_optimizer<without_states>);
static_assert(!zero::elementwise_optimizer<with_states_of_another_type>);
static_assert(!zero::elementwise_optimizer<without_validate>);
static_assert(!zero::elementwise_optimizer<with_a_validate_that_answers>);
static_assert(!zero::elementwise_optimizer<with_a_validate_that_changes>);
static_assert(!zero::elementwise_optimizer<without_at>);
static_assert(!zero::elementwise_optimizer<with_another_number_of_states>);
static_assert(!zero::elementwise_optimizer<for_floats_only>);
static_assert(!zero::elementwise_optimizer<with_an_update_that_returns>);
static_assert(!zero::elementwise_optimizer<with_an_update_of_an_object>);
static_assert(!zero::elementwise_optimizer<with_constants_that_own_memory>);

}  // namespace

TEST_CASE("a user's own optimizer does what ours do") {
  optimizer_conformance::check(adagrad{.learning_rate = 0.1});
}

TEST_CASE("a user's own optimizer gives the values of its formula") {
  // With gradients 3, 4 the sum is 9, then 25: steps of 0.5 * 3/3, then 0.5 * 4/5.
  std::array<double, 2> shard{1.0, -1.0};
  std::array<double, 2> gradient{3.0, -3.0};
  zero::sharded_optimizer_state state{adagrad{.learning_rate = 0.5}, std::span{shard}};
  state.step(std::span{shard}, std::span{gradient});
  CHECK(shard == std::array{0.5, -0.5});
  gradient = {4.0, -4.0};
  state.step(std::span{shard}, std::span{gradient});
  CHECK(shard[0] == doctest::Approx(0.1).epsilon(1e-15));
  CHECK(shard[1] == doctest::Approx(-0.1).epsilon(1e-15));
  CHECK(state.state("sum").as<double>()[0] == 25.0);
}

TEST_CASE("the square root of every type that an update gets is correctly rounded") {
  CHECK(zero::sqrt(2.0F) == std::sqrt(2.0F));
  CHECK(zero::sqrt(2.0) == std::sqrt(2.0));
  auto const floats = zero::sqrt(zero::detail::pack<float>(2.0F));
  CHECK(floats[0] == 0x1.6a09e6p+0F);  // 1.41421356237309504880...
  CHECK(floats[3] == 0x1.6a09e6p+0F);
  auto const doubles = zero::sqrt(zero::detail::pack<double>(2.0));
  CHECK(doubles[0] == 0x1.6a09e667f3bcdp+0);
  CHECK(doubles[1] == 0x1.6a09e667f3bcdp+0);
  static_assert(
      !std::is_invocable_v<decltype([](auto x) -> decltype(zero::sqrt(x)) { return x; }), int>);
}
