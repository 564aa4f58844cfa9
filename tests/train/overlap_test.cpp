// SPDX-License-Identifier: MIT
#include <support/recording_communicator.hpp>
#include <support/settings.hpp>
#include <support/simulated_device.hpp>
#include <zero/comm/run_threads.hpp>
#include <zero/optim/sgd.hpp>
#include <zero/train/sharded_model.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

using test::compute;
using test::simulated_time;
using test::ticks;

namespace {

/// A tensor on the simulated device.
struct tensor {
  std::vector<float> own;
  std::span<float> view;
};

}  // namespace

template <>
struct zero::tensor_traits<tensor> {
  using value_type = float;
  using device = test::simulated_device;
  static std::span<float> elements(tensor& t) { return t.view; }
  static void rebind(tensor& t, std::span<float> storage) {
    std::vector<float>{}.swap(t.own);
    t.view = storage;
  }
  static void allocate(tensor& t, std::size_t n) {
    t.own.assign(n, 0);
    t.view = t.own;
  }
};

namespace {

using communicator =
    test::recording_communicator<test::simulated_communicator<zero::thread_communicator>>;
using model = zero::sharded_model<communicator, zero::plain_sgd>;

using stages = std::vector<zero::stage>;
using policies = std::vector<zero::accumulation>;

constexpr std::size_t units = 8;

/// Without padding over 1, 2, 3, 4 or 8 ranks, so a collective's size tells its unit.
constexpr std::size_t size_of(std::size_t unit) { return 384 * (unit + 1); }

/// How long collectives take; compute takes a tick for each unit and direction.
struct network {
  ticks gather = 0;
  ticks reduction = 0;
  std::size_t slow_unit = units;  ///< whose gather takes `slow` ticks instead
  ticks slow = 0;
};

/// How the engine hands gradients over.
enum class delivery { lease, in_place, copied };

/// A rank: its model, and a journal of gathers, reductions and compute.
class engine {
 public:
  engine(zero::thread_communicator& threads, zero::stage at, zero::accumulation policy,
         network const& net, zero::options chosen = {})
      : comm_{test::simulated_communicator<zero::thread_communicator>{
                  threads.split(0, threads.rank()),
                  [net](std::string_view operation, std::size_t elements) {
                    return duration(net, operation, elements);
                  }},
              log} {
    for (std::size_t u = 0; u < units; ++u) {
      values_[u].own.assign(size_of(u), static_cast<float>(u));
      values_[u].view = values_[u].own;
    }
    log.describe = [](test::call const& made) -> std::string {
      std::size_t const unit = unit_of(std::max(made.from.size(), made.to.size()));
      if (unit == units) {
        return {};
      }
      return (made.operation == "all_gather" ? "gather " : "reduce ") + std::to_string(unit);
    };
    std::vector<std::vector<zero::typed_parameter<tensor, tensor>>> declared;
    for (std::size_t u = 0; u < units; ++u) {
      declared.push_back({zero::parameter(std::to_string(u), values_[u], gradients_[u])});
    }
    chosen.bucket_bytes = 0;
    sharded.emplace(comm_, declared, at, zero::plain_sgd{.learning_rate = 1}, policy, chosen);
    log.lines.clear();
    simulated_time() = {};
  }

  template <class Microbatch>
  void forward(Microbatch& micro) {
    for (std::size_t u = 0; u < units; ++u) {
      auto const lease = micro.forward(u);
      note("forward", u);
      compute(1);
    }
  }

  template <class Microbatch>
  void backward(Microbatch& micro) {
    for (std::size_t u = units; u-- > 0;) {
      auto const lease = micro.backward(u);
      note("backward", u);
      compute(1);
      for (float& g : gradients_[u].view) {
        g = (lease.accumulate() ? g : 0) + 1;
      }
    }
  }

  /// A window of two micro-batches and a step, in which element i's gradient is half its value,
  /// plus (rank + 1) (micro-batch + 1). Each way of handing it over frees or overwrites what it
  /// handed over.
  void train(delivery how) {
    for (std::size_t m = 0; m < 2; ++m) {
      auto micro = sharded->microbatch(m, 2);
      forward(micro);
      for (std::size_t u = units; u-- > 0;) {
        if (how == delivery::lease) {
          auto const lease = micro.backward(u);
          write_gradient(u, m, lease.accumulate(), gradients_[u].view);
          compute(1);
          continue;
        }
        auto const lease = micro.backward(u, zero::by_parameter);
        std::size_t const id = sharded->find(std::to_string(u));
        if (how == delivery::in_place) {
          auto const [place, accumulate] = micro.gradient(id);
          write_gradient(u, m, accumulate, place.as<float>());
          micro.gradient_ready(id);
        } else {
          std::vector<float> own(size_of(u));
          write_gradient(u, m, false, own);
          micro.gradient_ready(id, std::span{std::as_const(own)});
          std::ranges::fill(own, 1e9F);
        }
        compute(1);
      }
    }
    sharded->step();
  }

  /// Whether each element of unit u is `expected(u)`, in an evaluation and then in tensors given
  /// back.
  template <class Expected>
  [[nodiscard]] bool holds(Expected expected) {
    bool right = true;
    auto const check = [&](std::size_t u) {
      right =
          right && values_[u].view.size() == size_of(u) &&
          std::ranges::all_of(values_[u].view, [&](float value) { return value == expected(u); });
    };
    {
      auto evaluation = sharded->evaluation();
      for (std::size_t u = 0; u < units; ++u) {
        auto const lease = evaluation.forward(u);
        check(u);
      }
    }
    sharded->release();
    for (std::size_t u = 0; u < units; ++u) {
      check(u);
    }
    return right;
  }

  void note(std::string const& what, std::size_t unit) {
    log.note(what + " " + std::to_string(unit));
  }

  test::journal log;

 private:
  void write_gradient(std::size_t unit, std::size_t m, bool accumulate, std::span<float> out) {
    float const constant = static_cast<float>(comm_.rank() + 1) * static_cast<float>(m + 1);
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = (accumulate ? out[i] : 0) + 0.5F * values_[unit].view[i] + constant;
    }
  }

  static std::size_t unit_of(std::size_t elements) {
    for (std::size_t u = 0; u < units; ++u) {
      if (size_of(u) == elements) {
        return u;
      }
    }
    return units;
  }

  static ticks duration(network const& net, std::string_view operation, std::size_t elements) {
    std::size_t const unit = unit_of(elements);
    if (unit == units) {
      return 0;
    }
    if (operation == "all_gather") {
      return unit == net.slow_unit ? net.slow : net.gather;
    }
    return net.reduction;
  }

  std::array<tensor, units> values_;
  std::array<tensor, units> gradients_;
  communicator comm_;

 public:
  std::optional<model> sharded;
};

/// Run a window of `count` micro-batches on `ranks`, and then `check(engine)`.
template <class Check>
void run(int ranks, zero::stage at, zero::accumulation policy, network const& net,
         std::size_t count, zero::options const& chosen, Check check) {
  zero::run_threads(ranks, [&](zero::thread_communicator& threads) {
    engine e{threads, at, policy, net, chosen};
    for (std::size_t m = 0; m < count; ++m) {
      auto micro = e.sharded->microbatch(m, count);
      e.forward(micro);
      e.backward(micro);
    }
    check(e);
  });
}

std::string line(std::string_view what, std::size_t unit) {
  return std::string{what} + " " + std::to_string(unit);
}

}  // namespace

TEST_CASE("the reduction of a unit is enqueued before the backward of the one before it starts") {
  for (zero::stage const at :
       stages{zero::stage0{}, zero::stage1{}, zero::stage2{}, zero::stage3{}}) {
    for (zero::accumulation const policy :
         policies{zero::local_accumulate{}, zero::reduce_per_microbatch{}}) {
      for (bool const overlap : {true, false}) {
        run(2, at, policy, {.reduction = 3}, 1, {.overlap = overlap}, [](engine& e) {
          for (std::size_t k = units; k-- > 1;) {
            CHECK(e.log.find(line("backward", k)) < e.log.find(line("reduce", k)));
            CHECK(e.log.find(line("reduce", k)) < e.log.find(line("backward", k - 1)));
          }
        });
      }
    }
  }
}

TEST_CASE("with slow communication two gradient buckets are occupied beside the shard") {
  for (int const ranks : {1, 2}) {
    for (zero::stage const at : stages{zero::stage2{}, zero::stage3{}}) {
      run(ranks, at, zero::reduce_per_microbatch{}, {.reduction = 3}, 1, {}, [](engine& e) {
        CHECK(e.sharded->gradient_high_water() == 2);
        CHECK(e.sharded->ledger()[zero::category::gradient_buckets] ==
              2 * size_of(units - 1) * sizeof(float));
      });
    }
  }
}

TEST_CASE("backward waits for a gradient bucket exactly as long as its reduction still takes") {
  // Forward ends at 8. Unit 7 is reduced from 9 to 12, unit 6, done at 10, from 12 to 15; unit 5
  // waits for the bucket of 7 from 10 to 12; from then on each unit waits 2 ticks of the 3 that a
  // reduction takes. In stage 3 gathers don't wait for reductions, which have a stream of their
  // own.
  for (zero::stage const at : stages{zero::stage2{}, zero::stage3{}}) {
    run(1, at, zero::reduce_per_microbatch{}, {.reduction = 3}, 1, {}, [](engine& e) {
      CHECK(simulated_time().waited == 6 * 2);
      CHECK(simulated_time().now == 8 + 8 + 12);
      e.sharded->step();
      e.sharded->wait();
      CHECK(simulated_time().now == 9 + 8 * 3);
    });
  }
  // With a third bucket unit 4 is the first to wait, from 11 to 12, and units 3 to 0 wait 2 ticks
  // each.
  run(1, zero::stage2{}, zero::reduce_per_microbatch{.open_buckets = 3}, {.reduction = 3}, 1, {},
      [](engine& e) {
        CHECK(simulated_time().waited == 1 + 4 * 2);
        CHECK(e.sharded->gradient_high_water() == 3);
      });
  // With one bucket nothing overlaps: each unit but the first waits for the whole reduction.
  run(1, zero::stage2{}, zero::reduce_per_microbatch{.open_buckets = 1}, {.reduction = 3}, 1, {},
      [](engine& e) {
        CHECK(simulated_time().waited == 7 * 3);
        CHECK(e.sharded->gradient_high_water() == 1);
      });
  // Communication faster than compute costs nothing, and its bucket is free at once.
  run(1, zero::stage2{}, zero::reduce_per_microbatch{}, {.reduction = 1}, 1, {}, [](engine& e) {
    CHECK(simulated_time().waited == 0);
    CHECK(e.sharded->gradient_high_water() == 2);
  });
}

TEST_CASE("local accumulation reduces in the last micro-batch only, and never waits in backward") {
  for (zero::stage const at : stages{zero::stage0{}, zero::stage1{}, zero::stage2{}}) {
    run(1, at, zero::local_accumulate{}, {.reduction = 5}, 3, {}, [](engine& e) {
      CHECK(simulated_time().waited == 0);
      CHECK(simulated_time().now == 3 * 16);
      std::size_t const last =
          e.log.find("backward 7", e.log.find("backward 0", e.log.find("backward 0") + 1));
      CHECK(e.log.find("reduce 7") == last + 1);
      CHECK(std::ranges::count_if(e.log.lines, [](std::string const& each) {
              return each.starts_with("reduce");
            }) == 8);
      e.sharded->step();
      e.sharded->wait();
      CHECK(simulated_time().now ==
            2 * 16 + 9 + 8 * 5);  // the first reduction starts when unit 7 is done
    });
  }
}

TEST_CASE("without overlap each reduction is waited for") {
  run(1, zero::stage1{}, zero::local_accumulate{}, {.reduction = 2}, 1, {.overlap = false},
      [](engine& e) {
        e.sharded->step();
        e.sharded->wait();
        CHECK(simulated_time().now == 16 + 8 * 2);
        CHECK(simulated_time().waited == 8 * 2);
      });
  run(1, zero::stage1{}, zero::local_accumulate{}, {.reduction = 1}, 1, {.overlap = true},
      [](engine& e) {
        e.sharded->step();
        e.sharded->wait();
        CHECK(simulated_time().now == 16 + 1);
        CHECK(simulated_time().waited == 1);
      });
}

TEST_CASE("the gather of the next unit is enqueued before a unit's compute, in both directions") {
  for (int const ranks : {1, 2}) {
    for (std::size_t const depth : {1U, 2U, 3U}) {
      run(ranks, zero::stage3{.prefetch = depth}, zero::reduce_per_microbatch{}, {}, 1, {},
          [&](engine& e) {
            std::size_t const turn = e.log.find("backward 7");
            for (std::size_t k = 0; k < units; ++k) {
              CHECK(e.log.find(line("gather", std::min(k + depth, units - 1))) <
                    e.log.find(line("forward", k)));
              // Not earlier than it must: no bucket is gathered further ahead than the depth.
              CHECK((k + depth + 1 >= units ||
                     e.log.find(line("gather", k + depth + 1)) > e.log.find(line("forward", k))));
              std::size_t const ahead = k < depth ? 0 : k - depth;
              CHECK(e.log.find(line("gather", ahead), e.log.find("forward 7")) <
                    e.log.find(line("backward", k)));
            }
            // The turn crosses no pass: unit 7 is gathered again after the last forward compute.
            CHECK(e.log.find("gather 7", e.log.find("forward 7")) < turn);
            CHECK(e.sharded->gathered().high_water == 1 + depth);
            CHECK(e.sharded->gathered().gathers == 2 * units);
          });
    }
  }
}

TEST_CASE(
    "waiting for one slow gather falls with the prefetch depth, and the peak rises by a slot "
    "each") {
  // Unit 4's gather takes 5 ticks. In each direction it starts `depth` units ahead: 5 - depth are
  // left.
  std::uint64_t const slot = size_of(units - 1) * sizeof(float);
  std::uint64_t peak = 0;
  for (std::size_t const depth : {0U, 1U, 2U, 3U}) {
    run(1, zero::stage3{.prefetch = depth}, zero::local_accumulate{}, {.slow_unit = 4, .slow = 5},
        1, {}, [&](engine& e) {
          CHECK(simulated_time().waited == 2 * (5 - static_cast<ticks>(depth)));
          CHECK(simulated_time().now == 16 + simulated_time().waited);
          CHECK(e.sharded->plan().bytes == e.sharded->ledger());
          CHECK((depth == 0 || e.sharded->ledger().peak() == peak + slot));
          peak = e.sharded->ledger().peak();
          CHECK(e.sharded->gathered().high_water == 1 + depth);
        });
  }
  // Deeper helps forward alone: backward reaches unit 4 after 3 others.
  run(1, zero::stage3{.prefetch = 4}, zero::local_accumulate{}, {.slow_unit = 4, .slow = 5}, 1, {},
      [](engine&) { CHECK(simulated_time().waited == 1 + 2); });
  run(1, zero::stage3{.prefetch = 100}, zero::local_accumulate{}, {.slow_unit = 4, .slow = 5}, 1,
      {}, [](engine&) { CHECK(simulated_time().waited == 1 + 2); });
}

TEST_CASE(
    "gathers as long as compute are hidden by a prefetch of 1, but for the first of each pass") {
  run(1, zero::stage3{.prefetch = 0}, zero::local_accumulate{}, {.gather = 1}, 1, {},
      [](engine&) { CHECK(simulated_time().waited == 16); });
  run(1, zero::stage3{.prefetch = 1}, zero::local_accumulate{}, {.gather = 1}, 1, {},
      [](engine&) { CHECK(simulated_time().waited == 2); });
  run(1, zero::stage3{.prefetch = 1, .keep_after_forward = true}, zero::local_accumulate{},
      {.gather = 1}, 1, {}, [](engine&) { CHECK(simulated_time().waited == 1); });
}

TEST_CASE("every stage computes the right numbers on a device whose work runs late") {
  // The mean gradient of a window is p / 2 + 3 (P + 1) / 4, so p becomes p / 2 - 3 (P + 1) / 4:
  // exact.
  for (int const ranks : {1, 2, 3}) {
    for (test::setting each : test::every_setting({.clip_norm = 1e9})) {
      for (delivery const how : {delivery::lease, delivery::in_place, delivery::copied}) {
        for (bool const engine_adds : {false, true}) {
          if (engine_adds && how != delivery::lease) {
            continue;
          }
          CAPTURE(each.name);
          each.options.engine_adds = engine_adds;
          bool right = true;
          zero::run_threads(ranks, [&](zero::thread_communicator& threads) {
            engine e{threads, each.stage, each.policy, {.gather = 3, .reduction = 2}, each.options};
            for (int step = 0; step < 3; ++step) {
              e.train(how);
            }
            if (!e.holds([&](std::size_t u) {
                  float value = static_cast<float>(u);
                  for (int step = 0; step < 3; ++step) {
                    value = value / 2 - 0.75F * static_cast<float>(ranks + 1);
                  }
                  return value;
                })) {
              right = false;
            }
          });
          CHECK(right);
        }
      }
    }
  }
}
