// SPDX-License-Identifier: MIT
#include <support/owning_tensor.hpp>
#include <support/settings.hpp>
#include <zero/comm/run_threads.hpp>
#include <zero/optim/sgd.hpp>
#include <zero/train/sharded_model.hpp>

#include <doctest/doctest.h>
#include <support/thrown.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

// What may be called when, and what it does: micro-batches, leases, passes.

namespace {

using model = zero::sharded_model<zero::thread_communicator, zero::plain_sgd>;
using tensor = test::owning_tensor<float>;

constexpr std::size_t units = 4;
constexpr std::size_t size_of(std::size_t unit) { return 5 + 3 * unit; }

/// Units of one parameter each, whose elements are the unit's index; learning rate 1.
struct engine {
  engine(zero::thread_communicator& comm, zero::stage at, zero::accumulation policy,
         zero::options const& chosen = {})
      : values(units), gradients(units) {
    std::vector<std::vector<zero::typed_parameter<tensor, tensor>>> declared;
    for (std::size_t u = 0; u < units; ++u) {
      values[u] = tensor{size_of(u), static_cast<float>(u)};
      declared.push_back({zero::parameter(std::to_string(u), values[u], gradients[u])});
    }
    sharded.emplace(comm, declared, at, zero::plain_sgd{.learning_rate = 1}, policy, chosen);
  }

  /// Whether unit u is whole, and each element is `value`.
  [[nodiscard]] bool holds(std::size_t unit, float value) const {
    return values[unit].view.size() == size_of(unit) &&
           std::ranges::all_of(values[unit].view, [&](float each) { return each == value; });
  }

  template <class Lease>
  void add(Lease const& lease, float gradient) {
    for (float& g : gradients[lease.unit()].view) {
      g = (lease.accumulate() ? g : 0) + gradient;
    }
  }

  template <class Microbatch>
  void forward(Microbatch& micro) {
    for (std::size_t u = 0; u < units; ++u) {
      auto const lease = micro.forward(u);
      CHECK(values[u].view.size() == size_of(u));
    }
  }

  template <class Microbatch>
  void backward(Microbatch& micro, float gradient) {
    for (std::size_t u = units; u-- > 0;) {
      auto const lease = micro.backward(u);
      CHECK(values[u].view.size() == size_of(u));
      add(lease, gradient);
    }
  }

  void check(std::array<float, units> const& expected) {
    auto evaluation = sharded->evaluation();
    for (std::size_t u = 0; u < units; ++u) {
      auto const lease = evaluation.forward(u);
      CHECK(holds(u, expected[u]));
    }
  }

  std::vector<tensor> values;
  std::vector<tensor> gradients;
  std::optional<model> sharded;
};

template <class Body>
void in_every_setting(std::initializer_list<int> world_sizes, Body body) {
  for (int const ranks : world_sizes) {
    for (std::uint64_t const bucket_bytes : {0U, 60U, 1U << 20U}) {
      for (test::setting const& each : test::every_setting({.bucket_bytes = bucket_bytes})) {
        CAPTURE(each.name);
        CAPTURE(bucket_bytes);
        CAPTURE(ranks);
        zero::run_threads(ranks, [&](zero::thread_communicator& comm) {
          engine e{comm, each.stage, each.policy, each.options};
          body(e);
        });
      }
    }
  }
}

/// What `call(engine)` is refused with, on one rank in stage 3.
template <class Call>
std::string refusal(Call call, zero::stage at = zero::stage3{}) {
  std::string message;
  zero::run_threads(1, [&](zero::thread_communicator& comm) {
    engine e{comm, at, zero::local_accumulate{}};
    message = test::message_of([&] { call(e); });
  });
  return message;
}

bool mentions(std::string const& text, std::string const& part) {
  return text.find(part) != text.npos;
}

}  // namespace

TEST_CASE("a unit that forward uses twice has two backward leases, and their sum is its gradient") {
  in_every_setting({1, 2}, [](engine& e) {
    {
      auto micro = e.sharded->microbatch(0, 1);
      for (std::size_t const u : {0U, 1U, 2U, 1U, 3U}) {
        auto const lease = micro.forward(u);
        CHECK(e.holds(u, static_cast<float>(u)));
      }
      float gradient = 1;
      for (std::size_t const u : {3U, 1U, 2U, 1U, 0U}) {
        auto const lease = micro.backward(u);
        CHECK(e.holds(u, static_cast<float>(u)));
        e.add(lease, gradient);
        gradient *= 2;
      }
    }
    e.sharded->step();
    e.check({0 - 16, 1 - 2 - 8, 2 - 4, 3 - 1});
  });
}

TEST_CASE("forward may be left out, in part or whole") {
  in_every_setting({2}, [](engine& e) {
    {
      auto micro = e.sharded->microbatch(0, 1);
      { auto const lease = micro.forward(2); }
      e.backward(micro, 1);
    }
    e.sharded->step();
    e.check({-1, 0, 1, 2});
  });
}

TEST_CASE("units may come in another order in every step") {
  in_every_setting({1, 3}, [](engine& e) {
    std::array<std::array<std::size_t, units>, 3> const orders{
        {{0, 2, 1, 3}, {3, 1, 0, 2}, {0, 1, 2, 3}}};
    float step = 0;
    for (auto const& order : orders) {
      {
        auto micro = e.sharded->microbatch(0, 1);
        for (std::size_t const u : order) {
          auto const lease = micro.forward(u);
          CHECK(e.holds(u, static_cast<float>(u) - step));
        }
        for (std::size_t i = units; i-- > 0;) {
          auto const lease = micro.backward(order[i]);
          CHECK(e.holds(order[i], static_cast<float>(order[i]) - step));
          e.add(lease, 1);
        }
      }
      e.sharded->step();
      ++step;
    }
    e.check({-3, -2, -1, 0});
  });
}

TEST_CASE("a forward lease may reach into backward, and leases may nest") {
  in_every_setting({2}, [](engine& e) {
    {
      auto micro = e.sharded->microbatch(0, 1);
      for (std::size_t u = 0; u + 1 < units; ++u) {
        auto const lease = micro.forward(u);
      }
      std::size_t const last = units - 1;
      auto kept = micro.forward(last);
      {
        auto const again = micro.forward(last);
        CHECK(e.holds(last, 3));
      }
      CHECK(e.holds(last, 3));
      for (float const gradient : {1.0F, 2.0F}) {
        auto const lease = micro.backward(last);
        CHECK(e.holds(last, 3));
        e.add(lease, gradient);
      }
      CHECK(e.holds(last, 3));
      kept.end();
      for (std::size_t u = last; u-- > 0;) {
        auto const lease = micro.backward(u);
        CHECK(e.holds(u, static_cast<float>(u)));
        e.add(lease, 1);
      }
    }
    e.sharded->step();
    e.check({-1, 0, 1, 0});
  });
}

TEST_CASE(
    "evaluation between micro-batches, and micro-batches without a backward, don't disturb the "
    "window") {
  in_every_setting({1, 2}, [](engine& e) {
    for (std::size_t m = 0; m < 2; ++m) {
      {
        auto micro = e.sharded->microbatch(0, 2);
        e.forward(micro);
      }
      {
        auto micro = e.sharded->microbatch(m, 2);
        e.forward(micro);
        e.backward(micro, m == 0 ? 1.0F : 3.0F);
      }
      e.check({0, 1, 2, 3});
    }
    e.sharded->step();
    e.check({-2, -1, 0, 1});
  });
}

TEST_CASE("recomputation sees the same parameters, around backward or inside it") {
  in_every_setting({2}, [](engine& e) {
    {
      auto micro = e.sharded->microbatch(0, 1);
      e.forward(micro);
      for (std::size_t u = units; u-- > 0;) {
        if (u % 2 == 0) {
          auto const lease = micro.recompute(u);
          CHECK(e.holds(u, static_cast<float>(u)));
        }
        auto const lease = micro.backward(u);
        if (u % 2 == 1) {
          auto const inner = micro.recompute(u);
          CHECK(e.holds(u, static_cast<float>(u)));
        }
        CHECK(e.holds(u, static_cast<float>(u)));
        e.add(lease, 1);
      }
    }
    CHECK(e.sharded->gathered().occupied == 0);
    e.sharded->step();
    e.check({-1, 0, 1, 2});
  });
}

TEST_CASE("a lease ends once, however it was moved, and may be ended early") {
  zero::run_threads(1, [](zero::thread_communicator& comm) {
    engine e{comm, zero::stage3{.prefetch = 0}, zero::local_accumulate{}};
    auto micro = e.sharded->microbatch(0, 1);
    auto first = micro.forward(0);
    CHECK(first.unit() == 0);
    auto second = std::move(first);
    CHECK(e.holds(0, 0));
    first.end();  // NOLINT(bugprone-use-after-move): nothing to end
    CHECK(e.holds(0, 0));
    second.end();
    CHECK(e.values[0].view.empty());
    second.end();
    auto third = micro.forward(1);
    CHECK(e.holds(1, 1));
    third.end();
    third = micro.forward(2);
    CHECK(e.holds(2, 2));
    auto& same = third;
    third = std::move(same);
    CHECK(e.holds(2, 2));
  });
}

TEST_CASE("outside their leases the tensors of stage 3 are empty, those of other stages whole") {
  for (test::named_stage const& each : test::every_stage()) {
    CAPTURE(each.first);
    zero::run_threads(2, [&, &at = each.second](zero::thread_communicator& comm) {
      engine e{comm, at, zero::reduce_per_microbatch{}};
      std::size_t const outside = at.shards_parameters() ? 0 : size_of(1);
      CHECK(e.values[1].view.size() == outside);
      CHECK(e.gradients[1].view.empty());
      auto micro = e.sharded->microbatch(0, 1);
      {
        auto const lease = micro.backward(1);
        CHECK(e.values[1].view.size() == size_of(1));
        CHECK(e.gradients[1].view.size() == size_of(1));
      }
      CHECK(e.values[1].view.size() == outside);
    });
  }
}

TEST_CASE(
    "as many units as max_live_units may be leased at once, and one more is an error that lists "
    "them") {
  zero::run_threads(2, [](zero::thread_communicator& comm) {
    engine e{comm, zero::stage3{.prefetch = 1, .max_live_units = 2}, zero::local_accumulate{}};
    {
      auto micro = e.sharded->microbatch(0, 1);
      for (std::size_t u = 0; u + 1 < units; ++u) {
        auto const one = micro.forward(u);
        auto const two = micro.forward(u + 1);
        auto const again = micro.forward(u);
        CHECK(e.holds(u, static_cast<float>(u)));
        CHECK(e.holds(u + 1, static_cast<float>(u + 1)));
      }
    }
    CHECK(e.sharded->gathered().high_water <= 3);
  });
  std::string const what = refusal([](engine& e) {
    auto micro = e.sharded->microbatch(0, 1);
    auto const one = micro.forward(2);
    auto const two = micro.forward(0);
  });
  CHECK(mentions(
      what,
      "lease of unit 0: expected at most 1 live units (max_live_units), actual also units 2"));
}

TEST_CASE("units and parameters that aren't there, or aren't the lease's, are refused") {
  CHECK(mentions(refusal([](engine& e) {
                   auto micro = e.sharded->microbatch(0, 1);
                   auto const lease = micro.forward(units);
                 }),
                 "lease: expected a unit below 4, actual 4 (rank 0)"));
  for (std::size_t const id : {std::size_t{2}, std::size_t{units}}) {
    std::string const what = refusal([&](engine& e) {
      auto micro = e.sharded->microbatch(0, 1);
      auto const lease = micro.forward(1);
      (void)lease.parameter<float>(id);
    });
    CHECK(mentions(
        what, "lease of unit 1: expected one of its parameters, actual id " + std::to_string(id)));
  }
  CHECK(mentions(refusal([](engine& e) {
                   auto micro = e.sharded->microbatch(0, 1);
                   auto const lease = micro.backward(1);
                   (void)lease.gradient<double>(1);
                 }),
                 "to be asked for as float32, actual float64"));
}

TEST_CASE("a unit has as many backward leases as forward ones, or one") {
  CHECK(mentions(
      refusal([](engine& e) {
        auto micro = e.sharded->microbatch(0, 1);
        e.forward(micro);
        { auto const lease = micro.backward(3); }
        auto const lease = micro.backward(3);
      }),
      "backward: expected unit 3 1 time(s) in this micro-batch, as in forward, actual once more"));
}

TEST_CASE("micro-batches come as announced, one at a time, and not inside an evaluation") {
  CHECK(mentions(refusal([](engine& e) { auto micro = e.sharded->microbatch(1, 1); }),
                 "microbatch: expected an index below 1, actual 1"));
  auto const complete = [](engine& e, std::size_t index, std::size_t count) {
    auto micro = e.sharded->microbatch(index, count);
    e.backward(micro, 1);
  };
  CHECK(mentions(refusal([&](engine& e) {
                   complete(e, 0, 2);
                   complete(e, 1, 3);
                 }),
                 "expected a window of 2 micro-batches as announced, actual 3"));
  CHECK(mentions(refusal([&](engine& e) {
                   complete(e, 0, 2);
                   complete(e, 1, 2);
                   complete(e, 1, 2);
                 }),
                 "expected at most 2 in a window, actual one more"));
  CHECK(mentions(refusal([](engine& e) {
                   auto outer = e.sharded->microbatch(0, 2);
                   auto inner = e.sharded->microbatch(1, 2);
                 }),
                 "microbatch: expected no open micro-batch, actual one"));
  CHECK(mentions(refusal([](engine& e) {
                   auto micro = e.sharded->microbatch(0, 2);
                   auto evaluation = e.sharded->evaluation();
                 }),
                 "evaluation: expected no open micro-batch, actual one"));
  CHECK(mentions(refusal([](engine& e) {
                   auto evaluation = e.sharded->evaluation();
                   auto micro = e.sharded->microbatch(0, 2);
                 }),
                 "microbatch: expected no open evaluation, actual one"));
}

TEST_CASE("a released model refuses everything") {
  CHECK(mentions(refusal([](engine& e) {
                   e.sharded->release();
                   CHECK(e.holds(2, 2));
                   auto micro = e.sharded->microbatch(0, 1);
                 }),
                 "sharded_model: expected a bound model, actual one that was released"));
}

TEST_CASE("frozen parameters are leased, and have no gradient") {
  for (test::named_stage const& each : test::every_stage()) {
    CAPTURE(each.first);
    zero::run_threads(2, [&, &at = each.second](zero::thread_communicator& comm) {
      tensor a{6, 1};
      tensor b{7, 2};
      tensor of_a;
      tensor of_b;
      std::vector<std::vector<zero::typed_parameter<tensor, tensor>>> const declared{
          {zero::parameter("a", a, of_a), zero::parameter("b", b, of_b).frozen()}};
      model sharded{comm, declared, at, zero::plain_sgd{.learning_rate = 1},
                    zero::reduce_per_microbatch{}};
      {
        auto micro = sharded.microbatch(0, 1);
        { auto const lease = micro.forward(0); }
        auto const lease = micro.backward(0);
        CHECK(b.view.size() == 7);
        CHECK(of_b.view.empty());
        CHECK_FALSE(lease.accumulate());
        std::ranges::fill(of_a.view, 1.0F);
      }
      sharded.step();
      auto evaluation = sharded.evaluation();
      auto const lease = evaluation.forward(0);
      CHECK(a.view[5] == 0);
      CHECK(b.view[6] == 2);
    });
  }
  zero::run_threads(1, [](zero::thread_communicator& comm) {
    tensor a{6, 1};
    tensor of_a;
    std::vector<std::vector<zero::typed_parameter<tensor, tensor>>> const declared{
        {zero::parameter("a", a, of_a).frozen()}};
    model sharded{comm, declared, zero::stage0{}, zero::plain_sgd{}, zero::local_accumulate{}};
    auto micro = sharded.microbatch(0, 1);
    std::vector<float> const gradient(6);
    std::string const message =
        test::message_of([&] { micro.gradient_ready(0, std::span{gradient}); });
    CHECK(
        mentions(message, "gradient: expected a trainable parameter, actual 'a', which is frozen"));
  });
}

TEST_CASE(
    "a tied parameter is whole under either unit's lease, and its gradient is the sum of its "
    "uses") {
  for (int const ranks : {1, 2, 3}) {
    for (test::setting const& each : test::every_setting()) {
      CAPTURE(each.name);
      zero::run_threads(ranks, [&](zero::thread_communicator& comm) {
        tensor e{9, 10};
        tensor w{4, 1};
        tensor x{5, 2};
        std::array<tensor, 3> gradients;
        std::vector<std::vector<zero::any_parameter>> const declared{
            {zero::parameter("e", e, gradients[0])},
            {zero::parameter("w", w, gradients[1])},
            {zero::parameter("x", x, gradients[2]), zero::tied("e")}};
        model sharded{comm,        declared,    each.stage, zero::plain_sgd{.learning_rate = 1},
                      each.policy, each.options};
        for (int step = 0; step < 2; ++step) {
          {
            auto micro = sharded.microbatch(0, 1);
            for (std::size_t u = 0; u < 3; ++u) {
              auto const lease = micro.forward(u);
              if (u != 1) {
                CHECK(e.view.size() == 9);
                CHECK(e.view[8] == 10.0F - 3.0F * static_cast<float>(step));
                CHECK(lease.parameter<float>(0).data() == e.view.data());
              }
            }
            for (std::size_t u = 3; u-- > 0;) {
              auto const lease = micro.backward(u);
              for (std::size_t const id :
                   u == 2 ? std::vector<std::size_t>{2, 0} : std::vector<std::size_t>{u}) {
                bool const add = lease.accumulate(id);
                CHECK(add == (id == 0 && u == 0));
                for (float& g : gradients[id].view) {
                  g = (add ? g : 0) + static_cast<float>(u == 2 ? 2 : 1);
                }
              }
            }
          }
          sharded.step();
        }
        sharded.wait();
        sharded.release();
        CHECK(e.view[3] == 10 - 6);
        CHECK(w.view[3] == 1 - 2);
        CHECK(x.view[4] == 2 - 4);
      });
    }
  }
}
