// SPDX-License-Identifier: MIT
#include "train.hpp"

#include "digits.hpp"
#include "network.hpp"
#include "random.hpp"
#include "tensor_traits.hpp"

#include <zero/zero.hpp>

#include <Eigen/Core>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace mlp {
namespace {

/// The network's layers as the units that zero shards: one unit a layer. The tensors have no
/// storage yet; every element gets its first value where zero puts it, so no rank ever holds the
/// whole model for it.
template <class T>
auto units(network<T>& model, std::uint64_t seed) {
  using parameter = zero::typed_parameter<tensor<T>, tensor<T>>;
  std::vector<std::vector<parameter>> out;
  for (layer<T>& l : model.layers()) {
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

zero::stage stage_of(settings const& settings, int stage) {
  switch (stage) {
    case 0: return zero::stage0{};
    case 1:
      return zero::stage1{.gradients = settings.stage1_all_reduce
                                           ? zero::gradient_collective::all_reduce
                                           : zero::gradient_collective::reduce_scatter};
    case 2: return zero::stage2{};
    default:
      return zero::stage3{.prefetch = settings.prefetch,
                          .keep_after_forward = settings.keep_after_forward};
  }
}

zero::accumulation policy_of(settings const& settings, int stage) {
  if (settings.policy(stage) == accumulate::local) {
    return zero::local_accumulate{};
  }
  return zero::reduce_per_microbatch{};
}

zero::options options_of(settings const& settings) {
  zero::options out;
  if (settings.clip > 0) {
    out.clip_norm = settings.clip;
  }
  out.bucket_bytes = settings.bucket_bytes;
  out.overlap = settings.overlap;
  out.precision = settings.bf16 ? zero::bf16 : zero::fp32;
  return out;
}

std::vector<std::size_t> widths(settings const& settings) {
  std::vector<std::size_t> out{pixel_count};
  out.insert(out.end(), settings.hidden.begin(), settings.hidden.end());
  out.push_back(class_count);
  return out;
}

/// What the theory is told: sizes and settings.
formula formula_of(settings const& settings, int stage, int rank) {
  formula out;
  auto const width = widths(settings);
  for (std::size_t u = 0; u + 1 < width.size(); ++u) {
    out.units.push_back({width[u] * width[u + 1], width[u + 1]});
  }
  out.ranks = static_cast<std::uint64_t>(settings.ranks);
  out.rank = static_cast<std::uint64_t>(rank);
  out.stage = stage;
  out.all_reduce = settings.stage1_all_reduce;
  out.reduce_per_microbatch = settings.policy(stage) == accumulate::reduce;
  out.keep_after_forward = settings.keep_after_forward;
  out.prefetch = settings.prefetch;
  out.microbatches = settings.microbatches;
  out.bucket_bytes = settings.bucket_bytes;
  out.p = out.b = out.r = settings.bf16 ? 2 : 4;
  out.g = 4;
  std::uint64_t const states = settings.optimizer == optimizer::sgd ? 1 : 2;
  out.o = 4 * (states + (settings.bf16 ? 1 : 0));  // the master weights
  out.hyperparameter_bytes = states == 1 ? 32 : 40;
  out.derived_bytes = states == 1 ? 64 : 112;
  return out;
}

byte_counts counts(zero::memory_bytes const& bytes) {
  return {.parameters = bytes[zero::category::parameters],
          .gradients = bytes[zero::category::gradients],
          .optimizer_state = bytes[zero::category::optimizer_state],
          .gathered_units = bytes[zero::category::gathered_units],
          .gradient_buckets = bytes[zero::category::gradient_buckets],
          .staging = bytes[zero::category::staging],
          .control = bytes[zero::category::control],
          .engine = bytes[zero::category::engine],
          .padding = bytes.padding};
}

/// All that a step sends, whether the theory knows of it or not.
std::uint64_t training_bytes(zero::traffic_bytes const& sent) {
  return sent[zero::traffic::gradients] + sent[zero::traffic::parameters] +
         sent[zero::traffic::recomputation] + sent[zero::traffic::mispredicted];
}

/// The samples at `indices`: pixels into the rows of `to`, labels into the result.
std::vector<std::size_t> load(std::vector<digit> const& from, std::span<std::size_t const> indices,
                              matrix& to) {
  std::vector<std::size_t> labels;
  to.resize(static_cast<Eigen::Index>(indices.size()), static_cast<Eigen::Index>(pixel_count));
  for (std::size_t const index : indices) {
    std::copy(from[index].pixels.begin(), from[index].pixels.end(),
              to.data() + labels.size() * pixel_count);
    labels.push_back(from[index].label);
  }
  return labels;
}

/// Part `index` of `count` even parts of a batch.
std::span<std::size_t const> part(std::span<std::size_t const> batch, std::size_t index,
                                  std::size_t count) {
  std::size_t const first = batch.size() * index / count;
  return batch.subspan(first, batch.size() * (index + 1) / count - first);
}

/// One step: the batch is cut by micro-batch and then by rank, so that what a rank sees doesn't
/// depend on the stage. Each part's gradient is weighted so that their mean is the mean over the
/// batch's samples.
template <class T, class Sharded>
double train_step(network<T>& model, Sharded& sharded, std::vector<digit> const& samples,
                  std::span<std::size_t const> batch, settings const& settings, int rank) {
  auto const ranks = static_cast<std::size_t>(settings.ranks);
  std::size_t const parts = settings.microbatches * ranks;
  float const weight = static_cast<float>(parts) / static_cast<float>(batch.size());
  double loss = 0;
  for (std::size_t m = 0; m < settings.microbatches; ++m) {
    auto const mine = part(batch, m * ranks + static_cast<std::size_t>(rank), parts);
    auto const labels = load(samples, mine, model.input());
    auto micro = sharded.microbatch(m, settings.microbatches);
    for (std::size_t u = 0; u < sharded.units(); ++u) {
      auto lease = micro.forward(u);  // layer u's parameters are whole while it lives
      model.forward(u);
    }
    loss = model.loss(labels, weight);
    for (std::size_t u = sharded.units(); u-- > 0;) {
      auto lease = micro.backward(u);  // and its gradients have somewhere to go
      model.backward(u, lease.accumulate());
    }
  }
  sharded.step();
  return loss;
}

/// Accuracy on the test set, and a checksum of the parameters that gave it.
template <class T, class Sharded>
void evaluate(network<T>& model, Sharded& sharded, std::vector<digit> const& samples,
              outcome& out) {
  std::vector<std::size_t> all(samples.size());
  std::iota(all.begin(), all.end(), std::size_t{0});
  auto const labels = load(samples, all, model.input());
  out.parameter_checksum = fnv1a("");
  auto evaluation = sharded.evaluation();
  for (std::size_t u = 0; u < sharded.units(); ++u) {
    auto lease = evaluation.forward(u);
    model.forward(u);
    for (tensor<T> const* values : {&model.layers()[u].weight, &model.layers()[u].bias}) {
      std::string_view const bits{reinterpret_cast<char const*>(values->data()),
                                  values->size() * sizeof(T)};
      out.parameter_checksum = fnv1a(bits, out.parameter_checksum);
      out.parameters += values->size();
    }
  }
  out.test_accuracy =
      static_cast<double>(model.correct(labels)) / static_cast<double>(labels.size());
}

/// What every rank does.
template <class T, class Optimizer>
outcome train_rank(zero::thread_communicator& comm, settings const& settings, int stage,
                   Optimizer const& optimizer, step_observer const& after_step) {
  digits const data = read_digits(settings.data, comm.rank());
  network<T> model{widths(settings)};
  zero::sharded_model sharded{comm,      units(model, settings.seed), stage_of(settings, stage),
                              optimizer, policy_of(settings, stage),  options_of(settings)};
  std::size_t const samples = data.train.size();
  std::size_t const steps_per_epoch = (samples + settings.batch - 1) / settings.batch;
  outcome out;
  out.steps = settings.epochs * steps_per_epoch;
  std::uint64_t const sent_before = training_bytes(sharded.sent());
  auto const start = std::chrono::steady_clock::now();
  for (std::size_t epoch = 0; epoch < settings.epochs; ++epoch) {
    auto const order = permutation(samples, mix(settings.seed) + epoch);
    for (std::size_t step = 0; step < steps_per_epoch; ++step) {
      std::size_t const first = step * settings.batch;
      auto const batch = std::span{order}.subspan(first, std::min(settings.batch, samples - first));
      out.loss = train_step(model, sharded, data.train, batch, settings, comm.rank());
      if (comm.rank() == 0) {
        after_step(epoch * steps_per_epoch + step + 1, out.steps, out.loss);
      }
    }
  }
  sharded.wait();
  std::chrono::duration<double> const seconds = std::chrono::steady_clock::now() - start;
  out.seconds_per_step = seconds.count() / static_cast<double>(out.steps);
  out.sent_bytes_per_step = (training_bytes(sharded.sent()) - sent_before) / out.steps;
  evaluate(model, sharded, data.test, out);
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

}  // namespace

std::vector<outcome> train(settings const& settings, int stage, step_observer const& after_step) {
  std::vector<outcome> out(static_cast<std::size_t>(settings.ranks));
  zero::run_threads(settings.ranks, [&](zero::thread_communicator& comm) {
    out[static_cast<std::size_t>(comm.rank())] =
        with_optimizer(settings, [&](auto const& optimizer) {
          return settings.bf16
                     ? train_rank<Eigen::bfloat16>(comm, settings, stage, optimizer, after_step)
                     : train_rank<float>(comm, settings, stage, optimizer, after_step);
        });
  });
  return out;
}

}  // namespace mlp
