// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/any_span.hpp>
#include <zero/core/tensor_traits.hpp>

#include <cstddef>
#include <span>

/// @file
/// `any_tensor`: a non-owning handle to a tensor whose type is erased; what its `tensor_traits`
/// can't do is visible at run time.

namespace zero::inline v0 {

namespace detail {

/// One address per device type, so that erased tensors can be checked against a communicator's
/// device.
template <class Device>
inline constexpr char device_tag = 0;

struct tensor_functions {
  any_span (*elements)(void*);
  void (*rebind)(void*, any_span);       // null: not rebindable
  void (*allocate)(void*, std::size_t);  // null: can't own storage again
  zero::dtype dtype;
  char const* device;
};

template <contiguous_tensor T>
constexpr tensor_functions make_tensor_functions() {
  using traits = tensor_traits<T>;
  using value_type = typename traits::value_type;
  tensor_functions functions{};
  functions.elements = [](void* tensor) {
    return any_span{traits::elements(*static_cast<T*>(tensor))};
  };
  if constexpr (rebindable_tensor<T>) {
    functions.rebind = [](void* tensor, any_span storage) {
      traits::rebind(
          *static_cast<T*>(tensor),
          std::span<value_type>{static_cast<value_type*>(storage.data()), storage.size()});
    };
  }
  if constexpr (allocatable_tensor<T>) {
    functions.allocate = [](void* tensor, std::size_t n) {
      traits::allocate(*static_cast<T*>(tensor), n);
    };
  }
  functions.dtype = dtype_of<value_type>;
  functions.device = &device_tag<typename traits::device>;
  return functions;
}

template <contiguous_tensor T>
inline constexpr tensor_functions tensor_functions_of = make_tensor_functions<T>();

}  // namespace detail

/// Holds a pointer to the tensor, which must outlive it; empty when default-constructed.
class any_tensor {
 public:
  any_tensor() = default;

  template <contiguous_tensor T>
  explicit any_tensor(T& tensor) noexcept
      : tensor_{&tensor}, functions_{&detail::tensor_functions_of<T>} {}

  [[nodiscard]] explicit operator bool() const noexcept { return tensor_ != nullptr; }
  /// The tensor itself.
  [[nodiscard]] void const* address() const noexcept { return tensor_; }
  [[nodiscard]] any_span elements() const { return functions_->elements(tensor_); }
  [[nodiscard]] zero::dtype dtype() const noexcept { return functions_->dtype; }
  [[nodiscard]] bool rebindable() const noexcept { return functions_->rebind != nullptr; }
  [[nodiscard]] bool allocatable() const noexcept { return functions_->allocate != nullptr; }

  template <class Device>
  [[nodiscard]] bool on() const noexcept {
    return functions_->device == &detail::device_tag<Device>;
  }

  void rebind(any_span storage) const { functions_->rebind(tensor_, storage); }
  void allocate(std::size_t n) const { functions_->allocate(tensor_, n); }

 private:
  void* tensor_ = nullptr;
  detail::tensor_functions const* functions_ = nullptr;
};

}  // namespace zero::inline v0
