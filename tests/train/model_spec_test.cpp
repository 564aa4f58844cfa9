// SPDX-License-Identifier: MIT
#include <doctest/doctest.h>

#include <zero/core/bfloat16.hpp>
#include <zero/core/float16.hpp>
#include <zero/optim/adamw.hpp>
#include <zero/optim/sgd.hpp>
#include <zero/train/model_spec.hpp>
#include <zero/train/sharded_model.hpp>

#include <support/mock_model.hpp>
#include <support/thrown.hpp>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

namespace {

using unit = std::vector<zero::any_parameter>;
using units = std::vector<unit>;

struct choices {
  zero::stage stage = zero::stage0{};
  zero::accumulation policy = zero::local_accumulate{};
  zero::options options = {};
  zero::sgd optimizer = {.learning_rate = 1};
  std::uint64_t ranks = 2;
  std::uint64_t (*scratch)(zero::reduction_shape const&) = [](zero::reduction_shape const&) {
    return std::uint64_t{0};
  };
};

zero::detail::model_spec make(units const& of, choices const& chosen) {
  return {std::type_identity<zero::host>{},
          of,
          chosen.stage,
          chosen.optimizer,
          chosen.policy,
          chosen.options,
          chosen.ranks,
          0,
          chosen.scratch};
}

/// What a model of `of` is refused with; empty where it isn't.
std::string refusal(units const& of, choices const& chosen = {}) {
  test::thrown const caught = test::what_throws([&] { static_cast<void>(make(of, chosen)); });
  CHECK((caught.kind == test::kind::usage || caught.kind == test::kind::nothing));
  return caught.message;
}

bool says(std::string const& message, std::initializer_list<std::string_view> parts) {
  return test::thrown{test::kind::usage, message}.says(parts);
}

auto const zeros = [](std::span<float> out, std::size_t) {
  for (float& each : out) {
    each = 0;
  }
};

}  // namespace

TEST_CASE("what a stage shards must be able to give up its storage; the message names the cure") {
  std::vector<float> value(4);
  std::vector<float> gradient(4);
  test::tensor rebindable{4};
  units const stays{{zero::parameter("w", value, gradient)}};
  units const value_stays{{zero::parameter("w", value, rebindable)}};
  units const gradient_stays{{zero::parameter("w", rebindable, gradient)}};
  for (zero::accumulation const policy : {zero::accumulation(zero::local_accumulate{}),
                                          zero::accumulation(zero::reduce_per_microbatch{})}) {
    CHECK(refusal(stays, {.stage = zero::stage0{}, .policy = policy}).empty());
    CHECK(refusal(stays, {.stage = zero::stage1{}, .policy = policy}).empty());
    CHECK(refusal(value_stays, {.stage = zero::stage2{}, .policy = policy}).empty());
    for (auto const& [model, stage, what] :
         {std::tuple{gradient_stays, zero::stage(zero::stage2{}), "gradient"},
          std::tuple{gradient_stays, zero::stage(zero::stage3{}), "gradient"},
          std::tuple{value_stays, zero::stage(zero::stage3{}), "value"}}) {
      CHECK(says(
          refusal(model, {.stage = stage, .policy = policy}),
          {"parameter 'w'", "shards", what, "expected", "add rebind to its zero::tensor_traits"}));
    }
  }
}

TEST_CASE("a parameter has a value tensor or an initialiser") {
  zero::any_parameter nothing;
  nothing.name = "x";
  CHECK(refusal({{nothing}}) ==
        "parameter 'x': expected a value tensor or an initialiser, actual neither");
  CHECK(refusal({{zero::parameter<float>("x", {3}, zeros)}}).empty());
}

TEST_CASE(
    "a gradient has as many elements as its value, and a type that is reduced to the value's") {
  test::tensor value{4};
  test::tensor wrong{3};
  CHECK(refusal({{zero::parameter("w", value, wrong)}}) ==
        "parameter 'w': expected a gradient of 4 elements, actual 3");
  std::vector<float> wrong_vector(5);
  CHECK(refusal({{zero::parameter("w", value, wrong_vector)}}) ==
        "parameter 'w': expected a gradient of 4 elements, actual 5");
  test::owning_tensor<double> wide{4};
  CHECK(refusal({{zero::parameter("w", value, wide)}}) ==
        "parameter 'w': expected a gradient of float32, actual float64");
  test::tensor none;
  CHECK(refusal({{zero::parameter("w", value, none)}}).empty());

  test::owning_tensor<zero::bfloat16> half{4};
  CHECK(refusal({{zero::parameter("w", half, none)}}, {.options = {.precision = zero::bf16}})
            .empty());
  test::owning_tensor<zero::float16> other_half{4};
  CHECK(says(
      refusal({{zero::parameter("w", half, other_half)}}, {.options = {.precision = zero::bf16}}),
      {"parameter 'w'", "expected a gradient of bfloat16 or float32", "actual float16"}));
}

TEST_CASE("a parameter of a type that the precision doesn't name is refused") {
  test::owning_tensor<zero::bfloat16> half{4};
  CHECK(refusal({{zero::parameter("w", half)}}) ==
        "parameter 'w': expected float32 or wider, as the precision says, actual bfloat16");
  test::owning_tensor<zero::float16> other_half{4};
  CHECK(refusal({{zero::parameter("w", other_half)}}, {.options = {.precision = zero::bf16}}) ==
        "parameter 'w': expected bfloat16 or wider, as the precision says, actual float16");
}

TEST_CASE("a shape says how many elements a tensor that stays has") {
  std::vector<float> value(5);
  test::tensor gradient;
  CHECK(refusal({{zero::parameter("w", value, gradient, {2, 3}, zeros)}}) ==
        "parameter 'w': expected a value of 6 elements, actual 5");
  CHECK(refusal({{zero::parameter("w", value, gradient, {5, 1}, zeros)}}).empty());
}

TEST_CASE("sizes whose bytes don't fit 64 bits are refused, whatever makes them so large") {
  auto const of = [](zero::shape const& shape) {
    return units{{zero::parameter<float>("w", shape, zeros)}};
  };
  std::size_t const huge = std::size_t{1} << 32U;
  CHECK(refusal(of({huge, huge, 2})) ==
        "parameter 'w': expected a shape of fewer than 2^64 elements, actual [4294967296, "
        "4294967296, 2]");
  CHECK(
      says(refusal(of({huge, huge / 4})), {"layout", "expected fewer than 2^56 elements", "'w'"}));
  CHECK(says(refusal(of({3}), {.options = {.alignment = std::uint64_t{1} << 61U}, .ranks = 1}),
             {"layout", "expected fewer than 2^56 elements", "alignment"}));
  CHECK(says(refusal(of({3}), {.options = {.alignment = std::uint64_t{1} << 63U}}),
             {"fits 64 bits"}));
  CHECK(
      says(refusal(of({3}), {.options = {.alignment = std::numeric_limits<std::uint64_t>::max()}}),
           {"fits 64 bits"}));
  units many;
  for (int i = 0; i < 200; ++i) {
    many.push_back({zero::parameter<float>("w" + std::to_string(i), {1}, zeros)});
  }
  CHECK(says(refusal(many, {.options = {.bucket_bytes = 0, .alignment = std::uint64_t{1} << 54U}}),
             {"memory_map", "fits 64 bits"}));
  CHECK(refusal(of({huge, huge / 1024})).empty());
}

TEST_CASE("names are declared once, and tied to one that another unit declares") {
  std::array<test::tensor, 3> t{test::tensor{1}, test::tensor{2}, test::tensor{3}};
  CHECK(says(refusal({{zero::parameter("w", t[0])}, {zero::parameter("w", t[1])}}),
             {"expected one parameter named 'w'", "actual two", "tied"}));
  CHECK(says(refusal({{zero::parameter("w", t[0])}, {zero::tied("v")}}),
             {"'v'", "unit 1", "actual none"}));
  CHECK(says(refusal({{zero::parameter("w", t[0]), zero::tied("w")}}),
             {"expected unit 0 to tie", "'w', which it declares itself"}));
  CHECK(
      refusal({{zero::tied("w")}, {zero::parameter("w", t[0])}, {zero::tied("w"), zero::tied("w")}})
          .empty());
}

TEST_CASE(
    "two parameters that share a tensor or its elements are refused: case 15 with two names") {
  test::tensor t{4};
  test::tensor g;
  test::tensor h;
  std::initializer_list<std::string_view> const cure{"parameter 'out'", "of its own", "'in'",
                                                     "zero::tied"};
  CHECK(says(refusal({{zero::parameter("in", t, g)}, {zero::parameter("out", t, h)}}), cure));
  CHECK(says(refusal({{zero::parameter("in", t, g)}, {zero::parameter("out", h, g)}}), cure));

  std::vector<float> elements(10);
  std::span<float> const first{elements.data(), 6};
  std::span<float> const second{elements.data() + 5, 5};
  std::span<float> const third{elements.data() + 6, 4};
  test::tensor in;
  test::tensor out;
  in.view = first;
  out.view = second;
  CHECK(says(refusal({{zero::parameter("in", in)}, {zero::parameter("out", out)}}), cure));
  CHECK(says(refusal({{zero::parameter("out", out)}, {zero::parameter("in", in)}}), cure));
  out.view = third;
  CHECK(refusal({{zero::parameter("in", in)}, {zero::parameter("out", out)}}).empty());

  test::tensor a;
  test::tensor b;
  CHECK(says(
      refusal({{zero::parameter("a", a, g, {2}, zeros), zero::parameter("b", a, h, {2}, zeros)}}),
      {"parameter 'b'", "the value of 'a'"}));
  CHECK(refusal({{zero::parameter("a", a, g, {2}, zeros), zero::parameter("b", b, h, {2}, zeros)}})
            .empty());
}

TEST_CASE("hyperparameters are checked before anything is built") {
  test::tensor t{4};
  units const model{{zero::parameter("w", t)}};
  CHECK(says(refusal(model, {.optimizer = {.learning_rate = -1}}),
             {"sgd.learning_rate", "expected", "actual -1"}));
  CHECK(says(refusal(model, {.optimizer = {.momentum = std::nan("")}}),
             {"sgd.momentum", "actual nan"}));
  CHECK(refusal(model, {.optimizer = {.learning_rate = 0}}).empty());
}

TEST_CASE("scratch is what the largest reduction of a trainable segment asks for") {
  auto const halves = [](std::span<zero::bfloat16>, std::size_t) {};
  units const model{{zero::parameter<zero::bfloat16>("w", {41}, halves)},
                    {zero::parameter<float>("norm", {10}, zeros),
                     zero::parameter<float>("table", {1000}, zeros).frozen()}};
  choices chosen{.options = {.bucket_bytes = 0, .alignment = 1, .precision = zero::bf16},
                 .scratch = [](zero::reduction_shape const& of) -> std::uint64_t {
                   return 1000 * of.slice + 100 * zero::size_bytes(of.input) +
                          10 * zero::size_bytes(of.output) + (of.how == zero::combine::add ? 1 : 0);
                 }};
  // A slice of 21 elements, from 2 bytes to 4.
  CHECK(make(model, chosen).planned().bytes[zero::category::staging] == 21'240);
  chosen.policy = zero::reduce_per_microbatch{};
  CHECK(make(model, chosen).planned().bytes[zero::category::staging] == 21'241);
  chosen.scratch = choices{}.scratch;
  CHECK(make(model, chosen).planned().bytes[zero::category::staging] == 0);
}

TEST_CASE("no ranks, or a rank outside them, has no plan") {
  test::tensor t{4};
  units const model{{zero::parameter("w", t)}};
  auto const plan_of = [&](std::uint64_t ranks, std::uint64_t rank) {
    return test::what_throws([&] {
      static_cast<void>(zero::make_plan(ranks, rank, model, zero::stage3{}, zero::sgd{},
                                        zero::local_accumulate{}));
    });
  };
  CHECK(plan_of(0, 0).message == "make_plan: expected a rank below 0, actual 0");
  CHECK(plan_of(4, 4).message == "make_plan: expected a rank below 4, actual 4");
  CHECK(plan_of(4, 3).kind == test::kind::nothing);
  CHECK(refusal(model, {.ranks = 0}) == "layout: expected at least 1 rank, actual 0");
}

TEST_CASE("whatever ranks must agree on is in the text that they compare") {
  std::array<test::tensor, 3> t{test::tensor{6}, test::tensor{6}, test::tensor{4}};
  std::array<test::tensor, 3> g;
  test::owning_tensor<double> wide{6};
  auto const model = [&] {
    return units{{zero::parameter("a", t[0], g[0])}, {zero::parameter("b", t[2], g[2])}};
  };
  auto const text = [](units const& of, choices const& chosen) {
    return make(of, chosen).agreement();
  };
  std::string const usual = text(model(), {});
  CHECK(text(model(), {}) == usual);

  std::vector<std::string> others;
  auto const differs = [&](units const& of, choices const& chosen) {
    others.push_back(text(of, chosen));
  };
  differs({{zero::parameter("a", t[0], g[0])}}, {});
  differs({{zero::parameter("a", t[0], g[0]), zero::parameter("b", t[2], g[2])}}, {});
  differs({{zero::parameter("c", t[0], g[0])}, {zero::parameter("b", t[2], g[2])}}, {});
  differs({{zero::parameter("a", t[2], g[2])}, {zero::parameter("b", t[0], g[0])}}, {});
  differs({{zero::parameter("b", t[2], g[2])}, {zero::parameter("a", t[0], g[0])}}, {});
  differs({{zero::parameter("a", wide)}, {zero::parameter("b", t[2], g[2])}}, {});
  differs({{zero::parameter("a", t[0], g[0]).frozen()}, {zero::parameter("b", t[2], g[2])}}, {});
  differs({{zero::parameter("a", t[0], g[0])}, {zero::parameter("b", t[2], g[2]), zero::tied("a")}},
          {});
  differs({{zero::parameter("a", t[0], g[0], {6}, zeros)}, {zero::parameter("b", t[2], g[2])}}, {});
  differs({{zero::parameter("a", t[0], g[0], {2, 3}, zeros)}, {zero::parameter("b", t[2], g[2])}},
          {});
  differs({{zero::parameter("a", t[0], g[0], {3, 2}, zeros)}, {zero::parameter("b", t[2], g[2])}},
          {});
  differs(model(), {.stage = zero::stage1{}});
  differs(model(), {.stage = zero::stage1{zero::gradient_collective::all_reduce}});
  differs(model(), {.stage = zero::stage2{}});
  differs(model(), {.stage = zero::stage3{}});
  differs(model(), {.stage = zero::stage3{}, .options = {.overlap = false}});
  differs(model(), {.stage = zero::stage3{.prefetch = 2}});
  differs(model(), {.stage = zero::stage3{.keep_after_forward = true}});
  differs(model(), {.stage = zero::stage3{.keep_last = true}});
  differs(model(), {.stage = zero::stage3{.max_live_units = 2}});
  differs(model(), {.policy = zero::reduce_per_microbatch{}});
  differs(model(), {.policy = zero::reduce_per_microbatch{.open_buckets = 3}});
  differs(model(), {.options = {.clip_norm = 1}});
  differs(model(), {.options = {.clip_norm = std::nextafter(1.0, 2.0)}});
  differs(model(), {.options = {.bucket_bytes = 16}});
  differs(model(), {.options = {.alignment = 2}});
  differs(model(), {.options = {.start = zero::start::require_equal}});
  differs(model(), {.options = {.memory = {.registration = zero::memory_registration::buffer}}});
  differs(model(), {.options = {.memory = {.registration = zero::memory_registration::window}}});
  differs(model(), {.optimizer = {.learning_rate = 0.5}});
  differs(model(), {.optimizer = {.learning_rate = 1, .momentum = 0.5}});
  differs(model(), {.optimizer = {.learning_rate = 1, .momentum = 0.5, .nesterov = true}});
  differs(model(), {.optimizer = {.learning_rate = 1, .weight_decay = 1e-9}});
  others.push_back(usual);
  for (std::size_t i = 0; i < others.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      CHECK_MESSAGE(others[i] != others[j], "texts ", i, " and ", j);
    }
  }
}

TEST_CASE(
    "hyperparameters differ in their fingerprint, also where a learning rate of 0 hides them") {
  using zero::detail::fingerprint;
  CHECK(fingerprint(zero::adamw{}) == fingerprint(zero::adamw{}));
  for (zero::adamw const& other :
       {zero::adamw{.learning_rate = 1e-4}, zero::adamw{.beta1 = 0.8}, zero::adamw{.beta2 = 0.99},
        zero::adamw{.epsilon = 1e-7}, zero::adamw{.weight_decay = 0.5}}) {
    CHECK(fingerprint(other) != fingerprint(zero::adamw{}));
  }
  CHECK(fingerprint(zero::sgd{.learning_rate = 0, .momentum = 0.1}) !=
        fingerprint(zero::sgd{.learning_rate = 0, .momentum = 0.2}));
}
