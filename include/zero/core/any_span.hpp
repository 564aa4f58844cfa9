// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/dtype.hpp>
#include <zero/core/error.hpp>

#include <cstddef>
#include <span>
#include <type_traits>

/// @file
/// `any_span`: a span whose element type is known at run time. Spans of elements convert to it.

namespace zero::inline v0 {

template <class Void>
class basic_any_span {
  using byte_type = std::conditional_t<std::is_const_v<Void>, std::byte const, std::byte>;

 public:
  basic_any_span() = default;

  basic_any_span(Void* data, std::size_t size, zero::dtype type) noexcept
      : data_{data}, size_{size}, dtype_{type} {}

  template <element T, std::size_t Extent>
    requires(std::is_const_v<Void> || !std::is_const_v<T>)
  // NOLINTNEXTLINE(google-explicit-constructor): a span is one
  basic_any_span(std::span<T, Extent> span) noexcept
      : data_{span.data()}, size_{span.size()}, dtype_{dtype_of<T>} {}

  template <class Other>
    requires(std::is_const_v<Void> && !std::is_const_v<Other>)
  // NOLINTNEXTLINE(google-explicit-constructor): adds const
  basic_any_span(basic_any_span<Other> span) noexcept
      : data_{span.data()}, size_{span.size()}, dtype_{span.dtype()} {}

  [[nodiscard]] Void* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] bool empty() const noexcept { return size_ == 0; }
  [[nodiscard]] zero::dtype dtype() const noexcept { return dtype_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return size_ * size_bytes(dtype_); }

  [[nodiscard]] basic_any_span subspan(std::size_t first, std::size_t count) const noexcept {
    auto* const bytes = static_cast<byte_type*>(data_);
    return {data_ == nullptr ? nullptr : bytes + first * size_bytes(dtype_), count, dtype_};
  }

  /// The elements as T, which has this span's dtype.
  /// @throws zero::usage_error  T has another dtype.
  template <element T>
    requires(!std::is_const_v<Void> || std::is_const_v<T>)
  [[nodiscard]] std::span<T> as() const {
    if (dtype_of<T> != dtype_) {
      throw usage_error{
          detail::text("any_span: expected ", name(dtype_), ", actual ", name(dtype_of<T>))};
    }
    return {static_cast<T*>(data_), size_};
  }

 private:
  Void* data_ = nullptr;
  std::size_t size_ = 0;
  zero::dtype dtype_ = zero::dtype::float32;
};

using any_span = basic_any_span<void>;
using const_any_span = basic_any_span<void const>;

}  // namespace zero::inline v0
