// SPDX-License-Identifier: MIT
//
// The AdamW update beside its limit, an in-place loop over the same streams, and beside what it
// replaces, a plain loop over scalars. All three run within each iteration, so that they see the same
// memory; `ratio` is the median of the pairs' limit time / update time, between its quartiles.
//
//   float32    reads p g m v, writes p m v                   28 bytes an element
//   bfloat16   reads g master m v, writes p master m v,
//              and the line of p is fetched to be written    30 bytes an element

#include <zero/device/host.hpp>
#include <zero/device/pack.hpp>
#include <zero/optim/adamw.hpp>
#include <zero/optim/fused_update.hpp>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

namespace {

constexpr std::size_t elements = std::size_t{1}
                                 << 25U;  // a thread's arrays: 512 MiB, past any cache
constexpr int pairs = 25;
constexpr zero::adamw optimizer{.learning_rate = 1e-3, .weight_decay = 0.01};

template <class T>
class array {
 public:
  explicit array(float value)
      : memory_{static_cast<T*>(zero::host::allocate(elements * sizeof(T)))} {
    std::fill_n(memory_.get(), elements, static_cast<T>(value));
  }
  [[nodiscard]] T* data() const { return memory_.get(); }

 private:
  struct free_memory {
    void operator()(T* memory) const { zero::host::deallocate(memory, elements * sizeof(T)); }
  };
  std::unique_ptr<T, free_memory> memory_;
};

using zero::detail::pack;

/// One thread's shard. `master` is the parameter itself where that is float.
template <class Parameter>
struct shard {
  static constexpr bool has_master = sizeof(Parameter) == 2;
  static constexpr double bytes = has_master ? 30.0 : 28.0;

  array<Parameter> parameter{1.0F};
  array<Parameter> gradient{1e-3F};
  array<float> m{1e-3F};
  array<float> v{1e-6F};
  std::vector<array<float>> own_master;

  shard() {
    if (has_master) {
      own_master.emplace_back(1.0F);
    }
  }

  void update(std::int64_t step) {
    zero::fused_update(optimizer, step, 1.0,
                       zero::update_piece<zero::adamw>{
                           .parameter = {parameter.data(), elements, zero::dtype_of<Parameter>},
                           .master = has_master ? own_master.front().data() : nullptr,
                           .gradient = {gradient.data(), elements, zero::dtype_of<Parameter>},
                           .states = {m.data(), v.data()}});
  }

  /// The same streams with the least arithmetic.
  void limit() {
    auto* const mean = m.data();
    auto* const square = v.data();
    if constexpr (has_master) {
      using halves [[gnu::vector_size(16)]] = std::uint16_t;
      auto* const master = own_master.front().data();
      pack<float> const small{1e-6F};
      for (std::size_t i = 0; i < elements; i += 8) {
        auto const g = zero::detail::load_vector<halves>(gradient.data() + i);
        halves const p = zero::detail::load_vector<halves>(parameter.data() + i) + g;
        std::memcpy(static_cast<void*>(parameter.data() + i), &p, sizeof p);
        for (float* const to : {master + i, mean + i, square + i}) {
          (pack<float>::load(to) + small).store(to);
          (pack<float>::load(to + 4) + small).store(to + 4);
        }
      }
    } else {
      auto* const p = parameter.data();
      for (std::size_t i = 0; i < elements; i += 4) {
        auto const g = pack<float>::load(gradient.data() + i);
        (pack<float>::load(p + i) + g).store(p + i);
        (pack<float>::load(mean + i) + g).store(mean + i);
        (pack<float>::load(square + i) + g).store(square + i);
      }
    }
  }

  /// What one would write by hand.
  void scalar(std::int64_t step) {
    auto const t = static_cast<double>(step);
    auto const beta1 = static_cast<float>(optimizer.beta1);
    auto const beta2 = static_cast<float>(optimizer.beta2);
    auto const rate = static_cast<float>(optimizer.learning_rate);
    auto const decay = static_cast<float>(1 - optimizer.learning_rate * optimizer.weight_decay);
    auto const epsilon = static_cast<float>(optimizer.epsilon);
    auto const correction1 = static_cast<float>(1 - std::pow(optimizer.beta1, t));
    auto const correction2 = static_cast<float>(1 - std::pow(optimizer.beta2, t));
    auto* const mean = m.data();
    auto* const square = v.data();
    for (std::size_t i = 0; i < elements; ++i) {
      float const g = gradient.data()[i];
      float p = has_master ? own_master.front().data()[i] : static_cast<float>(parameter.data()[i]);
      mean[i] = beta1 * mean[i] + (1 - beta1) * g;
      square[i] = beta2 * square[i] + (1 - beta2) * g * g;
      p = decay * p -
          rate * (mean[i] / correction1) / (std::sqrt(square[i] / correction2) + epsilon);
      if (has_master) {
        own_master.front().data()[i] = p;
      }
      parameter.data()[i] = static_cast<Parameter>(p);
    }
  }
};

/// Threads that run the same work at the same time.
class team {
 public:
  explicit team(std::size_t size) : barrier_{static_cast<std::ptrdiff_t>(size)} {
    for (std::size_t rank = 1; rank < size; ++rank) {
      threads_.emplace_back([this, rank] { serve(rank); });
    }
  }
  ~team() {
    work_ = nullptr;
    barrier_.arrive_and_wait();
    for (auto& thread : threads_) {
      thread.join();
    }
  }

  /// Seconds until all of them have done `work(rank)`.
  double seconds(std::function<void(std::size_t)> work) {
    work_ = std::move(work);
    barrier_.arrive_and_wait();
    auto const start = std::chrono::steady_clock::now();
    work_(0);
    barrier_.arrive_and_wait();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

 private:
  void serve(std::size_t rank) {
    for (;;) {
      barrier_.arrive_and_wait();
      if (!work_) {
        return;
      }
      work_(rank);
      barrier_.arrive_and_wait();
    }
  }

  std::barrier<> barrier_;
  std::function<void(std::size_t)> work_;
  std::vector<std::thread> threads_;
};

double quantile(std::vector<double> values, double part) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(part * static_cast<double>(values.size() - 1) + 0.5)];
}

template <class Parameter>
void adamw(benchmark::State& state) {
  auto const threads = static_cast<std::size_t>(state.range(0));
  std::vector<shard<Parameter>> shards(threads);
  team workers{threads};
  std::vector<double> ratios;
  std::vector<double> update_seconds;
  std::vector<double> limit_seconds;
  std::vector<double> scalar_seconds;
  std::int64_t step = 0;
  for (auto _ : state) {
    ++step;
    double const update = workers.seconds([&](std::size_t rank) { shards[rank].update(step); });
    double const limit = workers.seconds([&](std::size_t rank) { shards[rank].limit(); });
    double const scalar = workers.seconds([&](std::size_t rank) { shards[rank].scalar(step); });
    ratios.push_back(limit / update);
    update_seconds.push_back(update);
    limit_seconds.push_back(limit);
    scalar_seconds.push_back(scalar);
    state.SetIterationTime(update);
  }
  auto const speed = [&](std::vector<double> const& seconds) {
    return shard<Parameter>::bytes * static_cast<double>(elements * threads) /
           quantile(seconds, 0.5) / 1e9;
  };
  state.counters["ratio"] = quantile(ratios, 0.5);
  state.counters["ratio_low"] = quantile(ratios, 0.25);
  state.counters["ratio_high"] = quantile(ratios, 0.75);
  state.counters["GB/s"] = speed(update_seconds);
  state.counters["limit_GB/s"] = speed(limit_seconds);
  state.counters["scalar_GB/s"] = speed(scalar_seconds);
}

BENCHMARK(adamw<float>)->ArgName("threads")->Arg(1)->Arg(2)->Iterations(pairs)->UseManualTime();
BENCHMARK(adamw<zero::bfloat16>)
    ->ArgName("threads")
    ->Arg(1)
    ->Arg(2)
    ->Iterations(pairs)
    ->UseManualTime();

}  // namespace

BENCHMARK_MAIN();
