// SPDX-License-Identifier: MIT
//
// The AdamW update beside its limit, an in-place loop over the same streams, and beside what it
// replaces, a plain loop over scalars. All three run within each iteration, so that they see the
// same memory; `limit_ratio` is the median of limit time / update time, 1 being at the limit.
//
//   float32    reads p g m v, writes p m v                   28 bytes an element
//   bfloat16   reads g master m v, writes p master m v,
//              and the line of p is fetched to be written    30 bytes an element

#include "paired.hpp"

#include <zero/core/dtype.hpp>
#include <zero/device/host.hpp>
#include <zero/device/pack.hpp>
#include <zero/optim/adamw.hpp>
#include <zero/optim/fused_update.hpp>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace {

/// For each thread, with arrays of 512 MiB together: past any cache.
constexpr std::size_t elements = std::size_t{1} << 25U;
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

template <class Parameter>
void adamw(benchmark::State& state) {
  auto const threads = static_cast<std::size_t>(state.range(0));
  std::vector<shard<Parameter>> shards(threads);
  paired::team workers{threads};
  paired::comparison limit;
  paired::comparison scalar;
  std::int64_t step = 0;
  for (auto _ : state) {
    ++step;
    double const update = workers.seconds([&](std::size_t rank) { shards[rank].update(step); });
    limit.add(update, workers.seconds([&](std::size_t rank) { shards[rank].limit(); }));
    scalar.add(update, workers.seconds([&](std::size_t rank) { shards[rank].scalar(step); }));
    state.SetIterationTime(update);
  }
  limit.report(state, "limit");
  scalar.report(state, "scalar");
  double const gigabytes = shard<Parameter>::bytes * static_cast<double>(elements * threads) / 1e9;
  state.counters["GB/s"] = gigabytes / limit.library_seconds();
  state.counters["limit_GB/s"] = gigabytes / limit.other_seconds();
}

BENCHMARK(adamw<float>)
    ->ArgName("threads")
    ->Arg(1)
    ->Arg(2)
    ->Iterations(paired::pairs)
    ->UseManualTime();
BENCHMARK(adamw<zero::bfloat16>)
    ->ArgName("threads")
    ->Arg(1)
    ->Arg(2)
    ->Iterations(paired::pairs)
    ->UseManualTime();

}  // namespace

BENCHMARK_MAIN();
