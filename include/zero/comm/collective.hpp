// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/concept.hpp>
#include <zero/core/any_span.hpp>
#include <zero/core/error.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

/// @file
/// One rank's call of a collective as a plain value, and its comparison with a peer's.
/// Nothing here is for users.

namespace zero::inline v0::detail {

enum class operation : std::uint8_t {
  reduce_scatter,
  all_gather,
  all_reduce,
  broadcast,
  barrier,
  exchange,
  split
};

[[nodiscard]] constexpr std::string_view name(operation op) noexcept {
  switch (op) {
    case operation::reduce_scatter: return "reduce_scatter";
    case operation::all_gather: return "all_gather";
    case operation::all_reduce: return "all_reduce";
    case operation::broadcast: return "broadcast";
    case operation::barrier: return "barrier";
    case operation::exchange: return "exchange";
    case operation::split: return "split";
  }
  return "unknown";
}

[[nodiscard]] constexpr std::string_view name(combine how) noexcept {
  return how == combine::add ? "add" : "overwrite";
}

[[nodiscard]] constexpr std::string_view name(reduction what) noexcept {
  return what == reduction::average ? "average" : "sum";
}

/// Whether the bytes [a, a + a_bytes) and [b, b + b_bytes) have one in common.
[[nodiscard]] inline bool overlap(void const* a, std::size_t a_bytes, void const* b,
                                  std::size_t b_bytes) noexcept {
  auto const* const first = static_cast<std::byte const*>(a);
  auto const* const second = static_cast<std::byte const*>(b);
  std::less<> const before;  // a total order over pointers into different arrays, too
  return a_bytes != 0 && b_bytes != 0 && before(first, second + b_bytes) &&
         before(second, first + a_bytes);
}

/// What must agree over ranks, and where this rank's bytes are.
struct collective {
  operation op = operation::barrier;
  combine how = combine::overwrite;
  reduction what = reduction::sum;
  dtype input_dtype = dtype::float32;
  dtype output_dtype = dtype::float32;
  int root = 0;
  std::size_t count = 0;             ///< elements of the larger span; bytes in the control channel
  std::byte const* input = nullptr;  ///< what peers read
  std::size_t input_bytes = 0;
  std::byte* output = nullptr;  ///< what this rank writes
  std::size_t output_bytes = 0;
  std::uint64_t place = 0;  ///< where peers' bytes are, if they find them by this rank's offset

  /// Whether `peer`, another rank's call, gave memory that this rank writes.
  [[nodiscard]] bool writes_into(collective const& peer) const noexcept {
    return overlap(output, output_bytes, peer.input, peer.input_bytes) ||
           overlap(output, output_bytes, peer.output, peer.output_bytes);
  }
};

/// How `actual`, of rank `rank`, differs from `expected`, of rank `reference`; empty where it
/// doesn't.
[[nodiscard]] inline std::string difference(collective const& expected, int reference,
                                            collective const& actual, int rank) {
  auto const differ = [&](auto const& wanted, auto const& found, std::string_view unit) {
    return text("expected ", wanted, unit, " as on rank ", reference, ", actual ", found, unit,
                " (rank ", rank, ")");
  };
  if (expected.op != actual.op) {
    return differ(name(expected.op), name(actual.op), "");
  }
  if (expected.count != actual.count) {
    return differ(expected.count, actual.count,
                  expected.op == operation::exchange ? " bytes" : " elements");
  }
  if (expected.input_dtype != actual.input_dtype) {
    return differ(name(expected.input_dtype), name(actual.input_dtype), "");
  }
  if (expected.output_dtype != actual.output_dtype) {
    return differ(name(expected.output_dtype), name(actual.output_dtype), " results");
  }
  if (expected.how != actual.how) {
    return differ(name(expected.how), name(actual.how), "");
  }
  if (expected.what != actual.what) {
    return differ(name(expected.what), name(actual.what), "");
  }
  if (expected.root != actual.root) {
    return differ(text("root ", expected.root), text("root ", actual.root), "");
  }
  if (expected.place != actual.place) {
    return differ("the place in the symmetric window", "another", "");
  }
  return {};
}

/// Whether two ranks' calls agree; as `difference`, without an allocation.
[[nodiscard]] inline bool agree(collective const& a, collective const& b) noexcept {
  return a.op == b.op && a.count == b.count && a.input_dtype == b.input_dtype &&
         a.output_dtype == b.output_dtype && a.how == b.how && a.what == b.what &&
         a.root == b.root && a.place == b.place;
}

}  // namespace zero::inline v0::detail
