// SPDX-License-Identifier: MIT
#include <zero/optim/sharded_state.hpp>

#include <doctest/doctest.h>
#include <support/thrown.hpp>

#include <zero/core/dtype.hpp>
#include <zero/core/error.hpp>
#include <zero/core/partition.hpp>
#include <zero/optim/adam.hpp>
#include <zero/optim/adamw.hpp>
#include <zero/optim/sgd.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace {

bool all_zero(std::span<float const> values) {
  return std::all_of(values.begin(), values.end(), [](float value) { return value == 0; });
}

}  // namespace

TEST_CASE("states start at zero, and nothing changes before the first step") {
  for (int round = 0; round < 20; ++round) {  // from the second one on in memory that isn't zero
    std::vector<float> parameter(700, 5.0F);
    zero::sharded_optimizer_state state{zero::adam{}, std::span{parameter}};
    CHECK(state.steps() == 0);
    CHECK(state.state("m").size() == 700);
    CHECK(all_zero(state.state("m").as<float>()));
    CHECK(all_zero(state.state("v").as<float>()));
    CHECK(state.master().empty());
    CHECK(parameter == std::vector<float>(700, 5.0F));
    std::vector<float> const gradient(700, 1.0F);
    state.step(std::span{parameter}, std::span{gradient});
    CHECK_FALSE(all_zero(state.state("m").as<float>()));
  }
}

TEST_CASE("the first step has number 1") {
  std::vector<float> parameter{0};
  std::vector<float> const gradient{1};
  zero::sharded_optimizer_state state{zero::adam{.learning_rate = 0.1, .weight_decay = 0.01},
                                      std::span{parameter}};
  state.step(std::span{parameter}, std::span{gradient});
  CHECK(state.steps() == 1);
  CHECK(parameter[0] == doctest::Approx(-0.1).epsilon(1e-6));  // not 0.0744
}

TEST_CASE("shards of a vector on 1, 2, 3, 4 and 8 ranks are updated to the bits of the whole") {
  constexpr std::size_t size = 6;  // on 4 ranks 2, 2, 2, 0, on 8 ranks 1, 1, 1, 1, 1, 1, 0, 0
  std::vector<float> whole(size);
  std::vector<float> gradient(size);
  for (std::size_t i = 0; i < size; ++i) {
    whole[i] = static_cast<float>(i);
    gradient[i] = 0.3F - static_cast<float>(i) / 7;
  }
  auto const start = whole;
  zero::sharded_optimizer_state reference{zero::adamw{}, std::span{whole}};
  for (int step = 0; step < 3; ++step) {
    reference.step(std::span{whole}, std::span{gradient}, 0.5);
  }
  for (std::size_t const ranks : {1U, 2U, 3U, 4U, 8U}) {
    CAPTURE(ranks);
    auto parameter = start;
    zero::partition const cut{size, ranks};
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      std::size_t const first = std::min<std::size_t>(cut.offset(rank), size);
      auto const shard = std::span{parameter}.subspan(first, cut.size(rank));
      zero::sharded_optimizer_state state{zero::adamw{}, shard};
      for (int step = 0; step < 3; ++step) {
        state.step(shard, std::span{gradient}.subspan(first, cut.size(rank)), 0.5);
      }
      CHECK(state.steps() == 3);
      auto const m = state.state("m").as<float>();
      CHECK(std::equal(
          m.begin(), m.end(),
          reference.state("m").as<float>().begin() + static_cast<std::ptrdiff_t>(first)));
    }
    CHECK(parameter == whole);
  }
}

TEST_CASE("16-bit parameters have a master, which starts with their values") {
  std::vector<zero::bfloat16> parameter(5, zero::bfloat16(1.5F));
  std::vector<float> const gradient(5, 0x1p-12F);
  zero::sharded_optimizer_state state{zero::plain_sgd{.learning_rate = 1}, std::span{parameter}};
  REQUIRE(state.master().size() == 5);
  CHECK(state.master().as<float>()[4] == 1.5F);
  state.step(std::span{parameter}, std::span{gradient});
  CHECK(state.master().as<float>()[4] == 1.5F - 0x1p-12F);
  CHECK(static_cast<float>(parameter[4]) == 1.5F);
}

TEST_CASE("the bytes are those of the states and the master") {
  std::vector<float> const single(10);
  std::vector<double> const wide(10);
  std::vector<zero::float16> const half(10);
  CHECK(zero::sharded_optimizer_state{zero::adamw{}, std::span{single}}.bytes() == 10 * 8);
  CHECK(zero::sharded_optimizer_state{zero::adamw{}, std::span{wide}}.bytes() == 10 * 16);
  CHECK(zero::sharded_optimizer_state{zero::adamw{}, std::span{half}}.bytes() == 10 * 12);
  CHECK(zero::sharded_optimizer_state{zero::sgd{}, std::span{single}}.bytes() == 10 * 4);
  CHECK(zero::sharded_optimizer_state{zero::plain_sgd{}, std::span{single}}.bytes() == 0);
  CHECK(zero::sharded_optimizer_state{zero::plain_sgd{}, std::span{half}}.bytes() == 10 * 4);
  CHECK(zero::sharded_optimizer_state{zero::adamw{}, std::span{single}.first(0)}.bytes() == 0);
}

TEST_CASE("a moved state goes on") {
  std::vector<float> parameter{1};
  std::vector<float> const gradient{1};
  zero::sharded_optimizer_state first{zero::sgd{.learning_rate = 1, .momentum = 0.5},
                                      std::span{parameter}};
  first.step(std::span{parameter}, std::span{gradient});
  auto second = std::move(first);
  second.step(std::span{parameter}, std::span{gradient});
  CHECK(second.steps() == 2);
  CHECK(parameter[0] == -1.5F);  // 1 - 1 - (0.5 + 1)
}

TEST_CASE("hyperparameters can change between steps") {
  std::vector<float> parameter{1};
  std::vector<float> const gradient{1};
  zero::sharded_optimizer_state state{zero::plain_sgd{.learning_rate = 0.5}, std::span{parameter}};
  state.step(std::span{parameter}, std::span{gradient});
  state.optimizer().learning_rate = 0.25;
  state.step(std::span{parameter}, std::span{gradient});
  CHECK(parameter[0] == 0.25F);
  state.optimizer().learning_rate = std::numeric_limits<double>::quiet_NaN();
  CHECK(test::message_of([&] { state.step(std::span{parameter}, std::span{gradient}); }) ==
        "plain_sgd.learning_rate: expected a finite number of at least 0, actual nan");
  CHECK(parameter[0] == 0.25F);
  CHECK(state.steps() == 2);
}

TEST_CASE("what doesn't fit the shard is refused, and changes nothing") {
  std::vector<float> parameter(3, 1.0F);
  std::vector<float> const gradient(3, 1.0F);
  std::vector<double> wide(3, 1.0);
  zero::sharded_optimizer_state state{zero::sgd{.learning_rate = 1}, std::span{parameter}};
  CHECK(test::message_of([&] { state.step(std::span{parameter}.first(2), std::span{gradient}); }) ==
        "sharded_optimizer_state::step: expected 3 elements of float32, actual 2 of float32");
  CHECK(test::message_of([&] { state.step(std::span{wide}, std::span{gradient}); }) ==
        "sharded_optimizer_state::step: expected 3 elements of float32, actual 3 of float64");
  CHECK(test::message_of([&] { state.step(std::span{parameter}, std::span{gradient}.first(2)); }) ==
        "fused_update: expected a gradient of 3 elements, actual 2");
  CHECK(test::message_of([&] { state.step(std::span{parameter}, std::span{wide}); }) ==
        "fused_update: expected a gradient of float32, actual float64");
  CHECK(test::message_of([&] { static_cast<void>(state.state("v")); }) ==
        "sharded_optimizer_state::state: expected one of {momentum}, actual v");
  CHECK(test::message_of([&] {
          zero::sharded_optimizer_state{zero::sgd{.learning_rate = -1}, std::span{parameter}};
        }) == "sgd.learning_rate: expected a finite number of at least 0, actual -1");
  CHECK(parameter == std::vector<float>(3, 1.0F));
  CHECK(state.steps() == 0);
}
