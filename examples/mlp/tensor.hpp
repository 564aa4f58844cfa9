// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <utility>

/// @file
/// This example's tensor: a type of its own, as an engine would have one. `zero` isn't mentioned
/// here; tensor_traits.hpp introduces the two.

namespace mlp {

/// Elements in the memory of a device that are either its own or somebody else's. Copying it would
/// make two views of one storage, so it can't be copied.
template <class T, class Device>
class tensor {
 public:
  tensor() = default;
  tensor(tensor const&) = delete;
  tensor& operator=(tensor const&) = delete;
  tensor(tensor&& other) noexcept
      : data_{std::exchange(other.data_, nullptr)}, size_{std::exchange(other.size_, 0)},
        owned_{std::exchange(other.owned_, 0)} {}
  tensor& operator=(tensor&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(owned_, other.owned_);
    return *this;
  }
  ~tensor() { give_up(); }

  [[nodiscard]] T* data() { return data_; }
  [[nodiscard]] T const* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return size_; }

  /// Own `size` elements, of any value.
  void own(std::size_t size) {
    give_up();
    data_ = static_cast<T*>(Device::allocate(size * sizeof(T)));
    size_ = owned_ = size;
  }

  /// Own at least `size` elements, of any value where there were fewer.
  void grow(std::size_t size) {
    if (owned_ < size) {
      own(size);
    }
  }

  /// Look at storage that somebody else owns; give up its own.
  void look_at(T* data, std::size_t size) {
    give_up();
    data_ = data;
    size_ = size;
  }

 private:
  void give_up() {
    if (owned_ != 0) {
      Device::deallocate(data_, owned_ * sizeof(T));
    }
    data_ = nullptr;
    size_ = owned_ = 0;
  }

  T* data_ = nullptr;
  std::size_t size_ = 0;
  std::size_t owned_ = 0;
};

}  // namespace mlp
