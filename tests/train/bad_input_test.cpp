// SPDX-License-Identifier: MIT
// What can be wrong when a model is built, on one rank or all: every rank gets the same message,
// and parameters stay as they were. And what looks wrong, but works.
#include <doctest/doctest.h>

#include <zero/comm/run_threads.hpp>
#include <zero/comm/solo.hpp>
#include <zero/optim/sgd.hpp>
#include <zero/train/sharded_model.hpp>

#include <support/failures.hpp>
#include <support/mock_model.hpp>
#include <support/settings.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// A sanitizer ends the program that asks for memory that there isn't.
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define MEMORY_IS_CHECKED
#endif
#elif defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define MEMORY_IS_CHECKED
#endif

namespace {

using zero::thread_communicator;
using sharded_model = zero::sharded_model<thread_communicator, zero::sgd>;
using values = std::vector<float>;
using units = std::vector<std::vector<zero::any_parameter>>;

constexpr zero::sgd plain{.learning_rate = 1};
constexpr std::chrono::milliseconds deadline{2000};

/// What one rank builds a model from.
struct recipe {
  zero::stage stage = zero::stage0{};
  zero::sgd optimizer = plain;
  zero::accumulation policy = zero::local_accumulate{};
  zero::options options = {};
};

/// Tensors of one rank, and the model that all ranks agree on.
struct rank_tensors {
  test::tensor a{6, 1};
  test::tensor b{4, 2};
  test::tensor c{6, 3};
  test::tensor a_gradient;
  test::tensor b_gradient;
  test::tensor c_gradient;

  [[nodiscard]] units usual() {
    return {{zero::parameter("a", a, a_gradient)},
            {zero::parameter("b", b, b_gradient), zero::parameter("c", c, c_gradient)}};
  }
  [[nodiscard]] bool untouched() const {
    return a.own == values(6, 1) && b.own == values(4, 2) && c.own == values(6, 3) && a.owns() &&
           b.owns() && c.owns();
  }
};

/// Build a model on `ranks` ranks, the last of which has changed units or recipe first. Every rank
/// must throw the same usage_error, with every part and that rank, in time, and keep its values.
template <class Change>
void check_refused(int ranks, std::initializer_list<std::string_view> parts, Change change,
                   recipe const& usual = {}) {
  test::failures const caught = test::run_failing(ranks, [&](thread_communicator& comm) {
    rank_tensors tensors;
    units of = tensors.usual();
    recipe how = usual;
    how.options.deadline = deadline;
    if (comm.rank() == comm.size() - 1) {
      change(tensors, of, how);
    }
    try {
      sharded_model const sharded{comm, of, how.stage, how.optimizer, how.policy, how.options};
    } catch (...) {
      CHECK(tensors.untouched());
      throw;
    }
  });
  CHECK_MESSAGE(caught.all_say(parts), caught.text());
  for (test::thrown const& each : caught.ranks) {
    CHECK_MESSAGE(each.kind == test::kind::usage, caught.text());
    CHECK_MESSAGE(each.message == caught.ranks[0].message, caught.text());
    CHECK_MESSAGE(each.refuses("sharded_model", ranks - 1), caught.text());
  }
  CHECK_MESSAGE(caught.took < deadline, caught.text());
}

auto const ones = [](std::span<float> out, std::size_t) {
  std::fill(out.begin(), out.end(), 1.0F);
};

}  // namespace

TEST_CASE("no ranks is refused with what was expected") {
  for (int const ranks : {0, -3}) {
    test::thrown const caught =
        test::what_throws([&] { zero::run_threads(ranks, [](thread_communicator&) {}); });
    CHECK(caught.kind == test::kind::usage);
    CHECK(caught.says({"expected at least 1 rank", "actual " + std::to_string(ranks)}));
  }
}

TEST_CASE("more ranks than elements work") {
  test::everywhere(
      {8}, {.clip_norm = 1e6}, [](thread_communicator& comm, test::setting const& how) {
        test::model engine{{{{"a", 1}}, {{"b", 3}, {"c", 1}}}};
        sharded_model sharded{comm, engine.units(), how.stage, plain, how.policy, how.options};
        auto const result = test::run_step(sharded, engine, static_cast<float>(comm.rank()));
        CHECK_MESSAGE(result.norm() == doctest::Approx(3.5 * std::sqrt(5.0)), how.name);
        test::whole_values const expected{{"a", {6.5F}}, {"b", values(3, 6.5F)}, {"c", {6.5F}}};
        CHECK_MESSAGE(test::read(sharded, engine) == expected, how.name);
      });
}

TEST_CASE("units without parameters, and one that only uses another's, work") {
  test::everywhere({1, 2, 3}, {}, [](thread_communicator& comm, test::setting const& how) {
    test::model engine{{{}, {{"a", 5}}, {}, {test::use_of("a")}, {}}};
    sharded_model sharded{comm, engine.units(), how.stage, plain, how.policy, how.options};
    CHECK_MESSAGE(sharded.units() == 5, how.name);
    test::run_step(sharded, engine, 1);
    test::run_step(sharded, engine, 1);
    test::whole_values const expected{{"a", values(5, 6)}};
    CHECK_MESSAGE(test::read(sharded, engine) == expected, how.name);
  });
}

TEST_CASE("a model of no units, or none that is trained, binds, evaluates and is released") {
  test::everywhere(
      {1, 2}, {.clip_norm = 1.0}, [](thread_communicator& comm, test::setting const& how) {
        test::model nothing{{}};
        sharded_model empty{comm, nothing.units(), how.stage, plain, how.policy, how.options};
        CHECK_MESSAGE(empty.units() == 0, how.name);
        empty.release();

        test::model frozen{{{{"a", 5, 3, true}}}};
        sharded_model sharded{comm, frozen.units(), how.stage, plain, how.policy, how.options};
        auto const result = test::run_step(sharded, frozen, 1);
        CHECK_MESSAGE(result.norm() == 0.0, how.name);
        test::whole_values const expected{{"a", values(5, 3)}};
        CHECK_MESSAGE(test::read(sharded, frozen) == expected, how.name);
        sharded.release();
        CHECK_MESSAGE(frozen.values() == expected, how.name);
      });
}

TEST_CASE("buckets of 0 bytes or larger than the model, and depths beyond it, work alike") {
  constexpr std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
  constexpr std::size_t deepest = std::numeric_limits<std::size_t>::max();
  for (std::uint64_t const bucket_bytes : {std::uint64_t{0}, std::uint64_t{1} << 40U, most}) {
    for (zero::stage const& stage :
         {zero::stage(zero::stage0{}), zero::stage(zero::stage2{}),
          zero::stage(zero::stage3{.prefetch = 1000}),
          zero::stage(zero::stage3{.prefetch = deepest, .max_live_units = deepest}),
          zero::stage(zero::stage3{.prefetch = deepest, .keep_after_forward = true})}) {
      for (bool const overlap : {false, true}) {
        zero::run_threads(3, [&](thread_communicator& comm) {
          test::model engine{{{{"a", 5}}, {{"b", 7}}, {{"c", 3}}}};
          sharded_model sharded{comm,
                                engine.units(),
                                stage,
                                plain,
                                zero::reduce_per_microbatch{.open_buckets = deepest},
                                {.bucket_bytes = bucket_bytes, .overlap = overlap}};
          CHECK(sharded.layout().buckets().size() == (bucket_bytes == 0 ? 3 : 1));
          test::run_step(sharded, engine, 1);
          test::run_step(sharded, engine, 1);
          test::whole_values const expected{
              {"a", values(5, 8)}, {"b", values(7, 8)}, {"c", values(3, 8)}};
          CHECK(test::read(sharded, engine) == expected);
          CHECK(sharded.ledger() == sharded.plan().bytes);
        });
      }
    }
  }
}

TEST_CASE("overlap is each rank's own choice, but in stage 3") {
  check_refused(3, {"sharded_model: expected stage 3", "overlap 1", "overlap 0"},
                [](rank_tensors&, units&, recipe& how) { how.options.overlap = false; },
                {.stage = zero::stage3{}});
  for (test::setting const& how : test::every_setting()) {
    if (how.stage.shards_parameters()) {
      continue;
    }
    zero::run_threads(3, [&](thread_communicator& comm) {
      test::model engine{{{{"a", 5}}, {{"b", 7}}, {{"c", 3}}}};
      zero::options options = how.options;
      options.overlap = comm.rank() == 1;
      options.bucket_bytes = 0;
      sharded_model sharded{comm, engine.units(), how.stage, plain, how.policy, options};
      test::run_step(sharded, engine, 1);
      test::run_step(sharded, engine, 1);
      test::whole_values const expected{
          {"a", values(5, 8)}, {"b", values(7, 8)}, {"c", values(3, 8)}};
      CHECK_MESSAGE(test::read(sharded, engine) == expected, how.name);
    });
  }
}

TEST_CASE(
    "a tensor that can't give up its storage, erased, is refused on every rank with the cure") {
  for (int const ranks : {1, 2, 3}) {
    values stays(6, 1.0F);
    auto const value_stays = [&](rank_tensors& tensors, units& of, recipe&) {
      of[0] = {zero::parameter("a", stays, tensors.a_gradient)};
    };
    auto const gradient_stays = [&](rank_tensors& tensors, units& of, recipe&) {
      of[0] = {zero::parameter("a", tensors.a, stays)};
    };
    std::string_view const cure = "add rebind to its zero::tensor_traits";
    check_refused(ranks,
                  {"parameter 'a'", "shards its value", "expected a tensor that can give up", cure},
                  value_stays, {.stage = zero::stage3{}});
    check_refused(
        ranks, {"parameter 'a'", "shards its gradient", "expected a tensor that can give up", cure},
        gradient_stays, {.stage = zero::stage3{}});
    check_refused(
        ranks, {"parameter 'a'", "shards its gradient", "expected a tensor that can give up", cure},
        gradient_stays, {.stage = zero::stage2{}});
  }
}

TEST_CASE("hyperparameters and options that can't be are every rank's error") {
  for (int const ranks : {1, 2, 3}) {
    auto const optimizer = [&](zero::sgd wrong, std::initializer_list<std::string_view> parts) {
      check_refused(ranks, parts,
                    [&](rank_tensors&, units&, recipe& how) { how.optimizer = wrong; });
    };
    double const nan = std::nan("");
    double const infinity = std::numeric_limits<double>::infinity();
    optimizer({.learning_rate = nan}, {"sgd.learning_rate: expected", "at least 0", "actual nan"});
    optimizer({.learning_rate = -0.5},
              {"sgd.learning_rate: expected", "at least 0", "actual -0.5"});
    optimizer({.learning_rate = infinity}, {"sgd.learning_rate: expected a finite", "actual inf"});
    optimizer({.momentum = -1}, {"sgd.momentum: expected", "actual -1"});
    optimizer({.weight_decay = nan}, {"sgd.weight_decay: expected", "actual nan"});
    optimizer({.nesterov = true}, {"sgd.momentum: expected more than 0 with nesterov", "actual 0"});

    auto const options = [&](auto change, std::initializer_list<std::string_view> parts) {
      check_refused(ranks, parts, [&](rank_tensors&, units&, recipe& how) { change(how); });
    };
    options([&](recipe& how) { how.options.clip_norm = nan; },
            {"options: expected clip_norm above 0", "nan"});
    options([&](recipe& how) { how.options.clip_norm = -1; },
            {"options: expected clip_norm", "actual -1"});
    options([&](recipe& how) { how.options.alignment = 0; },
            {"options: expected an alignment", "actual 0"});
    options([&](recipe& how) { how.options.deadline = std::chrono::milliseconds{0}; },
            {"options: expected a deadline", "actual 0 ms"});
    options([&](recipe& how) { how.stage.max_live_units = 0; },
            {"options: expected max_live_units", "actual 0"});
    options([&](recipe& how) { how.policy = zero::reduce_per_microbatch{.open_buckets = 0}; },
            {"options: expected open_buckets", "actual 0"});
  }
}

TEST_CASE("ranks that declare other parameters get the first difference, all alike") {
  for (int const ranks : {2, 3, 4}) {
    auto const differs = [&](std::initializer_list<std::string_view> parts,
                             std::function<void(rank_tensors&, units&)> const& change) {
      for (test::named_stage const& at : test::every_stage()) {
        check_refused(ranks, parts,
                      [&](rank_tensors& tensors, units& of, recipe&) { change(tensors, of); },
                      {.stage = at.second});
      }
    };
    differs({"sharded_model", "expected units 2 (as rank 0)", "actual units 3"},
            [](rank_tensors&, units& of) { of.emplace_back(); });
    differs({"sharded_model", "expected parameters 3 (as rank 0)", "actual parameters 2"},
            [](rank_tensors&, units& of) { of[1].pop_back(); });
    differs({"sharded_model", "expected unit 0: parameter 'a'", "actual unit 0: parameter 'x'"},
            [](rank_tensors&, units& of) { of[0][0].name = "x"; });
    differs(
        {"sharded_model", "parameter 'a' float32 [6]", "actual unit 0: parameter 'a' float32 [4]"},
        [](rank_tensors& t, units& of) {
          of[0] = {zero::parameter("a", t.b, t.b_gradient)};
          of[1] = {zero::parameter("b", t.a, t.a_gradient),
                   zero::parameter("c", t.c, t.c_gradient)};
        });
    differs({"sharded_model", "expected unit 1: parameter 'b'", "actual unit 1: parameter 'c'"},
            [](rank_tensors&, units& of) { std::swap(of[1][0], of[1][1]); });
    differs({"sharded_model", "expected unit 0: parameter 'a'", "'a' float32 [6], gradient",
             ", frozen"},
            [](rank_tensors&, units& of) { of[0][0].is_frozen = true; });
    differs({"sharded_model", "actual unit 1: tied 'a'"},
            [](rank_tensors&, units& of) { of[1].push_back(zero::tied("a")); });
    differs({"sharded_model", "expected unit 0: parameter 'a' float32 [6],", "actual",
             "[6] from an initialiser"},
            [](rank_tensors& t, units& of) {
              of[0] = {zero::parameter("a", t.a, t.a_gradient, {6}, ones)};
            });
    test::owning_tensor<double> wide{6, 1.0};
    differs({"sharded_model", "expected unit 0: parameter 'a' float32",
             "actual unit 0: parameter 'a' float64"},
            [&](rank_tensors&, units& of) { of[0] = {zero::parameter("a", wide)}; });
  }
  test::failures const caught = test::run_failing(2, [](thread_communicator& comm) {
    zero::shape const shape = comm.rank() == 0 ? zero::shape{2, 3} : zero::shape{3, 2};
    units const of{{zero::parameter<float>("a", shape, ones)}};
    sharded_model const sharded{comm, of, zero::stage3{}, plain, zero::local_accumulate{}};
  });
  CHECK_MESSAGE(caught.all_say({"parameter 'a' float32 [2, 3]",
                                "actual unit 0: parameter 'a' float32 [3, 2]"}),
                caught.text());
  CHECK_MESSAGE(caught.ranks[0].refuses("sharded_model", 1), caught.text());
  CHECK_MESSAGE(caught.ranks[1].refuses("sharded_model", 1), caught.text());
}

TEST_CASE("a declaration that is wrong on one rank alone is every rank's error") {
  for (int const ranks : {1, 2, 3}) {
    check_refused(ranks, {"expected one parameter named 'a'", "actual two"},
                  [](rank_tensors&, units& of, recipe&) { of[1][0].name = "a"; });
    check_refused(ranks, {"'x' in another unit for unit 1 to tie", "actual none"},
                  [](rank_tensors&, units& of, recipe&) { of[1].push_back(zero::tied("x")); });
    check_refused(ranks, {"parameter 'c'", "of its own", "'a'", "zero::tied"},
                  [](rank_tensors& t, units& of, recipe&) {
                    of[1][1] = zero::parameter("c", t.a, t.c_gradient);
                  });
    check_refused(
        ranks, {"parameter 'a': expected a gradient of 6 elements, actual 4"},
        [](rank_tensors& t, units& of, recipe&) { of[0][0] = zero::parameter("a", t.a, t.b); });
    check_refused(ranks, {"expected fewer than 2^56 elements"},
                  [](rank_tensors&, units& of, recipe&) {
                    of.push_back({zero::parameter<float>("huge", {std::size_t{1} << 62U}, ones)});
                  });
  }
}

#ifndef MEMORY_IS_CHECKED
TEST_CASE("more memory than there is is every rank's error") {
  for (int const ranks : {1, 2}) {
    test::failures const caught = test::run_failing(ranks, [](thread_communicator& comm) {
      rank_tensors tensors;
      zero::options const options{.alignment = std::uint64_t{1} << 46U};
      try {
        sharded_model const sharded{comm,  tensors.usual(),          zero::stage3{},
                                    plain, zero::local_accumulate{}, options};
      } catch (...) {
        CHECK(tensors.untouched());
        throw;
      }
    });
    for (test::thrown const& each : caught.ranks) {
      CHECK_MESSAGE((each.refuses("sharded_model", 0) && each.says("memory")), caught.text());
    }
  }
}
#endif

TEST_CASE(
    "ranks that chose other stages, policies or options get the first difference, all alike") {
  for (int const ranks : {2, 3}) {
    auto const differs = [&](std::initializer_list<std::string_view> parts, auto change) {
      check_refused(ranks, parts, [&](rank_tensors&, units&, recipe& how) { change(how); });
    };
    differs({"sharded_model: expected stage 0", "actual stage 1"},
            [](recipe& how) { how.stage = zero::stage1{}; });
    differs({"sharded_model: expected stage 0", "actual stage 3"},
            [](recipe& how) { how.stage = zero::stage3{}; });
    differs({"expected policy per_microbatch 0", "actual policy per_microbatch 1"},
            [](recipe& how) { how.policy = zero::reduce_per_microbatch{}; });
    differs({"options clip_norm 0", "actual options clip_norm 2"},
            [](recipe& how) { how.options.clip_norm = 2; });
    differs({"bucket_bytes 16777216", "bucket_bytes 8"},
            [](recipe& how) { how.options.bucket_bytes = 8; });
    differs({"alignment 0", "alignment 4"}, [](recipe& how) { how.options.alignment = 4; });
    differs({"start 0", "start 1"},
            [](recipe& how) { how.options.start = zero::start::require_equal; });
    differs({"optimizer with states momentum, hyperparameters"},
            [](recipe& how) { how.optimizer.learning_rate = std::nextafter(1.0, 2.0); });
  }
}

TEST_CASE("ranks that start from other values take rank 0's") {
  test::everywhere({2, 3, 4}, {}, [](thread_communicator& comm, test::setting const& how) {
    auto const rank = static_cast<float>(comm.rank());
    test::model engine{{{{"a", 5, 1 + rank}}, {{"b", 7, 2 + rank, true}}, {{"c", 1, 3 + rank}}}};
    sharded_model sharded{comm, engine.units(), how.stage, plain, how.policy, how.options};
    test::whole_values const expected{
        {"a", values(5, 1)}, {"b", values(7, 2)}, {"c", values(1, 3)}};
    CHECK_MESSAGE(test::read(sharded, engine) == expected, how.name);
  });
}

TEST_CASE(
    "ranks that must start equal and don't get an error that names the parameter; values stay") {
  recipe const equal{.options = {.start = zero::start::require_equal}};
  for (int const ranks : {2, 3, 4}) {
    for (test::named_stage const& at : test::every_stage()) {
      recipe how = equal;
      how.stage = at.second;
      test::failures const caught = test::run_failing(ranks, [&](thread_communicator& comm) {
        rank_tensors tensors;
        bool const odd = comm.rank() == comm.size() - 1;
        tensors.c.own[4] = odd ? -0.0F : 0.0F;  // differs in one bit
        values const before = tensors.c.own;
        try {
          sharded_model const sharded{comm,          tensors.usual(), how.stage,
                                      how.optimizer, how.policy,      how.options};
        } catch (...) {
          CHECK(tensors.c.own.size() == 6);
          CHECK(std::signbit(tensors.c.own[4]) == odd);
          CHECK(tensors.a.own == values(6, 1));
          throw;
        }
      });
      CHECK_MESSAGE(caught.all_say(
                        {"sharded_model: expected parameter 'c' to start from the values of rank 0",
                         "actual others", "(rank " + std::to_string(ranks - 1) + ")"}),
                    caught.text());
      CHECK(caught.took < deadline);
    }
    zero::run_threads(ranks, [&](thread_communicator& comm) {
      rank_tensors tensors;
      CHECK_NOTHROW(sharded_model(comm, tensors.usual(), zero::stage3{}, plain,
                                  zero::local_accumulate{}, equal.options));
    });
  }
}
