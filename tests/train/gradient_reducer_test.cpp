// SPDX-License-Identifier: MIT
#include <support/owning_tensor.hpp>
#include <support/recording_communicator.hpp>
#include <support/settings.hpp>
#include <zero/comm/run_threads.hpp>
#include <zero/optim/sgd.hpp>
#include <zero/train/sharded_model.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace {

using communicator = test::recording_communicator<zero::thread_communicator>;
using model = zero::sharded_model<communicator, zero::plain_sgd>;
using tensor = test::owning_tensor<float>;
using lines = std::vector<std::string>;
using stages = std::vector<zero::stage>;

constexpr std::size_t units = 4;

/// Padded over 1 to 4 ranks to themselves, so that a collective's size tells its unit.
constexpr std::size_t size_of(std::size_t unit) { return 192 * (unit + 1); }

/// A rank with units of one parameter of zeros each, and a journal of reductions.
struct engine {
  engine(zero::thread_communicator& threads, zero::stage at, zero::accumulation policy,
         zero::options chosen = {})
      : comm{threads.split(0, threads.rank()), log}, values(units), gradients(units) {
    log.describe = [](test::call const& made) -> std::string {
      bool const gathers = made.operation == "all_gather";
      for (std::size_t u = 0; u < units && made.operation != "broadcast"; ++u) {
        if ((gathers ? made.to.size() : made.from.size()) == size_of(u)) {
          return (gathers ? "gather " : "reduce ") + std::to_string(u);
        }
      }
      return {};
    };
    std::vector<std::vector<zero::typed_parameter<tensor, tensor>>> declared;
    for (std::size_t u = 0; u < units; ++u) {
      values[u] = tensor{size_of(u)};
      declared.push_back({zero::parameter(std::to_string(u), values[u], gradients[u])});
    }
    chosen.bucket_bytes = chosen.bucket_bytes.value_or(0);
    sharded.emplace(comm, declared, at, zero::plain_sgd{.learning_rate = 1}, policy, chosen);
  }

  [[nodiscard]] int rank() const { return comm.rank(); }

  /// Every element of the gradient is `value`.
  template <class Microbatch>
  void hand_over(Microbatch& micro, std::size_t unit, float value = 1) {
    std::vector<float> own(size_of(unit), value);
    micro.gradient_ready(unit, std::span{std::as_const(own)});
    std::ranges::fill(own, 1e9F);
  }

  template <class Microbatch>
  void forward(Microbatch& micro) {
    for (std::size_t u = 0; u < units; ++u) {
      auto const lease = micro.forward(u);
    }
  }

  [[nodiscard]] lines reductions() const {
    lines out;
    std::ranges::copy_if(log.lines, std::back_inserter(out),
                         [](std::string const& line) { return line.starts_with("reduce"); });
    return out;
  }

  /// After a step with learning rate 1 from zeros, each element is minus the mean gradient.
  void check(std::size_t unit, float mean) {
    auto evaluation = sharded->evaluation();
    auto const lease = evaluation.forward(unit);
    CHECK(std::ranges::all_of(values[unit].view,
                              [&](float value) { return std::abs(value + mean) < 1e-5F; }));
  }

  test::journal log;
  communicator comm;
  std::vector<tensor> values;
  std::vector<tensor> gradients;
  std::optional<model> sharded;
};

template <class Body>
void on_ranks(int ranks, Body body) {
  zero::run_threads(ranks, body);
}

template <class Call>
std::string refusal(Call call) {
  try {
    call();
  } catch (zero::usage_error const& caught) {
    return caught.what();
  }
  return "nothing was thrown";
}

bool mentions(std::string const& text, std::string const& part) {
  return text.find(part) != text.npos;
}

lines const last_first{"reduce 3", "reduce 2", "reduce 1", "reduce 0"};

}  // namespace

TEST_CASE(
    "reductions go out last bucket first on every rank, whatever order gradients get ready in") {
  std::vector<std::vector<std::size_t>> const orders{
      {3, 2, 1, 0}, {0, 1, 2, 3}, {2, 0, 3, 1}, {1, 3, 0, 2}};
  for (zero::stage const at : stages{zero::stage0{}, zero::stage1{}, zero::stage2{}}) {
    for (bool const overlap : {false, true}) {
      for (bool const per_microbatch : {false, true}) {
        on_ranks(4, [&](zero::thread_communicator& threads) {
          zero::accumulation policy = zero::local_accumulate{};
          if (per_microbatch) {
            policy = zero::reduce_per_microbatch{.open_buckets = 4};
          }
          engine e{threads, at, policy, {.overlap = overlap}};
          {
            auto micro = e.sharded->microbatch(0, 1);
            e.forward(micro);
            for (std::size_t const unit : orders[static_cast<std::size_t>(e.rank())]) {
              e.hand_over(micro, unit,
                          static_cast<float>((e.rank() + 1) * static_cast<int>(unit + 1)));
            }
          }
          CHECK(e.reductions() == last_first);
          e.sharded->step();
          for (std::size_t u = 0; u < units; ++u) {
            e.check(u, 2.5F * static_cast<float>(u + 1));
          }
        });
      }
    }
  }
}

TEST_CASE("in stage 3 gradients may get ready in any order, under their unit's lease or after it") {
  for (int const ranks : {1, 2, 3}) {
    for (bool const per_microbatch : {false, true}) {
      on_ranks(ranks, [&](zero::thread_communicator& threads) {
        zero::accumulation policy = zero::local_accumulate{};
        if (per_microbatch) {
          policy = zero::reduce_per_microbatch{.open_buckets = 4};
        }
        engine e{threads, zero::stage3{}, policy};
        for (int step = 0; step < 2; ++step) {
          e.log.lines.clear();
          {
            auto micro = e.sharded->microbatch(0, 1);
            e.forward(micro);
            for (std::size_t u = units; u-- > 0;) {
              auto const lease = micro.backward(u, zero::by_parameter);
              if (e.rank() == 0) {
                e.hand_over(micro, u);
              }
            }
            for (std::size_t u = 0; u < units && e.rank() != 0; ++u) {
              e.hand_over(micro, (u + static_cast<std::size_t>(e.rank())) % units);
            }
          }
          e.sharded->step();
          CHECK(e.reductions() == last_first);
        }
        for (std::size_t u = 0; u < units; ++u) {
          e.check(u, 2);
        }
      });
    }
  }
}

TEST_CASE("in stage 3 without overlap reductions have fixed places between the gathers") {
  // One rank hands each gradient over under its unit's lease, the other a unit later: with two
  // slots the reduction of unit u + 2 comes before the gathers for unit u.
  on_ranks(2, [](zero::thread_communicator& threads) {
    engine e{
        threads, zero::stage3{.prefetch = 0}, zero::reduce_per_microbatch{}, {.overlap = false}};
    {
      auto micro = e.sharded->microbatch(0, 1);
      e.forward(micro);
      e.log.lines.clear();
      for (std::size_t u = units; u-- > 0;) {
        auto const lease = micro.backward(u, zero::by_parameter);
        if (e.rank() == 0) {
          e.hand_over(micro, u);
        } else if (u + 1 < units) {
          e.hand_over(micro, u + 1);
        }
      }
      if (e.rank() == 1) {
        e.hand_over(micro, 0);
      }
      CHECK(e.log.lines ==
            lines{"gather 3", "gather 2", "reduce 3", "gather 1", "reduce 2", "gather 0"});
    }
    e.sharded->step();
    CHECK(e.reductions() == last_first);
    for (std::size_t u = 0; u < units; ++u) {
      e.check(u, 1);
    }
  });
}

TEST_CASE(
    "in stage 3 without overlap a gradient that comes too late for its place is an error with a "
    "cure") {
  on_ranks(1, [](zero::thread_communicator& threads) {
    engine e{threads, zero::stage3{}, zero::reduce_per_microbatch{}, {.overlap = false}};
    auto micro = e.sharded->microbatch(0, 1);
    e.forward(micro);
    for (std::size_t const u : {3U, 2U}) {
      auto const lease = micro.backward(u, zero::by_parameter);
    }
    std::string const what =
        refusal([&] { auto const lease = micro.backward(1, zero::by_parameter); });
    CHECK(mentions(what, "expected the gradients of bucket 3 before the lease of bucket 1"));
    CHECK(mentions(what, "raise open_buckets, or overlap"));
  });
}

TEST_CASE("more open gradient buckets than slots are an error that lists them") {
  for (bool const complete : {false, true}) {
    on_ranks(1, [&](zero::thread_communicator& threads) {
      engine e{threads, zero::stage2{}, zero::reduce_per_microbatch{}};
      auto micro = e.sharded->microbatch(0, 1);
      e.forward(micro);
      if (complete) {  // but waiting for the turn of 3
        e.hand_over(micro, 1);
        e.hand_over(micro, 0);
      } else {
        (void)micro.gradient(1);
        (void)micro.gradient(0);
      }
      std::string const what = refusal([&] { (void)micro.gradient(3); });
      CHECK(mentions(what,
                     "gradients of bucket 3: expected at most 2 buckets with unreduced gradients"));
      CHECK((mentions(what, "all open: 0, 1") || mentions(what, "all open: 1, 0")));
      CHECK(mentions(what, "raise open_buckets"));
    });
  }
}

TEST_CASE("a gradient is ready once a micro-batch, and comes in one way") {
  on_ranks(1, [](zero::thread_communicator& threads) {
    engine e{threads, zero::stage1{}, zero::local_accumulate{}};
    auto micro = e.sharded->microbatch(0, 2);
    e.forward(micro);
    e.hand_over(micro, 3);
    CHECK(mentions(
        refusal([&] { e.hand_over(micro, 3); }),
        "gradient_ready: expected parameter '3' once a micro-batch, actual twice (rank 0)"));
  });
  on_ranks(1, [](zero::thread_communicator& threads) {
    engine e{threads, zero::stage1{}, zero::local_accumulate{}};
    auto micro = e.sharded->microbatch(0, 1);
    e.hand_over(micro, 3);
    CHECK(mentions(refusal([&] { auto const lease = micro.backward(2); }),
                   "expected one way of delivering gradients"));
  });
  on_ranks(1, [](zero::thread_communicator& threads) {
    engine e{threads, zero::stage1{}, zero::local_accumulate{}};
    auto micro = e.sharded->microbatch(0, 1);
    { auto const lease = micro.backward(3); }
    CHECK(mentions(refusal([&] { e.hand_over(micro, 2); }),
                   "lease with backward(u, zero::by_parameter)"));
  });
  on_ranks(1, [](zero::thread_communicator& threads) {
    engine e{threads, zero::stage1{}, zero::local_accumulate{}};
    auto micro = e.sharded->microbatch(0, 1);
    CHECK(mentions(refusal([&] { e.hand_over(micro, units); }),
                   "expected a parameter below 4, actual 4"));
  });
}

TEST_CASE("a gradient of another size or type is refused") {
  on_ranks(1, [](zero::thread_communicator& threads) {
    engine e{threads, zero::stage1{}, zero::local_accumulate{}};
    auto micro = e.sharded->microbatch(0, 1);
    std::vector<float> const small(size_of(0) - 1);
    CHECK(refusal([&] { micro.gradient_ready(0, std::span{small}); }) ==
          "gradient_ready: expected 192 elements of float32 for parameter '0', actual 191 of "
          "float32 (rank 0)");
  });
  on_ranks(1, [](zero::thread_communicator& threads) {
    engine e{threads, zero::stage1{}, zero::local_accumulate{}};
    auto micro = e.sharded->microbatch(0, 1);
    std::vector<double> const wide(size_of(0));
    CHECK(mentions(refusal([&] { micro.gradient_ready(0, std::span{wide}); }),
                   "actual 192 of float64"));
  });
}

TEST_CASE(
    "the place of a gradient says whether to add: later micro-batches do where the engine "
    "accumulates") {
  for (zero::stage const at :
       stages{zero::stage0{}, zero::stage1{}, zero::stage2{}, zero::stage3{}}) {
    for (bool const per_microbatch : {false, true}) {
      on_ranks(2, [&](zero::thread_communicator& threads) {
        zero::accumulation policy = zero::local_accumulate{};
        if (per_microbatch) {
          policy = zero::reduce_per_microbatch{};
        }
        engine e{threads, at, policy};
        for (int step = 0; step < 2; ++step) {
          for (std::size_t m = 0; m < 2; ++m) {
            auto micro = e.sharded->microbatch(m, 2);
            e.forward(micro);
            for (std::size_t u = units; u-- > 0;) {
              auto const lease = micro.backward(u, zero::by_parameter);
              auto const [place, accumulate] = micro.gradient(u);
              CHECK(accumulate == (m == 1 && !per_microbatch));
              CHECK(place.size() == size_of(u));
              for (float& g : place.as<float>()) {
                g = (accumulate ? g : 0) + 4 * static_cast<float>(m);
              }
              micro.gradient_ready(u);
            }
          }
          e.sharded->step();
        }
        for (std::size_t u = 0; u < units; ++u) {
          e.check(u, 2 * 2);
        }
      });
    }
  }
}

TEST_CASE("a skipped parameter is zero, or what earlier micro-batches added up") {
  for (test::setting const& each : test::every_setting()) {
    CAPTURE(each.name);
    on_ranks(2, [&](zero::thread_communicator& threads) {
      engine e{threads, each.stage, each.policy, each.options};
      for (std::size_t m = 0; m < 3; ++m) {
        auto micro = e.sharded->microbatch(m, 3);
        e.forward(micro);
        for (std::size_t u = units; u-- > 0;) {
          auto const lease = micro.backward(u, zero::by_parameter);
          if (u == 2 && m != 1) {
            micro.skip(u);  // in the first and the last micro-batch
          } else {
            e.hand_over(micro, u, 6);
          }
        }
      }
      e.sharded->step();
      e.check(1, 6);
      e.check(2, 2);
    });
  }
}

TEST_CASE("for an engine that only adds, what was in a slot or a tensor before is cleared") {
  for (test::setting const& each : test::every_setting()) {
    CAPTURE(each.name);
    on_ranks(2, [&](zero::thread_communicator& threads) {
      zero::options chosen = each.options;
      chosen.engine_adds = true;
      chosen.bucket_bytes = 0;
      engine e{threads, each.stage, each.policy, chosen};
      for (int step = 0; step < 2; ++step) {
        for (std::size_t m = 0; m < 2; ++m) {
          auto micro = e.sharded->microbatch(m, 2);
          e.forward(micro);
          for (std::size_t u = units; u-- > 0;) {
            auto const lease = micro.backward(u);
            CHECK(lease.accumulate());
            for (float& g : e.gradients[u].view) {
              g += static_cast<float>(u + 1);
            }
          }
        }
        e.sharded->step();
      }
      for (std::size_t u = 0; u < units; ++u) {
        e.check(u, 2 * static_cast<float>(u + 1));
      }
    });
  }
}

TEST_CASE("the reduced gradient is the average over ranks, before the division by micro-batches") {
  for (int const ranks : {1, 2, 3}) {
    for (test::setting const& each : test::every_setting()) {
      CAPTURE(each.name);
      on_ranks(ranks, [&](zero::thread_communicator& threads) {
        zero::options chosen = each.options;
        chosen.bucket_bytes = 0;
        engine e{threads, each.stage, each.policy, chosen};
        for (std::size_t m = 0; m < 2; ++m) {
          auto micro = e.sharded->microbatch(m, 2);
          e.forward(micro);
          for (std::size_t u = units; u-- > 0;) {
            auto const lease = micro.backward(u);
            for (std::size_t i = 0; i < size_of(u); ++i) {
              float const g = static_cast<float>((e.rank() + 1) * static_cast<int>(i % 8));
              e.gradients[u].view[i] = (lease.accumulate() ? e.gradients[u].view[i] : 0) + g;
            }
          }
        }
        for (std::size_t u = 0; u < units; ++u) {
          auto const [elements, first] = e.sharded->gradient(u);
          std::size_t const slice = size_of(u) / static_cast<std::size_t>(ranks);
          bool const whole = each.stage.number() == 0 ||
                             each.stage.gradients == zero::gradient_collective::all_reduce;
          CHECK(elements.size() == (whole ? size_of(u) : slice));
          CHECK(first == (whole ? 0 : slice * static_cast<std::size_t>(e.rank())));
          bool right = true;
          for (std::size_t i = 0; i < elements.size(); ++i) {
            // Two micro-batches of (1 + ... + P) / P times the index.
            float const expected =
                static_cast<float>(ranks + 1) * static_cast<float>((first + i) % 8);
            right = right && elements.as<float>()[i] == expected;
          }
          CHECK(right);
        }
        e.sharded->step();
      });
    }
  }
}

TEST_CASE(
    "the reduced gradient can be asked for between the window's last backward and step only") {
  on_ranks(1, [](zero::thread_communicator& threads) {
    engine e{threads, zero::stage1{}, zero::local_accumulate{}};
    CHECK(mentions(refusal([&] { (void)e.sharded->gradient(0); }), "expected to be asked between"));
  });
  on_ranks(1, [](zero::thread_communicator& threads) {
    engine e{threads, zero::stage1{}, zero::local_accumulate{}};
    {
      auto micro = e.sharded->microbatch(0, 2);
      for (std::size_t u = units; u-- > 0;) {
        e.hand_over(micro, u);
      }
    }
    CHECK(mentions(refusal([&] { (void)e.sharded->gradient(0); }),
                   "actual after 1 of 2 micro-batches"));
  });
}

TEST_CASE("what an earlier bucket left in a slot reaches neither gradients nor norm") {
  for (zero::stage const at :
       stages{zero::stage0{}, zero::stage1{}, zero::stage2{}, zero::stage3{}}) {
    on_ranks(3, [&](zero::thread_communicator& threads) {
      engine e{threads,
               at,
               zero::reduce_per_microbatch{.open_buckets = 1},
               {.clip_norm = 1e9, .alignment = 7}};
      for (int step = 0; step < 2; ++step) {
        {
          auto micro = e.sharded->microbatch(0, 1);
          e.forward(micro);
          for (std::size_t u = units; u-- > 0;) {
            auto const lease = micro.backward(u);
            std::ranges::fill(e.gradients[u].view, static_cast<float>(u));
          }
        }
        // 192 (2 * 1 + 3 * 4 + 4 * 9) squares
        CHECK(std::abs(e.sharded->step().norm() - std::sqrt(192.0 * 50)) < 1e-9);
      }
      e.check(0, 0);
      e.check(3, 6);
    });
  }
}
