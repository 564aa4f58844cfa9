// SPDX-License-Identifier: MIT
#pragma once

#include <doctest/doctest.h>
#include <support/device_engine.hpp>
#include <support/same_bits.hpp>
#include <zero/core/bfloat16.hpp>
#include <zero/optim/adamw.hpp>
#include <zero/train/sharded_model.hpp>

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

/// @file
/// What a model offers beside the plain loop, on any device: tied, frozen and skipped parameters,
/// mixed types, tensors that keep their storage and parameters that have no tensor, recomputation,
/// gradients that the engine hands over, memory of the user's. What it trains to on one device is
/// compared with another.

namespace test {

/// A tensor that can't be rebound.
template <class Device>
struct fixed_tensor : device_tensor<Device, float> {
  using device_tensor<Device, float>::device_tensor;
};

}  // namespace test

template <class Device>
struct zero::tensor_traits<test::fixed_tensor<Device>> {
  using value_type = float;
  using device = Device;
  static std::span<float> elements(test::fixed_tensor<Device>& t) { return t.view(); }
};

namespace test {

/// How an engine uses a model, beside stage, policy and options.
struct feature_settings {
  std::string name;
  bool by_parameter = false;
  bool recomputes = false;
  bool engine_adds = false;
  bool own_memory = false;  ///< the arena is of the user's memory, which NCCL may register
  zero::start start = zero::start::broadcast;
};

[[nodiscard]] inline std::vector<feature_settings> every_feature() {
  return {{.name = "leases"},
          {.name = "recomputation, the engine adds", .recomputes = true, .engine_adds = true},
          {.name = "one by one, own memory", .by_parameter = true, .own_memory = true},
          {.name = "own memory, equal starts",
           .own_memory = true,
           .start = zero::start::require_equal}};
}

/// Memory of a device that counts what is taken.
template <class Device>
struct counted_memory {
  std::atomic<int> live{0};
  std::atomic<int> taken{0};

  [[nodiscard]] zero::memory_resource resource() {
    return {[](std::size_t bytes, void* self) {
              auto& mine = *static_cast<counted_memory*>(self);
              ++mine.live;
              ++mine.taken;
              return Device::allocate(bytes);
            },
            [](void* memory, std::size_t bytes, void* self) {
              --static_cast<counted_memory*>(self)->live;
              Device::deallocate(memory, bytes);
            },
            this, zero::memory_registration::buffer};
  }
};

template <class Device>
class feature_engine {
  using stream = typename Device::stream;

 public:
  /// In stages 0 and 1 one tensor keeps its storage.
  feature_engine(stream& on, bool keeps_storage) : stream_{on} {
    std::vector<float> start(sizes_.at("tensor"));
    for (std::size_t i = 0; i < start.size(); ++i) {
      start[i] = 0.5F * static_cast<float>(i) - 1.0F;
    }
    if (keeps_storage) {
      fixed_ = std::make_unique<fixed_tensor<Device>>(stream_, start);
    } else {
      free_ = std::make_unique<device_tensor<Device, float>>(stream_, start);
    }
  }

  [[nodiscard]] std::vector<std::vector<zero::any_parameter>> units() {
    std::vector<std::vector<zero::any_parameter>> out(names_.size());
    out[0] = {declared<float>("plain"), declared<float>("tied")};
    out[1] = {declared<float>("frozen").frozen(), declared<double>("double")};
    out[2] = {declared<zero::bfloat16>("short")};
    out[3] = {zero::tied("tied"), fixed_ ? zero::any_parameter{zero::parameter("tensor", *fixed_)}
                                         : zero::parameter("tensor", *free_)};
    out[4] = {declared<float>("skipped")};
    return out;
  }

  /// Two micro-batches and a step.
  template <class Model>
  void step(Model& model, feature_settings const& how, int rank, std::size_t number) {
    for (std::size_t m = 0; m < 2; ++m) {
      auto micro = model.microbatch(m, 2);
      for (std::size_t u = 0; u < names_.size(); ++u) {
        auto const lease = micro.forward(u);
      }
      batch const now{m, number,
                      0.25F * static_cast<float>(rank) + static_cast<float>(m) -
                          0.5F * static_cast<float>(number)};
      for (std::size_t u = names_.size(); u-- > 0;) {
        if (how.recomputes) {
          auto const lease = micro.recompute(u);
        }
        if (how.by_parameter) {
          hand_over(model, micro, u, now);
        } else {
          write(model, micro, u, now, how.engine_adds);
        }
      }
    }
    model.step();
  }

  /// The bytes of every value, unit by unit, read under leases.
  template <class Model>
  [[nodiscard]] std::vector<std::byte> values(Model& model) {
    std::vector<std::byte> out;
    auto evaluation = model.evaluation();
    for (std::size_t u = 0; u < names_.size(); ++u) {
      auto const lease = evaluation.forward(u);
      for (std::string const& name : names_[u]) {
        with_type(model, model.find(name), [&]<class T>(std::type_identity<T>, std::size_t id) {
          std::span<T> const from = lease.template parameter<T>(id);
          std::vector<T> copy(from.size());
          Device::download(stream_, from, std::span{copy});
          auto const bytes = std::as_bytes(std::span{copy});
          out.insert(out.end(), bytes.begin(), bytes.end());
        });
      }
    }
    return out;
  }

 private:
  /// A micro-batch of a step.
  struct batch {
    std::size_t index;
    std::size_t step;
    float constant;
  };

  template <class T>
  [[nodiscard]] static zero::any_parameter declared(std::string const& name) {
    return zero::parameter<T>(name, {sizes_.at(name)}, [](std::span<T> out, std::size_t first) {
      for (std::size_t i = 0; i < out.size(); ++i) {
        out[i] = static_cast<T>(0.125F * static_cast<float>((first + i) % 31) - 1.5F);
      }
    });
  }

  template <class Model, class Visit>
  static void with_type(Model const& model, std::size_t id, Visit visit) {
    zero::visit(model.layout().parameters()[id].spec.value,
                [&]<class T>(std::type_identity<T> type) {
                  if constexpr (!std::is_same_v<T, zero::float16>) {
                    visit(type, id);
                  }
                });
  }

  /// The parameter "skipped" has no gradient on any rank in step 1, and none in the second
  /// micro-batch of the others.
  [[nodiscard]] static bool skips(std::string const& name, batch const& now) {
    return name == "skipped" && (now.step == 1 || now.index == 1);
  }

  template <class Model, class Micro>
  void write(Model& model, Micro& micro, std::size_t u, batch const& now, bool engine_adds) {
    auto const lease = micro.backward(u);
    for (std::string const& name : names_[u]) {
      std::size_t const id = model.find(name);
      if (name == "frozen") {
        continue;
      }
      if (skips(name, now)) {
        lease.skip(id);
        continue;
      }
      with_type(model, id, [&]<class T>(std::type_identity<T>, std::size_t) {
        std::span<T> const value = lease.template parameter<T>(id);
        Device::launch(stream_, value.size(),
                       write_gradient<T>{value.data(), lease.template gradient<T>(id).data(),
                                         now.constant, engine_adds || lease.accumulate(id)});
      });
    }
  }

  /// One parameter after the other, each in another of the three ways. A tied one is whole after
  /// its last use.
  template <class Model, class Micro>
  void hand_over(Model& model, Micro& micro, std::size_t u, batch const& now) {
    auto const lease = micro.backward(u, zero::by_parameter);
    for (std::string const& name : names_[u]) {
      std::size_t const id = model.find(name);
      if (name == "frozen" || (name == "tied" && u != 0)) {
        continue;
      }
      if (skips(name, now)) {
        micro.skip(id);
        continue;
      }
      with_type(model, id, [&]<class T>(std::type_identity<T>, std::size_t) {
        std::span<T> const value = lease.template parameter<T>(id);
        if (id % 3 == 0) {
          auto const place = micro.gradient(id);
          Device::launch(stream_, value.size(),
                         write_gradient<T>{value.data(), place.span.template as<T>().data(),
                                           now.constant, place.accumulate});
          micro.gradient_ready(id);
          return;
        }
        stream& on = id % 3 == 1 ? stream_ : producer_;
        if (id % 3 == 2) {
          stream_.record(handed_over_);
          producer_.wait(handed_over_);
        }
        std::span<T> const own = scratch<T>(name, value.size());
        Device::launch(on, own.size(),
                       write_gradient<T>{value.data(), own.data(), now.constant, false});
        if (id % 3 == 1) {
          micro.gradient_ready(id, own);
        } else {
          micro.gradient_ready(id, own, producer_);
        }
      });
    }
  }

  /// The engine's own gradient of a parameter, which it writes again in each micro-batch.
  template <class T>
  [[nodiscard]] std::span<T> scratch(std::string const& name, std::size_t n) {
    auto& mine = scratch_[name];
    if (!mine) {
      mine = {Device::allocate(n * sizeof(T)),
              [n](void* memory) { Device::deallocate(memory, n * sizeof(T)); }};
    }
    return {static_cast<T*>(mine.get()), n};
  }

  inline static std::map<std::string, std::size_t> const sizes_{
      {"plain", 37}, {"tied", 20},   {"frozen", 17}, {"double", 9},
      {"short", 65}, {"tensor", 11}, {"skipped", 50}};
  inline static std::vector<std::vector<std::string>> const names_{
      {"plain", "tied"}, {"frozen", "double"}, {"short"}, {"tied", "tensor"}, {"skipped"}};

  stream& stream_;
  std::map<std::string, std::shared_ptr<void>> scratch_;
  stream producer_{};
  typename Device::event handed_over_;
  std::unique_ptr<fixed_tensor<Device>> fixed_;
  std::unique_ptr<device_tensor<Device, float>> free_;
};

/// Train three steps, and read the values.
template <class Communicator>
[[nodiscard]] std::vector<std::byte> train_features(Communicator& comm, setting const& how,
                                                    feature_settings const& features) {
  using device = typename Communicator::device;
  typename device::stream stream{};
  counted_memory<device> memory;
  std::vector<std::byte> out;
  {
    feature_engine<device> engine{stream, how.stage.number() < 2};
    zero::options options = how.options;
    options.engine_adds = features.engine_adds;
    options.start = features.start;
    if (features.own_memory) {
      options.memory = memory.resource();
    }
    if constexpr (requires { stream.native(); }) {
      options.stream = stream.native();
    }
    zero::sharded_model model{
        comm, engine.units(), how.stage, zero::adamw{.learning_rate = 0.01}, how.policy, options};
    CHECK_MESSAGE(model.ledger() == model.plan().bytes, how.name);
    for (std::size_t number = 0; number < 3; ++number) {
      engine.step(model, features, comm.rank(), number);
    }
    CHECK_MESSAGE(model.steps(model.find("plain")) == 3, how.name);
    CHECK_MESSAGE(model.steps(model.find("skipped")) == 2, how.name);
    out = engine.values(model);
  }
  CHECK(memory.live == 0);
  CHECK(memory.taken == (features.own_memory ? 1 : 0));
  return out;
}

/// The same in stage 0 on ranks that are threads of the host.
[[nodiscard]] inline std::vector<std::byte> host_features(int ranks, zero::accumulation policy,
                                                          feature_settings const& features) {
  std::vector<std::byte> out;
  run_ranks(ranks, [&](zero::thread_communicator& comm) {
    auto values = train_features(comm,
                                 {"host, " + features.name,
                                  zero::stage0{},
                                  policy,
                                  {.bucket_bytes = 0, .precision = zero::bf16}},
                                 features);
    if (comm.rank() == 0) {
      out = std::move(values);
    }
  });
  return out;
}

/// Call `run(ranks, setting, features, expected)` for each world size, feature, stage and policy.
template <class Run>
void every_feature_run(std::vector<int> const& world_sizes, Run const& run) {
  for (int const ranks : world_sizes) {
    for (feature_settings const& features : every_feature()) {
      std::vector<std::byte> const local = host_features(ranks, zero::local_accumulate{}, features);
      std::vector<std::byte> const reduced =
          host_features(ranks, zero::reduce_per_microbatch{}, features);
      for (setting how : every_setting({.bucket_bytes = 0, .precision = zero::bf16})) {
        how.name += ", " + features.name + ", " + std::to_string(ranks) + " ranks";
        run(ranks, how, features, how.policy.per_microbatch ? reduced : local);
      }
    }
  }
}

}  // namespace test
