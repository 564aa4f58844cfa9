// SPDX-License-Identifier: MIT
//
// A whole step of `sharded_model`, AdamW in fp32 on 10 million parameters, beside what it must not
// be slower than: the same arithmetic in a loop written by hand (stage 0, one rank), and bare loops
// with the reads and writes of the step's collectives and update (every stage, two ranks).

#include "paired.hpp"

#include <zero/comm/solo.hpp>
#include <zero/comm/threads.hpp>
#include <zero/device/host.hpp>
#include <zero/device/pack.hpp>
#include <zero/optim/adamw.hpp>
#include <zero/train/sharded_model.hpp>

#include <benchmark/benchmark.h>

#include <cmath>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace {

using paired::comparison;
using paired::team;

constexpr std::size_t layers = 10;
constexpr std::size_t layer = 1'000'000;
constexpr std::size_t elements = layers * layer;
constexpr zero::adamw optimizer{.learning_rate = 1e-3, .weight_decay = 0.01};

using declared = decltype(zero::parameter<float>("", {}, [](std::span<float>, std::size_t) {}));

std::vector<std::vector<declared>> units() {
  std::vector<std::vector<declared>> out;
  for (std::size_t u = 0; u < layers; ++u) {
    out.push_back({zero::parameter<float>("layer" + std::to_string(u), {layer},
                                          [](std::span<float> values, std::size_t) {
                                            std::fill(values.begin(), values.end(), 1.0F);
                                          })});
  }
  return out;
}

/// A loop's window without compute: every unit is leased as in training, nothing is written.
template <class Model>
void step(Model& model) {
  {
    auto micro = model.microbatch(0, 1);
    for (std::size_t u = 0; u < model.units(); ++u) {
      auto const lease = micro.forward(u);
    }
    for (std::size_t u = model.units(); u-- > 0;) {
      auto const lease = micro.backward(u);
    }
  }
  model.step();
  model.wait();
}

class array {
 public:
  explicit array(float value)
      : memory_{static_cast<float*>(zero::host::allocate(elements * sizeof(float)))} {
    std::fill_n(memory_.get(), elements, value);
  }
  [[nodiscard]] float* data() const { return memory_.get(); }

 private:
  struct free_memory {
    void operator()(float* memory) const {
      zero::host::deallocate(memory, elements * sizeof(float));
    }
  };
  std::unique_ptr<float, free_memory> memory_;
};

using zero::detail::pack;

struct arrays {
  array p{1.0F};
  array g{0.0F};
  array m{0.0F};
  array v{0.0F};
  array whole{0.0F};

  /// AdamW with 16-byte vectors, as one would write it by hand.
  void adamw(int t) {
    using value = pack<float>;
    value const one_minus_beta1{1 - optimizer.beta1};
    value const beta2{optimizer.beta2};
    value const one_minus_beta2{1 - optimizer.beta2};
    value const rate{optimizer.learning_rate / (1 - std::pow(optimizer.beta1, t))};
    value const root{std::sqrt(1 - std::pow(optimizer.beta2, t))};
    value const epsilon{optimizer.epsilon};
    value const decay{1 - optimizer.learning_rate * optimizer.weight_decay};
    for (std::size_t i = 0; i < elements; i += 4) {
      value const gradient = value::load(g.data() + i);
      value const mean = value::load(m.data() + i);
      value const first = mean + one_minus_beta1 * (gradient - mean);
      value const second =
          beta2 * value::load(v.data() + i) + one_minus_beta2 * (gradient * gradient);
      (decay * value::load(p.data() + i) - rate * first / (zero::sqrt(second) / root + epsilon))
          .store(p.data() + i);
      first.store(m.data() + i);
      second.store(v.data() + i);
    }
  }

  /// p += g, m += g, v += g over [begin, end): the update's streams with the least arithmetic.
  void update(std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; i += 4) {
      auto const gradient = pack<float>::load(g.data() + i);
      for (float* const to : {p.data() + i, m.data() + i, v.data() + i}) {
        (pack<float>::load(to) + gradient).store(to);
      }
    }
  }

  /// This rank's half of the sum of two gradients, in place.
  void reduce(arrays const& peer, std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; i += 4) {
      (pack<float>::load(g.data() + i) + pack<float>::load(peer.g.data() + i)).store(g.data() + i);
    }
  }
};

void stage0_one_rank(benchmark::State& state) {
  zero::solo comm;
  zero::sharded_model model{comm,
                            units(),
                            zero::stage0{},
                            optimizer,
                            zero::local_accumulate{},
                            zero::options{.overlap = state.range(0) != 0}};
  arrays hand;
  comparison by_hand;
  int t = 0;
  team alone{1};
  for (auto _ : state) {
    ++t;
    double const library = alone.seconds([&](std::size_t) { step(model); });
    double const other = alone.seconds([&](std::size_t) { hand.adamw(t); });
    by_hand.add(library, other);
    state.SetIterationTime(library);
  }
  by_hand.report(state, "by_hand");
}

/// The step's reads and writes of memory, by bare loops on two cores.
void limit(zero::stage const& at, team& ranks, std::vector<arrays>& of, double& seconds) {
  auto const half = [](std::size_t rank) {
    return std::pair{rank * (elements / 2), (rank + 1) * (elements / 2)};
  };
  seconds += ranks.seconds([&](std::size_t rank) {
    auto const [begin, end] = half(rank);
    of[rank].reduce(of[1 - rank], begin, end);
  });
  auto const gather = [&](auto from, auto to) {
    seconds += ranks.seconds([&](std::size_t rank) {
      auto const [begin, end] = half(1 - rank);
      std::copy(from(1 - rank) + begin, from(1 - rank) + end, to(rank) + begin);
    });
  };
  if (at.reduces_whole()) {
    gather([&](std::size_t r) { return of[r].g.data(); },
           [&](std::size_t r) { return of[r].g.data(); });
  }
  seconds += ranks.seconds([&](std::size_t rank) {
    auto const [begin, end] =
        at.replicates_updates() ? std::pair{std::size_t{0}, elements} : half(rank);
    of[rank].update(begin, end);
  });
  if (at.shards_parameters()) {
    for (int pass = 0; pass < 2; ++pass) {  // into slots: the rank's own half is copied, too
      for (std::size_t from : {std::size_t{0}, std::size_t{1}}) {
        seconds += ranks.seconds([&](std::size_t rank) {
          auto const [begin, end] = half((rank + from) % 2);
          arrays const& source = of[(rank + from) % 2];
          std::copy(source.p.data() + begin, source.p.data() + end, of[rank].whole.data() + begin);
        });
      }
    }
  } else if (!at.replicates_updates()) {
    gather([&](std::size_t r) { return of[r].p.data(); },
           [&](std::size_t r) { return of[r].p.data(); });
  }
}

template <class Stage>
void two_ranks(benchmark::State& state) {
  using model_type = zero::sharded_model<zero::thread_communicator, zero::adamw>;
  auto communicators = zero::thread_communicator::create(2);
  std::vector<std::unique_ptr<model_type>> models(2);
  zero::accumulation const policy = zero::local_accumulate{};
  team ranks{2};
  ranks.seconds([&](std::size_t rank) {
    models[rank] = std::make_unique<model_type>(communicators[rank], units(), Stage{}, optimizer,
                                                policy, zero::options{});
  });
  std::vector<arrays> bare(2);
  comparison to_limit;
  for (auto _ : state) {
    double const library = ranks.seconds([&](std::size_t rank) { step(*models[rank]); });
    double bound = 0;
    limit(Stage{}, ranks, bare, bound);
    to_limit.add(library, bound);
    state.SetIterationTime(library);
  }
  to_limit.report(state, "limit");
  ranks.seconds([&](std::size_t rank) { models[rank].reset(); });
}

BENCHMARK(stage0_one_rank)
    ->ArgName("overlap")
    ->Arg(0)
    ->Arg(1)
    ->Iterations(paired::pairs)
    ->UseManualTime();
BENCHMARK(two_ranks<zero::stage0>)->Iterations(paired::pairs)->UseManualTime();
BENCHMARK(two_ranks<zero::stage1>)->Iterations(paired::pairs)->UseManualTime();
BENCHMARK(two_ranks<zero::stage2>)->Iterations(paired::pairs)->UseManualTime();
BENCHMARK(two_ranks<zero::stage3>)->Iterations(paired::pairs)->UseManualTime();

}  // namespace

BENCHMARK_MAIN();
