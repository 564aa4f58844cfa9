// SPDX-License-Identifier: MIT
#include <support/owning_tensor.hpp>
#include <support/settings.hpp>
#include <zero/comm/run_threads.hpp>
#include <zero/optim/adamw.hpp>
#include <zero/train/sharded_model.hpp>

#include <doctest/doctest.h>
#include <support/same_bits.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

// Promise 2: parameters have the same bits in every stage, for every bucket size, prefetch depth,
// alignment and overlap, with clipping and without, for each policy and precision.

namespace {

constexpr std::size_t microbatches = 3;
constexpr int steps = 3;

struct setting {
  std::string name;
  zero::stage stage;
  std::optional<std::uint64_t> bucket_bytes;
  std::optional<std::uint64_t> alignment;
  bool overlap;
  bool engine_adds;
};

/// Every stage in three ways that together use each value of every option; the first is the
/// plainest.
std::vector<setting> settings() {
  std::vector<setting> out;
  std::size_t turn = 0;
  for (auto const& [name, stage] : test::every_stage()) {
    for (std::size_t way = 0; way < 3; ++way, ++turn) {
      setting each{name, stage, {}, {}, turn % 2 == 1, turn % 5 == 4};
      if (way > 0) {
        constexpr std::array<std::uint64_t, 4> bytes{0, 300, 1000, 1U << 20U};
        each.bucket_bytes = bytes[turn % bytes.size()];
        constexpr std::array<std::uint64_t, 3> elements{1, 3, 64};
        each.alignment = elements[turn % elements.size()];
      }
      if (stage.shards_parameters() && way == 2) {
        each.stage.prefetch = turn % 2 == 0 ? 1 : 100;
      }
      each.name += way == 0 ? ""
                            : ", bucket_bytes " + std::to_string(*each.bucket_bytes) +
                                  ", alignment " + std::to_string(*each.alignment);
      each.name += each.overlap ? ", overlapping" : ", inline";
      each.name += each.engine_adds ? ", engine adds" : "";
      out.push_back(each);
    }
  }
  return out;
}

float to_float(float value) { return value; }
float to_float(zero::bfloat16 value) { return static_cast<float>(value); }

/// Parameters of one type, and numbers that no rounding leaves alone.
template <class T>
class part {
 public:
  part(std::string prefix, std::vector<std::size_t> const& sizes) : prefix_{std::move(prefix)} {
    for (std::size_t const size : sizes) {
      values_.emplace_back(size);
      gradients_.emplace_back();
      for (std::size_t i = 0; i < size; ++i) {
        values_.back().view[i] = T(std::sin(static_cast<float>(7 * values_.size() + i)));
      }
    }
  }

  [[nodiscard]] std::size_t size() const { return values_.size(); }

  [[nodiscard]] zero::any_parameter declare(std::size_t k) {
    return zero::parameter(prefix_ + std::to_string(k), values_[k], gradients_[k]);
  }

  /// Gradients that depend on the parameters as they are, and differ between ranks and
  /// micro-batches.
  void write(std::size_t k, int rank, std::size_t m, bool accumulate) {
    std::span<T> const out = gradients_[k].view;
    for (std::size_t i = 0; i < out.size(); ++i) {
      float const p = to_float(values_[k].view[i]);
      float const g =
          0.3F * p + std::cos(static_cast<float>(i + 11 * m) + 1.7F * static_cast<float>(rank));
      out[i] = T(accumulate ? to_float(out[i]) + g : g);
    }
  }

  void append(std::vector<float>& out) const {
    for (auto const& value : values_) {
      for (T const each : value.view) {
        out.push_back(to_float(each));
      }
    }
  }

 private:
  std::string prefix_;
  std::vector<test::owning_tensor<T>> values_;
  std::vector<test::owning_tensor<T>> gradients_;
};

/// The values after some steps, whole. Units have one wide parameter, one of T, and the first a
/// frozen one; the last uses the first's, too.
template <class T>
std::vector<float> train(zero::thread_communicator& comm, setting const& chosen,
                         zero::accumulation policy, zero::options options) {
  part<T> weights{"weight", {100, 3, 0, 64, 1}};
  part<float> norms{"norm", {5, 9, 33, 1, 0}};
  part<T> frozen{"frozen", {21}};
  std::vector<std::vector<zero::any_parameter>> units;
  for (std::size_t u = 0; u < weights.size(); ++u) {
    units.push_back({weights.declare(u), norms.declare(u)});
  }
  units.front().push_back(frozen.declare(0).frozen());
  units.back().push_back(zero::tied("weight0"));

  options.bucket_bytes = chosen.bucket_bytes;
  options.alignment = chosen.alignment;
  options.overlap = chosen.overlap;
  options.engine_adds = chosen.engine_adds;
  zero::sharded_model sharded{comm,   units,  chosen.stage, zero::adamw{.learning_rate = 0.1},
                              policy, options};
  auto const id = [&](std::string const& name, std::size_t k) {
    return sharded.find(name + std::to_string(k));
  };
  for (int step = 0; step < steps; ++step) {
    for (std::size_t m = 0; m < microbatches; ++m) {
      auto micro = sharded.microbatch(m, microbatches);
      for (std::size_t u = 0; u < sharded.units(); ++u) {
        auto const lease = micro.forward(u);
      }
      for (std::size_t u = sharded.units(); u-- > 0;) {
        auto const lease = micro.backward(u);
        weights.write(u, comm.rank(), m, lease.accumulate(id("weight", u)));
        norms.write(u, comm.rank(), m, lease.accumulate(id("norm", u)));
        if (u + 1 == sharded.units()) {
          weights.write(0, comm.rank(), m + 5, lease.accumulate(id("weight", 0)));
        }
      }
    }
    sharded.step();
  }
  CHECK(sharded.plan().bytes == sharded.ledger());
  sharded.release();
  std::vector<float> out;
  weights.append(out);
  norms.append(out);
  frozen.append(out);
  return out;
}

float largest_difference(std::vector<float> const& a, std::vector<float> const& b) {
  float largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    largest = std::max(largest, std::abs(a[i] - b[i]));
  }
  return largest;
}

/// Check every setting at every world size; `rounding` is what the two policies may differ by.
template <class T>
void check(zero::precision precision, float rounding) {
  for (int const ranks : {1, 2, 3, 4, 8}) {
    for (std::optional<double> const clip : {std::optional<double>{}, std::optional<double>{1.5}}) {
      std::array<std::vector<float>, 2> expected;
      for (bool const per_microbatch : {false, true}) {
        std::vector<float>& first = expected[per_microbatch ? 1 : 0];
        for (setting const& each : settings()) {
          CAPTURE(each.name);
          CAPTURE(ranks);
          CAPTURE(per_microbatch);
          zero::accumulation policy = zero::local_accumulate{};
          if (per_microbatch) {
            policy = zero::reduce_per_microbatch{};
          }
          std::vector<std::vector<float>> got(static_cast<std::size_t>(ranks));
          zero::run_threads(ranks, [&](zero::thread_communicator& comm) {
            got[static_cast<std::size_t>(comm.rank())] =
                train<T>(comm, each, policy, {.clip_norm = clip, .precision = precision});
          });
          first = first.empty() ? got.front() : first;
          for (std::vector<float> const& mine : got) {
            CHECK(test::same_bits(mine, first));
          }
        }
      }
      CHECK(std::ranges::none_of(expected[0], [](float each) { return std::isnan(each); }));
      CHECK(largest_difference(expected[0], expected[1]) <= rounding);
    }
  }
}

}  // namespace

TEST_CASE("fp32: the same bits in every stage and setting; the policies agree within rounding") {
  check<float>(zero::fp32, 1e-5F);
}

TEST_CASE("bf16 with fp32 gradients: the same bits in every stage and setting") {
  check<zero::bfloat16>(zero::bf16, 0.02F);
}

TEST_CASE("bf16 with bf16 gradients: the same bits in every stage and setting") {
  check<zero::bfloat16>(zero::bf16_reduced, 0.02F);
}

TEST_CASE("a clip norm that is never reached changes no bit") {
  setting const plain = settings().front();
  for (int const ranks : {1, 2, 3}) {
    zero::run_threads(ranks, [&](zero::thread_communicator& comm) {
      std::vector<float> const without =
          train<zero::bfloat16>(comm, plain, zero::local_accumulate{}, {.precision = zero::bf16});
      std::vector<float> const with = train<zero::bfloat16>(
          comm, plain, zero::local_accumulate{}, {.clip_norm = 1e6, .precision = zero::bf16});
      CHECK(test::same_bits(without, with));
    });
  }
}
