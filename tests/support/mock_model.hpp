// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/parameter.hpp>
#include <zero/core/tensor_traits.hpp>

#include <support/owning_tensor.hpp>

#include <cstddef>
#include <map>
#include <optional>
#include <span>
#include <string>
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

/// Elements by the name of their parameter.
using whole_values = std::map<std::string, std::vector<float>>;

template <class Tensor>
[[nodiscard]] std::span<float> elements_of(Tensor& of) {
  return zero::tensor_traits<Tensor>::elements(of);
}

/// `Tensor` can be made of a size and a value; gradients that can't be rebound have their elements
/// already.
template <class Tensor>
class basic_model {
 public:
  using structure = std::vector<std::vector<declaration>>;

  explicit basic_model(structure units) : units_{std::move(units)} {
    for (std::vector<declaration> const& unit : units_) {
      for (declaration const& each : unit) {
        if (!is_use(each)) {
          values_[each.name] = Tensor(each.size, each.value);
          if constexpr (zero::rebindable_tensor<Tensor>) {
            gradients_[each.name];
          } else {
            gradients_[each.name] = Tensor(each.size, 0.0F);
          }
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
  [[nodiscard]] Tensor& value(std::string const& name) { return values_.at(name); }
  [[nodiscard]] Tensor& gradient(std::string const& name) { return gradients_.at(name); }

  /// The elements of every parameter that has them here, by name.
  [[nodiscard]] whole_values values() {
    whole_values out;
    for (auto& [name, value] : values_) {
      std::span<float> const here = elements_of(value);
      out[name].assign(here.begin(), here.end());
    }
    return out;
  }

 private:
  [[nodiscard]] static bool is_use(declaration const& of) noexcept {
    return of.size == static_cast<std::size_t>(-1);
  }

  structure units_;
  std::map<std::string, Tensor> values_;
  std::map<std::string, Tensor> gradients_;
  std::map<std::string, bool> frozen_;
};

using model = basic_model<tensor>;

/// Write or add, as the lease says, the gradients of `unit`: `gradient(name, i)` is an optional
/// number for element i, and nothing, for element 0, skips the parameter.
template <class Sharded, class Tensor, class Lease, class Gradient>
void write_gradients(Sharded& sharded, basic_model<Tensor>& engine, Lease const& lease,
                     Gradient gradient) {
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
    std::span<float> const place = elements_of(engine.gradient(each.name));
    for (std::size_t i = 0; i < place.size(); ++i) {
      place[i] = (add ? place[i] : 0.0F) + *std::optional<float>{gradient(each.name, i)};
    }
  }
}

/// Forward over the units in order, and backward in reverse, in an open micro-batch.
template <class Sharded, class Tensor, class Microbatch, class Gradient>
void forward_and_backward(Sharded& sharded, basic_model<Tensor>& engine, Microbatch& micro,
                          Gradient gradient) {
  for (std::size_t u = 0; u < sharded.units(); ++u) {
    auto const lease = micro.forward(u);
  }
  for (std::size_t u = sharded.units(); u-- > 0;) {
    auto const lease = micro.backward(u);
    write_gradients(sharded, engine, lease, gradient);
  }
}

/// Micro-batch `index` of `count`.
template <class Sharded, class Tensor, class Gradient>
void run_microbatch(Sharded& sharded, basic_model<Tensor>& engine, std::size_t index,
                    std::size_t count, Gradient gradient) {
  auto micro = sharded.microbatch(index, count);
  forward_and_backward(sharded, engine, micro, gradient);
}

/// A window of one micro-batch in which every element's gradient is `gradient`, and a step.
template <class Sharded, class Tensor>
auto run_step(Sharded& sharded, basic_model<Tensor>& engine, float gradient) {
  run_microbatch(sharded, engine, 0, 1,
                 [gradient](std::string const&, std::size_t) { return gradient; });
  return sharded.step();
}

/// Every parameter's whole value, by name. Collective in stage 3.
template <class Sharded, class Tensor>
[[nodiscard]] whole_values read(Sharded& sharded, basic_model<Tensor>& engine) {
  whole_values out;
  auto evaluation = sharded.evaluation();
  for (std::size_t u = 0; u < sharded.units(); ++u) {
    auto const lease = evaluation.forward(u);
    for (declaration const& each : engine.declared()[u]) {
      std::span<float> const elements = elements_of(engine.value(each.name));
      out[each.name].assign(elements.begin(), elements.end());
    }
  }
  return out;
}

}  // namespace test
