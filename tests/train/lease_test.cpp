// SPDX-License-Identifier: MIT
// What the training loop may do with leases and gradients, and what it may not.
#include <doctest/doctest.h>

#include <zero/comm/run_threads.hpp>
#include <zero/optim/sgd.hpp>
#include <zero/train/sharded_model.hpp>

#include <support/check_values.hpp>
#include <support/failures.hpp>
#include <support/mock_model.hpp>
#include <support/settings.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace {

using zero::thread_communicator;
using sharded_model = zero::sharded_model<thread_communicator, zero::sgd>;
using values = std::vector<float>;
using test::everywhere;

constexpr zero::sgd plain{.learning_rate = 1};
auto const one = [](std::string const&, std::size_t) { return 1.0F; };

test::model::structure three_units() { return {{{"a", 5}}, {{"b", 7}}, {{"c", 3}}}; }

/// Run body(sharded, engine, comm) in every setting on two ranks; every rank must fail and say
/// `parts`, and every later call of the model must fail too.
template <class Body>
void check_refused(test::model::structure const& units,
                   std::initializer_list<std::string_view> parts, Body body,
                   zero::options options = {}) {
  options.deadline = std::chrono::milliseconds{2000};
  for (test::setting const& how : test::every_setting(options)) {
    test::failures const caught = test::run_failing(2, [&](thread_communicator& comm) {
      test::model engine{units};
      sharded_model sharded{comm, engine.units(), how.stage, plain, how.policy, how.options};
      test::thrown const first = test::what_throws([&] { body(sharded, engine, comm); });
      CHECK_MESSAGE(test::what_throws([&] { sharded.wait(); }).kind != test::kind::nothing,
                    how.name);
      if (first.kind != test::kind::nothing) {
        throw zero::usage_error{first.message};
      }
    });
    CHECK_MESSAGE(caught.all_say(parts), how.name, "\n", caught.text());
    CHECK_MESSAGE(caught.took < std::chrono::milliseconds{2000}, how.name);
  }
}

/// The same in stage 3 only.
template <class Body>
void check_refused_in_stage_3(test::model::structure const& units, zero::stage3 const& stage,
                              std::initializer_list<std::string_view> parts, Body body) {
  for (bool const overlap : {false, true}) {
    test::failures const caught = test::run_failing(2, [&](thread_communicator& comm) {
      test::model engine{units};
      sharded_model sharded{
          comm,  engine.units(),           stage,
          plain, zero::local_accumulate{}, {.bucket_bytes = 0, .overlap = overlap}};
      body(sharded, engine);
    });
    CHECK_MESSAGE(caught.all_say(parts), caught.text());
  }
}

}  // namespace

TEST_CASE("a lease of a temporary evaluation keeps its unit whole, and leaves nothing behind") {
  for (std::uint64_t const bucket_bytes : {0U, 1000U}) {
    everywhere(
        {1, 2, 3}, {.bucket_bytes = bucket_bytes},
        [](thread_communicator& comm, test::setting const& how) {
          test::model engine{{{{"a", 5, 1}}, {{"b", 7, 2}}, {{"c", 3, 3}}}};
          sharded_model sharded{comm, engine.units(), how.stage, plain, how.policy, how.options};
          for (int repeat = 0; repeat < 2; ++repeat) {
            for (std::size_t const u : {0U, 1U, 2U, 1U}) {
              {
                auto const lease = sharded.evaluation().forward(u);
                std::string const name(1, static_cast<char>('a' + u));
                std::span<float> const elements = lease.parameter<float>(sharded.find(name));
                CHECK_MESSAGE(std::all_of(elements.begin(), elements.end(),
                                          [u](float e) { return e == static_cast<float>(u + 1); }),
                              how.name);
              }
              CHECK_MESSAGE(sharded.gathered().occupied == 0, how.name);
            }
            zero::traffic_bytes const sent = sharded.sent();
            CHECK_MESSAGE(sent[zero::traffic::parameters] == 0, how.name);
            CHECK_MESSAGE((sent[zero::traffic::evaluation] != 0) ==
                              (how.stage.shards_parameters() && comm.size() > 1),
                          how.name);
            test::run_microbatch(sharded, engine, 0, 1,
                                 [](std::string const&, std::size_t) { return 0.0F; });
            sharded.step();
            sharded.wait();
            break;
          }
        });
  }
}

TEST_CASE("a lease that outlives its micro-batch still counts, for step and for its gradient") {
  everywhere({1, 2}, {}, [](thread_communicator& comm, test::setting const& how) {
    test::model engine{{{{"a", 5}}}};
    sharded_model sharded{comm, engine.units(), how.stage, plain, how.policy, how.options};
    {
      auto lease = [&] {
        auto micro = sharded.microbatch(0, 1);
        return micro.backward(0);
      }();
      sharded.wait();
      test::write_gradients(sharded, engine, lease, one);
    }
    sharded.step();
    test::check_values(sharded, engine, {{"a", values(5, 9)}}, how);
  });
}

TEST_CASE("a lease moves, ends early, and is refused once it has ended") {
  everywhere({1, 2}, {}, [](thread_communicator& comm, test::setting const& how) {
    test::model engine{three_units()};
    sharded_model sharded{comm, engine.units(), how.stage, plain, how.policy, how.options};
    {
      auto micro = sharded.microbatch(0, 1);
      for (std::size_t u = 3; u-- > 0;) {
        auto first = micro.backward(u);
        auto lease = std::move(first);
        std::size_t const id = sharded.layout().units()[u].parameters[0];
        std::string const unit = "lease of unit " + std::to_string(u);
        CHECK_MESSAGE(test::what_throws([&] {
                        static_cast<void>(first.accumulate());
                      }).says({unit, "expected", "actual"}),
                      how.name);
        CHECK_MESSAGE(test::what_throws([&] { first.skip(id); }).says(unit), how.name);
        CHECK_MESSAGE(
            test::what_throws([&] { static_cast<void>(first.parameter<float>(id)); }).says(unit),
            how.name);
        test::write_gradients(sharded, engine, lease, one);
        lease.end();
        lease.end();
        CHECK_MESSAGE(
            test::what_throws([&] { static_cast<void>(lease.gradient<float>(id)); }).says(unit),
            how.name);
      }
    }
    sharded.step();
    test::check_values(sharded, engine,
                       {{"a", values(5, 9)}, {"b", values(7, 9)}, {"c", values(3, 9)}}, how);
  });
}

TEST_CASE("stage 3 leases as many units at once as one asked for, and names those that are open") {
  check_refused_in_stage_3(
      three_units(), {.prefetch = 0},
      {"lease of unit 1", "expected at most 1 live units", "actual also units 0", "(rank "},
      [](sharded_model& sharded, test::model&) {
        auto micro = sharded.microbatch(0, 1);
        auto const first = micro.forward(0);
        auto const second = micro.forward(1);
      });
  check_refused_in_stage_3(
      three_units(), {.prefetch = 1, .max_live_units = 2},
      {"lease of unit 1", "expected at most 2 live units", "actual also units 0 2"},
      [](sharded_model& sharded, test::model&) {
        auto evaluation = sharded.evaluation();
        auto const first = evaluation.forward(2);
        auto const second = evaluation.forward(0);
        auto const again = evaluation.forward(0);
        auto const third = evaluation.forward(1);
      });
  for (std::size_t const prefetch : {0U, 1U, 5U}) {
    zero::run_threads(2, [&](thread_communicator& comm) {
      test::model engine{three_units()};
      zero::stage3 const stage{.prefetch = prefetch, .max_live_units = 3};
      sharded_model sharded{comm, engine.units(), stage, plain, zero::local_accumulate{}};
      auto micro = sharded.microbatch(0, 1);
      auto const first = micro.forward(1);
      auto const second = micro.forward(0);
      auto const third = micro.forward(2);
      for (auto const& [name, elements] : engine.values()) {
        CHECK(elements == values(elements.size(), 10));
      }
    });
  }
}

TEST_CASE("in stages 0 to 2 any number of units may be leased") {
  for (zero::stage const& stage :
       {zero::stage(zero::stage0{}), zero::stage(zero::stage1{}), zero::stage(zero::stage2{})}) {
    zero::run_threads(2, [&](thread_communicator& comm) {
      test::model engine{three_units()};
      sharded_model sharded{comm, engine.units(), stage, plain, zero::local_accumulate{}};
      {
        auto micro = sharded.microbatch(0, 1);
        auto const first = micro.backward(1);
        auto const second = micro.backward(0);
        auto const third = micro.backward(2);
        for (auto const* lease : {&first, &second, &third}) {
          test::write_gradients(sharded, engine, *lease, one);
        }
      }
      sharded.step();
      sharded.wait();
      CHECK(engine.values().at("b") == values(7, 9));
    });
  }
}

TEST_CASE("a backward more than forwards is refused") {
  check_refused(three_units(),
                {"backward: expected unit 1 1 time(s)", "actual once more", "(rank "},
                [](sharded_model& sharded, test::model& engine, thread_communicator&) {
                  auto micro = sharded.microbatch(0, 1);
                  for (std::size_t const u : {2U, 1U, 1U}) {
                    auto const lease = micro.backward(u);
                    test::write_gradients(sharded, engine, lease, one);
                  }
                });
  check_refused({{{"a", 5}}}, {"backward: expected unit 0 2 time(s)", "actual once more", "(rank "},
                [](sharded_model& sharded, test::model& engine, thread_communicator&) {
                  auto micro = sharded.microbatch(0, 1);
                  for (int i = 0; i < 2; ++i) {
                    auto const lease = micro.forward(0);
                  }
                  for (int i = 0; i < 3; ++i) {
                    auto const lease = micro.backward(0);
                    test::write_gradients(sharded, engine, lease, one);
                  }
                });
}

TEST_CASE("backward leases that write one gradient are open one after the other") {
  std::initializer_list<std::string_view> const parts{
      "backward: expected unit 0 after the lease of unit 1 has ended", "gradient of 'e'",
      "actual before", "(rank "};
  for (test::setting how : test::every_setting()) {
    how.stage.max_live_units = 2;
    test::failures const caught = test::run_failing(2, [&](thread_communicator& comm) {
      test::model engine{{{{"e", 4}}, {test::use_of("e"), {"w", 4}}}};
      sharded_model sharded{comm, engine.units(), how.stage, plain, how.policy, how.options};
      auto micro = sharded.microbatch(0, 1);
      auto const first = micro.backward(1);
      auto const second = micro.backward(0);
    });
    CHECK_MESSAGE(caught.all_say(parts), how.name, "\n", caught.text());
  }
  check_refused({{{"a", 5}}},
                {"backward: expected unit 0 after the lease of unit 0 has ended", "(rank "},
                [](sharded_model& sharded, test::model&, thread_communicator&) {
                  auto micro = sharded.microbatch(0, 1);
                  for (int i = 0; i < 2; ++i) {
                    auto const lease = micro.forward(0);
                  }
                  auto const first = micro.backward(0);
                  auto const second = micro.backward(0);
                });
}

TEST_CASE("micro-batches have an index below their count, which the window keeps, and don't nest") {
  auto const run = [](sharded_model& sharded, test::model& engine, std::size_t m,
                      std::size_t count) { test::run_microbatch(sharded, engine, m, count, one); };
  check_refused(three_units(), {"microbatch: expected an index below 2, actual 2", "(rank "},
                [&](sharded_model& sharded, test::model& engine, thread_communicator&) {
                  run(sharded, engine, 2, 2);
                });
  check_refused(three_units(), {"microbatch: expected an index below 0, actual 0", "(rank "},
                [&](sharded_model& sharded, test::model& engine, thread_communicator&) {
                  run(sharded, engine, 0, 0);
                });
  check_refused(
      three_units(),
      {"microbatch: expected a window of 3 micro-batches as announced, actual 2", "(rank "},
      [&](sharded_model& sharded, test::model& engine, thread_communicator&) {
        run(sharded, engine, 0, 3);
        run(sharded, engine, 1, 2);
      });
  check_refused(
      three_units(),
      {"microbatch: expected at most 1 in a window, actual one more", "call step", "(rank "},
      [&](sharded_model& sharded, test::model& engine, thread_communicator&) {
        run(sharded, engine, 0, 1);
        run(sharded, engine, 0, 1);
      });
  check_refused(three_units(), {"microbatch: expected no open micro-batch, actual one", "(rank "},
                [](sharded_model& sharded, test::model&, thread_communicator&) {
                  auto const outer = sharded.microbatch(0, 2);
                  auto const inner = sharded.microbatch(1, 2);
                });
  check_refused(three_units(), {"evaluation: expected no open micro-batch, actual one", "(rank "},
                [](sharded_model& sharded, test::model&, thread_communicator&) {
                  auto const outer = sharded.microbatch(0, 2);
                  auto const inner = sharded.evaluation();
                });
  check_refused(three_units(), {"microbatch: expected no open evaluation, actual one", "(rank "},
                [](sharded_model& sharded, test::model&, thread_communicator&) {
                  auto const outer = sharded.evaluation();
                  auto const inner = sharded.microbatch(0, 2);
                });
}

TEST_CASE("ids, units and types that aren't there are refused by name") {
  test::model::structure const units{{{"a", 5}}, {{"b", 7, 10, true}}};
  auto const backward = [](std::size_t u, auto use) {
    return [u, use](sharded_model& sharded, test::model&, thread_communicator&) {
      auto micro = sharded.microbatch(0, 1);
      auto const lease = micro.backward(u);
      use(lease);
    };
  };
  check_refused(units, {"lease: expected a unit below 2, actual 2", "(rank "},
                backward(2, [](auto const&) {}));
  check_refused(units, {"lease of unit 0: expected one of its parameters, actual id 1", "(rank "},
                backward(0, [](auto const& lease) {
                  static_cast<void>(lease.template parameter<float>(1));
                }));
  check_refused(units, {"lease of unit 0: expected one of its parameters, actual id 77", "(rank "},
                backward(0, [](auto const& lease) { static_cast<void>(lease.accumulate(77)); }));
  check_refused(
      units, {"expected a trainable parameter, actual 'b', which is frozen", "(rank "},
      backward(1, [](auto const& lease) { static_cast<void>(lease.template gradient<float>(1)); }));
  check_refused(units, {"expected a trainable parameter, actual 'b', which is frozen", "(rank "},
                backward(1, [](auto const& lease) { lease.skip(1); }));
  check_refused(
      units, {"expected parameter 'a' to be asked for as float32, actual float64", "(rank "},
      backward(0,
               [](auto const& lease) { static_cast<void>(lease.template gradient<double>(0)); }));
  check_refused(units,
                {"expected parameter 'a' to be asked for as float32, actual bfloat16", "(rank "},
                backward(0, [](auto const& lease) {
                  static_cast<void>(lease.template parameter<zero::bfloat16>(0));
                }));
  auto const by_parameter = [](auto use) {
    return [use](sharded_model& sharded, test::model&, thread_communicator&) {
      auto micro = sharded.microbatch(0, 1);
      use(micro);
    };
  };
  check_refused(units, {"expected a parameter below 2, actual 9", "(rank "},
                by_parameter([](auto& micro) { micro.skip(9); }));
  check_refused(units, {"expected a parameter below 2, actual 9", "(rank "},
                by_parameter([](auto& micro) { micro.gradient_ready(9, zero::const_any_span{}); }));
  check_refused(units, {"expected a trainable parameter, actual 'b', which is frozen", "(rank "},
                by_parameter([](auto& micro) { static_cast<void>(micro.gradient(1)); }));
  check_refused(units, {"expected a parameter below 2, actual 2", "(rank "},
                [](sharded_model& sharded, test::model&, thread_communicator&) {
                  static_cast<void>(sharded.steps(2));
                });
  check_refused(units, {"expected a parameter below 2, actual 5", "(rank "},
                [](sharded_model& sharded, test::model& engine, thread_communicator&) {
                  test::run_microbatch(sharded, engine, 0, 1, one);
                  static_cast<void>(sharded.gradient(5));
                });
  zero::run_threads(2, [&](thread_communicator& comm) {
    test::model engine{units};
    sharded_model const sharded{comm, engine.units(), zero::stage3{}, plain,
                                zero::local_accumulate{}};
    test::thrown const caught =
        test::what_throws([&] { static_cast<void>(sharded.find("nobody")); });
    CHECK(caught.says({"find: expected a declared parameter, actual 'nobody'", "(rank "}));
    CHECK(sharded.find("b") == 1);
  });
}

TEST_CASE("gradients come in one way in a micro-batch") {
  values const gradient(5, 1.0F);
  zero::const_any_span const span{std::span{gradient}};
  check_refused({{{"a", 5}, {"b", 5}}},
                {"expected one way of delivering gradients", "by_parameter", "(rank "},
                [&](sharded_model& sharded, test::model& engine, thread_communicator&) {
                  auto micro = sharded.microbatch(0, 1);
                  micro.gradient_ready(0, span);
                  auto const lease = micro.backward(0);
                  test::write_gradients(sharded, engine, lease, one);
                });
  check_refused({{{"a", 5}}, {{"b", 5}}},
                {"expected one way of delivering gradients", "by_parameter", "(rank "},
                [&](sharded_model& sharded, test::model& engine, thread_communicator&) {
                  auto micro = sharded.microbatch(0, 1);
                  {
                    auto const lease = micro.backward(1);
                    test::write_gradients(sharded, engine, lease, one);
                  }
                  micro.gradient_ready(0, span);
                });
}

TEST_CASE(
    "a gradient is handed over once, in the parameter's size and type, to a place that was asked "
    "for") {
  values const gradient(5, 1.0F);
  std::vector<double> const wide(5, 1.0);
  auto const deliver = [](auto use) {
    return [use](sharded_model& sharded, test::model& engine, thread_communicator&) {
      auto micro = sharded.microbatch(0, 1);
      use(micro, engine);
    };
  };
  test::model::structure const units{{{"a", 5}, {"b", 5}}};
  check_refused(
      units, {"gradient_ready: expected parameter 'a' once a micro-batch, actual twice", "(rank "},
      deliver([&](auto& micro, test::model&) {
        micro.gradient_ready(0, std::span{gradient});
        micro.gradient_ready(0, std::span{gradient});
      }));
  check_refused(
      units, {"gradient_ready: expected parameter 'a' once a micro-batch, actual twice", "(rank "},
      deliver([&](auto& micro, test::model&) {
        micro.skip(0);
        micro.gradient_ready(0, std::span{gradient});
      }));
  check_refused(
      units,
      {"gradient_ready: expected 5 elements of float32 for parameter 'a', actual 4", "(rank "},
      deliver([&](auto& micro, test::model&) {
        micro.gradient_ready(0, std::span{gradient}.first(4));
      }));
  check_refused(
      units, {"gradient_ready: expected 5 elements of float32", "actual 5 of float64", "(rank "},
      deliver([&](auto& micro, test::model&) { micro.gradient_ready(0, std::span{wide}); }));
  check_refused(
      units,
      {"gradient_ready: expected gradient(id) before for parameter 'b', actual none", "(rank "},
      deliver([&](auto& micro, test::model&) {
        static_cast<void>(micro.gradient(0));
        micro.gradient_ready(1);
      }));
  check_refused(
      units, {"gradient_ready: expected elements apart from the place of parameter 'a'", "(rank "},
      deliver([&](auto& micro, test::model& engine) {
        static_cast<void>(micro.gradient(0));
        micro.gradient_ready(0, engine.gradient("a").view);
      }));
}

TEST_CASE("no more buckets than one asked for hold gradients that wait for their turn") {
  values const gradient(5, 1.0F);
  test::model::structure const units{{{"a", 5}}, {{"b", 5}}, {{"c", 5}}, {{"d", 5}}};
  for (zero::stage const& stage :
       {zero::stage(zero::stage0{}), zero::stage(zero::stage1{}), zero::stage(zero::stage2{})}) {
    test::failures const caught = test::run_failing(2, [&](thread_communicator& comm) {
      test::model engine{units};
      sharded_model sharded{comm,
                            engine.units(),
                            stage,
                            plain,
                            zero::reduce_per_microbatch{.open_buckets = 3},
                            {.bucket_bytes = 0}};
      auto micro = sharded.microbatch(0, 1);
      for (std::size_t id = 0; id < 4; ++id) {  // the last is wanted first
        micro.gradient_ready(id, std::span{gradient});
      }
    });
    CHECK_MESSAGE(caught.all_say({"gradients of bucket 3", "expected at most 3 buckets",
                                  "actual all open", "0, 1, 2", "(rank ", "open_buckets"}),
                  caught.text());
  }
}

TEST_CASE("a unit's parameters that disagree on adding are asked for one by one") {
  check_refused(
      {{{"e", 4}}, {{"w", 4}, test::use_of("e")}},
      {"accumulate: expected one answer for unit 1, actual 1 of 2", "accumulate(id)", "(rank "},
      [](sharded_model& sharded, test::model& engine, thread_communicator&) {
        auto micro = sharded.microbatch(0, 1);
        {
          auto const lease = micro.backward(0);
          CHECK_FALSE(lease.accumulate());
          test::write_gradients(sharded, engine, lease, one);
        }
        auto const lease = micro.backward(1);
        CHECK_FALSE(lease.accumulate(sharded.find("w")));
        CHECK(lease.accumulate(sharded.find("e")));
        static_cast<void>(lease.accumulate());
      });
}

TEST_CASE("a step's result is read before the next step, and a norm needs a clip norm") {
  for (bool const clips : {false, true}) {
    zero::options options;
    if (clips) {
      options.clip_norm = 1e6;
    }
    everywhere({1, 2}, options, [&](thread_communicator& comm, test::setting const& how) {
      test::model engine{{{{"a", 4}}}};
      sharded_model sharded{comm, engine.units(), how.stage, plain, how.policy, how.options};
      auto const first = test::run_step(sharded, engine, 3);
      CHECK_MESSAGE(!first.skipped(), how.name);
      if (clips) {
        CHECK_MESSAGE(first.norm() == 6.0, how.name);
      } else {
        CHECK_MESSAGE(test::what_throws([&] {
                        static_cast<void>(first.norm());
                      }).says({"step_result: expected options::clip_norm, actual none"}),
                      how.name);
      }
      auto const second = test::run_step(sharded, engine, 1);
      CHECK_MESSAGE(
          test::what_throws([&] {
            static_cast<void>(first.skipped());
          }).says({"step_result: expected to be read before the next step", "step 1 after step 2"}),
          how.name);
      CHECK_MESSAGE(!second.skipped(), how.name);
    });
  }
}

TEST_CASE("a reduced gradient is asked for between a window's last backward and step") {
  check_refused({{{"a", 5}}},
                {"gradient: expected to be asked between", "actual after 0 of ", "(rank "},
                [](sharded_model& sharded, test::model&, thread_communicator&) {
                  static_cast<void>(sharded.gradient(0));
                });
  check_refused({{{"a", 5}}},
                {"gradient: expected to be asked between", "actual after 1 of 2", "(rank "},
                [](sharded_model& sharded, test::model& engine, thread_communicator&) {
                  test::run_microbatch(sharded, engine, 0, 2, one);
                  static_cast<void>(sharded.gradient(0));
                });
  check_refused({{{"a", 5}}}, {"gradient: expected no open micro-batch", "(rank "},
                [](sharded_model& sharded, test::model& engine, thread_communicator&) {
                  auto micro = sharded.microbatch(0, 1);
                  test::forward_and_backward(sharded, engine, micro, one);
                  static_cast<void>(sharded.gradient(0));
                });
  everywhere(
      {1, 2, 3, 4}, {.alignment = 1}, [](thread_communicator& comm, test::setting const& how) {
        test::model engine{{{{"a", 5}, {"b", 4}}}};
        sharded_model sharded{comm, engine.units(), how.stage, plain, how.policy, how.options};
        for (std::size_t m = 0; m < 2; ++m) {  // element i of a gets 10 i + m on each rank
          test::run_microbatch(sharded, engine, m, 2, [m](std::string const& name, std::size_t i) {
            return name == "a" ? static_cast<float>(10 * i + m) : 1.0F;
          });
        }
        zero::gradient_part const part = sharded.gradient(0);
        std::span<float> const elements = part.elements.as<float>();
        for (std::size_t i = 0; i < elements.size(); ++i) {
          CHECK_MESSAGE(elements[i] == static_cast<float>(20 * (part.first + i) + 1), how.name);
        }
        // Slices of ceil(9 / P) elements, of which the first five belong to a.
        auto const world = static_cast<std::size_t>(comm.size());
        std::size_t const slice = (9 + world - 1) / world;
        std::size_t const begin =
            std::min<std::size_t>(5, slice * static_cast<std::size_t>(comm.rank()));
        std::size_t const end = std::min<std::size_t>(5, begin + slice);
        bool const whole = how.stage.reduces_whole();
        CHECK_MESSAGE(elements.size() == (whole ? 5 : end - begin), how.name);
        CHECK_MESSAGE((elements.empty() || part.first == (whole ? 0 : begin)), how.name);
        sharded.step();
        test::check_values(sharded, engine,
                           {{"a", {9.5F, -0.5F, -10.5F, -20.5F, -30.5F}}, {"b", values(4, 9)}},
                           how);
      });
}

TEST_CASE("a released model has given its tensors their values, and takes no more calls") {
  everywhere({1, 2, 3}, {}, [](thread_communicator& comm, test::setting const& how) {
    test::model engine{{{{"a", 5, 1}}, {{"b", 7, 2, true}}, {test::use_of("a"), {"c", 3, 3}}}};
    sharded_model sharded{comm, engine.units(), how.stage, plain, how.policy, how.options};
    test::run_step(sharded, engine, 1);
    sharded.release();
    test::whole_values const expected{
        {"a", values(5, -1)}, {"b", values(7, 2)}, {"c", values(3, 2)}};
    CHECK_MESSAGE(engine.values() == expected, how.name);
    for (std::string const name : {"a", "b", "c"}) {
      CHECK_MESSAGE(engine.value(name).owns(), how.name);
      CHECK_MESSAGE(engine.gradient(name).view.empty(), how.name);
    }
    auto const refused = [&](auto call) {
      test::thrown const caught = test::what_throws(call);
      CHECK_MESSAGE(
          caught.says(
              {"sharded_model: expected a bound model, actual one that was released", "(rank "}),
          how.name, ": ", caught.message);
    };
    refused([&] { sharded.wait(); });
    refused([&] { sharded.step(); });
    refused([&] { static_cast<void>(sharded.microbatch(0, 1)); });
    refused([&] { static_cast<void>(sharded.evaluation()); });
    refused([&] { static_cast<void>(sharded.gradient(0)); });
    refused([&] { sharded.release(); });
  });
}

TEST_CASE(
    "release needs tensors that can own elements again, and is refused before anything is "
    "changed") {
  for (test::named_stage const& at : test::every_stage()) {
    test::failures const caught = test::run_failing(2, [&](thread_communicator& comm) {
      test::unreturnable_tensor<float> value{5, 1.0F};
      test::tensor gradient;
      std::vector<std::vector<zero::any_parameter>> const units{
          {zero::parameter("a", value, gradient)}};
      sharded_model sharded{comm, units, at.second, plain, zero::local_accumulate{}};
      sharded.release();
    });
    CHECK_MESSAGE(
        caught.all_say({"release: parameter 'a'", "expected a tensor that can own storage again",
                        "actual none", "add allocate", "(rank "}),
        at.first, "\n", caught.text());
  }
}

TEST_CASE("evaluation and recomputation change no result, and are metered by their names") {
  for (bool const nested : {false, true}) {
    everywhere(
        {2, 3}, {.bucket_bytes = 0}, [&](thread_communicator& comm, test::setting const& how) {
          test::model engine{three_units()};
          sharded_model sharded{comm, engine.units(), how.stage, plain, how.policy, how.options};
          for (float const expected : {9.0F, 8.0F}) {
            test::check_values(sharded, engine,
                               {{"a", values(5, expected + 1)}, {"c", values(3, expected + 1)}},
                               how);
            {
              auto micro = sharded.microbatch(0, 1);
              for (std::size_t u = 0; u < 3; ++u) {
                auto const lease = micro.forward(u);
              }
              for (std::size_t u = 3; u-- > 0;) {
                auto again = micro.recompute(u);
                CHECK_MESSAGE(again.parameter<float>(u)[0] == expected + 1, how.name);
                if (!nested) {
                  again.end();
                }
                auto const lease = micro.backward(u);
                test::write_gradients(sharded, engine, lease, one);
              }
            }
            sharded.step();
          }
          test::check_values(sharded, engine,
                             {{"a", values(5, 8)}, {"b", values(7, 8)}, {"c", values(3, 8)}}, how);

          // With 64 bytes of alignment every unit is one slice of 16 elements a rank.
          zero::traffic_bytes const sent = sharded.sent();
          auto const peers = static_cast<std::uint64_t>(comm.size() - 1);
          std::uint64_t const gather = 3 * peers * 16 * sizeof(float);  // of every unit once
          bool const gathers = how.stage.shards_parameters();
          bool const kept = how.stage.keep_after_forward;
          std::uint64_t const saved = how.stage.keep_last ? 2 * gather / 3 : 0;  // in two steps
          std::uint64_t const updates =
              how.stage.number() == 1 || how.stage.number() == 2 ? 2 * gather : 0;
          CHECK_MESSAGE(sent[zero::traffic::evaluation] == (gathers ? 3 * gather : 0), how.name);
          CHECK_MESSAGE(sent[zero::traffic::mispredicted] == 0, how.name);
          CHECK_MESSAGE(sent[zero::traffic::parameters] ==
                            (gathers ? (kept ? 2 : 4) * gather - saved : updates),
                        how.name);
          if (!gathers || kept || nested) {
            CHECK_MESSAGE(sent[zero::traffic::recomputation] == 0, how.name);
          } else if (how.stage.prefetch == 0) {
            CHECK_MESSAGE(sent[zero::traffic::recomputation] == 2 * gather - saved, how.name);
          }
        });
  }
}

TEST_CASE("a recomputation that ends after the backward inside it releases the unit") {
  for (bool const overlap : {false, true}) {
    zero::run_threads(2, [&](thread_communicator& comm) {
      test::model engine{three_units()};
      sharded_model sharded{comm,  engine.units(),           zero::stage3{.prefetch = 0},
                            plain, zero::local_accumulate{}, {.overlap = overlap}};
      auto micro = sharded.microbatch(0, 1);
      for (std::size_t u = 3; u-- > 0;) {
        {
          auto const again = micro.recompute(u);
          auto const lease = micro.backward(u);
          CHECK(sharded.gathered().occupied == 1);
          test::write_gradients(sharded, engine, lease, one);
        }
        CHECK(sharded.gathered().occupied == 0);
      }
    });
  }
}

TEST_CASE("the order of units may change from step to step") {
  everywhere({1, 2, 3}, {}, [](thread_communicator& comm, test::setting const& how) {
    test::model engine{{{{"a", 5}}, {{"b", 7}}, {{"c", 3}}, {{"d", 9}}}};
    sharded_model sharded{comm, engine.units(), how.stage, plain, how.policy, how.options};
    std::vector<std::size_t> order{0, 1, 2, 3};
    float expected = 10;
    do {
      {
        auto micro = sharded.microbatch(0, 1);
        for (std::size_t const u : order) {
          auto const lease = micro.forward(u);
          CHECK_MESSAGE(lease.parameter<float>(u)[0] == expected, how.name);
        }
        std::size_t backward = 0;
        for (std::size_t const u :
             order) {  // a backward order that no forward predicts, each second step
          std::size_t const chosen = order[0] % 2 == 0 ? u : order[3 - backward++];
          auto const lease = micro.backward(chosen);
          CHECK_MESSAGE(lease.parameter<float>(chosen)[0] == expected, how.name);
          test::write_gradients(sharded, engine, lease, one);
        }
      }
      sharded.step();
      expected -= 1;
    } while (std::next_permutation(order.begin(), order.end()));
    CHECK_MESSAGE(sharded.gathered().occupied == 0, how.name);
    test::check_values(sharded, engine, {{"a", values(5, -14)}, {"d", values(9, -14)}}, how);
  });
}
