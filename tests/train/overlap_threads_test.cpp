// SPDX-License-Identifier: MIT
#include <support/owning_tensor.hpp>
#include <support/recording_communicator.hpp>
#include <zero/comm/run_threads.hpp>
#include <zero/optim/sgd.hpp>
#include <zero/train/sharded_model.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

// Communication that stands still until the test lets it go: what goes on meanwhile really overlaps
// it.

namespace {

using communicator = test::recording_communicator<zero::thread_communicator>;
using model = zero::sharded_model<communicator, zero::plain_sgd>;
using tensor = test::owning_tensor<float>;

constexpr std::size_t units = 8;

/// Unit u has 10 + u elements of value u; a gradient is the rank plus 1 everywhere.
struct engine {
  engine(zero::thread_communicator& threads, zero::stage at, zero::accumulation policy)
      : comm{threads.split(0, threads.rank()), log} {
    std::vector<std::vector<zero::typed_parameter<tensor, tensor>>> declared;
    for (std::size_t u = 0; u < units; ++u) {
      values[u] = tensor{10 + u, static_cast<float>(u)};
      declared.push_back({zero::parameter(std::to_string(u), values[u], gradients[u])});
    }
    sharded.emplace(comm, declared, at, zero::plain_sgd{.learning_rate = 2}, policy,
                    zero::options{.bucket_bytes = 0});
  }

  template <class Microbatch>
  void forward(Microbatch& micro, std::size_t u) {
    auto const lease = micro.forward(u);
    CHECK(std::ranges::count(values[u].view, static_cast<float>(u)) ==
          static_cast<std::ptrdiff_t>(10 + u));
  }

  template <class Microbatch>
  void backward(Microbatch& micro, std::size_t u) {
    auto const lease = micro.backward(u);
    std::ranges::fill(gradients[u].view, static_cast<float>(comm.rank() + 1));
  }

  /// Each element is u - 2 (P + 1) / 2 after one step.
  void check() {
    auto evaluation = sharded->evaluation();
    for (std::size_t u = 0; u < units; ++u) {
      auto const lease = evaluation.forward(u);
      float const expected = static_cast<float>(u) - static_cast<float>(comm.size() + 1);
      CHECK(std::ranges::count(values[u].view, expected) == static_cast<std::ptrdiff_t>(10 + u));
    }
  }

  test::gate held;
  test::journal log;
  communicator comm;
  std::array<tensor, units> values;
  std::array<tensor, units> gradients;
  std::optional<model> sharded;
};

template <class Body>
void on_ranks(zero::stage at, zero::accumulation policy, Body body) {
  for (int const ranks : {1, 2, 4}) {
    zero::run_threads(ranks, [&](zero::thread_communicator& threads) {
      engine e{threads, at, policy};
      body(e);
    });
  }
}

}  // namespace

TEST_CASE("backward goes on while the first reduction stands still") {
  using stages = std::vector<zero::stage>;
  for (zero::stage const at : stages{zero::stage0{}, zero::stage1{}, zero::stage2{}}) {
    on_ranks(at, zero::local_accumulate{}, [](engine& e) {
      e.log.reductions = &e.held;
      {
        auto micro = e.sharded->microbatch(0, 1);
        for (std::size_t u = 0; u < units; ++u) {
          e.forward(micro, u);
        }
        for (std::size_t u = units; u-- > 0;) {
          e.backward(micro, u);
          e.held.await(1);  // the reduction of unit 7 has started, in a thread of its own
        }
      }
      CHECK(e.held.passed() == 0);
      e.sharded->step();  // returns, too
      CHECK(e.held.passed() == 0);
      CHECK(e.log.calls.size() >= units);
      e.held.open(units);
      e.sharded->wait();
      CHECK(e.held.passed() == units);
      e.check();
    });
  }
}

TEST_CASE("backward is two buckets ahead of reductions, and goes on as each is done") {
  using stages = std::vector<zero::stage>;
  for (zero::stage const at : stages{zero::stage1{}, zero::stage2{}}) {
    on_ranks(at, zero::reduce_per_microbatch{}, [](engine& e) {
      e.log.reductions = &e.held;
      {
        auto micro = e.sharded->microbatch(0, 1);
        for (std::size_t u = 0; u < units; ++u) {
          e.forward(micro, u);
        }
        e.backward(micro, 7);
        e.held.await(1);
        e.backward(micro, 6);
        CHECK(e.held.passed() == 0);
        for (std::size_t u = 6; u-- > 0;) {
          e.held.open(1);
          e.backward(micro, u);  // waits for the reduction of unit u + 2, and for no other
          CHECK(e.held.passed() == static_cast<int>(6 - u));
        }
      }
      e.held.open(2);
      e.sharded->step();
      e.sharded->wait();
      CHECK(e.sharded->gradient_high_water() == 2);
      e.check();
    });
  }
}

TEST_CASE("a unit's compute goes on while the gather of the next one stands still") {
  on_ranks(zero::stage3{.prefetch = 1}, zero::local_accumulate{}, [](engine& e) {
    e.log.gathers = &e.held;
    {
      auto micro = e.sharded->microbatch(0, 1);
      for (std::size_t u = 0; u < units; ++u) {
        e.held.open(1);
        e.forward(micro, u);
        CHECK(e.held.passed() == static_cast<int>(u + 1));
      }
      for (std::size_t u = units; u-- > 0;) {
        e.held.open(1);
        e.backward(micro, u);
        CHECK(e.held.passed() == static_cast<int>(2 * units - u));
      }
    }
    e.held.open(100);
    e.sharded->step();
    e.check();
  });
}
