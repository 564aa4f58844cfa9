// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <vector>

/// @file
/// This example's tensor: a type of its own, as an engine would have one. `zero` isn't mentioned
/// here; tensor_traits.hpp introduces the two.

namespace mlp {

/// Elements that are either its own or somebody else's. Copying it would make two views of one
/// storage, so it can't be copied.
template <class T>
class tensor {
 public:
  tensor() = default;
  tensor(tensor const&) = delete;
  tensor& operator=(tensor const&) = delete;
  tensor(tensor&&) = default;
  tensor& operator=(tensor&&) = default;

  [[nodiscard]] T* data() { return data_; }
  [[nodiscard]] T const* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return size_; }

  /// Own `size` elements.
  void own(std::size_t size) {
    storage_.resize(size);
    data_ = storage_.data();
    size_ = size;
  }

  /// Look at storage that somebody else owns; give up its own.
  void look_at(T* data, std::size_t size) {
    std::vector<T>{}.swap(storage_);
    data_ = data;
    size_ = size;
  }

 private:
  std::vector<T> storage_;
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace mlp
