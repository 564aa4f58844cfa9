// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/parameter.hpp>

#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

/// @file
/// A small engine: tensors of any types, a model of any sizes, and a gradient that depends on rank,
/// step, micro-batch and value, so that an update that is missed, doubled or misplaced shows in the
/// bits.

namespace test {

using unit_sizes = std::vector<std::vector<std::size_t>>;

/// The initial value of element `i` of parameter `id`.
inline float first_value(std::size_t id, std::size_t i) {
  return 0.25F * static_cast<float>(id + 1) - 0.0625F * static_cast<float>(i % 29);
}

template <class Value, class Gradient = Value>
class engine {
 public:
  std::vector<Value> values;
  std::vector<Gradient> gradients;

  /// Values exist; `differs` is added to all of them.
  explicit engine(unit_sizes const& sizes, float differs = 0) {
    for (auto const& unit : sizes) {
      ids_.emplace_back();
      for (std::size_t const n : unit) {
        std::size_t const id = values.size();
        ids_.back().push_back(id);
        values.emplace_back(n);
        gradients.emplace_back(n);
        auto const elements = value(id);
        for (std::size_t i = 0; i < n; ++i) {
          elements[i] = static_cast<value_type>(first_value(id, i) + differs);
        }
      }
    }
  }

  [[nodiscard]] static std::string name(std::size_t id) { return "p" + std::to_string(id); }

  [[nodiscard]] auto units() {
    std::vector<std::vector<zero::typed_parameter<Value, Gradient>>> out;
    for (auto const& unit : ids_) {
      out.emplace_back();
      for (std::size_t const id : unit) {
        out.back().push_back(zero::parameter(name(id), values[id], gradients[id]));
      }
    }
    return out;
  }

  [[nodiscard]] auto value(std::size_t id) {
    return zero::tensor_traits<Value>::elements(values[id]);
  }
  [[nodiscard]] auto gradient(std::size_t id) {
    return zero::tensor_traits<Gradient>::elements(gradients[id]);
  }
  [[nodiscard]] std::vector<std::size_t> const& ids(std::size_t unit) const { return ids_[unit]; }

  /// Write, or add, the gradient of parameter `id` to `out`, from its value.
  template <class Values, class Out>
  static void differentiate(Values const& values, Out const& out, bool accumulate, float seed) {
    for (std::size_t i = 0; i < out.size(); ++i) {
      float const g =
          0.3F * static_cast<float>(values[i]) + seed + 0.125F * static_cast<float>(i % 7);
      out[i] =
          static_cast<typename Out::value_type>(accumulate ? static_cast<float>(out[i]) + g : g);
    }
  }

  [[nodiscard]] static float seed(int rank, std::size_t step, std::size_t m) {
    return 0.1F * static_cast<float>(rank + 1) - 0.07F * static_cast<float>(step) +
           0.5F * static_cast<float>(m);
  }

  /// One window, through the tensors.
  template <class Model>
  void train(Model& sharded, int rank, std::size_t step, std::size_t microbatches) {
    for (std::size_t m = 0; m < microbatches; ++m) {
      auto micro = sharded.microbatch(m, microbatches);
      for (std::size_t u = 0; u < sharded.units(); ++u) {
        auto const lease = micro.forward(u);
      }
      for (std::size_t u = sharded.units(); u-- > 0;) {
        auto const lease = micro.backward(u);
        for (std::size_t const id : ids_[u]) {
          differentiate(value(id), gradient(id), lease.accumulate(id), seed(rank, step, m));
        }
      }
    }
    sharded.step();
  }

  /// All values, one parameter after the other.
  [[nodiscard]] auto all() {
    std::vector<value_type> out;
    for (std::size_t id = 0; id < values.size(); ++id) {
      auto const elements = value(id);
      out.insert(out.end(), elements.begin(), elements.end());
    }
    return out;
  }

 private:
  using value_type = typename zero::tensor_traits<Value>::value_type;
  std::vector<std::vector<std::size_t>> ids_;
};

}  // namespace test
