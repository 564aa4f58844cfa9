// SPDX-License-Identifier: MIT
// Ranks that throw, leave, or never come: every rank gets an error in time, parameters stay as they
// were, and nothing hangs or ends the program.
#include <doctest/doctest.h>

#include <zero/comm/run_threads.hpp>
#include <zero/optim/sgd.hpp>
#include <zero/train/sharded_model.hpp>

#include <support/failures.hpp>
#include <support/hooked_communicator.hpp>
#include <support/mock_model.hpp>
#include <support/settings.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace {

using communicator = test::hooked<zero::thread_communicator>;
using sharded_model = zero::sharded_model<communicator, zero::sgd>;
using std::chrono::milliseconds;

constexpr zero::sgd plain{.learning_rate = 1};
constexpr milliseconds deadline{2000};

/// Units that grow, so that what is gathered ahead is more than what was gathered.
test::model::structure growing() { return {{{"a", 3}}, {{"b", 50}}, {{"c", 7}, {"d", 400}}}; }

/// What this rank has of the parameters, whole or a shard, and whether it changed since.
class memory {
 public:
  memory(sharded_model& sharded, test::model& engine, test::hooks& hooks) {
    hooks.before_call = [this](test::collective_call const& call) { add(call.input); };
    static_cast<void>(test::read(sharded, engine));  // gathers every shard, in stage 3
    hooks.before_call = nullptr;
    for (auto const& [name, elements] : engine.values()) {
      add(std::span<float const>{engine.value(name).view});
    }
    remember();
  }

  /// Take what is there now as what must stay.
  void remember() {
    before_.clear();
    for (zero::const_any_span const part : parts_) {
      auto const* const bytes = static_cast<std::byte const*>(part.data());
      before_.insert(before_.end(), bytes, bytes + part.bytes());
    }
  }

  [[nodiscard]] bool unchanged() {
    std::vector<std::byte> const before = before_;
    remember();
    return before == before_;
  }

 private:
  void add(zero::const_any_span part) {
    if (!part.empty()) {
      parts_.push_back(part);
    }
  }

  std::vector<zero::const_any_span> parts_;
  std::vector<std::byte> before_;
};

/// Everything that a rank has in a failing run.
struct rank_state {
  communicator& comm;
  test::hooks& hooks;
  test::model& engine;
  sharded_model& sharded;

  [[nodiscard]] int rank() const { return comm.rank(); }
};

/// One step over one micro-batch, gradient 1; `at(where)` is called at each place in it.
template <class At>
void step(rank_state const& state, At at) {
  {
    auto micro = state.sharded.microbatch(0, 1);
    at("in the micro-batch");
    for (std::size_t u = 0; u < state.sharded.units(); ++u) {
      auto const lease = micro.forward(u);
      at("in a forward lease");
    }
    at("between forward and backward");
    for (std::size_t u = state.sharded.units(); u-- > 0;) {
      {
        auto const lease = micro.backward(u);
        test::write_gradients(state.sharded, state.engine, lease,
                              [](std::string const&, std::size_t) { return 1.0F; });
        at("in a backward lease");
      }
      at("between backward leases");
    }
  }
  at("before step");
  state.sharded.step();
  at("after step");
  state.sharded.wait();
  at("after wait");
}

void step(rank_state const& state) {
  step(state, [](std::string_view) {});
}

/// Run body(rank_state) on `ranks` ranks, which must fail on each, and leave parameters as they
/// were.
template <class Body>
test::failures run(int ranks, test::setting const& how, Body body, milliseconds limit = deadline) {
  return test::run_failing(ranks, [&](zero::thread_communicator& comm) {
    auto const hooks = std::make_shared<test::hooks>();
    communicator hooked{comm.split(0, comm.rank()), hooks};
    test::model engine{growing()};
    zero::options options = how.options;
    options.deadline = limit;
    sharded_model sharded{hooked, engine.units(), how.stage, plain, how.policy, options};
    rank_state const state{hooked, *hooks, engine, sharded};
    step(state);
    memory parameters{sharded, engine, *hooks};
    test::thrown const caught = test::what_throws([&] { body(state); });
    CHECK_MESSAGE(parameters.unchanged(), how.name, ", rank ", comm.rank(), ": ", caught.message);
    if (caught.kind == test::kind::usage) {
      throw zero::usage_error{caught.message};
    }
    if (caught.kind == test::kind::communication) {
      throw zero::communication_error{caught.message};
    }
    if (caught.kind == test::kind::other) {
      throw std::runtime_error{caught.message};
    }
  });
}

/// The deadline where, in stage 3, one rank may gather while the other reduces: each on a
/// communicator of its own, so that neither is in the wrong call.
milliseconds cross_wait(test::setting const& how) {
  return how.stage.shards_parameters() ? milliseconds{300} : deadline;
}

void check_all_say(test::failures const& caught, test::setting const& how,
                   std::initializer_list<std::string_view> parts) {
  CHECK_MESSAGE(caught.all_say(parts), how.name, "\n", caught.text());
  CHECK_MESSAGE(caught.took < deadline, how.name, "\n", caught.text());
}

/// Every rank's message has the call that failed, what it expected and found, and `rank`.
void check_all_blame(test::failures const& caught, test::setting const& how, int rank) {
  check_all_say(caught, how, {"expected", "actual", "rank " + std::to_string(rank)});
  for (test::thrown const& each : caught.ranks) {
    CHECK_MESSAGE(
        (each.says("step: expected") || each.says("exchange #") || each.says("all_gather #") ||
         each.says("all_reduce #") || each.says("reduce_scatter #")),
        how.name, "\n", caught.text());
  }
}

/// Every call of a model whose group has failed throws, at once.
void check_dead(rank_state const& state, std::string_view how) {
  auto const start = std::chrono::steady_clock::now();
  sharded_model& sharded = state.sharded;
  for (int repeat = 0; repeat < 2; ++repeat) {
    CHECK_MESSAGE(test::what_throws([&] { step(state); }).kind != test::kind::nothing, how);
    CHECK_MESSAGE(
        test::what_throws([&] { static_cast<void>(sharded.step()); }).kind != test::kind::nothing,
        how);
    CHECK_MESSAGE(test::what_throws([&] { static_cast<void>(sharded.gradient(0)); }).kind !=
                      test::kind::nothing,
                  how);
  }
  CHECK_MESSAGE(std::chrono::steady_clock::now() - start < deadline, how);
}

}  // namespace

TEST_CASE(
    "a rank that throws in its own code, wherever, gives every other rank an error with its "
    "number") {
  for (int const ranks : {2, 3}) {
    for (test::setting const& how : test::every_setting()) {
      for (std::string_view const place :
           {"in the micro-batch", "in a forward lease", "between forward and backward",
            "in a backward lease", "between backward leases", "before step", "outside"}) {
        test::setting const named{how.name + ", " + std::string{place}, how.stage, how.policy,
                                  how.options};
        std::atomic<int> went_on{0};
        test::failures const caught = run(ranks, named, [&](rank_state const& state) {
          if (state.rank() == 1 && place == "outside") {
            throw std::runtime_error{"boom"};
          }
          step(state, [&](std::string_view where) {
            if (state.rank() == 1 && where == place) {
              throw std::runtime_error{"boom"};
            }
          });
          ++went_on;
        });
        CHECK_MESSAGE(went_on == 0, named.name);
        CHECK_MESSAGE(caught.ranks[1].message == "boom", named.name);
        for (std::size_t rank = 0; rank < caught.ranks.size(); ++rank) {
          CHECK_MESSAGE((rank == 1 || (caught.ranks[rank].kind == test::kind::communication &&
                                       caught.ranks[rank].says("rank 1"))),
                        named.name, "\n", caught.text());
        }
        CHECK_MESSAGE(caught.took < deadline, named.name, "\n", caught.text());
      }
    }
  }
}

TEST_CASE("a rank that catches its own exception and goes on is stopped, and so are its peers") {
  for (test::setting const& how : test::every_setting()) {
    for (std::string_view const place :
         {"in the micro-batch", "in a forward lease", "between forward and backward",
          "in a backward lease", "between backward leases"}) {
      test::failures const caught = run(3, how, [&](rank_state const& state) {
        try {
          step(state, [&](std::string_view where) {
            if (state.rank() == 2 && where == place) {
              throw std::logic_error{"mine"};
            }
          });
        } catch (std::logic_error const&) {
          step(state);
        }
      });
      check_all_say(caught, how, {"rank 2", "an exception ended"});
    }
    test::failures const caught = run(2, how, [](rank_state const& state) {
      try {
        auto evaluation = state.sharded.evaluation();
        for (std::size_t u = 0; u < 3; ++u) {
          auto const lease = evaluation.forward(u);
        }
        if (state.rank() == 1) {
          throw std::logic_error{"mine"};
        }
      } catch (std::logic_error const&) {
      }
      step(state);
    });
    check_all_say(caught, how, {"rank 1", "an exception ended the evaluation"});
  }
}

TEST_CASE(
    "an exception that is caught between the lease that it ended and the end of the micro-batch") {
  for (test::setting const& how : test::every_setting()) {
    test::failures const caught = run(2, how, [&](rank_state const& state) {
      {
        auto micro = state.sharded.microbatch(0, 1);
        for (std::size_t u = state.sharded.units(); u-- > 0;) {
          try {
            auto const lease = micro.backward(u);
            test::write_gradients(state.sharded, state.engine, lease,
                                  [](std::string const&, std::size_t) { return 1.0F; });
            if (u == 1 && state.rank() == 1) {
              throw std::logic_error{"mine"};
            }
          } catch (std::logic_error const&) {
          }
        }
      }
      state.sharded.step();
      state.sharded.wait();
    });
    check_all_say(caught, how, {"an exception ended the lease of unit 1 (rank 1)"});
  }
}

TEST_CASE("a rank that ends early is missed at once, by name") {
  for (test::setting const& how : test::every_setting()) {
    test::failures const caught = run(3, how, [&](rank_state const& state) {
      if (state.rank() != 1) {
        step(state);
        check_dead(state, how.name);
      }
    });
    CHECK_MESSAGE(caught.ranks[1].kind == test::kind::nothing, how.name);
    for (std::size_t const rank : {0U, 2U}) {
      CHECK_MESSAGE(caught.ranks[rank].says({"#", "expected 3 ranks", "rank 1 has left"}), how.name,
                    "\n", caught.text());
    }
    CHECK_MESSAGE(caught.took < deadline, how.name);
  }
}

TEST_CASE("a rank that never arrives is missed at the deadline, and then gets the error too") {
  for (bool const overlap : {false, true}) {
    zero::stage const stage = overlap ? zero::stage(zero::stage3{}) : zero::stage(zero::stage1{});
    test::setting const how{"", stage, zero::reduce_per_microbatch{}, {.overlap = overlap}};
    std::atomic<int> threw{0};
    test::failures const caught = run(3, how, [&](rank_state const& state) {
      if (state.rank() == 1) {
        while (threw < 2) {
          std::this_thread::sleep_for(milliseconds{1});
        }
        step(state);
        return;
      }
      auto const start = std::chrono::steady_clock::now();
      try {
        step(state);
      } catch (...) {
        auto const took = std::chrono::steady_clock::now() - start;
        CHECK(took > deadline - milliseconds{100});
        CHECK(took < 2 * deadline);
        ++threw;
        check_dead(state, "after the deadline");
        throw;
      }
    });
    CHECK_MESSAGE(
        caught.all_say({"#", "expected 3 ranks within 2000 ms", "actual 2", "missing rank 1"}),
        caught.text());
  }
}

TEST_CASE(
    "case 53: a rank that dies in its second bucket ends both of its peers' models, and all "
    "calls") {
  for (bool const throws : {true, false}) {
    for (test::setting const& how : test::every_setting({.bucket_bytes = 0})) {
      test::failures const caught = run(3, how, [&](rank_state const& state) {
        test::model other_engine{growing()};
        zero::options options = how.options;
        options.deadline = deadline;
        sharded_model other{state.comm, other_engine.units(), how.stage,
                            plain,      how.policy,           options};
        rank_state const second{state.comm, state.hooks, other_engine, other};
        {
          auto micro = other.microbatch(0, 1);
          for (std::size_t u = 3; u-- > 0;) {
            auto const lease = micro.backward(u);
            if (u == 1 && state.rank() == 2) {
              if (throws) {
                throw std::runtime_error{"boom"};
              }
              return;
            }
            test::write_gradients(other, other_engine, lease,
                                  [](std::string const&, std::size_t) { return 1.0F; });
          }
        }
        test::thrown const caught_here = test::what_throws([&] {
          other.step();
          other.wait();
        });
        CHECK_MESSAGE(caught_here.says("rank 2"), how.name, ": ", caught_here.message);
        check_dead(second, how.name);
        step(state);
      });
      for (std::size_t const rank : {0U, 1U}) {  // the first model: by rank 2, or by one after it
        CHECK_MESSAGE((caught.ranks[rank].says("aborted by rank ") ||
                       caught.ranks[rank].says("rank 2 has left")),
                      how.name, "\n", caught.text());
      }
      CHECK_MESSAGE(caught.took < deadline, how.name, "\n", caught.text());
    }
  }
}

TEST_CASE(
    "a rank that never builds the model is missed at the communicator's deadline; values stay") {
  test::failures const caught = test::run_failing(3, [](zero::thread_communicator& raw) {
    raw.set_deadline(milliseconds{500});
    auto const hooks = std::make_shared<test::hooks>();
    communicator comm{raw.split(0, raw.rank()), hooks};
    if (raw.rank() == 2) {
      std::this_thread::sleep_for(milliseconds{1500});
      return;
    }
    test::model engine{growing()};
    try {
      sharded_model const sharded{comm, engine.units(), zero::stage3{}, plain,
                                  zero::local_accumulate{}};
    } catch (...) {
      CHECK(engine.value("d").own == std::vector<float>(400, 10.0F));
      throw;
    }
  });
  for (std::size_t const rank : {0U, 1U}) {
    CHECK_MESSAGE(
        caught.ranks[rank].says({"split #", "expected 3 ranks within 500 ms", "missing rank 2"}),
        caught.text());
  }
}

namespace {

/// Bind on `ranks` ranks, which must fail on each; tensors that have values keep them.
template <class Units>
test::failures run_binding(int ranks, test::setting const& how, Units units) {
  return test::run_failing(ranks, [&](zero::thread_communicator& raw) {
    auto const hooks = std::make_shared<test::hooks>();
    communicator comm{raw.split(0, raw.rank()), hooks};
    test::model engine{growing()};
    for (auto const& [name, elements] : engine.values()) {  // other values on each rank
      std::ranges::fill(engine.value(name).view, static_cast<float>(raw.rank()));
    }
    test::whole_values const before = engine.values();
    try {
      sharded_model const sharded{
          comm, units(engine, raw.rank()), how.stage, plain, how.policy, how.options};
    } catch (...) {
      CHECK_MESSAGE(engine.values() == before, how.name, ", rank ", raw.rank());
      CHECK_MESSAGE(engine.value("a").owns(), how.name);
      throw;
    }
  });
}

/// A tensor whose elements can't be asked for on some ranks.
struct moody_tensor {
  std::vector<float> own = std::vector<float>(3, 1.0F);
  bool throws = false;
};

}  // namespace

template <>
struct zero::tensor_traits<moody_tensor> {
  using value_type = float;
  using device = zero::host;
  static std::span<float> elements(moody_tensor& tensor) {
    if (tensor.throws) {
      throw std::runtime_error{"no elements today"};
    }
    return tensor.own;
  }
};

TEST_CASE(
    "an initialiser that throws on one rank is every rank's error, and values that exist stay") {
  for (test::setting const& how : test::every_setting()) {
    test::tensor tensors[2][2];
    test::failures const caught = run_binding(2, how, [&](test::model& engine, int rank) {
      auto units = engine.units();
      units.push_back({zero::parameter("new", tensors[rank][0], tensors[rank][1], {40},
                                       [rank](std::span<float> out, std::size_t) {
                                         if (rank == 1) {
                                           throw std::runtime_error{"no numbers today"};
                                         }
                                         std::fill(out.begin(), out.end(), 1.0F);
                                       })});
      return units;
    });
    check_all_say(caught, how,
                  {"sharded_model: expected the initialiser of parameter 'new' to return",
                   "no numbers today", "(rank 1)"});
    CHECK(!caught.ranks[0].says("sharded_model: sharded_model: "));
  }
}

TEST_CASE("a tensor whose elements can't be asked for is every rank's error, and values stay") {
  for (zero::stage const& stage : {zero::stage(zero::stage0{}), zero::stage(zero::stage2{})}) {
    test::setting const how{"", stage, zero::local_accumulate{}, {}};
    std::vector<moody_tensor> moody(3);
    moody[2].throws = true;
    test::failures const caught = run_binding(3, how, [&](test::model& engine, int rank) {
      auto units = engine.units();
      units.push_back({zero::parameter("moody", moody[static_cast<std::size_t>(rank)])});
      return units;
    });
    check_all_say(caught, how, {"sharded_model: ", "no elements today", "(rank 2)"});
  }
}

TEST_CASE("a lease held past step is an error on every rank, and nothing is updated") {
  for (bool const backward : {false, true}) {
    for (test::setting const& how : test::every_setting()) {
      test::failures const caught = run(2, how, [&](rank_state const& state) {
        using model = std::remove_reference_t<decltype(state.sharded.microbatch(0, 1).forward(0))>;
        std::optional<model> held;
        {
          auto micro = state.sharded.microbatch(0, 1);
          for (std::size_t u = 3; u-- > 0;) {
            auto lease = micro.backward(u);
            test::write_gradients(state.sharded, state.engine, lease,
                                  [](std::string const&, std::size_t) { return 1.0F; });
            if (u == 0 && backward && state.rank() == 1) {
              lease.end();
            }
          }
          if (state.rank() == 1) {
            held.emplace(micro.forward(0));
          } else {
            auto const lease = micro.forward(0);
          }
        }
        state.sharded.step();
        state.sharded.wait();
      });
      check_all_say(caught, how, {"step: expected no open lease", "actual units 0", "rank 1"});
    }
  }
}

TEST_CASE("a step inside a micro-batch, or without a backward, is an error on every rank") {
  for (test::setting const& how : test::every_setting()) {
    test::failures caught = run(2, how, [&](rank_state const& state) {
      auto micro = state.sharded.microbatch(0, 1);
      test::forward_and_backward(state.sharded, state.engine, micro,
                                 [](std::string const&, std::size_t) { return 1.0F; });
      state.sharded.step();
    });
    check_all_say(caught, how, {"step: expected no open micro-batch, actual one", "(rank "});
    caught = run(2, how, [](rank_state const& state) { state.sharded.step(); });
    check_all_say(caught, how,
                  {"step: expected a micro-batch with a backward, actual none", "(rank "});
  }
}

TEST_CASE("a trainable parameter with neither gradient nor skip is an error on every rank") {
  for (bool const everywhere : {false, true}) {
    for (test::setting const& how : test::every_setting({.bucket_bytes = 0})) {
      auto const body = [&](rank_state const& state) {
        {
          auto micro = state.sharded.microbatch(0, 1);
          for (std::size_t u = 3; u-- > 0;) {
            if (u == 0 && (everywhere || state.rank() == 1)) {
              continue;
            }
            auto const lease = micro.backward(u);
            test::write_gradients(state.sharded, state.engine, lease,
                                  [](std::string const&, std::size_t) { return 1.0F; });
          }
        }
        state.sharded.step();
        state.sharded.wait();
      };
      test::failures const caught = run(2, how, body, cross_wait(how));
      if (everywhere || !how.stage.shards_parameters()) {
        check_all_say(caught, how,
                      {"step: expected a gradient or skip", "actual none for 'a'", "(rank "});
      } else {  // rank 0 misses rank 1 in the gather of unit 0
        check_all_blame(caught, how, 1);
      }
    }
  }
}

TEST_CASE("windows that differ between ranks are an error on every rank, and nothing is updated") {
  for (test::setting const& how : test::every_setting()) {
    auto const run_windows = [&](std::size_t ran, std::size_t announced) {
      auto const body = [&](rank_state const& state) {
        std::size_t const mine = state.rank() == 0 ? 2 : ran;
        std::size_t const said = state.rank() == 0 ? 2 : announced;
        for (std::size_t m = 0; m < mine; ++m) {
          test::run_microbatch(state.sharded, state.engine, m, said,
                               [](std::string const&, std::size_t) { return 1.0F; });
        }
        state.sharded.step();
        state.sharded.wait();
      };
      return run(2, how, body, cross_wait(how));
    };
    check_all_blame(run_windows(1, 1), how, 1);
    check_all_blame(run_windows(1, 2), how, 1);
    check_all_blame(run_windows(3, 3), how, 1);
    test::failures const caught =
        run_windows(2, 3);  // as announced, where collectives didn't differ before
    check_all_blame(caught, how, 1);
    CHECK_MESSAGE((how.policy.per_microbatch || how.stage.shards_parameters() ||
                   caught.all_say({"step: expected a window of ", " announced micro-batches"})),
                  how.name, "\n", caught.text());
  }
}

TEST_CASE(
    "units leased in another order on one rank are an error on every rank before the update") {
  test::model::structure const alike{{{"a", 8}}, {{"b", 8}}, {{"c", 8}}};
  for (test::setting const& how : test::every_setting({.bucket_bytes = 0, .deadline = deadline})) {
    test::failures const caught = test::run_failing(2, [&](zero::thread_communicator& raw) {
      communicator comm{raw.split(0, raw.rank()), std::make_shared<test::hooks>()};
      test::model engine{alike};
      sharded_model sharded{comm, engine.units(), how.stage, plain, how.policy, how.options};
      {
        auto micro = sharded.microbatch(0, 1);
        std::vector<std::size_t> order{2, 1, 0};
        if (raw.rank() == 1) {
          order = {1, 2, 0};
        }
        for (std::size_t const u : order) {
          auto const lease = micro.forward(u);
        }
        for (std::size_t const u : order) {
          auto const lease = micro.backward(u);
          test::write_gradients(sharded, engine, lease,
                                [](std::string const&, std::size_t) { return 1.0F; });
        }
      }
      sharded.step();
      sharded.wait();
    });
    check_all_say(caught, how,
                  {"step: expected units in one order on all ranks", "actual another", "rank"});
  }
}

TEST_CASE(
    "hyperparameters that one rank changed alone are an error on every rank before the update") {
  for (test::setting const& how : test::every_setting()) {
    test::failures caught = run(2, how, [](rank_state const& state) {
      state.sharded.optimizer().learning_rate = state.rank() == 0 ? 1 : 0.5;
      step(state);
    });
    check_all_say(
        caught, how,
        {"step: expected one optimizer on all ranks", "actual other hyperparameters", "rank"});
    caught = run(2, how, [](rank_state const& state) {
      state.sharded.optimizer().learning_rate = -1;
      step(state);
    });
    check_all_say(caught, how, {"step: sgd.learning_rate: expected", "actual -1", "(rank "});
  }
}

namespace {

/// What a fault leaves behind.
struct fault {
  std::size_t number;  ///< of rank 1's collectives
  bool in_stream;
};

/// Two steps with rank 1's n-th collective failing. Returns how many collectives it made.
std::size_t run_with_fault(test::setting const& how, fault const& bad) {
  std::size_t made = 0;
  test::failures const caught = test::run_failing(3, [&](zero::thread_communicator& raw) {
    auto const hooks = std::make_shared<test::hooks>();
    communicator comm{raw.split(0, raw.rank()), hooks};
    test::model engine{growing()};
    zero::options options = how.options;
    options.deadline = deadline;
    options.clip_norm = 1e6;
    sharded_model sharded{comm, engine.units(), how.stage, plain, how.policy, options};
    rank_state const state{comm, *hooks, engine, sharded};
    memory parameters{sharded, engine, *hooks};
    hooks->calls = 0;
    bool in_update = false;  // the failing call is the gather of what was just updated
    auto const fail = [&](test::collective_call const& call) {
      if (raw.rank() == 1 && call.number == bad.number) {
        throw std::runtime_error{"the cable was cut"};
      }
    };
    auto const look = [&](test::collective_call const& call) {
      in_update = in_update || (call.number == bad.number && !how.stage.shards_parameters() &&
                                std::string_view{call.operation} == "all_gather" &&
                                call.output.data() == engine.value("a").view.data());
    };
    if (bad.in_stream) {
      hooks->in_stream = fail;
      hooks->before_call = look;
    } else {
      hooks->before_call = [=](test::collective_call const& call) {
        look(call);
        fail(call);
      };
    }
    try {
      for (int i = 0; i < 2; ++i) {
        step(state);
        parameters.remember();
      }
      if (raw.rank() == 1) {
        made = hooks->calls;
      }
    } catch (...) {
      if (!in_update) {
        CHECK_MESSAGE(parameters.unchanged(), how.name, ", rank ", raw.rank(), ", call ",
                      bad.number);
      } else if (bad.in_stream) {
        for (int repeat = 0; repeat < 2; ++repeat) {
          test::thrown const later = test::what_throws([&] { sharded.wait(); });
          CHECK_MESSAGE(later.says({"expected a whole update", "failed midway", "(rank "}),
                        how.name, ": ", later.message);
        }
      }
      check_dead(state, how.name);
      throw;
    }
  });
  if (made == 0) {
    CHECK_MESSAGE(caught.ranks[1].says("the cable was cut"), how.name, "\n", caught.text());
    CHECK_MESSAGE(caught.all_say({"the cable was cut"}), how.name, ", call ", bad.number, "\n",
                  caught.text());
  }
  CHECK_MESSAGE(caught.took < deadline, how.name);
  return made;
}

}  // namespace

TEST_CASE(
    "whichever collective fails, every rank learns why, and a step that didn't begin changes "
    "nothing") {
  for (bool const in_stream : {false, true}) {
    for (test::setting const& how : test::every_setting()) {
      std::size_t number = 1;
      while (run_with_fault(how, {number, in_stream}) == 0) {
        ++number;
      }
      CHECK_MESSAGE(number > 4, how.name);
    }
  }
}
