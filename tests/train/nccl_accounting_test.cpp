// SPDX-License-Identifier: MIT
// Over NCCL, too, a plan states every byte of the device: a communicator takes none of its own.
#include <zero/comm/nccl.hpp>
#include <zero/optim/adamw.hpp>

#include <doctest/doctest.h>
#include <comm/ranks.hpp>
#include <fake/cuda.hpp>
#include <fake/nccl.hpp>
#include <support/device_engine.hpp>
#include <support/formula.hpp>
#include <support/model_cases.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace {

constexpr std::size_t most_scratch = std::size_t{1} << 20U;

/// Bytes of the current device that are allocated.
std::uint64_t used_bytes() {
  std::size_t free = 0;
  std::size_t total = 0;
  CHECK(cudaMemGetInfo(&free, &total) == cudaSuccess);
  return total - free;
}

template <class T>
constexpr formula::type type_of =
    zero::dtype_of<T> == zero::dtype::float32 ? formula::type::f32 : formula::type::bf16;

/// The engine's model in the formula's words. Its tensors hold all values and gradients.
template <class T>
formula::model described(formula::type reduced) {
  formula::model out;
  for (auto const& unit : test::device_units()) {
    out.emplace_back();
    for (std::size_t const n : unit) {
      formula::parameter each;
      each.elements = n;
      each.value = each.gradient = type_of<T>;
      each.reduced = reduced;
      each.held_bytes = 2 * n * sizeof(T);
      out.back().parameters.push_back(each);
    }
  }
  return out;
}

formula::settings settings_of(test::run_case const& run, test::shape_case const& shape,
                              zero::nccl_options const& how, int ranks) {
  formula::settings out = test::settings_of(run, shape, static_cast<std::uint64_t>(ranks));
  out.device_alignment = 256;
  out.sum_blocks = 256;
  out.through = how.mode == zero::nccl_mode::ordered ? formula::reductions::other_ranks
                                                     : formula::reductions::all_ranks;
  out.most_scratch = how.scratch_bytes;
  return out;
}

/// Plan, ledger, formula, and what the device says, before and after some steps.
template <class T>
void check(zero::nccl& comm, zero::nccl_options const& how, zero::precision precision,
           formula::type reduced, test::run_case const& run, test::shape_case const& shape,
           bool overlap) {
  auto const rank = static_cast<std::uint64_t>(comm.rank());
  formula::settings const settings = settings_of(run, shape, how, comm.size());
  std::string const title =
      test::title({how.mode == zero::nccl_mode::ordered ? "ordered" : "fast", {}, {}, {}}, run,
                  settings, rank) +
      (overlap ? ", overlapping" : "");
  formula::memory const expected =
      formula::expectation{described<T>(reduced), settings}.of_rank(rank);
  std::uint64_t const before = used_bytes();
  {
    zero::cuda_stream stream;
    test::device_engine<zero::cuda, T> engine{stream};
    zero::options options;
    options.stream = stream.native();
    options.precision = precision;
    options.bucket_bytes = shape.bucket_bytes;
    options.alignment = shape.alignment;
    options.overlap = overlap;
    if (overlap) {
      options.clip_norm = 1.0;
    }
    zero::plan const early = zero::make_plan<zero::cuda>(
        settings.ranks, rank, engine.units(), run.stage, zero::adamw{}, run.policy, options, how);
    zero::sharded_model model{comm, engine.units(), run.stage, zero::adamw{}, run.policy, options};
    zero::plan const& plan = model.plan();
    CHECK_MESSAGE(test::in_words(plan.bytes, plan.bind_peak_bytes) == expected, title);
    CHECK_MESSAGE(test::in_words(early.bytes, early.bind_peak_bytes) == expected, title);
    CHECK_MESSAGE(test::in_words(model.ledger(), plan.bind_peak_bytes) == expected, title);
    CHECK_MESSAGE(used_bytes() - before == expected.arena(), title);  // tensors gave up theirs
    engine.step(model, {.microbatches = 2}, comm.rank(), 0);
    engine.step(model, {.microbatches = 1}, comm.rank(), 1);
    model.wait();
    CHECK_MESSAGE(used_bytes() - before == expected.arena(), title);
    CHECK_MESSAGE(model.ledger() == plan.bytes, title);
  }
  CHECK_MESSAGE(used_bytes() == before, title);
}

constexpr zero::nccl_mode modes[] = {zero::nccl_mode::ordered, zero::nccl_mode::fast};

}  // namespace

TEST_CASE("ledger, plan, formula and the device agree, for every stage, policy, mode and P") {
  fake::set_device_count(4);
  fake::protect_device_memory(false);  // for speed
  std::vector<test::shape_case> const shapes = test::shape_cases();
  for (int const ranks : {1, 2, 3, 4}) {
    for (zero::nccl_mode const mode : modes) {
      zero::nccl_options const how{.mode = mode, .scratch_bytes = most_scratch};
      test::watchdog const limit;
      zero::run_nccl(
          ranks,
          [&](zero::nccl& comm) {
            std::size_t turn = static_cast<std::size_t>(ranks);
            for (test::run_case const& run : test::run_cases()) {
              ++turn;  // another shape each time
              test::shape_case const& shape = shapes[turn % shapes.size()];
              bool const overlap = turn % 2 == 0;
              check<float>(comm, how, zero::fp32, formula::type::f32, run, shape, overlap);
              check<zero::bfloat16>(comm, how, zero::bf16, formula::type::f32, run, shape, overlap);
              check<zero::bfloat16>(comm, how, zero::bf16_reduced, formula::type::bf16, run, shape,
                                    overlap);
            }
          },
          how);
      CHECK(fake::live() == fake::live_counts{});
    }
  }
}

TEST_CASE("plans of every kind of model are the formula with the scratch of either mode") {
  for (test::model_case const& each : test::model_cases()) {
    test::declared_model const model{each};
    for (test::run_case const& run : test::run_cases()) {
      for (zero::nccl_mode const mode : modes) {
        for (int const ranks : {1, 2, 4, 7}) {
          zero::nccl_options const how{.mode = mode};
          formula::settings settings = settings_of(run, {}, how, ranks);
          settings.device_alignment = 64;  // the tensors are the host's
          settings.sum_blocks = 0;
          zero::options options;
          options.precision = each.precision;
          zero::plan const plan = zero::make_plan(settings.ranks, 0, model.units(), run.stage,
                                                  zero::adamw{}, run.policy, options, how);
          CHECK_MESSAGE((test::in_words(plan.bytes, plan.bind_peak_bytes) ==
                         formula::expectation{model.formula(), settings}.of_rank(0)),
                        test::title(each, run, settings, 0));
        }
      }
    }
  }
}

TEST_CASE("scratch by hand: 300,000 floats over 4 ranks, whole and in parts") {
  // Slices of 75,000 floats are 300,000 bytes: 1,172 times 256 is 300,032.
  auto const zeros = [](std::span<float> /*out*/, std::size_t /*first*/) {};
  std::vector<std::vector<zero::any_parameter>> const units{
      {zero::parameter<float>("w", {300'000}, zeros)}, {zero::parameter<float>("b", {7}, zeros)}};
  auto const staging = [&](zero::accumulation policy, zero::nccl_options const& how) {
    zero::options options;
    options.bucket_bytes = 0;
    options.alignment = 1;
    return zero::make_plan<zero::cuda>(4, 0, units, zero::stage2{}, zero::adamw{}, policy, options,
                                       how)
        .bytes[zero::category::staging];
  };
  zero::accumulation const local = zero::local_accumulate{};
  zero::accumulation const each = zero::reduce_per_microbatch{};
  CHECK(staging(local, {.mode = zero::nccl_mode::ordered}) == 3 * 300'032);
  CHECK(staging(each, {.mode = zero::nccl_mode::ordered}) == 3 * 300'032);
  CHECK(staging(local, {.mode = zero::nccl_mode::fast}) == 0);  // NCCL writes the result
  CHECK(staging(each, {.mode = zero::nccl_mode::fast}) == 4 * 300'032);
  CHECK(staging(each, {.mode = zero::nccl_mode::fast, .scratch_bytes = most_scratch}) ==
        most_scratch);
  CHECK(zero::make_plan<zero::cuda>(4, 0, units, zero::stage2{}, zero::adamw{}, each)
            .bytes[zero::category::staging] == 0);  // by another communicator
}
