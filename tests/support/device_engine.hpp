// SPDX-License-Identifier: MIT
#pragma once

#include <comm/ranks.hpp>
#include <support/settings.hpp>
#include <zero/core/bfloat16.hpp>
#include <zero/core/tensor_traits.hpp>
#include <zero/train/sharded_model.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

/// @file
/// An engine whose tensors are on any device: raw pointers, and a kernel for the gradient, on a
/// stream of the engine's own. What it trains to on one device is compared with another.

namespace test {

/// Elements of a device's memory: its own, until it is rebound.
template <class Device, class T>
class device_tensor {
 public:
  device_tensor(typename Device::stream& stream, std::vector<T> const& values)
      : device_tensor{values.size()} {
    Device::upload(stream, std::span{values}, view_);
  }
  device_tensor(device_tensor const&) = delete;
  device_tensor& operator=(device_tensor const&) = delete;
  ~device_tensor() { Device::deallocate(own_, own_bytes_); }

  [[nodiscard]] std::span<T> view() const { return view_; }
  void rebind(std::span<T> storage) {
    Device::deallocate(std::exchange(own_, nullptr), own_bytes_);
    own_bytes_ = 0;
    view_ = storage;
  }
  void allocate(std::size_t n) {
    own_bytes_ = n * sizeof(T);
    own_ = static_cast<T*>(Device::allocate(own_bytes_));
    view_ = {own_, n};
  }

 private:
  explicit device_tensor(std::size_t n) { allocate(n); }

  std::size_t own_bytes_ = 0;
  std::span<T> view_;
  T* own_ = nullptr;
};

/// g = value / 2 + constant + i / 8, added or not.
template <class T>
struct write_gradient {
  T const* value;
  T* gradient;
  float constant;
  bool accumulate;

  ZERO_HOST_DEVICE void operator()(std::size_t first, std::size_t count) const {
    for (std::size_t i = first; i < first + count; ++i) {
      float const g =
          0.5F * static_cast<float>(value[i]) + constant + 0.125F * static_cast<float>(i % 16);
      gradient[i] = static_cast<T>(accumulate ? static_cast<float>(gradient[i]) + g : g);
    }
  }
};

/// The sum of a parameter's values: what a forward reads of it.
template <class T>
struct read_parameter {
  T const* value;
  std::size_t size;
  T* sum;

  ZERO_HOST_DEVICE void operator()(std::size_t /*first*/, std::size_t /*count*/) const {
    float all = 0;
    for (std::size_t i = 0; i < size; ++i) {
      all += static_cast<float>(value[i]);
    }
    *sum = static_cast<T>(all);
  }
};

/// What a run of the engine is made of, beside stage, policy and options.
struct run_settings {
  std::size_t steps = 10;
  std::size_t microbatches = 2;
  bool by_parameter = false;  ///< gradients one by one
  bool reads = false;         ///< forward reads each parameter
  float extra = 0;            ///< in each element of a gradient
};

/// Elements of each parameter, unit by unit: sizes that don't divide, one element, none.
inline std::vector<std::vector<std::size_t>> const& device_units() {
  static std::vector<std::vector<std::size_t>> const units{{37, 5}, {64}, {1, 0, 130}, {19, 3}};
  return units;
}

template <class Device, class T>
std::vector<T> start_values(std::size_t u, std::size_t p, std::size_t n) {
  std::vector<T> out(n);
  for (std::size_t i = 0; i < n; ++i) {
    out[i] = static_cast<T>(0.25F * static_cast<float>((u * 7 + p * 3 + i * 5) % 23) - 2.0F);
  }
  return out;
}

}  // namespace test

template <class Device, class T>
struct zero::tensor_traits<test::device_tensor<Device, T>> {
  using value_type = T;
  using device = Device;
  using tensor = test::device_tensor<Device, T>;
  static std::span<T> elements(tensor& t) { return t.view(); }
  static void rebind(tensor& t, std::span<T> storage) { t.rebind(storage); }
  static void allocate(tensor& t, std::size_t n) { t.allocate(n); }
};

namespace test {

template <class Device, class T>
class device_engine {
  using stream = typename Device::stream;
  using tensor = device_tensor<Device, T>;

 public:
  /// `on` is the engine's stream.
  explicit device_engine(stream& on) : stream_{on} {
    for (std::size_t u = 0; u < device_units().size(); ++u) {
      auto& unit = units_.emplace_back();
      for (std::size_t p = 0; p < device_units()[u].size(); ++p) {
        std::size_t const n = device_units()[u][p];
        unit.emplace_back(std::make_unique<tensor>(stream_, start_values<Device, T>(u, p, n)),
                          std::make_unique<tensor>(stream_, std::vector<T>(n)));
      }
    }
  }

  [[nodiscard]] auto units() {
    std::vector<std::vector<zero::any_parameter>> out;
    for (std::size_t u = 0; u < units_.size(); ++u) {
      auto& unit = out.emplace_back();
      for (std::size_t p = 0; p < units_[u].size(); ++p) {
        unit.push_back(zero::parameter(name(u, p), *units_[u][p].first, *units_[u][p].second));
      }
    }
    return out;
  }

  static std::string name(std::size_t u, std::size_t p) {
    return std::to_string(u) + "." + std::to_string(p);
  }

  template <class Model>
  auto step(Model& model, run_settings const& run, int rank, std::size_t step) {
    for (std::size_t m = 0; m < run.microbatches; ++m) {
      this->microbatch(model, run, m, rank, step);
    }
    return model.step();
  }

  /// Micro-batch `m` of a step.
  template <class Model>
  void microbatch(Model& model, run_settings const& run, std::size_t m, int rank,
                  std::size_t step) {
    auto micro = model.microbatch(m, run.microbatches);
    for (std::size_t u = 0; u < units_.size(); ++u) {
      auto const lease = micro.forward(u);
      if (run.reads) {
        read(u);
      }
    }
    float const constant = static_cast<float>(rank + 1) * 0.25F + static_cast<float>(m) -
                           static_cast<float>(step % 3) + run.extra;
    for (std::size_t u = units_.size(); u-- > 0;) {
      if (run.by_parameter) {
        auto const lease = micro.backward(u, zero::by_parameter);
        for (std::size_t p = units_[u].size(); p-- > 0;) {
          std::size_t const id = model.find(name(u, p));
          auto const place = micro.gradient(id);
          launch(u, p, place.span.template as<T>(), constant, place.accumulate);
          micro.gradient_ready(id);
        }
      } else {
        auto const lease = micro.backward(u);
        for (std::size_t p = 0; p < units_[u].size(); ++p) {
          std::size_t const id = model.find(name(u, p));
          launch(u, p, lease.template gradient<T>(id), constant, lease.accumulate(id));
        }
      }
    }
  }

  /// Every value, in order, read under leases.
  template <class Model>
  std::vector<T> values(Model& model) {
    std::vector<T> out;
    auto evaluation = model.evaluation();
    for (std::size_t u = 0; u < units_.size(); ++u) {
      auto const lease = evaluation.forward(u);
      read_values(u, out);
    }
    return out;
  }

  /// Every value, in order, as the tensors have it.
  std::vector<T> values() {
    std::vector<T> out;
    for (std::size_t u = 0; u < units_.size(); ++u) {
      read_values(u, out);
    }
    return out;
  }

 private:
  void read_values(std::size_t u, std::vector<T>& out) {
    for (auto const& [value, gradient] : units_[u]) {
      std::vector<T> copy(value->view().size());
      Device::download(stream_, value->view(), std::span{copy});
      out.insert(out.end(), copy.begin(), copy.end());
    }
  }

  void read(std::size_t u) {
    if (!sum_) {
      sum_ = std::make_unique<tensor>(stream_, std::vector<T>(1));
    }
    for (auto const& [value, gradient] : units_[u]) {
      std::span<T> const elements = value->view();
      Device::launch(stream_, 1,
                     read_parameter<T>{elements.data(), elements.size(), sum_->view().data()});
    }
  }

  void launch(std::size_t u, std::size_t p, std::span<T> gradient, float constant, bool add) {
    std::span<T> const value = units_[u][p].first->view();
    Device::launch(stream_, value.size(),
                   write_gradient<T>{value.data(), gradient.data(), constant, add});
  }

  stream& stream_;
  std::vector<std::vector<std::pair<std::unique_ptr<tensor>, std::unique_ptr<tensor>>>> units_;
  std::unique_ptr<tensor> sum_;
};

/// Train an engine of a rank's own, and read its values.
template <class T, class Communicator, class Optimizer>
std::vector<T> train(Communicator& comm, setting const& how, Optimizer const& optimizer,
                     run_settings const& run) {
  using device = typename Communicator::device;
  typename device::stream stream{};
  device_engine<device, T> engine{stream};
  zero::options options = how.options;
  if constexpr (requires { stream.native(); }) {
    options.stream = stream.native();
  }
  zero::sharded_model model{comm, engine.units(), how.stage, optimizer, how.policy, options};
  CHECK(model.ledger() == model.plan().bytes);
  for (std::size_t step = 0; step < run.steps; ++step) {
    engine.step(model, run, comm.rank(), step);
  }
  model.wait();
  return engine.values(model);
}

/// The same in stage 0 on ranks that are threads of the host, for each policy.
template <class T>
class host_values {
 public:
  template <class Optimizer>
  host_values(int ranks, zero::options const& options, Optimizer const& optimizer,
              run_settings const& run)
      : local_{train_host(ranks, {"", zero::stage0{}, zero::local_accumulate{}, options}, optimizer,
                          run)},
        per_microbatch_{train_host(
            ranks, {"", zero::stage0{}, zero::reduce_per_microbatch{}, options}, optimizer, run)} {}

  [[nodiscard]] std::vector<T> const& of(setting const& how) const {
    return how.policy.per_microbatch ? per_microbatch_ : local_;
  }

 private:
  template <class Optimizer>
  static std::vector<T> train_host(int ranks, setting const& how, Optimizer const& optimizer,
                                   run_settings const& run) {
    std::vector<T> out;
    run_ranks(ranks, [&](zero::thread_communicator& comm) {
      auto values = train<T>(comm, how, optimizer, run);
      if (comm.rank() == 0) {
        out = std::move(values);
      }
    });
    return out;
  }

  std::vector<T> local_;
  std::vector<T> per_microbatch_;
};

}  // namespace test
