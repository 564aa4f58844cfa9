// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/bfloat16.hpp>
#include <zero/core/float16.hpp>

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>
#include <utility>

/// @file
/// Element types at run time, and the one trait that makes a foreign element type work.

namespace zero::inline v0 {

enum class dtype : std::uint8_t { float32, float64, float16, bfloat16 };

[[nodiscard]] constexpr std::size_t size_bytes(dtype type) noexcept {
  return type == dtype::float64 ? 8 : type == dtype::float32 ? 4 : 2;
}

[[nodiscard]] constexpr std::string_view name(dtype type) noexcept {
  switch (type) {
    case dtype::float32: return "float32";
    case dtype::float64: return "float64";
    case dtype::float16: return "float16";
    case dtype::bfloat16: return "bfloat16";
  }
  return "unknown";
}

/// The customization point for element types: specialize it with `static constexpr dtype value` for
/// a type that has the same layout (`__half`, `Eigen::bfloat16`).
template <class T>
struct dtype_traits {};

template <>
struct dtype_traits<float> {
  static constexpr dtype value = dtype::float32;
};
template <>
struct dtype_traits<double> {
  static constexpr dtype value = dtype::float64;
};
template <>
struct dtype_traits<float16> {
  static constexpr dtype value = dtype::float16;
};
template <>
struct dtype_traits<bfloat16> {
  static constexpr dtype value = dtype::bfloat16;
};

/// A type whose values can be stored in a tensor. A type of another size than its dtype is not one.
template <class T>
concept element = requires { dtype_traits<std::remove_cv_t<T>>::value; } &&
                  sizeof(T) == size_bytes(dtype_traits<std::remove_cv_t<T>>::value) &&
                  std::is_trivially_copyable_v<std::remove_cv_t<T>>;

template <element T>
inline constexpr dtype dtype_of = dtype_traits<std::remove_cv_t<T>>::value;

/// The type that sums and updates of a dtype are computed in: double for float64, else float.
template <element T>
using accumulate_type = std::conditional_t<dtype_of<T> == dtype::float64, double, float>;

[[nodiscard]] constexpr dtype accumulate_dtype(dtype type) noexcept {
  return type == dtype::float64 ? dtype::float64 : dtype::float32;
}

/// Whether sums of `from`, kept in its accumulate type, are rounded to `to`: the same dtype, or
/// float32 and a 16-bit one.
[[nodiscard]] constexpr bool can_sum(dtype from, dtype to) noexcept {
  return from == to || (from == dtype::float32 && size_bytes(to) == 2) ||
         (size_bytes(from) == 2 && to == dtype::float32);
}

/// Call `function(std::type_identity<T>{})` with the library's own type T of `type`.
template <class Function>
constexpr decltype(auto) visit(dtype type, Function&& function) {
  switch (type) {
    case dtype::float64: return std::forward<Function>(function)(std::type_identity<double>{});
    case dtype::float16: return std::forward<Function>(function)(std::type_identity<float16>{});
    case dtype::bfloat16: return std::forward<Function>(function)(std::type_identity<bfloat16>{});
    case dtype::float32: break;
  }
  return std::forward<Function>(function)(std::type_identity<float>{});
}

static_assert(element<float> && element<bfloat16 const> && !element<int>);

}  // namespace zero::inline v0
