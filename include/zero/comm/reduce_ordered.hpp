// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/collective.hpp>
#include <zero/core/any_span.hpp>
#include <zero/device/ordered_sum.hpp>

#include <span>

/// @file
/// The arithmetic of every ordered reduction. Nothing here is for users.

namespace zero::inline v0::detail {

/// Reduce the ranks' elements, which `sources` point to in rank order, as `call` asks.
inline void reduce_ordered(std::span<void const* const> sources, collective const& call,
                           any_span result) {
  double const scale =
      call.what == reduction::average ? 1 / static_cast<double>(sources.size()) : 1;
  ordered_sum(sources, call.input_dtype, result, call.how == combine::add, scale);
}

}  // namespace zero::inline v0::detail
