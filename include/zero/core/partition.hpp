// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/error.hpp>

#include <algorithm>
#include <cstdint>
#include <limits>

/// @file
/// `partition`: n elements cut into P equal slices whose starts are aligned. The last slices may
/// hold fewer real elements than the others, or none; every slice has the same padded size, so
/// collectives are even.

namespace zero::inline v0 {

/// The smallest multiple of `alignment` (1 or more) that is at least `value`.
/// @throws zero::usage_error  the result doesn't fit 64 bits.
[[nodiscard]] constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t alignment) {
  std::uint64_t const rest = value % alignment;
  if (rest == 0) {
    return value;
  }
  if (value > std::numeric_limits<std::uint64_t>::max() - (alignment - rest)) {
    throw usage_error{detail::text("round_up: expected a multiple of ", alignment,
                                   " that fits 64 bits, actual ", value, " to be rounded up")};
  }
  return value + (alignment - rest);
}

/// Shapes: slice r is [offset(r), offset(r) + size(r)), padded to slice() elements.
/// Units:  elements.
class partition {
 public:
  constexpr partition() = default;

  /// @throws zero::usage_error  no parts, an alignment of 0, or a padded size past 64 bits.
  constexpr partition(std::uint64_t elements, std::uint64_t parts, std::uint64_t alignment = 1)
      : elements_{elements}, parts_{parts} {
    if (parts == 0) {
      throw usage_error{"partition: expected at least 1 part, actual 0"};
    }
    if (alignment == 0) {
      throw usage_error{"partition: expected an alignment of at least 1 element, actual 0"};
    }
    slice_ = round_up(elements / parts + (elements % parts != 0 ? 1 : 0), alignment);
    if (slice_ > std::numeric_limits<std::uint64_t>::max() / parts) {
      throw usage_error{detail::text("partition: expected a padded size that fits 64 bits, actual ",
                                     elements, " elements over ", parts, " parts aligned to ",
                                     alignment)};
    }
  }

  [[nodiscard]] constexpr std::uint64_t elements() const noexcept { return elements_; }
  [[nodiscard]] constexpr std::uint64_t parts() const noexcept { return parts_; }
  /// The padded size of every slice.
  [[nodiscard]] constexpr std::uint64_t slice() const noexcept { return slice_; }
  /// The padded size of all slices together.
  [[nodiscard]] constexpr std::uint64_t padded() const noexcept { return slice_ * parts_; }
  [[nodiscard]] constexpr std::uint64_t padding() const noexcept { return padded() - elements_; }
  /// Where slice `part` starts; may lie past the last real element.
  [[nodiscard]] constexpr std::uint64_t offset(std::uint64_t part) const noexcept {
    return part * slice_;
  }
  /// How many real elements slice `part` holds.
  [[nodiscard]] constexpr std::uint64_t size(std::uint64_t part) const noexcept {
    std::uint64_t const first = std::min(offset(part), elements_);
    return std::min(slice_, elements_ - first);
  }

  friend constexpr bool operator==(partition const&, partition const&) = default;

 private:
  std::uint64_t elements_ = 0;
  std::uint64_t parts_ = 1;
  std::uint64_t slice_ = 0;
};

static_assert(partition{10, 4}.slice() == 3 && partition{10, 4}.size(3) == 1);
static_assert(partition{6, 4}.size(3) == 0 && partition{0, 4}.padded() == 0);

}  // namespace zero::inline v0
