// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/tensor_traits.hpp>

#include <cstddef>
#include <span>
#include <vector>

/// @file
/// An engine's tensor as tests need it: it owns its elements until it is rebound, then it looks at
/// others'.

namespace test {

template <class T>
struct owning_tensor {
  std::vector<T> own;
  std::span<T> view;

  owning_tensor() = default;
  explicit owning_tensor(std::size_t n, T value = T{}) : own(n, value), view{own} {}
  owning_tensor(owning_tensor&&) = default;
  owning_tensor& operator=(owning_tensor&&) = default;

  /// The elements are this tensor's own.
  [[nodiscard]] bool owns() const { return view.data() == own.data() && view.size() == own.size(); }
};

/// The same, but it can't own elements again.
template <class T>
struct unreturnable_tensor : owning_tensor<T> {
  using owning_tensor<T>::owning_tensor;
};

}  // namespace test

template <class T>
struct zero::tensor_traits<test::unreturnable_tensor<T>> {
  using value_type = T;
  using device = zero::host;
  static std::span<T> elements(test::owning_tensor<T>& tensor) { return tensor.view; }
  static void rebind(test::owning_tensor<T>& tensor, std::span<T> storage) {
    std::vector<T>{}.swap(tensor.own);
    tensor.view = storage;
  }
};

template <class T>
struct zero::tensor_traits<test::owning_tensor<T>>
    : zero::tensor_traits<test::unreturnable_tensor<T>> {
  static void allocate(test::owning_tensor<T>& tensor, std::size_t n) {
    tensor.own.assign(n, T{});
    tensor.view = tensor.own;
  }
};
