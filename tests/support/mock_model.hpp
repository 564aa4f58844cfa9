// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/parameter.hpp>

#include <support/owning_tensor.hpp>

#include <cstddef>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// @file
/// A tiny engine: models of given sizes, whose gradients are what the test says.

namespace test {

using tensor = owning_tensor<float>;

/// A parameter of a mock model.
struct declaration {
  std::string name;
  std::size_t size = 0;
  float value = 10;  ///< of every element
  bool frozen = false;
};

/// A use of a parameter that another unit declares.
[[nodiscard]] inline declaration use_of(std::string name) {
  return {std::move(name), static_cast<std::size_t>(-1)};
}

class model {
 public:
  using structure = std::vector<std::vector<declaration>>;

  explicit model(structure units) : units_{std::move(units)} {
    for (std::vector<declaration> const& unit : units_) {
      for (declaration const& each : unit) {
        if (!is_use(each)) {
          values_[each.name] = tensor{each.size, each.value};
          gradients_[each.name];
          frozen_[each.name] = each.frozen;
        }
      }
    }
  }

  [[nodiscard]] std::vector<std::vector<zero::any_parameter>> units() {
    std::vector<std::vector<zero::any_parameter>> out;
    for (std::vector<declaration> const& unit : units_) {
      std::vector<zero::any_parameter>& parameters = out.emplace_back();
      for (declaration const& each : unit) {
        if (is_use(each)) {
          parameters.push_back(zero::tied(each.name));
        } else {
          parameters.push_back(
              zero::parameter(each.name, values_[each.name], gradients_[each.name]));
          parameters.back().is_frozen = each.frozen;
        }
      }
    }
    return out;
  }

  [[nodiscard]] structure const& declared() const noexcept { return units_; }
  [[nodiscard]] bool is_frozen(std::string const& name) const { return frozen_.at(name); }
  [[nodiscard]] tensor& value(std::string const& name) { return values_.at(name); }
  [[nodiscard]] tensor& gradient(std::string const& name) { return gradients_.at(name); }

  /// The elements of every parameter that has them here, by name.
  [[nodiscard]] std::map<std::string, std::vector<float>> values() const {
    std::map<std::string, std::vector<float>> out;
    for (auto const& [name, value] : values_) {
      out[name].assign(value.view.begin(), value.view.end());
    }
    return out;
  }

 private:
  [[nodiscard]] static bool is_use(declaration const& of) noexcept {
    return of.size == static_cast<std::size_t>(-1);
  }

  structure units_;
  std::map<std::string, tensor> values_;
  std::map<std::string, tensor> gradients_;
  std::map<std::string, bool> frozen_;
};

using whole_values = std::map<std::string, std::vector<float>>;

/// Write or add, as the lease says, the gradients of `unit`: `gradient(name, i)` is an optional number for
/// element i, and nothing, for element 0, skips the parameter.
template <class Sharded, class Lease, class Gradient>
void write_gradients(Sharded& sharded, model& engine, Lease const& lease, Gradient gradient) {
  for (declaration const& each : engine.declared()[lease.unit()]) {
    if (engine.is_frozen(each.name)) {
      continue;
    }
    std::size_t const id = sharded.find(each.name);
    if (!std::optional<float>{gradient(each.name, std::size_t{0})}) {
      lease.skip(id);
      continue;
    }
    bool const add = lease.accumulate(id);
    std::span<float> const place = engine.gradient(each.name).view;
    for (std::size_t i = 0; i < place.size(); ++i) {
      place[i] = (add ? place[i] : 0.0F) + *std::optional<float>{gradient(each.name, i)};
    }
  }
}

/// Forward over the units in order, and backward in reverse, in an open micro-batch.
template <class Sharded, class Microbatch, class Gradient>
void forward_and_backward(Sharded& sharded, model& engine, Microbatch& micro, Gradient gradient) {
  for (std::size_t u = 0; u < sharded.units(); ++u) {
    auto const lease = micro.forward(u);
  }
  for (std::size_t u = sharded.units(); u-- > 0;) {
    auto const lease = micro.backward(u);
    write_gradients(sharded, engine, lease, gradient);
  }
}

/// Micro-batch `index` of `count`.
template <class Sharded, class Gradient>
void run_microbatch(Sharded& sharded, model& engine, std::size_t index, std::size_t count,
                    Gradient gradient) {
  auto micro = sharded.microbatch(index, count);
  forward_and_backward(sharded, engine, micro, gradient);
}

/// A window of one micro-batch in which every element's gradient is `gradient`, and a step.
template <class Sharded>
auto run_step(Sharded& sharded, model& engine, float gradient) {
  run_microbatch(sharded, engine, 0, 1,
                 [gradient](std::string const&, std::size_t) { return gradient; });
  return sharded.step();
}

/// Every parameter's whole value, by name. Collective in stage 3.
template <class Sharded>
[[nodiscard]] whole_values read(Sharded& sharded, model& engine) {
  whole_values out;
  auto evaluation = sharded.evaluation();
  for (std::size_t u = 0; u < sharded.units(); ++u) {
    auto const lease = evaluation.forward(u);
    for (declaration const& each : engine.declared()[u]) {
      std::span<float> const elements = engine.value(each.name).view;
      out[each.name].assign(elements.begin(), elements.end());
    }
  }
  return out;
}

}  // namespace test
