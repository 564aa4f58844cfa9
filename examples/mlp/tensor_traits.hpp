// SPDX-License-Identifier: MIT
#pragma once

#include "tensor.hpp"

#include <zero/core/tensor_traits.hpp>
#include <zero/device/host.hpp>

#include <Eigen/Core>

#include <cstddef>
#include <span>

/// @file
/// All that `zero` is told about this example's types: where a tensor's elements are, how it is
/// pointed at other storage, and that Eigen's bfloat16 is a bfloat16.

template <>
struct zero::dtype_traits<Eigen::bfloat16> {
  static constexpr dtype value = dtype::bfloat16;
};

template <class T>
struct zero::tensor_traits<mlp::tensor<T>> {
  using value_type = T;
  using device = zero::host;
  static std::span<T> elements(mlp::tensor<T>& tensor) { return {tensor.data(), tensor.size()}; }
  static void rebind(mlp::tensor<T>& tensor, std::span<T> storage) {
    tensor.look_at(storage.data(), storage.size());
  }
  static void allocate(mlp::tensor<T>& tensor, std::size_t n) { tensor.own(n); }
};

static_assert(zero::rebindable_tensor<mlp::tensor<float>>);
static_assert(zero::rebindable_tensor<mlp::tensor<Eigen::bfloat16>>);
