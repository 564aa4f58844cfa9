// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/dtype.hpp>
#include <zero/device/pack_scalar.hpp>
#include <zero/device/vector.hpp>

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstring>
#include <type_traits>

/// @file
/// `pack`: 16 bytes of float or double with arithmetic, so that a kernel is vectors at plain `-O2`.
/// Each operation is rounded by itself, whatever the compiler's flags (`-ffast-math` excepted), so
/// an element gets the same bits in every lane, at every alignment, and in every build.

namespace zero::inline v0::detail {

#if !defined(__CUDA_ARCH__)

template <class T>
struct pack_types;
template <>
struct pack_types<float> {
  using vector = float_vector;
  using mask = int_vector;
};
template <>
struct pack_types<double> {
  using vector = double_vector;
  using mask = long_vector;
};

/// T is float or double.
template <class T>
class pack {
 public:
  using vector = typename pack_types<T>::vector;
  /// What a comparison gives; `select` takes it.
  using mask = typename pack_types<T>::mask;

  static constexpr std::size_t size = 16 / sizeof(T);

  pack() = default;
  /// The same value in every lane.
  pack(T value) noexcept {  // NOLINT(google-explicit-constructor): so that `2.0F * p` works
    if constexpr (size == 4) {
      vector_ = vector{value, value, value, value};
    } else {
      vector_ = vector{value, value};
    }
  }

  /// The same value in every lane, rounded to T.
  template <std::floating_point Other>
    requires(!std::same_as<Other, T>)
  explicit pack(Other value) noexcept : pack{static_cast<T>(value)} {}

  explicit pack(vector value) noexcept : vector_{value} {}
  [[nodiscard]] vector native() const noexcept { return vector_; }

  /// `size` elements from memory that is aligned as one element is, converted (double to float:
  /// rounded).
  template <element E>
  [[nodiscard]] static pack load(E const* from) noexcept {
    if constexpr (dtype_of<E> == dtype_of<T>) {
      return pack{load_vector<vector>(from)};
    } else if constexpr (dtype_of<E> == dtype::float32) {
      return pack{load_widened(reinterpret_cast<float const*>(from))};
    } else if constexpr (std::is_same_v<T, double>) {
      return pack{vector{double{static_cast<float>(from[0])}, double{static_cast<float>(from[1])}}};
    } else if constexpr (dtype_of<E> == dtype::float64) {
      return pack{vector{static_cast<float>(from[0]), static_cast<float>(from[1]),
                         static_cast<float>(from[2]), static_cast<float>(from[3])}};
    } else if constexpr (dtype_of<E> == dtype::bfloat16) {
      return pack{vector_cast<vector>(load_high_halves(from))};
    } else {
      return pack{widen_float16(load_high_halves(from))};
    }
  }

  /// Write `size` elements, each rounded to nearest, ties to even. Only a pack of float can be
  /// written as 16-bit floats.
  template <element E>
    requires(std::is_same_v<T, float> || sizeof(E) > 2)
  void store(E* to) const noexcept {
    if constexpr (dtype_of<E> == dtype_of<T>) {
      std::memcpy(to, &vector_, sizeof vector_);
    } else if constexpr (sizeof(E) > 2) {
      for (std::size_t lane = 0; lane < size; ++lane) {
        to[lane] = static_cast<E>(vector_[lane]);
      }
    } else if constexpr (dtype_of<E> == dtype::bfloat16) {
      store_high_halves(to, round_to_bfloat16(vector_));
    } else {
      store_high_halves(to, round_to_float16(vector_));
    }
  }

  /// The values that `store` to elements of E would leave there.
  template <element E>
    requires(std::is_same_v<T, float> || sizeof(E) == sizeof(T))
  [[nodiscard]] pack rounded_to() const noexcept {
    if constexpr (dtype_of<E> == dtype::bfloat16) {
      return pack{vector_cast<vector>(round_to_bfloat16(vector_) & 0xffff0000U)};
    } else if constexpr (dtype_of<E> == dtype::float16) {
      return pack{widen_float16(round_to_float16(vector_))};
    } else {
      return *this;
    }
  }

  [[nodiscard]] T operator[](std::size_t lane) const noexcept { return vector_[lane]; }

  friend pack operator+(pack a, pack b) noexcept { return pack{a.vector_ + b.vector_}; }
  friend pack operator-(pack a, pack b) noexcept { return pack{a.vector_ - b.vector_}; }
  friend pack operator*(pack a, pack b) noexcept { return pack{rounded(a.vector_ * b.vector_)}; }
  friend pack operator/(pack a, pack b) noexcept { return pack{a.vector_ / b.vector_}; }
  friend pack operator-(pack a) noexcept { return pack{-a.vector_}; }
  pack& operator+=(pack other) noexcept { return *this = *this + other; }
  pack& operator-=(pack other) noexcept { return *this = *this - other; }
  pack& operator*=(pack other) noexcept { return *this = *this * other; }
  pack& operator/=(pack other) noexcept { return *this = *this / other; }

  friend mask operator<(pack a, pack b) noexcept { return a.vector_ < b.vector_; }
  friend mask operator>(pack a, pack b) noexcept { return a.vector_ > b.vector_; }
  friend mask operator<=(pack a, pack b) noexcept { return a.vector_ <= b.vector_; }
  friend mask operator>=(pack a, pack b) noexcept { return a.vector_ >= b.vector_; }
  friend mask operator==(pack a, pack b) noexcept { return a.vector_ == b.vector_; }
  friend mask operator!=(pack a, pack b) noexcept { return a.vector_ != b.vector_; }

  /// Lane by lane `condition ? when_true : when_false`.
  friend pack select(mask condition, pack when_true, pack when_false) noexcept {
    return pack{detail::select(condition, when_true.vector_, when_false.vector_)};
  }
  /// Lane by lane `a > b ? a : b`: b where one of them is NaN.
  friend pack max(pack a, pack b) noexcept { return select(a > b, a, b); }
  friend pack abs(pack a) noexcept {
    vector const sign = -vector{};
    return pack{vector_cast<vector>(vector_cast<mask>(a.vector_) & ~vector_cast<mask>(sign))};
  }
  friend pack sqrt(pack a) noexcept { return pack{square_root(a.vector_)}; }

 private:
  vector vector_;
};

template <class T>
using two_packs = std::array<pack<T>, 2>;

/// Two packs from the next elements; 16-bit floats are read at once.
template <class T, element E>
[[nodiscard]] two_packs<T> load_two(E const* from) noexcept {
  if constexpr (sizeof(E) == 2 && std::is_same_v<T, float>) {
    auto const [first, second] = load_two_high_halves(from);
    if constexpr (dtype_of<E> == dtype::bfloat16) {
      return {pack<T>{vector_cast<float_vector>(first)},
              pack<T>{vector_cast<float_vector>(second)}};
    } else {
      return {pack<T>{widen_float16(first)}, pack<T>{widen_float16(second)}};
    }
  } else {
    return {pack<T>::load(from), pack<T>::load(from + pack<T>::size)};
  }
}

/// Write both packs, as `pack::store` does it; 16-bit floats are written at once, and one test for
/// both finds that no bfloat16 is NaN.
template <class T, element E>
void store_two(std::array<pack<T>, 2> const& from, E* to) noexcept {
  auto const& [first, second] = from;
  if constexpr (dtype_of<E> == dtype::float16) {
    store_two_high_halves(to, round_to_float16(first.native()), round_to_float16(second.native()));
  } else if constexpr (dtype_of<E> == dtype::bfloat16) {
    if (!any_nan(first.native(), second.native())) [[likely]] {
      store_two_high_halves(to, round_number_to_bfloat16(first.native()),
                            round_number_to_bfloat16(second.native()));
    } else {
      store_two_high_halves(to, round_to_bfloat16(first.native()),
                            round_to_bfloat16(second.native()));
    }
  } else {
    first.store(to);
    second.store(to + pack<T>::size);
  }
}

/// From and to an array.
template <class T, element E>
[[nodiscard]] two_packs<T> read_lanes(E const (&from)[2 * pack<T>::size]) noexcept {
  return load_two<T>(&from[0]);
}
template <class T, element E>
void write_lanes(two_packs<T> const& from, E (&to)[2 * pack<T>::size]) noexcept {
  store_two(from, &to[0]);
}

template <class T>
[[nodiscard]] pack<T> square_root_of(pack<T> value) noexcept {
  return sqrt(value);
}

#endif

/// The first `count` elements and then the last one over and over, so that no lane computes with
/// something unknown.
template <class Real, class T>
[[nodiscard]] ZERO_HOST_DEVICE two_packs<Real> load_some(T const* from,
                                                         std::size_t count) noexcept {
  constexpr std::size_t width = 2 * pack<Real>::size;
  T lanes[width];
  for (std::size_t lane = 0; lane < width; ++lane) {
    lanes[lane] = from[std::min(lane, count - 1)];
  }
  return read_lanes<Real>(lanes);
}

template <class Real, class T>
ZERO_HOST_DEVICE void store_some(two_packs<Real> const& value, T* to, std::size_t count) noexcept {
  T lanes[2 * pack<Real>::size];
  write_lanes(value, lanes);
  for (std::size_t lane = 0; lane < count; ++lane) {
    to[lane] = lanes[lane];
  }
}

/// The lanes as double, exactly: the first two, then the last two.
[[nodiscard]] ZERO_HOST_DEVICE inline two_packs<double> widen(pack<float> value) noexcept {
#if defined(__CUDA_ARCH__)
  two_packs<double> out;
  for (std::size_t i = 0; i < 4; ++i) {
    out[i / 2].set(i % 2, value[i]);
  }
  return out;
#else
  return {pack<double>{widen_low(value.native())}, pack<double>{widen_high(value.native())}};
#endif
}

}  // namespace zero::inline v0::detail
