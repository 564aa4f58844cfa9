// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/config.hpp>
#include <zero/core/dtype.hpp>
#include <zero/device/vector.hpp>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

/// @file
/// `pack` as a GPU computes with it: a number per lane, no operation fused with the next, so that
/// an element gets the bits that it gets on the host. Memory is read and written 16 bytes at a time
/// where it starts at a multiple of that. Only CUDA's device compiler sees this.

namespace zero::inline v0::detail {

#if defined(__CUDA_ARCH__)

__device__ inline float add_rounded(float a, float b) { return __fadd_rn(a, b); }
__device__ inline double add_rounded(double a, double b) { return __dadd_rn(a, b); }
__device__ inline float multiply_rounded(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double multiply_rounded(double a, double b) { return __dmul_rn(a, b); }
__device__ inline float divide_rounded(float a, float b) { return __fdiv_rn(a, b); }
__device__ inline double divide_rounded(double a, double b) { return __ddiv_rn(a, b); }
__device__ inline float root_rounded(float a) { return __fsqrt_rn(a); }
__device__ inline double root_rounded(double a) { return __dsqrt_rn(a); }

struct alignas(16) sixteen_bytes {
  std::uint32_t words[4];
};

template <class T>
[[nodiscard]] __device__ bool is_wide(T const* first) {
  return reinterpret_cast<std::uintptr_t>(first) % 16 == 0;
}

/// N elements from and to global memory that is aligned as one element is.
template <std::size_t N, class E>
struct lanes {
  E of[N];

  static constexpr std::size_t words = N * sizeof(E) / 16;
  static constexpr bool fills_words = words != 0 && words * 16 == N * sizeof(E);

  __device__ static lanes read(E const* from) {
    lanes out;
    if constexpr (fills_words) {
      if (is_wide(from)) {
        sixteen_bytes parts[words];
        for (std::size_t i = 0; i < words; ++i) {
          parts[i] = reinterpret_cast<sixteen_bytes const*>(from)[i];
        }
        memcpy(out.of, parts, sizeof out.of);
        return out;
      }
    }
    for (std::size_t i = 0; i < N; ++i) {
      out.of[i] = from[i];
    }
    return out;
  }

  __device__ void write(E* to) const {
    if constexpr (fills_words) {
      if (is_wide(to)) {
        write_words(to);
        return;
      }
    }
    for (std::size_t i = 0; i < N; ++i) {
      to[i] = of[i];
    }
  }

  /// To a multiple of 16 bytes. By an intrinsic: the compiler splits plain stores again where it
  /// finds those of the other branch of `write` alike.
  __device__ void write_words(E* to) const {
    uint4 parts[words];
    memcpy(parts, of, sizeof of);
    for (std::size_t i = 0; i < words; ++i) {
      __stwb(reinterpret_cast<uint4*>(to) + i, parts[i]);
    }
  }
};

/// One element as another type, rounded once.
template <class To, class From>
__device__ To convert_lane(From value) {
  if constexpr (sizeof(From) == 2) {
    return static_cast<To>(static_cast<float>(value));
  } else {
    return static_cast<To>(value);
  }
}

template <class T>
class pack {
 public:
  static constexpr std::size_t size = 16 / sizeof(T);

  struct mask {
    bool of[size];
  };
  using vector = std::conditional_t<sizeof(T) == 4, float_vector, double_vector>;

  pack() = default;
  __device__ pack(T value) {  // NOLINT(google-explicit-constructor): so that `2.0F * p` works
    for (T& lane : lanes_) {
      lane = value;
    }
  }
  template <std::floating_point Other>
    requires(!std::same_as<Other, T>)
  __device__ explicit pack(Other value) : pack{static_cast<T>(value)} {}

  /// Never called: the host's code is compiled with the device's, too.
  explicit pack(vector value) noexcept;
  [[nodiscard]] vector native() const noexcept;

  template <element E>
  [[nodiscard]] __device__ static pack load(E const* from) {
    auto const read = lanes<size, E>::read(from);
    pack out;
    for (std::size_t i = 0; i < size; ++i) {
      out.lanes_[i] = convert_lane<T>(read.of[i]);
    }
    return out;
  }

  template <element E>
  __device__ void store(E* to) const {
    lanes<size, E> out;
    for (std::size_t i = 0; i < size; ++i) {
      out.of[i] = convert_lane<E>(lanes_[i]);
    }
    out.write(to);
  }

  template <element E>
  [[nodiscard]] __device__ pack rounded_to() const {
    pack out;
    for (std::size_t i = 0; i < size; ++i) {
      out.lanes_[i] = convert_lane<T>(convert_lane<E>(lanes_[i]));
    }
    return out;
  }

  [[nodiscard]] __device__ T operator[](std::size_t lane) const { return lanes_[lane]; }
  __device__ void set(std::size_t lane, T value) { lanes_[lane] = value; }

  __device__ friend pack operator+(pack a, pack b) {
    return each(a, b, [](T x, T y) { return add_rounded(x, y); });
  }
  __device__ friend pack operator-(pack a, pack b) {
    return each(a, b, [](T x, T y) { return add_rounded(x, -y); });
  }
  __device__ friend pack operator*(pack a, pack b) {
    return each(a, b, [](T x, T y) { return multiply_rounded(x, y); });
  }
  __device__ friend pack operator/(pack a, pack b) {
    return each(a, b, [](T x, T y) { return divide_rounded(x, y); });
  }
  __device__ friend pack operator-(pack a) {
    return each(a, a, [](T x, T) { return -x; });
  }
  __device__ pack& operator+=(pack other) { return *this = *this + other; }
  __device__ pack& operator-=(pack other) { return *this = *this - other; }
  __device__ pack& operator*=(pack other) { return *this = *this * other; }
  __device__ pack& operator/=(pack other) { return *this = *this / other; }

  __device__ friend mask operator<(pack a, pack b) {
    return compare(a, b, [](T x, T y) { return x < y; });
  }
  __device__ friend mask operator>(pack a, pack b) {
    return compare(a, b, [](T x, T y) { return x > y; });
  }
  __device__ friend mask operator<=(pack a, pack b) {
    return compare(a, b, [](T x, T y) { return x <= y; });
  }
  __device__ friend mask operator>=(pack a, pack b) {
    return compare(a, b, [](T x, T y) { return x >= y; });
  }
  __device__ friend mask operator==(pack a, pack b) {
    return compare(a, b, [](T x, T y) { return x == y; });
  }
  __device__ friend mask operator!=(pack a, pack b) {
    return compare(a, b, [](T x, T y) { return x != y; });
  }

  __device__ friend pack select(mask condition, pack when_true, pack when_false) {
    pack out;
    for (std::size_t i = 0; i < size; ++i) {
      out.lanes_[i] = condition.of[i] ? when_true.lanes_[i] : when_false.lanes_[i];
    }
    return out;
  }
  __device__ friend pack max(pack a, pack b) { return select(a > b, a, b); }
  __device__ friend pack abs(pack a) {
    return each(a, a, [](T x, T) { return ::fabs(x); });
  }
  __device__ friend pack sqrt(pack a) {
    return each(a, a, [](T x, T) { return root_rounded(x); });
  }

 private:
  template <class Function>
  __device__ static pack each(pack a, pack b, Function function) {
    pack out;
    for (std::size_t i = 0; i < size; ++i) {
      out.lanes_[i] = function(a.lanes_[i], b.lanes_[i]);
    }
    return out;
  }
  template <class Function>
  __device__ static mask compare(pack a, pack b, Function function) {
    mask out;
    for (std::size_t i = 0; i < size; ++i) {
      out.of[i] = function(a.lanes_[i], b.lanes_[i]);
    }
    return out;
  }

  alignas(16) T lanes_[size];
};

template <class T>
[[nodiscard]] __device__ pack<T> square_root_of(pack<T> value) {
  return sqrt(value);
}

template <class T>
using two_packs = std::array<pack<T>, 2>;

/// Two packs from lanes in registers, and back.
template <class T, element E>
[[nodiscard]] __device__ two_packs<T> read_lanes(E const (&from)[2 * pack<T>::size]) {
  constexpr std::size_t half = pack<T>::size;
  two_packs<T> out;
  for (std::size_t i = 0; i < half; ++i) {
    out[0].set(i, convert_lane<T>(from[i]));
    out[1].set(i, convert_lane<T>(from[half + i]));
  }
  return out;
}

template <class T, element E>
__device__ void write_lanes(two_packs<T> const& from, E (&to)[2 * pack<T>::size]) {
  constexpr std::size_t half = pack<T>::size;
  for (std::size_t i = 0; i < half; ++i) {
    to[i] = convert_lane<E>(from[0][i]);
    to[half + i] = convert_lane<E>(from[1][i]);
  }
}

template <class T, element E>
[[nodiscard]] __device__ two_packs<T> load_two(E const* from) {
  return read_lanes<T>(lanes<2 * pack<T>::size, E>::read(from).of);
}

template <class T, element E>
__device__ void store_two(two_packs<T> const& from, E* to) {
  lanes<2 * pack<T>::size, E> out;
  write_lanes(from, out.of);
  out.write(to);
}

/// To a multiple of 16 bytes.
template <class T, element E>
__device__ void store_wide(two_packs<T> const& from, E* to) {
  lanes<2 * pack<T>::size, E> out;
  write_lanes(from, out.of);
  out.write_words(to);
}

#endif

}  // namespace zero::inline v0::detail
