// SPDX-License-Identifier: MIT
#include <doctest/doctest.h>
#include <support/counting_allocator.hpp>
#include <support/formula.hpp>
#include <support/model_cases.hpp>
#include <support/owning_tensor.hpp>
#include <zero/core/bfloat16.hpp>
#include <zero/optim/adamw.hpp>
#include <zero/optim/sgd.hpp>
#include <zero/train/sharded_model.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace {

using zero::category;

constexpr std::uint64_t world_sizes[] = {1, 2, 3, 4, 8};

zero::options options_of(test::model_case const& model, test::shape_case const& shape) {
  zero::options out;
  out.precision = model.precision;
  out.bucket_bytes = shape.bucket_bytes;
  out.alignment = shape.alignment;
  return out;
}

/// Every rank's plan against the formula, over everything that a plan depends on.
void compare_plans(std::vector<test::model_case> const& models,
                   std::vector<test::run_case> const& runs) {
  for (test::model_case const& each : models) {
    test::declared_model const model{each};
    for (test::run_case const& run : runs) {
      for (test::shape_case const& shape : test::shape_cases()) {
        for (std::uint64_t const ranks : world_sizes) {
          formula::settings const settings = test::settings_of(run, shape, ranks);
          formula::expectation const expected{model.formula(), settings};
          for (std::uint64_t rank = 0; rank < ranks; ++rank) {
            zero::plan const plan =
                zero::make_plan(ranks, rank, model.units(), run.stage, zero::adamw{}, run.policy,
                                options_of(each, shape));
            formula::memory const memory = expected.of_rank(rank);
            CHECK_MESSAGE(test::in_words(plan.bytes, plan.bind_peak_bytes) == memory,
                          test::title(each, run, settings, rank));
            CHECK_MESSAGE(plan.bytes.peak() == memory.peak(),
                          test::title(each, run, settings, rank));
            CHECK_MESSAGE(plan.bytes.arena() == memory.arena(),
                          test::title(each, run, settings, rank));
            for (std::size_t const microbatches : {1U, 2U, 3U}) {
              CHECK_MESSAGE(
                  plan.sent_bytes_per_step(microbatches) == expected.of_step(microbatches).total(),
                  test::title(each, run, settings, rank), ", ", microbatches, " micro-batches");
            }
          }
        }
      }
    }
  }
}

std::vector<test::run_case> runs_below(int stage) {
  std::vector<test::run_case> out;
  for (test::run_case const& each : test::run_cases()) {
    if (each.formula.stage < stage) {
      out.push_back(each);
    }
  }
  return out;
}

zero::options const one_element{.bucket_bytes = {}, .alignment = 1};

/// Units of `sizes` elements each, without tensors.
template <class T>
auto bare_units(std::vector<std::size_t> const& sizes) {
  std::vector<std::vector<zero::typed_parameter<zero::no_tensor, zero::no_tensor>>> units;
  for (std::size_t const n : sizes) {
    units.push_back({zero::parameter<T>("p" + std::to_string(units.size()), {n},
                                        [](std::span<T> /*out*/, std::size_t /*first*/) {})});
  }
  return units;
}

}  // namespace

TEST_CASE(
    "plans are the formula in every category, for every stage, policy, precision, cut and world "
    "size") {
  compare_plans(test::model_cases(), test::run_cases());
}

TEST_CASE(
    "plans count what stays in tensors that can't be rebound as the engine's, and one staging "
    "bucket") {
  compare_plans(test::staying_cases(true), runs_below(2));
  compare_plans(test::staying_cases(false), runs_below(3));
}

TEST_CASE("a plan by hand: 10 and 6 floats over 4 ranks") {
  // Alignment 16: the first segment has slices of ceil(10 / 4) = 3, padded to 16; so has the
  // second.
  auto const units = bare_units<float>({10, 6});
  zero::options const apart{.bucket_bytes = 0};
  auto const plan_of = [&](zero::stage at, zero::accumulation policy, std::uint64_t rank) {
    return zero::make_plan(4, rank, units, at, zero::adamw{}, policy, apart);
  };

  zero::plan const whole = plan_of(zero::stage0{}, zero::local_accumulate{}, 0);
  CHECK(whole.bytes[category::parameters] == 16 * 4);
  CHECK(whole.bytes[category::gradients] == 16 * 4);
  CHECK(whole.bytes[category::optimizer_state] == 2 * 16 * 4);
  // What a step keeps beside tensors, in units of 16 bytes: 96; 5 hyperparameters; 7 vectors for
  // each parameter; 2 counts; 2 + 2 flags; a message of 40 bytes and 2 flags, and a sum, of this
  // rank and of all 4.
  constexpr std::uint64_t beside = 96 + 48 + 2 * 7 * 16 + 16 + 16 + 16 + 5 * (48 + 16);
  static_assert(beside == 736);  // and 32 to the next multiple of 64
  // 4 things, 2 segments of 64 elements
  CHECK(whole.bytes.padding == 4 * (2 * 64 * 4 - 16 * 4) + 768);
  CHECK(whole.bytes.peak() == 4 * 2 * 64 * 4 + 768);
  CHECK(whole.bind_peak_bytes == whole.bytes.peak());
  CHECK(whole.sent_bytes_per_step() == 2 * 3 * 2 * 16 * 4);  // (r + g) to 3 peers, 2 slices of 16

  // All real elements are in the first slice; the other ranks have shards of padding.
  zero::plan const first = plan_of(zero::stage3{.prefetch = 0}, zero::reduce_per_microbatch{}, 0);
  CHECK(first.bytes[category::parameters] == 16 * 4);
  CHECK(first.bytes[category::gradients] == 16 * 4);
  CHECK(first.bytes[category::optimizer_state] == 2 * 16 * 4);
  CHECK(first.bytes[category::gathered_units] == 10 * 4);        // one slot
  CHECK(first.bytes[category::gradient_buckets] == 2 * 10 * 4);  // two
  CHECK(first.bytes.peak() == 4 * 2 * 16 * 4 + 3 * 64 * 4 + 768);
  zero::plan const last = plan_of(zero::stage3{.prefetch = 0}, zero::reduce_per_microbatch{}, 3);
  CHECK(last.bytes[category::parameters] == 0);
  CHECK(last.bytes[category::gradients] == 0);
  CHECK(last.bytes[category::optimizer_state] == 0);
  CHECK(last.bytes[category::gathered_units] == 10 * 4);
  CHECK(last.bytes.peak() == first.bytes.peak());
  CHECK(last.sent_bytes_per_step(2) == (2 + 2 * 2) * 3 * 2 * 16 * 4);  // (2 r + 2 * 2 p)
}

TEST_CASE("a plan of sizes that divide pads no tensor, and is the theory's table") {
  // 3072 elements = 4 ranks * 4 units * 192; every slice is a multiple of 16 elements.
  constexpr std::uint64_t all = 3072;
  constexpr std::uint64_t p = 4, g = 4, o = 8, r = 4, ranks = 4;
  auto const units = bare_units<float>({768, 768, 768, 768});
  for (std::uint64_t rank = 0; rank < ranks; ++rank) {
    auto const plan_of = [&](zero::stage at, bool per_microbatch) {
      zero::accumulation const policy = per_microbatch
                                            ? zero::accumulation(zero::reduce_per_microbatch{})
                                            : zero::accumulation(zero::local_accumulate{});
      return zero::make_plan(ranks, rank, units, at, zero::adamw{}, policy,
                             zero::options{.bucket_bytes = 0});
    };
    auto const persistent = [](zero::plan const& plan) {
      return plan.bytes[category::parameters] + plan.bytes[category::gradients] +
             plan.bytes[category::optimizer_state];
    };
    auto const f = [](std::uint64_t bytes) { return bytes * (ranks - 1) / ranks; };
    zero::stage const stage1_all_reduce =
        zero::stage1{.gradients = zero::gradient_collective::all_reduce};
    zero::stage const kept = zero::stage3{.keep_after_forward = true};

    for (bool const per_microbatch : {false, true}) {
      for (zero::stage const at :
           {zero::stage(zero::stage0{}), zero::stage(zero::stage1{}), stage1_all_reduce,
            zero::stage(zero::stage2{}), zero::stage(zero::stage3{}), kept}) {
        zero::memory_bytes const bytes = plan_of(at, per_microbatch).bytes;
        // Beside tensors: 96 + 48 + 4 * 7 * 16 + 32 + 16 + 16 + 5 * (48 + 16) = 976 bytes.
        CHECK(bytes.padding == 1024);
      }
    }
    CHECK(persistent(plan_of(zero::stage0{}, false)) == (p + g + o) * all);
    CHECK(persistent(plan_of(zero::stage1{}, false)) == (p + g) * all + o * all / ranks);
    CHECK(persistent(plan_of(zero::stage2{}, true)) == p * all + (g + o) * all / ranks);
    CHECK(persistent(plan_of(zero::stage3{}, true)) == (p + g + o) * all / ranks);
    // The other policy: stage 2 costs as much as stage 1, and stage 1 as little as stage 2.
    CHECK(persistent(plan_of(zero::stage2{}, false)) == (p + g) * all + o * all / ranks);
    CHECK(persistent(plan_of(zero::stage1{}, true)) == p * all + (g + o) * all / ranks);
    CHECK(persistent(plan_of(stage1_all_reduce, true)) == (p + g) * all + o * all / ranks);
    CHECK(persistent(plan_of(zero::stage3{}, false)) == g * all + (p + o) * all / ranks);

    for (std::uint64_t const m : {1U, 2U, 3U}) {
      CHECK(plan_of(zero::stage0{}, false).sent_bytes_per_step(m) == f((r + g) * all));
      CHECK(plan_of(zero::stage1{}, false).sent_bytes_per_step(m) == f((r + p) * all));
      CHECK(plan_of(stage1_all_reduce, false).sent_bytes_per_step(m) == f((r + g + p) * all));
      CHECK(plan_of(zero::stage2{}, false).sent_bytes_per_step(m) == f((r + p) * all));
      CHECK(plan_of(zero::stage3{}, false).sent_bytes_per_step(m) == f((r + 2 * p * m) * all));
      CHECK(plan_of(kept, false).sent_bytes_per_step(m) == f((r + p * m) * all));
      CHECK(plan_of(zero::stage0{}, true).sent_bytes_per_step(m) == f((r + g) * m * all));
      CHECK(plan_of(zero::stage2{}, true).sent_bytes_per_step(m) == f((r * m + p) * all));
      CHECK(plan_of(zero::stage3{}, true).sent_bytes_per_step(m) == f((r * m + 2 * p * m) * all));
    }
  }
}

TEST_CASE("slots are as many as the largest buckets that can be whole, or unreduced, at once") {
  auto const units = bare_units<float>({10, 30, 20, 30, 10});
  auto const gathered = [&](zero::stage3 at) {
    zero::plan const plan =
        zero::make_plan(2, 0, units, at, zero::adamw{}, zero::local_accumulate{}, one_element);
    return plan.bytes[category::gathered_units];
  };
  CHECK(gathered({.prefetch = 0}) == 1 * 30 * 4);
  CHECK(gathered({.prefetch = 1}) == 2 * 30 * 4);
  CHECK(gathered({.prefetch = 3}) == 4 * 30 * 4);
  CHECK(gathered({.prefetch = 0, .max_live_units = 3}) == 3 * 30 * 4);
  CHECK(gathered({.prefetch = 1, .max_live_units = 3}) == 4 * 30 * 4);
  CHECK(gathered({.prefetch = 4}) == 5 * 30 * 4);
  CHECK(gathered({.prefetch = static_cast<std::size_t>(-1)}) == 5 * 30 * 4);  // more than there are
  CHECK(gathered({.prefetch = 9, .max_live_units = static_cast<std::size_t>(-1)}) == 5 * 30 * 4);
  CHECK(gathered({.prefetch = 0, .keep_after_forward = true}) == 100 * 4);

  auto const unreduced = [&](std::size_t open) {
    return zero::make_plan(2, 0, units, zero::stage2{}, zero::adamw{},
                           zero::reduce_per_microbatch{open},
                           zero::options{.bucket_bytes = 0, .alignment = 1})
        .bytes[category::gradient_buckets];
  };
  CHECK(unreduced(1) == 1 * 30 * 4);
  CHECK(unreduced(2) == 2 * 30 * 4);
  CHECK(unreduced(5) == 5 * 30 * 4);
  CHECK(unreduced(static_cast<std::size_t>(-1)) == 5 * 30 * 4);
  // Joined up to 160 bytes: {10, 30}, {20}, {30, 10}; the largest has 40 elements.
  CHECK(zero::make_plan(2, 0, units, zero::stage2{}, zero::adamw{}, zero::reduce_per_microbatch{},
                        zero::options{.bucket_bytes = 160, .alignment = 1})
            .bytes[category::gradient_buckets] == 2 * 40 * 4);
  // A bucket of 10, 30 and 20 would be 240 bytes, more than a byte less allows.
  CHECK(zero::make_plan(2, 0, units, zero::stage2{}, zero::adamw{}, zero::reduce_per_microbatch{},
                        zero::options{.bucket_bytes = 239, .alignment = 1})
            .bytes[category::gradient_buckets] == 2 * 50 * 4);
  CHECK(zero::make_plan(2, 0, units, zero::stage2{}, zero::adamw{}, zero::reduce_per_microbatch{},
                        zero::options{.bucket_bytes = 240, .alignment = 1})
            .bytes[category::gradient_buckets] == 2 * 60 * 4);
}

TEST_CASE("a tied bucket that stays gathered has one slot more, of each kind") {
  auto units = std::vector<std::vector<zero::any_parameter>>{};
  auto const nothing = [](std::span<float> /*out*/, std::size_t /*first*/) {};
  for (std::size_t u = 0; u < 5; ++u) {
    units.push_back({zero::parameter<float>("p" + std::to_string(u), {8}, nothing)});
  }
  auto const plan_of = [&] {
    return zero::make_plan(2, 0, units, zero::stage3{.prefetch = 0}, zero::adamw{},
                           zero::reduce_per_microbatch{.open_buckets = 2}, one_element);
  };
  CHECK(plan_of().bytes[category::gathered_units] == 1 * 8 * 4);
  CHECK(plan_of().bytes[category::gradient_buckets] == 2 * 8 * 4);
  units[4].push_back(zero::tied("p0"));
  CHECK(plan_of().bytes[category::gathered_units] == 2 * 8 * 4);
  CHECK(plan_of().bytes[category::gradient_buckets] == 3 * 8 * 4);
}

TEST_CASE("frozen parameters cost neither gradient nor optimizer state, and are not reduced") {
  auto units = std::vector<std::vector<zero::any_parameter>>{};
  auto const nothing = [](std::span<float> /*out*/, std::size_t /*first*/) {};
  units.push_back({zero::parameter<float>("frozen", {800}, nothing).frozen()});
  units.push_back({zero::parameter<float>("trained", {8}, nothing)});
  zero::plan const plan = zero::make_plan(2, 0, units, zero::stage3{.prefetch = 0}, zero::adamw{},
                                          zero::reduce_per_microbatch{}, one_element);
  CHECK(plan.bytes[category::parameters] == 404 * 4);
  CHECK(plan.bytes[category::gradients] == 4 * 4);
  CHECK(plan.bytes[category::optimizer_state] == 2 * 4 * 4);
  CHECK(plan.bytes[category::gathered_units] == 800 * 4);
  CHECK(plan.bytes[category::gradient_buckets] == 8 * 4);  // one trainable bucket: one slot
  CHECK(plan.sent_bytes_per_step() == 4 * 4 + 2 * 404 * 4);
}

TEST_CASE("each optimizer costs its own states") {
  auto const units = bare_units<float>({64});
  auto const state = [&](auto const& optimizer) {
    return zero::make_plan(2, 0, units, zero::stage1{}, optimizer, zero::local_accumulate{})
        .bytes[category::optimizer_state];
  };
  CHECK(state(zero::plain_sgd{}) == 0);
  CHECK(state(zero::sgd{}) == 32 * 4);
  CHECK(state(zero::adamw{}) == 2 * 32 * 4);
}

TEST_CASE(
    "7.5 billion parameters over 64 ranks take what the theory's table says, before anything is "
    "allocated") {
  constexpr std::uint64_t all = 7'500'000'000;
  constexpr std::uint64_t ranks = 64;
  constexpr std::size_t unit_count = 75;
  long const before = counting_allocator::of_thread.live_bytes;
  counting_allocator::of_thread.peak_bytes = before;

  auto const nothing = [](std::span<zero::bfloat16> /*out*/, std::size_t /*first*/) {};
  std::vector<std::vector<zero::any_parameter>> bare;
  std::vector<std::vector<zero::any_parameter>> wide;  // with float gradients: b = g = 4
  std::vector<test::owning_tensor<zero::bfloat16>> values(unit_count);
  std::vector<test::owning_tensor<float>> gradients(unit_count);
  for (std::size_t u = 0; u < unit_count; ++u) {
    std::string const name = "w" + std::to_string(u);
    bare.push_back({zero::parameter<zero::bfloat16>(name, {10'000, 10'000}, nothing)});
    wide.push_back({zero::parameter(name, values[u], gradients[u], {10'000, 10'000}, nothing)});
  }

  struct row {
    zero::stage stage;
    zero::accumulation policy;
    std::uint64_t whole_bytes;    // per element, on every rank
    std::uint64_t sharded_bytes;  // per element, on one rank
    double gigabytes;
  };
  auto const check = [&](std::vector<std::vector<zero::any_parameter>> const& units,
                         zero::precision precision, std::vector<row> const& table) {
    for (row const& expected : table) {
      std::uint64_t sum = 0;
      for (std::uint64_t const rank : {0U, 1U, 31U, 62U, 63U}) {
        zero::plan const plan =
            zero::make_plan(ranks, rank, units, expected.stage, zero::adamw{}, expected.policy,
                            zero::options{.precision = precision});
        std::uint64_t const persistent = plan.bytes[category::parameters] +
                                         plan.bytes[category::gradients] +
                                         plan.bytes[category::optimizer_state];
        // What alignment moves from one rank to another: less than 32 elements a slice.
        double const exact = static_cast<double>(expected.whole_bytes * all) +
                             static_cast<double>(expected.sharded_bytes * all) / ranks;
        double const moved = static_cast<double>(32 * unit_count * expected.sharded_bytes);
        bool const is_last = rank == ranks - 1;  // has what is left
        CHECK(std::abs(static_cast<double>(persistent) - exact) <= (is_last ? 64 * moved : moved));
        CHECK(std::round(static_cast<double>(persistent) / 1e8) / 10 ==
              doctest::Approx(expected.gigabytes));
        CHECK(static_cast<double>(plan.bytes.padding) <
              1e-3 * static_cast<double>(plan.bytes.peak()));
        sum += persistent;
      }
      CHECK(sum > 0);
    }
  };
  zero::accumulation const local = zero::local_accumulate{};
  zero::accumulation const reduce = zero::reduce_per_microbatch{};
  check(bare, zero::bf16_reduced,
        {{zero::stage0{}, local, 2 + 2 + 12, 0, 120},
         {zero::stage1{}, local, 2 + 2, 12, 31.4},
         {zero::stage2{}, reduce, 2, 2 + 12, 16.6},
         {zero::stage3{}, reduce, 0, 2 + 2 + 12, 1.9}});
  check(wide, zero::bf16,
        {{zero::stage0{}, local, 2 + 4 + 12, 0, 135},
         {zero::stage1{}, local, 2 + 4, 12, 46.4},
         {zero::stage2{}, reduce, 2, 4 + 12, 16.9},
         {zero::stage3{}, reduce, 0, 2 + 4 + 12, 2.1}});
  // Gradients in 2 bytes that are reduced to 4: both are kept where they accumulate locally.
  check(bare, zero::bf16,
        {{zero::stage0{}, local, 2 + 2 + 4 + 12, 0, 150},
         {zero::stage1{}, local, 2 + 2, 4 + 12, 31.9},
         {zero::stage0{}, reduce, 2 + 4 + 12, 0, 135},
         {zero::stage2{}, reduce, 2, 4 + 12, 16.9},
         {zero::stage3{}, reduce, 0, 2 + 4 + 12, 2.1}});

  if (counting_allocator::available) {
    CHECK(counting_allocator::of_thread.peak_bytes - before < 1'000'000);
    CHECK(counting_allocator::of_thread.device_allocations == 0);
  }
}

TEST_CASE("what the ranks of a stage hold adds up to the model, to the element") {
  constexpr std::uint64_t all = 7 * 1'234'567;
  auto const units = bare_units<zero::bfloat16>(std::vector<std::size_t>(7, 1'234'567));
  for (std::uint64_t const ranks : {1U, 2U, 3U, 4U, 8U, 61U}) {
    std::uint64_t parameters = 0;
    std::uint64_t gradients = 0;
    std::uint64_t state = 0;
    for (std::uint64_t rank = 0; rank < ranks; ++rank) {
      zero::plan const plan =
          zero::make_plan(ranks, rank, units, zero::stage3{}, zero::adamw{},
                          zero::reduce_per_microbatch{}, zero::options{.precision = zero::bf16});
      parameters += plan.bytes[category::parameters];
      gradients += plan.bytes[category::gradients];
      state += plan.bytes[category::optimizer_state];
    }
    CHECK(parameters == 2 * all);
    CHECK(gradients == 4 * all);
    CHECK(state == 12 * all);
  }
}

TEST_CASE("one parameter may have more than 2^32 elements") {
  // Over 3 ranks, in elements: slices of ceil(6'000'000'001 / 3) = 2'000'000'001, the last one
  // 1'999'999'999.
  constexpr std::size_t n = 6'000'000'001;
  auto const units = bare_units<float>({n});
  auto const plan_of = [&](zero::stage at, std::uint64_t rank) {
    return zero::make_plan(3, rank, units, at, zero::adamw{}, zero::reduce_per_microbatch{},
                           one_element);
  };
  zero::plan const first = plan_of(zero::stage3{.prefetch = 0}, 0);
  CHECK(first.bytes[category::parameters] == 4 * 2'000'000'001ULL);
  CHECK(first.bytes[category::optimizer_state] == 8 * 2'000'000'001ULL);
  CHECK(first.bytes[category::gathered_units] == 4 * 6'000'000'001ULL);
  CHECK(first.bytes[category::gradient_buckets] == 4 * 6'000'000'001ULL);
  CHECK(first.sent_bytes_per_step(1) == (1 + 2) * 2 * 4 * 2'000'000'001ULL);
  CHECK(plan_of(zero::stage3{}, 2).bytes[category::parameters] == 4 * 1'999'999'999ULL);
  zero::plan const whole = plan_of(zero::stage0{}, 1);
  CHECK(whole.bytes[category::parameters] == 4 * 6'000'000'001ULL);
  CHECK(whole.bytes[category::optimizer_state] == 8 * 6'000'000'001ULL);
  CHECK(whole.sent_bytes_per_step(2) == 2 * (1 + 1) * 2 * 4 * 2'000'000'001ULL);
}

TEST_CASE("a plan says in words what stage and policy cost together") {
  auto const units = bare_units<float>({10});
  auto const words = [&](zero::stage at, zero::accumulation policy) {
    return zero::make_plan(2, 0, units, at, zero::adamw{}, policy).describe();
  };
  auto const says = [](std::string const& text, std::string const& what) {
    return text.find(what) != std::string::npos;
  };
  CHECK(
      says(words(zero::stage2{}, zero::local_accumulate{}), "gradient memory is that of stage 1"));
  CHECK(
      says(words(zero::stage3{}, zero::local_accumulate{}), "gradient memory is that of stage 1"));
  CHECK_FALSE(says(words(zero::stage2{}, zero::reduce_per_microbatch{}), "stage 1"));
  CHECK(says(words(zero::stage1{}, zero::reduce_per_microbatch{}),
             "gradient memory is that of stage 2"));
  CHECK_FALSE(says(words(zero::stage1{}, zero::local_accumulate{}), "stage 2"));
  CHECK(says(words(zero::stage3{.keep_after_forward = true}, zero::reduce_per_microbatch{}),
             "reserve all parameters for the model's life"));
  CHECK(says(words(zero::stage0{}, zero::local_accumulate{}),
             "parameters: 40 bytes\ngradients: 40 bytes\n"));
}

TEST_CASE("a plan of an empty model, and of a model with empty units, is empty") {
  std::vector<std::vector<zero::any_parameter>> units;
  for (std::size_t n : {0U, 1U, 3U}) {
    units.resize(n);
    for (test::run_case const& run : test::run_cases()) {
      zero::plan const plan = zero::make_plan(3, 1, units, run.stage, zero::adamw{}, run.policy);
      // State, hyperparameters, 1 + 3 messages of no flags and sums: 96 + 48 + 4 * (48 + 16) = 400
      // bytes.
      CHECK(plan.bytes.padding == 448);
      CHECK(plan.bytes.peak() == 448);
      CHECK(plan.sent_bytes_per_step(2) == 0);
    }
  }
}
