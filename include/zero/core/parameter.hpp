// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/any_tensor.hpp>
#include <zero/core/error.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

/// @file
/// How an engine declares its parameters: `parameter(...)` in three forms, `tied(name)`,
/// `.frozen()`, and `any_parameter`, which erases them. A unit is a list of these.

namespace zero::inline v0 {

/// Extents of a parameter, outermost first; empty for a scalar.
using shape = std::vector<std::size_t>;

/// Fills `out` with the elements [first, first + out.size()) of a parameter, the same at every
/// world size.
using any_initialiser = std::function<void(any_span out, std::size_t first)>;

/// A declared parameter with its tensors' types erased; a unit that mixes tensor types is a list of
/// these.
struct any_parameter {
  std::string name;
  zero::dtype dtype = zero::dtype::float32;
  any_tensor value;     ///< empty: read and written through the lease's span
  any_tensor gradient;  ///< empty: through the lease's span, or handed over by gradient_ready
  zero::shape shape;    ///< meaningful where `initialiser` is set
  any_initialiser initialiser;  ///< empty: the value's elements exist and are taken over
  bool is_frozen = false;
  bool is_tied = false;  ///< a use of the parameter of that name, which another unit declares

  [[nodiscard]] any_parameter frozen() const {
    any_parameter copy{*this};
    copy.is_frozen = true;
    return copy;
  }
};

/// Stands for a tensor that a parameter doesn't have.
struct no_tensor {};

/// An `any_parameter` that still knows its tensors' types, so that a stage they can't serve is
/// refused by the compiler.
template <class Value, class Gradient>
struct typed_parameter : any_parameter {
  using value_tensor = Value;
  using gradient_tensor = Gradient;

  [[nodiscard]] typed_parameter frozen() const {
    typed_parameter copy{*this};
    copy.is_frozen = true;
    return copy;
  }
};

namespace detail {

/// How many elements a parameter of that name and shape has.
/// @throws zero::usage_error  the product exceeds 64 bits.
[[nodiscard]] inline std::size_t element_count(std::string_view name, zero::shape const& extents) {
  std::size_t count = std::ranges::count(extents, 0U) == 0 ? 1 : 0;
  for (std::size_t const extent : extents) {
    if (extent != 0 && count > std::numeric_limits<std::size_t>::max() / extent) {
      std::string shape;
      for (std::size_t const each : extents) {
        shape += text(shape.empty() ? "" : ", ", each);
      }
      throw usage_error{text("parameter '", name,
                             "': expected a shape of fewer than 2^64 elements, actual [", shape,
                             "]")};
    }
    count *= extent;
  }
  return count;
}

template <element T, class Initialiser>
[[nodiscard]] any_initialiser erase_initialiser(Initialiser initialiser) {
  static_assert(std::invocable<Initialiser&, std::span<T>, std::size_t>,
                "an initialiser is called as (std::span<T> out, std::size_t first)");
  return [initialiser = std::move(initialiser)](any_span out, std::size_t first) mutable {
    initialiser(std::span<T>{static_cast<T*>(out.data()), out.size()}, first);
  };
}

template <class Tensor>
[[nodiscard]] any_tensor erase_tensor(Tensor& tensor) {
  static_assert(
      contiguous_tensor<Tensor>,
      "zero doesn't know this tensor: specialize zero::tensor_traits for it (value_type, device, "
      "elements, and rebind for stages 2 and 3)");
  return any_tensor{tensor};
}

}  // namespace detail

/// A parameter whose value exists and is taken over. Both tensors must outlive the model.
template <class Value, class Gradient>
[[nodiscard]] typed_parameter<Value, Gradient> parameter(std::string name, Value& value,
                                                         Gradient& gradient) {
  typed_parameter<Value, Gradient> out;
  out.name = std::move(name);
  out.value = detail::erase_tensor(value);
  out.gradient = detail::erase_tensor(gradient);
  out.dtype = out.value.dtype();
  return out;
}

/// The same without a gradient tensor: frozen, or its gradient goes through the lease's span or
/// `gradient_ready`.
template <class Value>
[[nodiscard]] typed_parameter<Value, no_tensor> parameter(std::string name, Value& value) {
  typed_parameter<Value, no_tensor> out;
  out.name = std::move(name);
  out.value = detail::erase_tensor(value);
  out.dtype = out.value.dtype();
  return out;
}

/// A parameter whose tensors have no storage yet: `initialiser(std::span<T> out, std::size_t
/// first)` makes the elements from `first` on, of any part, in memory of the host: on the host
/// device where they will live, else they are copied from there.
template <class Value, class Gradient, class Initialiser>
[[nodiscard]] typed_parameter<Value, Gradient> parameter(std::string name, Value& value,
                                                         Gradient& gradient, zero::shape extents,
                                                         Initialiser initialiser) {
  auto out = parameter(std::move(name), value, gradient);
  out.shape = std::move(extents);
  out.initialiser =
      detail::erase_initialiser<typename tensor_traits<Value>::value_type>(std::move(initialiser));
  return out;
}

/// A parameter without tensors: read and written through the lease's spans.
template <element T, class Initialiser>
[[nodiscard]] typed_parameter<no_tensor, no_tensor> parameter(std::string name, zero::shape extents,
                                                              Initialiser initialiser) {
  typed_parameter<no_tensor, no_tensor> out;
  out.name = std::move(name);
  out.dtype = dtype_of<T>;
  out.shape = std::move(extents);
  out.initialiser = detail::erase_initialiser<T>(std::move(initialiser));
  return out;
}

/// A use, in another unit, of the parameter that is declared as `name` elsewhere.
[[nodiscard]] inline typed_parameter<no_tensor, no_tensor> tied(std::string name) {
  typed_parameter<no_tensor, no_tensor> out;
  out.name = std::move(name);
  out.is_tied = true;
  return out;
}

}  // namespace zero::inline v0
