// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/any_span.hpp>
#include <zero/device/host_copy.hpp>
#include <zero/device/pack.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

/// @file
/// Conversion between element types on the host.

namespace zero::inline v0::detail {

/// Round to nearest, ties to even, once.
template <element To, element From>
[[nodiscard]] constexpr To round_to(From value) noexcept {
  if constexpr (std::is_same_v<To, From>) {
    return value;
  } else if constexpr (std::is_same_v<From, double> && sizeof(To) == 2) {
    // Through a float rounded to odd, whose last bit remembers that something was lost.
    auto narrow = static_cast<float>(value);
    auto bits = std::bit_cast<std::uint32_t>(narrow);
    if (double{narrow} != value && value == value && bits % 2 == 0) {
      bool const past = narrow > 0 ? double{narrow} > value : double{narrow} < value;
      bits += past ? ~0U : 1U;
    }
    return static_cast<To>(std::bit_cast<float>(bits));
  } else if constexpr (sizeof(From) == 2) {
    return static_cast<To>(static_cast<float>(value));
  } else {
    return static_cast<To>(value);
  }
}

/// Convert element by element. `to` has the size of `from`; the ranges don't overlap, or have one
/// dtype and are the same. A template, so that who doesn't call it doesn't compile the kernels.
template <class = void>
void host_convert(const_any_span from, any_span to) noexcept {
  if (from.dtype() == to.dtype()) {
    host_copy(to.data(), from.data(), from.bytes());
    return;
  }
  visit(from.dtype(), [&]<class From>(std::type_identity<From>) {
    visit(to.dtype(), [&]<class To>(std::type_identity<To>) {
      auto const* const source = static_cast<From const*>(from.data());
      auto* const target = static_cast<To*>(to.data());
      std::size_t i = 0;
      if constexpr (sizeof(From) <= 4 && sizeof(To) <= 4) {  // same bits, four at a time
        for (; i + 4 <= from.size(); i += 4) {
          pack<float>::load(source + i).store(target + i);
        }
      }
      for (; i < from.size(); ++i) {
        target[i] = round_to<To>(source[i]);
      }
    });
  });
}

}  // namespace zero::inline v0::detail
