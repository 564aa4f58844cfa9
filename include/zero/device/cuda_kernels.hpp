// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/dtype.hpp>
#include <zero/core/error.hpp>
#include <zero/device/cuda_error.hpp>
#include <zero/device/host_convert.hpp>
#include <zero/device/pack.hpp>
#include <zero/device/pack_kernel.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>
#include <tuple>

/// @file
/// The kernels of `cuda::convert` and `cuda::sum`, with the bits of the host's.

namespace zero::inline v0::detail {

/// The most arrays that a kernel sums: they are passed by value.
inline constexpr std::size_t most_sources = 256;

/// @throws zero::usage_error  no source or too many, or dtypes that can't be summed.
inline void check_sum(std::string_view operation, std::size_t sources, dtype from, dtype to) {
  if (sources == 0 || sources > most_sources) {
    throw usage_error{text(operation, ": expected 1 to ", most_sources, " sources, actual ",
                           sources, rank_suffix())};
  }
  if (!can_sum(from, to)) {
    throw usage_error{text(operation, ": expected a destination of ", name(from), ", actual ",
                           name(to), rank_suffix())};
  }
}

/// One of the types has 64 bits.
template <class From, class To>
struct convert_elements {
  static constexpr std::size_t grain = 8;

  From const* from;
  To* to;

  ZERO_HOST_DEVICE void operator()(std::size_t first, std::size_t count) const {
    for (std::size_t i = first; i < first + count; ++i) {
      to[i] = round_to<To>(from[i]);
    }
  }
};

template <class From, class To>
  requires(sizeof(From) <= 4 && sizeof(To) <= 4)
struct convert_elements<From, To> {
  using real = float;
  static constexpr std::size_t grain = 8;

  From const* from;
  To* to;

  struct keep {
    ZERO_HOST_DEVICE std::array<two_packs<float>, 1> operator()(
        two_packs<float> const& value) const {
      return {value};
    }
  };
  [[nodiscard]] ZERO_HOST_DEVICE std::tuple<From const*> inputs() const { return {from}; }
  [[nodiscard]] ZERO_HOST_DEVICE std::tuple<To*> outputs() const { return {to}; }
  [[nodiscard]] ZERO_HOST_DEVICE bool active() const { return true; }
  [[nodiscard]] ZERO_HOST_DEVICE keep operation() const { return {}; }
  ZERO_HOST_DEVICE void operator()(std::size_t first, std::size_t count) const {
    run_kernel(*this, first, count);
  }
};

template <class Real>
ZERO_HOST_DEVICE two_packs<Real> scale_total(two_packs<Real> const& total, Real scale) {
  return {total[0] * pack<Real>{scale}, total[1] * pack<Real>{scale}};
}
/// A sum added to what was there, in the arithmetic of `To`.
template <class To, class Real>
ZERO_HOST_DEVICE two_packs<Real> add_total(two_packs<Real> const& before,
                                           two_packs<Real> const& total) {
  return {before[0] + total[0].template rounded_to<To>(),
          before[1] + total[1].template rounded_to<To>()};
}

/// The sum of one source, added.
template <class Source, class To>
struct add_elements {
  using real = accumulate_type<Source>;
  static constexpr std::size_t grain = width_of<real>;

  To* to;
  Source const* from;
  real scale;

  struct add {
    real scale;
    ZERO_HOST_DEVICE std::array<two_packs<real>, 1> operator()(
        two_packs<real> const& before, two_packs<real> const& source) const {
      return {add_total<To>(before, scale_total(source, scale))};
    }
  };
  [[nodiscard]] ZERO_HOST_DEVICE std::tuple<To const*, Source const*> inputs() const {
    return {to, from};
  }
  [[nodiscard]] ZERO_HOST_DEVICE std::tuple<To*> outputs() const { return {to}; }
  [[nodiscard]] ZERO_HOST_DEVICE bool active() const { return true; }
  [[nodiscard]] ZERO_HOST_DEVICE add operation() const { return {scale}; }
  ZERO_HOST_DEVICE void operator()(std::size_t first, std::size_t count) const {
    run_kernel(*this, first, count);
  }
};

template <class Source, class To>
struct sum_elements {
  using accumulate = accumulate_type<Source>;
  static constexpr std::size_t width = width_of<accumulate>;
  static constexpr std::size_t grain = width;

  To* to;
  accumulate scale;
  bool add;
  unsigned count;
  Source const* sources[most_sources];

  ZERO_HOST_DEVICE void operator()(std::size_t first, std::size_t size) const {
    std::size_t const last = first + size;
    for (std::size_t i = first; i < last; i += width) {
      sum(i, last - i < width ? last - i : width);
    }
  }

 private:
  template <class T>
  ZERO_HOST_DEVICE static two_packs<accumulate> load(T const* from, std::size_t size) {
    return size == width ? load_two<accumulate>(from) : load_some<accumulate>(from, size);
  }

  ZERO_HOST_DEVICE void sum(std::size_t i, std::size_t size) const {
    two_packs<accumulate> total = load(sources[0] + i, size);
    for (unsigned s = 1; s < count; ++s) {
      two_packs<accumulate> const next = load(sources[s] + i, size);
      total[0] += next[0];
      total[1] += next[1];
    }
    total = scale_total(total, scale);
    if (add) {
      total = add_total<To>(load(to + i, size), total);
    }
    if (size == width) {
      store_two(total, to + i);
    } else {
      store_some(total, to + i, size);
    }
  }
};

}  // namespace zero::inline v0::detail
