// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/any_span.hpp>
#include <zero/device/pack.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

/// @file
/// The norm of a gradient, with the same bits however its elements are cut into shards and in
/// whatever order the shards' sums are added up:
///
///   1. each rank finds `largest_magnitude` of its elements; the largest of all ranks is the anchor
///   2. each rank takes `sum_of_squares` with that anchor; the sums are added
///   3. `norm`, and `clip_factor` for the update's multiplier
///
/// Each square is rounded to a multiple of a unit, 2^-80 of a power of four above the largest
/// square, and the multiples are added as integers. So the sum of n squares is off by n/2 units at
/// most; it is exact where all are multiples of one power of two, at least 2^-39 of the anchor.

namespace zero::inline v0 {

namespace detail {

__extension__ using int128 = __int128;

/// The squares' two parts have this many bits each.
inline constexpr int square_bits = 40;

/// The smallest exponent with |anchor| < 2^exponent.
[[nodiscard]] ZERO_HOST_DEVICE inline int exponent_above(double anchor) noexcept {
  int exponent = 0;
  static_cast<void>(std::frexp(anchor, &exponent));
  return exponent;
}

}  // namespace detail

/// A sum of squares in units that follow from the anchor: sums with one anchor can be added,
/// exactly. Plain bytes, to be sent as such. Up to 2^47 elements.
class norm_sum {
 public:
  constexpr norm_sum() = default;
  constexpr explicit norm_sum(detail::int128 units) noexcept : units_{units} {}

  constexpr norm_sum& operator+=(norm_sum other) noexcept {
    units_ += other.units_;
    return *this;
  }
  [[nodiscard]] constexpr detail::int128 units() const noexcept { return units_; }
  friend constexpr bool operator==(norm_sum const&, norm_sum const&) = default;

 private:
  detail::int128 units_ = 0;
};

static_assert(std::is_trivially_copyable_v<norm_sum>);

namespace detail {

#if !defined(__CUDA_ARCH__)

/// The bits of the largest magnitude: as integers they have the magnitudes' order, with NaN last.
/// (A vector type made here from `Bits` would lose its lanes in CUDA's compiler.)
template <class T>
[[nodiscard]] auto largest_magnitude_bits(T const* from, std::size_t size) noexcept {
  using Vector = std::conditional_t<sizeof(T) == 8, long_vector,
                                    std::conditional_t<sizeof(T) == 4, int_vector, short_vector>>;
  using Bits = std::remove_cvref_t<decltype(std::declval<Vector&>()[0])>;
  constexpr Bits magnitude = std::numeric_limits<Bits>::max();
  constexpr std::size_t lanes = 16 / sizeof(Bits);
  std::size_t const whole = size - size % lanes;
  Vector best{};
  for (std::size_t i = 0; i < whole; i += lanes) {
    Vector const bits = load_vector<Vector>(from + i) & magnitude;
    best = select(bits > best, bits, best);
  }
  Bits largest = 0;
  for (std::size_t lane = 0; lane < lanes; ++lane) {
    largest = std::max(largest, static_cast<Bits>(best[lane]));
  }
  for (std::size_t i = whole; i < size; ++i) {
    largest = std::max(largest, static_cast<Bits>(std::bit_cast<Bits>(from[i]) & magnitude));
  }
  return largest;
}

/// Adds up squares below 4^exponent as integers.
class square_adder {
 public:
  /// This many calls of `add` can't overflow.
  static constexpr std::size_t capacity = std::size_t{1} << 20U;

  explicit square_adder(int exponent) noexcept
      : high_anchor_{std::ldexp(1.5, 2 * exponent + 52 - square_bits)},
        low_anchor_{std::ldexp(1.5, 2 * exponent + 52 - 2 * square_bits)} {}

  /// The sum of an anchor and a number has, in its low bits, the number rounded to a multiple of
  /// the anchor's last place. What the first rounding leaves is exact, and gets the second.
  void add(pack<double> square) noexcept {
    pack<double> const high = high_anchor_ + square;
    pack<double> const low = low_anchor_ + (square - (high - high_anchor_));
    high_ += bits_of(high) - bits_of(high_anchor_);
    low_ += bits_of(low) - bits_of(low_anchor_);
  }

  [[nodiscard]] int128 units() const noexcept {
    return lanes_of(high_) * (int128{1} << square_bits) + lanes_of(low_);
  }

 private:
  using bits [[gnu::vector_size(16)]] = std::uint64_t;

  static bits bits_of(pack<double> value) noexcept { return vector_cast<bits>(value.native()); }
  static int128 lanes_of(bits sum) noexcept {
    return int128{static_cast<std::int64_t>(sum[0])} + static_cast<std::int64_t>(sum[1]);
  }

  pack<double> high_anchor_;
  pack<double> low_anchor_;
  bits high_{};
  bits low_{};
};

/// Four elements as double.
template <class T>
[[nodiscard]] std::array<pack<double>, 2> load_four(T const* from) noexcept {
  if constexpr (sizeof(T) == 2) {
    return widen(pack<float>::load(from));
  } else {
    return load_two<double>(from);
  }
}

template <class T>
[[nodiscard]] int128 sum_of_squares(T const* from, std::size_t size, int exponent) noexcept {
  // Squares of doubles leave double's range: scale by a power of two first. Squares of the others
  // don't, and are exact.
  int const shift = sizeof(T) == 8 ? std::clamp(exponent, -1000, 1000) : 0;
  pack<double> const scale{std::ldexp(1.0, -shift)};
  constexpr std::size_t block = 2 * square_adder::capacity;
  int128 units = 0;
  while (size != 0) {
    square_adder adder{exponent - shift};
    auto const add_four = [&](T const* four) {
      for (pack<double> element : load_four(four)) {
        if constexpr (sizeof(T) == 8) {
          element *= scale;
        }
        adder.add(element * element);
      }
    };
    std::size_t const count = std::min(size, block);
    std::size_t const whole = count - count % 4;
    for (std::size_t i = 0; i < whole; i += 4) {
      add_four(from + i);
    }
    if (whole != count) {
      std::array<T, 4> rest{};
      std::copy_n(from + whole, count - whole, rest.data());
      add_four(rest.data());
    }
    units += adder.units();
    from += count;
    size -= count;
  }
  return units;
}

#else

/// The same on a GPU, for the few elements that are a thread's.
template <class T>
[[nodiscard]] __device__ auto largest_magnitude_bits(T const* from, std::size_t size) {
  using Bits = std::conditional_t<sizeof(T) == 8, std::int64_t,
                                  std::conditional_t<sizeof(T) == 4, std::int32_t, std::int16_t>>;
  constexpr Bits magnitude = std::numeric_limits<Bits>::max();
  Bits largest = 0;
  for (std::size_t i = 0; i < size; ++i) {
    auto const bits = static_cast<Bits>(std::bit_cast<Bits>(from[i]) & magnitude);
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

template <class T>
[[nodiscard]] __device__ int128 sum_of_squares(T const* from, std::size_t size, int exponent) {
  int const shift = sizeof(T) != 8     ? 0
                    : exponent < -1000 ? -1000
                    : exponent > 1000  ? 1000
                                       : exponent;
  double const scale = ldexp(1.0, -shift);
  double const high_anchor = ldexp(1.5, 2 * (exponent - shift) + 52 - square_bits);
  double const low_anchor = ldexp(1.5, 2 * (exponent - shift) + 52 - 2 * square_bits);
  std::int64_t high = 0;
  std::int64_t low = 0;
  for (std::size_t i = 0; i < size; ++i) {
    double element = static_cast<double>(from[i]);
    if (sizeof(T) == 8) {
      element = __dmul_rn(element, scale);
    }
    double const square = __dmul_rn(element, element);
    double const upper = __dadd_rn(high_anchor, square);
    double const rest = __dadd_rn(square, -__dadd_rn(upper, -high_anchor));
    double const lower = __dadd_rn(low_anchor, rest);
    high += std::bit_cast<std::int64_t>(upper) - std::bit_cast<std::int64_t>(high_anchor);
    low += std::bit_cast<std::int64_t>(lower) - std::bit_cast<std::int64_t>(low_anchor);
  }
  return int128{high} * (int128{1} << square_bits) + low;
}

#endif

/// `largest_magnitude` and `sum_of_squares` of elements in any memory.
[[nodiscard]] ZERO_HOST_DEVICE inline double magnitude_of(void const* gradient, std::size_t size,
                                                          dtype type) {
  return visit(type, [&]<class T>(std::type_identity<T>) {
    auto const largest = largest_magnitude_bits(static_cast<T const*>(gradient), size);
    auto const value = static_cast<double>(std::bit_cast<T>(largest));
    return std::isfinite(value) ? value : std::numeric_limits<double>::infinity();
  });
}

[[nodiscard]] ZERO_HOST_DEVICE inline norm_sum squares_of(void const* gradient, std::size_t size,
                                                          dtype type, double anchor) {
  if (anchor == 0 || !std::isfinite(anchor)) {
    return norm_sum{};
  }
  return visit(type, [&]<class T>(std::type_identity<T>) {
    return norm_sum{sum_of_squares(static_cast<T const*>(gradient), size, exponent_above(anchor))};
  });
}

}  // namespace detail

/// A maximum, as a sum: what `accumulate` takes.
struct largest_value {
  double value;

  ZERO_HOST_DEVICE largest_value& operator+=(largest_value other) noexcept {
    value = other.value > value ? other.value : value;
    return *this;
  }
};

/// The largest magnitude of any element, exactly; infinity if an element is infinite or NaN; 0 if
/// there are none.
[[nodiscard]] inline double largest_magnitude(const_any_span gradient) {
  return detail::magnitude_of(gradient.data(), gradient.size(), gradient.dtype());
}

/// The sum of the squares of `gradient`, whose magnitudes are at most `anchor`. (Squares of doubles
/// are rounded first.) With an anchor of 0 or infinity the norm is the anchor, and the sum is 0.
[[nodiscard]] inline norm_sum sum_of_squares(const_any_span gradient, double anchor) {
  return detail::squares_of(gradient.data(), gradient.size(), gradient.dtype(), anchor);
}

/// The square root of a sum taken with `anchor`.
[[nodiscard]] ZERO_HOST_DEVICE inline double norm(norm_sum sum, double anchor) noexcept {
  if (anchor == 0 || !std::isfinite(anchor)) {
    return anchor;
  }
  return std::ldexp(std::sqrt(static_cast<double>(sum.units())),
                    detail::exponent_above(anchor) - detail::square_bits);
}

/// What to multiply a gradient of norm `norm` by, so that its norm is at most `max_norm`.
[[nodiscard]] constexpr double clip_factor(double norm, double max_norm) noexcept {
  return norm > max_norm ? max_norm / norm : 1.0;
}

}  // namespace zero::inline v0
