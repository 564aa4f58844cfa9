// SPDX-License-Identifier: MIT
#include <support/owning_tensor.hpp>
#include <support/settings.hpp>
#include <zero/comm/run_threads.hpp>
#include <zero/optim/sgd.hpp>
#include <zero/train/sharded_model.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace {

using tensor = test::owning_tensor<float>;
using values = std::vector<std::vector<double>>;

constexpr double rate = 0.1;
constexpr double momentum = 0.9;
constexpr double decay = 0.01;

/// Sizes that no number of ranks divides, one, and none.
std::vector<std::size_t> const sizes{13, 1, 0, 40};
constexpr std::size_t steps = 4;

/// A gradient of rank, step, micro-batch, parameter and element.
double gradient_of(std::size_t rank, std::size_t step, std::size_t m, std::size_t k,
                   std::size_t i) {
  return std::sin(static_cast<double>(1 + rank + 3 * step + 5 * m + 7 * k + 11 * i));
}
double start_of(std::size_t k, std::size_t i) { return std::cos(static_cast<double>(3 * k + i)); }

struct problem {
  std::size_t ranks;
  std::size_t microbatches;
  zero::sgd optimizer;
  std::optional<double> clip_norm;
};

/// The parameters and the norms of each step, by the formula, in double, in one process.
std::pair<values, std::vector<double>> alone(problem const& of) {
  values p(sizes.size());
  values buffer(sizes.size());
  std::vector<double> norms;
  for (std::size_t k = 0; k < sizes.size(); ++k) {
    buffer[k].assign(sizes[k], 0.0);
    for (std::size_t i = 0; i < sizes[k]; ++i) {
      p[k].push_back(start_of(k, i));
    }
  }
  for (std::size_t step = 0; step < steps; ++step) {
    values mean(sizes.size());
    double squares = 0;
    for (std::size_t k = 0; k < sizes.size(); ++k) {
      for (std::size_t i = 0; i < sizes[k]; ++i) {
        double sum = 0;
        for (std::size_t rank = 0; rank < of.ranks; ++rank) {
          for (std::size_t m = 0; m < of.microbatches; ++m) {
            sum += gradient_of(rank, step, m, k, i);
          }
        }
        mean[k].push_back(sum / static_cast<double>(of.ranks * of.microbatches));
        squares += mean[k].back() * mean[k].back();
      }
    }
    double const norm = std::sqrt(squares);
    norms.push_back(norm);
    double const scale = of.clip_norm && norm > *of.clip_norm ? *of.clip_norm / norm : 1;
    for (std::size_t k = 0; k < sizes.size(); ++k) {
      for (std::size_t i = 0; i < sizes[k]; ++i) {
        double const g = scale * mean[k][i] + of.optimizer.weight_decay * p[k][i];
        buffer[k][i] = of.optimizer.momentum * buffer[k][i] + g;
        p[k][i] -=
            of.optimizer.learning_rate *
            (of.optimizer.nesterov ? g + of.optimizer.momentum * buffer[k][i] : buffer[k][i]);
      }
    }
  }
  return {p, norms};
}

using model = zero::sharded_model<zero::thread_communicator, zero::sgd>;

/// One parameter a unit.
struct engine {
  explicit engine(std::vector<std::size_t> const& of_sizes)
      : parameters(of_sizes.size()), gradients(of_sizes.size()) {
    for (std::size_t k = 0; k < of_sizes.size(); ++k) {
      parameters[k] = tensor{of_sizes[k]};
      for (std::size_t i = 0; i < of_sizes[k]; ++i) {
        parameters[k].view[i] = static_cast<float>(start_of(k, i));
      }
      units.push_back({zero::parameter(std::to_string(k), parameters[k], gradients[k])});
    }
  }

  /// Forward, and backward where `gradient(k, i)` is what to write or add; nothing, for element 0,
  /// skips.
  template <class Gradient>
  void run(model& sharded, std::size_t m, std::size_t count, Gradient gradient) {
    auto micro = sharded.microbatch(m, count);
    for (std::size_t u = 0; u < units.size(); ++u) {
      auto const lease = micro.forward(u);
    }
    for (std::size_t u = units.size(); u-- > 0;) {
      auto const lease = micro.backward(u);
      std::span<float> const out = gradients[u].view;
      if (!std::optional<double>{gradient(u, std::size_t{0})}) {
        lease.skip(u);
        continue;
      }
      for (std::size_t i = 0; i < out.size(); ++i) {
        out[i] = (lease.accumulate() ? out[i] : 0) +
                 static_cast<float>(*std::optional<double>{gradient(u, i)});
      }
    }
  }

  std::vector<tensor> parameters;
  std::vector<tensor> gradients;
  std::vector<std::vector<zero::typed_parameter<tensor, tensor>>> units;
};

void compare(zero::sgd const& optimizer, std::optional<double> clip_norm) {
  for (int const ranks : {1, 2, 3, 4, 8}) {
    problem const of{static_cast<std::size_t>(ranks), 2, optimizer, clip_norm};
    auto const [expected, norms] = alone(of);
    for (test::setting const& each :
         test::every_setting({.clip_norm = clip_norm, .bucket_bytes = 64})) {
      CAPTURE(each.name);
      zero::run_threads(
          ranks, [&, &wanted = expected, &lengths = norms](zero::thread_communicator& comm) {
            engine e{sizes};
            model sharded{comm, e.units, each.stage, optimizer, each.policy, each.options};
            for (std::size_t step = 0; step < steps; ++step) {
              for (std::size_t m = 0; m < 2; ++m) {
                e.run(sharded, m, 2, [&](std::size_t k, std::size_t i) {
                  return gradient_of(static_cast<std::size_t>(comm.rank()), step, m, k, i);
                });
              }
              auto const result = sharded.step();
              if (clip_norm) {
                CHECK(std::abs(result.norm() - lengths[step]) < 1e-5);
              }
            }
            sharded.release();
            double largest = 0;
            for (std::size_t k = 0; k < sizes.size(); ++k) {
              for (std::size_t i = 0; i < sizes[k]; ++i) {
                largest = std::max(
                    largest, std::abs(static_cast<double>(e.parameters[k].view[i]) - wanted[k][i]));
              }
            }
            CHECK(largest < 2e-6);  // floats of size 1, over 4 steps
          });
    }
  }
}

}  // namespace

TEST_CASE(
    "SGD with momentum and decay is what one process computes by the formula, in every stage") {
  compare({.learning_rate = rate, .momentum = momentum, .weight_decay = decay}, {});
}

TEST_CASE("Nesterov's momentum with a clipped norm is what one process computes by the formula") {
  compare({.learning_rate = rate, .momentum = momentum, .nesterov = true, .weight_decay = decay},
          0.5);
}

TEST_CASE("a gradient on some ranks only counts as zero on the others") {
  for (int const ranks : {2, 3}) {
    for (test::setting const& each : test::every_setting()) {
      CAPTURE(each.name);
      zero::run_threads(ranks, [&](zero::thread_communicator& comm) {
        engine e{{5, 3}};
        model sharded{comm,        e.units,     each.stage, zero::sgd{.learning_rate = 1},
                      each.policy, each.options};
        // Unit 1 has a gradient on the last rank only, in one of two micro-batches.
        for (std::size_t m = 0; m < 2; ++m) {
          e.run(sharded, m, 2, [&](std::size_t k, std::size_t) -> std::optional<double> {
            if (k == 1 && (m == 0 || comm.rank() + 1 < ranks)) {
              return std::nullopt;
            }
            return 6.0;
          });
        }
        sharded.step();
        CHECK(sharded.steps(0) == 1);
        CHECK(sharded.steps(1) == 1);
        sharded.release();
        CHECK(std::abs(e.parameters[0].view[0] - (static_cast<float>(start_of(0, 0)) - 6)) < 1e-5F);
        float const expected =
            static_cast<float>(start_of(1, 2)) - 3.0F / static_cast<float>(ranks);
        CHECK(std::abs(e.parameters[1].view[2] - expected) < 1e-5F);
      });
    }
  }
}

TEST_CASE(
    "a parameter without a gradient anywhere isn't updated: neither decay, momentum nor count "
    "moves") {
  for (int const ranks : {1, 2, 3}) {
    for (test::setting const& each : test::every_setting()) {
      CAPTURE(each.name);
      zero::run_threads(ranks, [&](zero::thread_communicator& comm) {
        engine e{{5, 3}};
        model sharded{
            comm,        e.units,
            each.stage,  zero::sgd{.learning_rate = 1, .momentum = 0.5, .weight_decay = 0.5},
            each.policy, each.options};
        double p = start_of(1, 1);
        double buffer = 0;
        for (int step = 0; step < 3; ++step) {
          e.run(sharded, 0, 1, [&](std::size_t k, std::size_t) -> std::optional<double> {
            return k == 1 && step == 1 ? std::nullopt : std::optional{2.0};
          });
          sharded.step();
          if (step != 1) {
            buffer = 0.5 * buffer + 2 + 0.5 * p;
            p -= buffer;
          }
        }
        CHECK(sharded.steps(0) == 3);
        CHECK(sharded.steps(1) == 2);
        sharded.release();
        CHECK(std::abs(e.parameters[1].view[1] - p) < 1e-5);
      });
    }
  }
}

TEST_CASE(
    "with clipping a gradient that isn't finite skips the step on every rank, and leaves no "
    "trace") {
  for (int const ranks : {1, 2, 3}) {
    for (double const bad :
         {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
      for (test::setting const& each : test::every_setting({.clip_norm = 1e9})) {
        CAPTURE(each.name);
        zero::run_threads(ranks, [&](zero::thread_communicator& comm) {
          engine e{{5, 3}};
          model sharded{comm,        e.units,
                        each.stage,  zero::sgd{.learning_rate = 1, .momentum = 0.5},
                        each.policy, each.options};
          auto const window = [&](bool spoilt) {
            for (std::size_t m = 0; m < 3; ++m) {
              e.run(sharded, m, 3, [&](std::size_t k, std::size_t i) {
                bool const here = spoilt && comm.rank() + 1 == ranks && m == 1 && k == 1 && i == 2;
                return here ? bad : 1.0;
              });
            }
          };
          window(false);
          CHECK_FALSE(sharded.step().skipped());
          window(true);
          CHECK(sharded.step().skipped());
          window(false);
          auto const result = sharded.step();
          CHECK_FALSE(result.skipped());
          CHECK(std::abs(result.norm() - std::sqrt(8.0)) < 1e-12);
          CHECK(sharded.steps(0) == 2);
          sharded.release();
          for (std::size_t k = 0; k < 2; ++k) {
            for (std::size_t i = 0; i < e.parameters[k].view.size(); ++i) {
              CHECK(std::abs(e.parameters[k].view[i] - (start_of(k, i) - 1 - 1.5)) < 1e-5);
            }
          }
        });
      }
    }
  }
}

TEST_CASE("a window that ends early is averaged over the micro-batches that ran") {
  for (int const ranks : {1, 2}) {
    for (test::setting const& each : test::every_setting()) {
      CAPTURE(each.name);
      zero::run_threads(ranks, [&](zero::thread_communicator& comm) {
        engine e{{5, 3}};
        model sharded{comm,        e.units,     each.stage, zero::sgd{.learning_rate = 1},
                      each.policy, each.options};
        for (std::size_t m = 0; m < 2; ++m) {
          e.run(sharded, m, 5, [&](std::size_t, std::size_t) { return m == 0 ? 1.0 : 3.0; });
        }
        sharded.step();
        sharded.release();
        CHECK(std::abs(e.parameters[0].view[4] - (start_of(0, 4) - 2)) < 1e-6);
      });
    }
  }
}
