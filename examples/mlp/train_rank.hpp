// SPDX-License-Identifier: MIT
#pragma once

#include "cost.hpp"
#include "digits.hpp"
#include "network.hpp"
#include "random.hpp"
#include "samples.hpp"
#include "sharding.hpp"
#include "tensor_traits.hpp"
#include "train.hpp"

#include <zero/zero.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

/// @file
/// The training loop: one for every device, communicator and stage.

namespace mlp {

/// The network's layers as the units that zero shards: one unit a layer. The tensors have no
/// storage yet; every element gets its first value where zero puts it, so no rank ever holds the
/// whole model for it.
template <class T, class Device>
auto units(network<T, Device>& model, std::uint64_t seed) {
  using parameter = zero::typed_parameter<tensor<T, Device>, tensor<T, Device>>;
  std::vector<std::vector<parameter>> out;
  for (layer<T, Device>& l : model.layers()) {
    std::string const name = "layer" + std::to_string(out.size());
    // Source: He et al., Delving deep into rectifiers (2015): a variance of 2 / inputs.
    float const bound = std::sqrt(6.0F / static_cast<float>(l.inputs));
    std::uint64_t const key = mix(seed) ^ fnv1a(name);
    auto const random = [=](std::span<T> to, std::size_t first) {
      initialise(to, first, key, bound);
    };
    auto const zeros = [](std::span<T> to, std::size_t) { std::fill(to.begin(), to.end(), T{}); };
    out.push_back({zero::parameter(name + ".weight", l.weight, l.weight_gradient,
                                   {l.inputs, l.outputs}, random),
                   zero::parameter(name + ".bias", l.bias, l.bias_gradient, {l.outputs}, zeros)});
  }
  return out;
}

/// Samples [first, first + count) of an epoch.
struct range {
  std::size_t first;
  std::size_t count;

  /// Part `index` of `parts` even parts.
  [[nodiscard]] range part(std::size_t index, std::size_t parts) const {
    std::size_t const begin = count * index / parts;
    return {first + begin, count * (index + 1) / parts - begin};
  }
};

/// One step: the batch is cut by micro-batch and then by rank, so that what a rank sees doesn't
/// depend on the stage. Each part's gradient is weighted so that their mean is the mean over the
/// batch's samples.
template <class T, class Device, class Sharded>
void train_step(network<T, Device>& model, Sharded& sharded, samples<Device>& epoch, range batch,
                settings const& settings, int rank) {
  auto const ranks = static_cast<std::size_t>(settings.ranks);
  std::size_t const parts = settings.microbatches * ranks;
  float const weight = static_cast<float>(parts) / static_cast<float>(batch.count);
  for (std::size_t m = 0; m < settings.microbatches; ++m) {
    range const mine = batch.part(m * ranks + static_cast<std::size_t>(rank), parts);
    model.read(epoch.pixels(mine.first), mine.count);
    auto micro = sharded.microbatch(m, settings.microbatches);
    for (std::size_t u = 0; u < sharded.units(); ++u) {
      auto lease = micro.forward(u);  // layer u's parameters are whole while it lives
      model.forward(u);
    }
    model.loss(epoch.labels(mine.first), weight);
    for (std::size_t u = sharded.units(); u-- > 0;) {
      auto lease = micro.backward(u);  // and its gradients have somewhere to go
      model.backward(u, lease.accumulate());
    }
  }
  sharded.step();
}

/// Accuracy on the test set, and a checksum of the parameters that gave it.
template <class T, class Device, class Sharded>
void evaluate(network<T, Device>& model, Sharded& sharded, std::vector<digit> const& test,
              samples<Device>& on_device, outcome& out) {
  model.read(on_device.pixels(0), test.size());
  out.parameter_checksum = fnv1a("");
  auto evaluation = sharded.evaluation();
  for (std::size_t u = 0; u < sharded.units(); ++u) {
    auto lease = evaluation.forward(u);
    model.forward(u);
    layer<T, Device> const& l = model.layers()[u];
    for (tensor<T, Device> const* values : {&l.weight, &l.bias}) {
      auto const copy = model.download(*values, values->size());
      std::string_view const bits{reinterpret_cast<char const*>(copy.data()),
                                  copy.size() * sizeof(T)};
      out.parameter_checksum = fnv1a(bits, out.parameter_checksum);
      out.parameters += copy.size();
    }
  }
  auto const classes = model.classes();
  std::size_t right = 0;
  for (std::size_t i = 0; i < test.size(); ++i) {
    right += classes[i] == test[i].label ? 1U : 0U;
  }
  out.test_accuracy = static_cast<double>(right) / static_cast<double>(test.size());
}

/// What every rank does, with parameters of type T.
template <class T, class Communicator, class Optimizer>
outcome train_rank(Communicator& comm, settings const& settings, int stage,
                   Optimizer const& optimizer, step_observer const& after_step) {
  using where = typename Communicator::device;
  digits const data = read_digits(settings.data, comm.rank());
  typename where::stream stream{};
  samples<where> seen;
  network<T, where> model{widths(settings), stream};
  zero::options options = options_of(settings);
  if constexpr (requires { stream.native(); }) {
    options.stream = stream.native();
  }
  zero::sharded_model sharded{comm,      units(model, settings.seed), stage_of(settings, stage),
                              optimizer, policy_of(settings, stage),  options};
  std::size_t const count = data.train.size();
  std::size_t const steps_per_epoch = (count + settings.batch - 1) / settings.batch;
  outcome out;
  out.steps = settings.epochs * steps_per_epoch;
  std::uint64_t const sent_before = training_bytes(sharded.sent());
  auto const start = std::chrono::steady_clock::now();
  for (std::size_t epoch = 0; epoch < settings.epochs; ++epoch) {
    seen.load(stream, data.train, permutation(count, mix(settings.seed) + epoch));
    for (std::size_t step = 0; step < steps_per_epoch; ++step) {
      std::size_t const first = step * settings.batch;
      train_step(model, sharded, seen, {first, std::min(settings.batch, count - first)}, settings,
                 comm.rank());
      std::size_t const done = epoch * steps_per_epoch + step + 1;
      if (comm.rank() == 0 && 100 * done / out.steps != 100 * (done - 1) / out.steps) {
        after_step(done, out.steps, model.mean_loss());
      }
    }
  }
  sharded.wait();
  stream.synchronize();
  std::chrono::duration<double> const seconds = std::chrono::steady_clock::now() - start;
  out.loss = model.mean_loss();
  out.seconds_per_step = seconds.count() / static_cast<double>(out.steps);
  out.sent_bytes_per_step = (training_bytes(sharded.sent()) - sent_before) / out.steps;
  std::vector<std::size_t> all(data.test.size());
  std::iota(all.begin(), all.end(), std::size_t{0});
  seen.load(stream, data.test, all);
  evaluate(model, sharded, data.test, seen, out);
  out.planned = counts(sharded.plan().bytes);
  out.allocated = counts(sharded.ledger());
  out.bind_peak_bytes = sharded.plan().bind_peak_bytes;
  formula const theory = formula_of(settings, stage, comm.rank());
  out.formula = theory.bytes();
  out.formula_sent_bytes_per_step = theory.sent_bytes_per_step();
  return out;
}

/// Call `function` with the optimizer that the settings name.
template <class Function>
auto with_optimizer(settings const& settings, Function function) {
  switch (settings.optimizer) {
    case optimizer::sgd:
      return function(zero::sgd{.learning_rate = settings.rate(), .momentum = 0.9});
    case optimizer::adam: return function(zero::adam{.learning_rate = settings.rate()});
    case optimizer::adamw: break;
  }
  return function(zero::adamw{.learning_rate = settings.rate()});
}

/// What `run_threads` and its like call on every rank: trains, and fills the rank's place in `out`.
template <class Bfloat16>
auto rank_function(settings const& settings, int stage, step_observer const& after_step,
                   std::vector<outcome>& out) {
  return [&, stage](auto& comm) -> void {
    out[static_cast<std::size_t>(comm.rank())] =
        with_optimizer(settings, [&](auto const& optimizer) {
          return settings.bf16 ? train_rank<Bfloat16>(comm, settings, stage, optimizer, after_step)
                               : train_rank<float>(comm, settings, stage, optimizer, after_step);
        });
  };
}

}  // namespace mlp
