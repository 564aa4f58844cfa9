// SPDX-License-Identifier: MIT
#pragma once

#include "tensor.hpp"

#include <zero/core/tensor_traits.hpp>
#include <zero/device/host.hpp>

#include <cstddef>
#include <span>

/// @file
/// All that `zero` is told about this example's tensors: where the elements are, on which device,
/// and how a tensor is pointed at other storage.

template <class T, class Device>
struct zero::tensor_traits<mlp::tensor<T, Device>> {
  using value_type = T;
  using device = Device;
  using tensor = mlp::tensor<T, Device>;
  static std::span<T> elements(tensor& of) { return {of.data(), of.size()}; }
  static void rebind(tensor& of, std::span<T> storage) {
    of.look_at(storage.data(), storage.size());
  }
  static void allocate(tensor& of, std::size_t n) { of.own(n); }
};

static_assert(zero::rebindable_tensor<mlp::tensor<float, zero::host>>);
