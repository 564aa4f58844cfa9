// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/any_span.hpp>
#include <zero/core/error.hpp>
#include <zero/device/host_copy.hpp>
#include <zero/device/pack.hpp>
#include <zero/device/wide_sum.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <type_traits>
#include <utility>

/// @file
/// `ordered_sum`: the sum of several arrays, in their order, rounded once. It is the arithmetic of
/// every ordered reduction, and depends on nothing but the values: an element gets the same bits
/// wherever a span is cut or starts, and in every build.

namespace zero::inline v0::detail {

/// What is left to do with a sum.
template <class Accumulate>
struct sum_end {
  Accumulate scale;
  bool add;
};

template <class Accumulate>
inline constexpr std::size_t sum_step = 4 * pack<Accumulate>::size;

/// A whole number of steps: `partial` (where there is one) plus `Count` sources. In one function
/// for all callers; the destination may be one of what is read.
template <bool HasPartial, std::size_t Count, element Source, element Destination>
[[gnu::noinline]] void sum_steps(accumulate_type<Source> const* partial, Source const* const* from,
                                 Destination* to, std::size_t size,
                                 sum_end<accumulate_type<Source>> end) noexcept {
  using lanes = pack<accumulate_type<Source>>;
  constexpr std::size_t ahead = 4096 / sizeof(Source);  // a page: the processor looks no further
  std::array<Source const*, Count> sources;
  std::copy_n(from, Count, sources.begin());
  lanes const scale{end.scale};
  auto const each_source = [&]<std::size_t... S>(std::index_sequence<S...>) {
    auto const sum_at = [&](std::size_t at) {
      lanes sum;
      if constexpr (HasPartial) {
        sum = (lanes::load(partial + at) + ... + lanes::load(sources[S] + at));
      } else {
        sum = (... + lanes::load(sources[S] + at));
      }
      sum *= scale;
      return end.add ? lanes::load(to + at) + sum.template rounded_to<Destination>() : sum;
    };
    for (std::size_t i = 0; i < size; i += 4 * lanes::size) {
      (__builtin_prefetch(sources[S] + i + ahead), ...);
      lanes const a = sum_at(i);
      lanes const b = sum_at(i + lanes::size);
      lanes const c = sum_at(i + 2 * lanes::size);
      lanes const d = sum_at(i + 3 * lanes::size);
      a.store(to + i);
      b.store(to + i + lanes::size);
      c.store(to + i + 2 * lanes::size);
      d.store(to + i + 3 * lanes::size);
    }
  };
  each_source(std::make_index_sequence<Count>{});
}

/// `sum_steps`, with wider instructions where they pay.
template <bool HasPartial, std::size_t Count, element Source, element Destination>
void sum_whole(accumulate_type<Source> const* partial, Source const* const* from, Destination* to,
               std::size_t size, sum_end<accumulate_type<Source>> end) noexcept {
#ifdef ZERO_WIDE_SUM
  if constexpr (prefers_wide<HasPartial, Source, Destination>) {
    if (has_wide_sum()) {
      wide_sum_steps<HasPartial, Count>(partial, from, to, size, end.scale, end.add);
      return;
    }
  }
#endif
  sum_steps<HasPartial, Count>(partial, from, to, size, end);
}

/// `sum_whole` for any size: what is left after the last whole step goes through a step of its own.
template <bool HasPartial, std::size_t Count, element Source, element Destination>
void sum_some(accumulate_type<Source> const* partial, Source const* const* from, Destination* to,
              std::size_t size, sum_end<accumulate_type<Source>> end) noexcept {
  constexpr std::size_t step = sum_step<accumulate_type<Source>>;
  std::size_t const whole = size / step * step;
  std::size_t const rest = size - whole;
  sum_whole<HasPartial, Count>(partial, from, to, whole, end);
  if (rest == 0) {
    return;
  }
  std::array<std::array<Source, step>, Count> tails{};
  std::array<Source const*, Count> sources;
  std::array<accumulate_type<Source>, step> partial_tail{};
  std::array<Destination, step> result{};
  for (std::size_t s = 0; s < Count; ++s) {
    std::copy_n(from[s] + whole, rest, tails[s].begin());
    sources[s] = tails[s].data();
  }
  if constexpr (HasPartial) {
    std::copy_n(partial + whole, rest, partial_tail.begin());
  }
  std::copy_n(to + whole, rest, result.begin());
  sum_whole<HasPartial, Count>(partial_tail.data(), sources.data(), result.data(), step, end);
  std::copy_n(result.begin(), rest, to + whole);
}

/// One to four sources.
template <element Source, element Destination>
void sum_few(std::span<Source const* const> from, Destination* to, std::size_t size,
             sum_end<accumulate_type<Source>> end) noexcept {
  switch (from.size()) {
    case 1: return sum_some<false, 1>(nullptr, from.data(), to, size, end);
    case 2: return sum_some<false, 2>(nullptr, from.data(), to, size, end);
    case 3: return sum_some<false, 3>(nullptr, from.data(), to, size, end);
    default: return sum_some<false, 4>(nullptr, from.data(), to, size, end);
  }
}

/// More sources: block by block, with the sum so far in a buffer that stays in the first-level
/// cache.
template <element Source, element Destination>
void sum_many(std::span<void const* const> sources, Destination* to, std::size_t size,
              sum_end<accumulate_type<Source>> end) noexcept {
  using accumulate = accumulate_type<Source>;
  constexpr std::size_t block = 4096 / sizeof(accumulate);
  std::array<accumulate, block> partial;
  std::array<Source const*, 4> from;
  std::size_t const head = (sources.size() - 1) % 4 + 1;  // then a multiple of four is left
  for (std::size_t first = 0; first < size; first += block) {
    std::size_t const count = std::min(block, size - first);
    auto const next = [&](std::size_t s, std::size_t some) {
      for (std::size_t k = 0; k < some; ++k) {
        from[k] = static_cast<Source const*>(sources[s + k]) + first;
      }
    };
    next(0, head);
    sum_few(std::span<Source const* const>{from.data(), head}, partial.data(), count,
            sum_end<accumulate>{1, false});
    for (std::size_t s = head; s < sources.size(); s += 4) {
      next(s, 4);
      if (s + 4 < sources.size()) {
        sum_some<true, 4>(partial.data(), from.data(), partial.data(), count,
                          sum_end<accumulate>{1, false});
      } else {
        sum_some<true, 4>(partial.data(), from.data(), to + first, count, end);
      }
    }
  }
}

/// destination[i] = (sources[0][i] + sources[1][i] + ...) * scale, or with `add` that much more.
///
/// The sum and the product are in the accumulate type of `source_type` (double for float64, else
/// float; `scale` too), and rounded once to the destination's dtype. With `add` the rounded value
/// is added in the destination's own arithmetic (16-bit floats: in float, then rounded).
///
/// Shapes:   every source has `destination.size()` elements; the destination may be one of them.
/// Ordering: runs in the caller.
/// @throws zero::usage_error  no source, or dtypes that can't be summed: the destination has the
///                            sources' dtype, or one of the two is float32 and the other 16 bits
///                            wide.
/// A template, so that who doesn't call it doesn't compile the kernels.
template <class = void>
void ordered_sum(std::span<void const* const> sources, dtype source_type, any_span destination,
                 bool add, double scale) {
  if (sources.empty()) {
    throw usage_error{"ordered_sum: expected at least 1 source, actual 0"};
  }
  bool const same_type = source_type == destination.dtype();
  if (sources.size() == 1 && same_type && !add && scale == 1) {
    host_copy(destination.data(), sources[0], destination.bytes());
    return;
  }
  visit(source_type, [&]<class Source>(std::type_identity<Source>) {
    visit(destination.dtype(), [&]<class Destination>(std::type_identity<Destination>) {
      if constexpr (can_sum(dtype_of<Source>, dtype_of<Destination>)) {
        using accumulate = accumulate_type<Source>;
        auto* const to = static_cast<Destination*>(destination.data());
        sum_end<accumulate> const end{static_cast<accumulate>(scale), add};
        if (sources.size() > 4) {
          sum_many<Source>(sources, to, destination.size(), end);
          return;
        }
        std::array<Source const*, 4> from{};
        for (std::size_t s = 0; s < sources.size(); ++s) {
          from[s] = static_cast<Source const*>(sources[s]);
        }
        sum_few(std::span<Source const* const>{from.data(), sources.size()}, to, destination.size(),
                end);
      } else {
        throw usage_error{text("ordered_sum: expected a destination of ", name(source_type),
                               ", actual ", name(destination.dtype()))};
      }
    });
  });
}

}  // namespace zero::inline v0::detail
