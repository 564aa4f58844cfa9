// SPDX-License-Identifier: MIT
#include <support/owning_tensor.hpp>
#include <support/settings.hpp>
#include <zero/comm/run_threads.hpp>
#include <zero/optim/adamw.hpp>
#include <zero/train/sharded_model.hpp>

#include <doctest/doctest.h>
#include <support/thrown.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

// An engine that zero has never heard of: a tensor class of its own, and an autograd that makes
// gradients when it needs them, hands them over in an order of its own, and frees them.
namespace mock {

class tensor {
 public:
  explicit tensor(std::size_t size) : own_{new float[size]{}}, data_{own_.get()}, size_{size} {}

  [[nodiscard]] float* data() { return data_; }
  [[nodiscard]] std::size_t size() const { return size_; }
  float& operator[](std::size_t i) { return data_[i]; }

  /// Give up what it owns for elements that someone else keeps.
  void borrow(float* data, std::size_t size) {
    own_.reset();
    data_ = data;
    size_ = size;
  }

 private:
  std::unique_ptr<float[]> own_;
  float* data_;
  std::size_t size_;
};

struct parameter {
  std::string name;
  std::size_t layer;
  tensor value;
};

/// Layers x -> tanh(W x + b), and a loss of half the squared distance to a target. With `lazy`,
/// backward is done with the gradient of a layer's bias only after the next layer's weights.
class network {
 public:
  explicit network(std::vector<std::size_t> widths, bool lazy = false)
      : widths_{std::move(widths)}, lazy_{lazy} {
    for (std::size_t l = 0; l < layers(); ++l) {
      parameters_.push_back({"weight" + std::to_string(l), l, tensor{widths_[l] * widths_[l + 1]}});
      parameters_.push_back({"bias" + std::to_string(l), l, tensor{widths_[l + 1]}});
    }
    std::size_t n = 0;
    for (parameter& p : parameters_) {
      for (std::size_t i = 0; i < p.value.size(); ++i) {
        p.value[i] = std::sin(static_cast<float>(++n)) * 0.5F;
      }
    }
  }

  [[nodiscard]] std::size_t layers() const { return widths_.size() - 1; }
  [[nodiscard]] std::vector<parameter>& parameters() { return parameters_; }

  /// `around(layer)` gives an object that lives while the layer computes.
  template <class Around>
  void forward(std::vector<float> const& input, Around around) {
    values_.assign(1, input);
    for (std::size_t l = 0; l < layers(); ++l) {
      [[maybe_unused]] auto const scope = around(l);
      std::vector<float> out(widths_[l + 1]);
      for (std::size_t i = 0; i < out.size(); ++i) {
        float sum = bias(l)[i];
        for (std::size_t j = 0; j < widths_[l]; ++j) {
          sum += weight(l)[i * widths_[l] + j] * values_[l][j];
        }
        out[i] = std::tanh(sum);
      }
      values_.push_back(std::move(out));
    }
  }

  /// `on_gradient(name, elements)` gets each gradient before it is freed.
  template <class Around, class OnGradient>
  void backward(std::vector<float> const& target, Around around, OnGradient on_gradient) {
    std::vector<float> error(target.size());
    for (std::size_t i = 0; i < error.size(); ++i) {
      error[i] = values_.back()[i] - target[i];
    }
    std::vector<float> late;
    for (std::size_t l = layers(); l-- > 0;) {
      [[maybe_unused]] auto const scope = around(l);
      std::vector<float> before(widths_[l]);
      std::vector<float> of_weight(widths_[l] * widths_[l + 1]);
      for (std::size_t i = 0; i < error.size(); ++i) {
        error[i] *= 1 - values_[l + 1][i] * values_[l + 1][i];
        for (std::size_t j = 0; j < widths_[l]; ++j) {
          of_weight[i * widths_[l] + j] = error[i] * values_[l][j];
          before[j] += error[i] * weight(l)[i * widths_[l] + j];
        }
      }
      on_gradient("weight" + std::to_string(l), std::span<float const>{of_weight});
      if (lazy_ && l + 1 < layers()) {
        on_gradient("bias" + std::to_string(l + 1), std::span<float const>{late});
      }
      late = std::exchange(error, std::move(before));
      if (!lazy_ || l == 0) {
        on_gradient("bias" + std::to_string(l), std::span<float const>{late});
      }
    }
  }

 private:
  tensor& weight(std::size_t layer) { return parameters_[2 * layer].value; }
  tensor& bias(std::size_t layer) { return parameters_[2 * layer + 1].value; }

  std::vector<std::size_t> widths_;
  bool lazy_;
  std::vector<parameter> parameters_;
  std::vector<std::vector<float>> values_;  // of the layers, from the last forward
};

}  // namespace mock

// What the engine needs to train in stages 0 to 3. [glue]
template <>
struct zero::tensor_traits<mock::tensor> {
  using value_type = float;
  using device = zero::host;
  static std::span<float> elements(mock::tensor& t) { return {t.data(), t.size()}; }
  static void rebind(mock::tensor& t, std::span<float> to) { t.borrow(to.data(), to.size()); }
};
// [end of glue]

namespace stranger {

/// An element type of an engine's own, laid out like a bfloat16.
struct brain {
  std::uint16_t bits;
};

brain make(float value) {
  return {static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16U)};
}
float read(brain value) { return std::bit_cast<float>(std::uint32_t{value.bits} << 16U); }

}  // namespace stranger

template <>
struct zero::dtype_traits<stranger::brain> {
  static constexpr dtype value = dtype::bfloat16;
};

namespace {

using values = std::vector<std::vector<float>>;

constexpr zero::adamw optimizer{.learning_rate = 0.05, .epsilon = 1e-3, .weight_decay = 0.1};
constexpr std::size_t steps = 3;
constexpr std::size_t microbatches = 2;
std::vector<std::size_t> const widths{7, 5, 3, 4, 1};

/// A sample of its own for each rank, step and micro-batch.
std::vector<float> input_of(std::size_t sample) {
  std::vector<float> x(widths.front());
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = std::cos(static_cast<float>(3 * sample + i));
  }
  return x;
}
std::vector<float> target_of(std::size_t sample) { return {std::sin(static_cast<float>(sample))}; }

std::size_t sample_of(std::size_t step, std::size_t m, std::size_t rank) {
  return 100 * step + 10 * m + rank;
}

values train(zero::thread_communicator& comm, test::setting const& chosen) {
  mock::network net{widths, comm.rank() % 2 == 1};
  auto const rank = static_cast<std::size_t>(comm.rank());
  // [glue]
  std::vector<std::vector<zero::any_parameter>> units(net.layers());
  for (auto& p : net.parameters()) units[p.layer].push_back(zero::parameter(p.name, p.value));
  zero::sharded_model sharded{comm, units, chosen.stage, optimizer, chosen.policy, chosen.options};
  // [end of glue]
  for (std::size_t step = 0; step < steps; ++step) {
    for (std::size_t m = 0; m < microbatches; ++m) {
      std::size_t const sample = sample_of(step, m, rank);
      std::vector<float> const target = target_of(sample);
      // [glue]
      auto micro = sharded.microbatch(m, microbatches);
      net.forward(input_of(sample), [&](auto layer) { return micro.forward(layer); });
      auto const hold = [&](auto layer) { return micro.backward(layer, zero::by_parameter); };
      net.backward(target, hold, [&](auto n, auto g) { micro.gradient_ready(sharded.find(n), g); });
      // [end of glue]
    }
    // [glue]
    sharded.step();
    // [end of glue]
  }
  values out;
  auto evaluation = sharded.evaluation();
  for (std::size_t u = 0; u < sharded.units(); ++u) {
    auto const lease = evaluation.forward(u);
    for (mock::parameter& p : net.parameters()) {
      if (p.layer == u) {
        out.emplace_back(p.value.data(), p.value.data() + p.value.size());
      }
    }
  }
  return out;
}

/// The same by one process without zero: gradients of all samples, averaged, and AdamW by its
/// formula.
values train_alone(std::size_t ranks) {
  mock::network net{widths};
  std::vector<std::vector<double>> parameters;
  for (mock::parameter& p : net.parameters()) {
    parameters.emplace_back(p.value.data(), p.value.data() + p.value.size());
  }
  auto first = parameters;
  auto second = parameters;
  for (std::size_t k = 0; k < parameters.size(); ++k) {
    std::ranges::fill(first[k], 0.0);
    std::ranges::fill(second[k], 0.0);
  }
  for (std::size_t step = 0; step < steps; ++step) {
    std::vector<std::vector<double>> gradients(parameters.size());
    for (std::size_t m = 0; m < microbatches; ++m) {
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        std::size_t const sample = sample_of(step, m, rank);
        net.forward(input_of(sample), [](std::size_t) { return 0; });
        net.backward(
            target_of(sample), [](std::size_t) { return 0; },
            [&](std::string const& name, std::span<float const> gradient) {
              for (std::size_t k = 0; k < parameters.size(); ++k) {
                if (net.parameters()[k].name == name) {
                  gradients[k].resize(gradient.size());
                  for (std::size_t i = 0; i < gradient.size(); ++i) {
                    gradients[k][i] += static_cast<double>(gradient[i]) /
                                       static_cast<double>(ranks * microbatches);
                  }
                }
              }
            });
      }
    }
    double const t = static_cast<double>(step + 1);
    for (std::size_t k = 0; k < parameters.size(); ++k) {
      for (std::size_t i = 0; i < parameters[k].size(); ++i) {
        double const g = gradients[k][i];
        double& m = first[k][i];
        double& v = second[k][i];
        double& p = parameters[k][i];
        m = 0.9 * m + 0.1 * g;
        v = 0.999 * v + 0.001 * g * g;
        double const corrected = m / (1 - std::pow(0.9, t));
        double const size = std::sqrt(v / (1 - std::pow(0.999, t)));
        p -= 0.05 * (0.1 * p + corrected / (size + 1e-3));
        net.parameters()[k].value[i] = static_cast<float>(p);
      }
    }
  }
  values out;
  for (std::vector<double> const& p : parameters) {
    out.emplace_back(p.begin(), p.end());
  }
  return out;
}

double largest_difference(values const& a, values const& b) {
  double largest = a.size() == b.size() ? 0 : 1e9;
  for (std::size_t k = 0; k < std::min(a.size(), b.size()); ++k) {
    largest = a[k].size() == b[k].size() ? largest : 1e9;
    for (std::size_t i = 0; i < std::min(a[k].size(), b[k].size()); ++i) {
      largest =
          std::max(largest, std::abs(static_cast<double>(a[k][i]) - static_cast<double>(b[k][i])));
    }
  }
  return largest;
}

}  // namespace

TEST_CASE(
    "an engine with a tensor and an autograd of its own trains in every stage as it does alone") {
  for (int const ranks : {1, 2, 3, 4, 8}) {
    values const alone = train_alone(static_cast<std::size_t>(ranks));
    CHECK(largest_difference(alone, train_alone(static_cast<std::size_t>(ranks) + 1)) >
          1e-3);                   // it matters
    std::vector<values> first(2);  // of each policy
    for (std::uint64_t const bucket_bytes : {0U, 100U, 1U << 20U}) {
      for (test::setting const& each : test::every_setting({.bucket_bytes = bucket_bytes})) {
        CAPTURE(each.name);
        std::vector<values> got(static_cast<std::size_t>(ranks));
        zero::run_threads(ranks, [&](zero::thread_communicator& comm) {
          got[static_cast<std::size_t>(comm.rank())] = train(comm, each);
        });
        for (values const& mine : got) {
          // Gradients are sums of floats in another order: 3 steps of 0.05 keep that below 2e-6.
          CHECK(largest_difference(mine, alone) < 2e-6);
          CHECK(mine == got.front());
          values& same = first[each.policy.per_microbatch ? 1 : 0];
          same = same.empty() ? mine : same;
          CHECK(mine == same);  // in every stage, with any buckets, overlapping or not
        }
      }
    }
  }
}

TEST_CASE("the glue of an engine is 15 lines or fewer") {
  std::ifstream source{ZERO_TEST_DIR "/train/sharded_model_test.cpp"};
  CHECK(source.good());
  int lines = 0;
  bool counting = false;
  for (std::string line; std::getline(source, line);) {
    std::size_t const begin = line.find_first_not_of(' ');
    if (begin == line.npos) {
      continue;
    }
    bool const comment = line.compare(begin, 2, "//") == 0;
    if (comment && line.ends_with("[end of glue]")) {
      counting = false;
    } else if (comment && line.ends_with("[glue]")) {
      counting = true;
    } else if (counting && !comment) {
      ++lines;
    }
  }
  CHECK(lines > 10);
  CHECK(lines <= 15);
}

namespace {

using tensor = test::owning_tensor<float>;
using model = zero::sharded_model<zero::thread_communicator, zero::adamw>;

/// Whose first step is 0.25 against the gradient's sign.
constexpr zero::adamw signs{.learning_rate = 0.25, .epsilon = 0, .weight_decay = 0};

bool mentions(std::string const& text, std::string const& part) {
  return text.find(part) != text.npos;
}

/// A window of one micro-batch: forward, and backward with `write(lease, unit)`.
template <class Write>
void run_window(model& sharded, Write write) {
  auto micro = sharded.microbatch(0, 1);
  for (std::size_t u = 0; u < sharded.units(); ++u) {
    auto const lease = micro.forward(u);
  }
  for (std::size_t u = sharded.units(); u-- > 0;) {
    auto const lease = micro.backward(u);
    write(lease, u);
  }
}

}  // namespace

TEST_CASE("communicator and optimizer are deduced, and the stage is a type or data") {
  zero::run_threads(2, [](zero::thread_communicator& comm) {
    tensor value{4, 1};
    tensor gradient;
    std::vector<std::vector<zero::typed_parameter<tensor, tensor>>> const units{
        {zero::parameter("w", value, gradient)}};
    {
      zero::sharded_model sharded{comm,
                                  units,
                                  zero::stage3{.prefetch = 2},
                                  zero::adamw{.learning_rate = 1e-3},
                                  zero::reduce_per_microbatch{},
                                  zero::options{.clip_norm = 1.0}};
      static_assert(std::is_same_v<decltype(sharded), model>);
      CHECK(sharded.units() == 1);
    }
    value = tensor{4, 1};
    zero::stage const at = zero::stage2{};
    zero::accumulation const policy = zero::local_accumulate{};
    zero::sharded_model sharded{comm, units, at, zero::adamw{}, policy};
    static_assert(std::is_same_v<decltype(sharded), model>);
  });
}

TEST_CASE("units are lists of any kind, of parameters whose types are erased where they differ") {
  zero::run_threads(2, [](zero::thread_communicator& comm) {
    tensor value{4, 1};
    tensor gradient;
    test::owning_tensor<double> wide{2, 3};
    test::owning_tensor<double> of_wide;
    std::array<std::vector<zero::any_parameter>, 2> const units{
        std::vector<zero::any_parameter>{zero::parameter("w", value, gradient)},
        std::vector<zero::any_parameter>{zero::parameter("d", wide, of_wide), zero::tied("w")}};
    model sharded{comm, units, zero::stage3{}, signs, zero::local_accumulate{}};
    CHECK(sharded.units() == 2);
    CHECK(sharded.layout().parameters().size() == 2);
    run_window(sharded, [&](auto const& lease, std::size_t u) {
      if (u == 1) {
        std::ranges::fill(of_wide.view, 1.0);
        CHECK_FALSE(lease.accumulate(0));
        std::ranges::fill(gradient.view, 1.0F);
      } else {
        CHECK(lease.accumulate(0));
        gradient.view[0] -= 3;  // -2 in all
      }
    });
    sharded.step();
    sharded.release();
    CHECK(std::abs(value.view[0] - 1.25F) < 1e-6F);
    CHECK(std::abs(value.view[3] - 0.75F) < 1e-6F);
    CHECK(std::abs(wide.view[1] - 2.75) < 1e-12);
  });
}

TEST_CASE(
    "parameters without tensors, also of a stranger's type, are read and written through leases") {
  for (int const ranks : {1, 2, 3, 8}) {
    for (test::setting const& each : test::every_setting({.precision = zero::bf16})) {
      CAPTURE(each.name);
      zero::run_threads(ranks, [&](zero::thread_communicator& comm) {
        auto const ones = [](auto out, std::size_t) { std::ranges::fill(out, 1.0F); };
        auto const brains = [](std::span<stranger::brain> out, std::size_t first) {
          for (std::size_t i = 0; i < out.size(); ++i) {
            out[i] = stranger::make(static_cast<float>(first + i));
          }
        };
        std::vector<std::vector<zero::any_parameter>> const units{
            {zero::parameter<float>("w", {3, 2}, ones),
             zero::parameter<stranger::brain>("b", {5}, brains)},
            {zero::parameter<stranger::brain>("f", {7}, brains).frozen()}};
        model sharded{comm, units, each.stage, signs, each.policy, each.options};
        auto const w = sharded.find("w");
        auto const b = sharded.find("b");
        auto const f = sharded.find("f");
        run_window(sharded, [&](auto const& lease, std::size_t u) {
          if (u == 0) {
            CHECK(lease.template parameter<float>(w).size() == 6);
            CHECK(lease.template gradient<float>(w).size() == 6);
            std::ranges::fill(lease.template gradient<float>(w), -3.0F);
            std::ranges::fill(lease.template gradient<stranger::brain>(b), stranger::make(2));
          } else {
            CHECK(stranger::read(lease.template parameter<stranger::brain>(f)[6]) == 6);
          }
        });
        sharded.step();
        auto evaluation = sharded.evaluation();
        {
          auto const lease = evaluation.forward(0);
          for (float const value : lease.parameter<float>(w)) {
            CHECK(std::abs(value - 1.25F) < 1e-6F);
          }
          for (std::size_t i = 0; i < 5; ++i) {
            CHECK(stranger::read(lease.parameter<stranger::brain>(b)[i]) ==
                  static_cast<float>(i) - 0.25F);
          }
        }
        auto const lease = evaluation.forward(1);
        CHECK(stranger::read(lease.parameter<stranger::brain>(f)[3]) == 3);
        if (ranks == 1) {  // it ends the group: nothing comes after it
          CHECK(mentions(test::message_of([&] { (void)lease.parameter<float>(f); }),
                         "'f' to be asked for as bfloat16, actual float32"));
        }
      });
    }
  }
}

TEST_CASE("hyperparameters may change between steps, and each parameter counts its own updates") {
  zero::run_threads(2, [](zero::thread_communicator& comm) {
    tensor a{3, 1};
    tensor b{3, 1};
    tensor of_a;
    tensor of_b;
    std::vector<std::vector<zero::typed_parameter<tensor, tensor>>> const units{
        {zero::parameter("a", a, of_a)}, {zero::parameter("b", b, of_b)}};
    model sharded{comm, units, zero::stage1{}, signs, zero::local_accumulate{}};
    for (int step = 0; step < 3; ++step) {
      sharded.optimizer().learning_rate = step == 1 ? 1.0 : 0.25;
      run_window(sharded, [&](auto const& lease, std::size_t u) {
        std::ranges::fill(u == 0 ? of_a.view : of_b.view, 1.0F);
        if (u == 1 && step == 1) {
          lease.skip(1);
        }
      });
      sharded.step();
    }
    sharded.wait();
    CHECK(sharded.steps(0) == 3);
    CHECK(sharded.steps(1) == 2);
    CHECK(std::abs(a.view[0] + 0.5F) < 1e-5F);
    CHECK(std::abs(b.view[0] - 0.5F) < 1e-5F);
  });
}

TEST_CASE("a step's result is read when it is wanted, before the next step") {
  zero::run_threads(2, [](zero::thread_communicator& comm) {
    tensor value{4, 1};
    tensor gradient;
    std::vector<std::vector<zero::typed_parameter<tensor, tensor>>> const units{
        {zero::parameter("w", value, gradient)}};
    model sharded{comm, units, zero::stage2{}, signs, zero::local_accumulate{}, {.clip_norm = 1e9}};
    auto const write = [&](auto const&, std::size_t) { std::ranges::fill(gradient.view, 3.0F); };
    run_window(sharded, write);
    auto const first = sharded.step();
    CHECK(first.norm() == 6);
    CHECK_FALSE(first.skipped());
    run_window(sharded, write);
    auto const second = sharded.step();
    CHECK(mentions(test::message_of([&] { (void)first.norm(); }), "actual step 1 after step 2"));
    CHECK(second.norm() == 6);
  });
  zero::run_threads(1, [](zero::thread_communicator& comm) {
    tensor value{4, 1};
    tensor gradient;
    std::vector<std::vector<zero::typed_parameter<tensor, tensor>>> const units{
        {zero::parameter("w", value, gradient)}};
    model sharded{comm, units, zero::stage2{}, signs, zero::local_accumulate{}};
    run_window(sharded, [&](auto const&, std::size_t) { std::ranges::fill(gradient.view, 3.0F); });
    auto const result = sharded.step();
    CHECK(mentions(test::message_of([&] { (void)result.norm(); }),
                   "expected options::clip_norm, actual none"));
    CHECK_FALSE(result.skipped());
  });
}

TEST_CASE("the plan that is made without a communicator is the model's") {
  for (test::setting const& each : test::every_setting()) {
    CAPTURE(each.name);
    zero::run_threads(3, [&](zero::thread_communicator& comm) {
      auto const zeros = [](std::span<float>, std::size_t) {};
      std::vector<std::vector<zero::any_parameter>> const units{
          {zero::parameter<float>("a", {100}, zeros)}, {zero::parameter<float>("b", {7}, zeros)}};
      zero::plan const planned =
          zero::make_plan(3, static_cast<std::uint64_t>(comm.rank()), units, each.stage,
                          zero::adamw{}, each.policy, each.options);
      model const sharded{comm, units, each.stage, zero::adamw{}, each.policy, each.options};
      CHECK(planned.bytes == sharded.plan().bytes);
      CHECK(planned.bytes == sharded.ledger());
      CHECK(planned.describe() == sharded.plan().describe());
      CHECK(planned.sent_bytes_per_step(2) == sharded.plan().sent_bytes_per_step(2));
    });
  }
}

TEST_CASE("a name that nobody declared is refused") {
  zero::run_threads(1, [](zero::thread_communicator& comm) {
    auto const zeros = [](std::span<float>, std::size_t) {};
    std::vector<std::vector<zero::any_parameter>> const units{
        {zero::parameter<float>("a", {1}, zeros)}};
    model const sharded{comm, units, zero::stage0{}, zero::adamw{}, zero::local_accumulate{}};
    CHECK(sharded.find("a") == 0);
    CHECK(test::message_of([&] { (void)sharded.find("b"); }) ==
          "find: expected a declared parameter, actual 'b' (rank 0)");
  });
}
