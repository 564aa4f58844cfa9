// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/dtype.hpp>
#include <zero/core/error.hpp>
#include <zero/device/cuda_error.hpp>
#include <zero/device/host_convert.hpp>
#include <zero/device/pack.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>

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

template <class From, class To>
struct convert_elements {
  static constexpr std::size_t grain = 8;

  From const* from;
  To* to;

  ZERO_HOST_DEVICE void operator()(std::size_t first, std::size_t count) const {
    if constexpr (sizeof(From) <= 4 && sizeof(To) <= 4) {
      constexpr std::size_t width = 2 * pack<float>::size;
      std::size_t const last = first + count;
      for (std::size_t i = first; i < last; i += width) {
        if (last - i >= width) {
          store_two(load_two<float>(from + i), to + i);
        } else {
          store_some<float>(load_some<float>(from + i, last - i), to + i, last - i);
        }
      }
    } else {
      for (std::size_t i = first; i < first + count; ++i) {
        to[i] = round_to<To>(from[i]);
      }
    }
  }
};

template <class Source, class To>
struct sum_elements {
  using accumulate = accumulate_type<Source>;
  using value = pack<accumulate>;
  static constexpr std::size_t width = 2 * value::size;
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
    total[0] *= value{scale};
    total[1] *= value{scale};
    if (add) {
      two_packs<accumulate> const before = load(to + i, size);
      total[0] = before[0] + total[0].template rounded_to<To>();
      total[1] = before[1] + total[1].template rounded_to<To>();
    }
    if (size == width) {
      store_two(total, to + i);
    } else {
      store_some(total, to + i, size);
    }
  }
};

}  // namespace zero::inline v0::detail
