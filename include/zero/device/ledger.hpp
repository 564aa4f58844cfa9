// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/config.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

/// @file
/// The bytes of a run by category. A plan and the arena's ledger are both `memory_bytes`, so that
/// they can be compared to the byte.

namespace zero::inline v0 {

/// What elements of tensors in device memory are for. `engine` is memory that the user's engine
/// holds on its own.
enum class category : std::uint8_t {
  parameters,
  gradients,
  optimizer_state,
  gathered_units,
  gradient_buckets,
  staging,
  engine,
};

inline constexpr std::size_t category_count = 7;

[[nodiscard]] constexpr std::string_view name(category kind) noexcept {
  constexpr std::array<std::string_view, category_count> names{
      "parameters",       "gradients", "optimizer_state", "gathered_units",
      "gradient_buckets", "staging",   "engine"};
  return names[static_cast<std::size_t>(kind)];
}

/// Bytes by category. A category counts real elements.
class memory_bytes {
 public:
  /// What is not an element of a tensor: alignment, and what a step keeps beside tensors (counters,
  /// flags, norms, hyperparameters).
  std::uint64_t padding = 0;

  [[nodiscard]] constexpr std::uint64_t& operator[](category kind) noexcept {
    return real_[static_cast<std::size_t>(kind)];
  }
  [[nodiscard]] constexpr std::uint64_t operator[](category kind) const noexcept {
    return real_[static_cast<std::size_t>(kind)];
  }

  /// All categories and the padding.
  [[nodiscard]] constexpr std::uint64_t peak() const noexcept {
    std::uint64_t sum = padding;
    for (std::uint64_t const bytes : real_) {
      sum += bytes;
    }
    return sum;
  }

  /// What the library itself allocates: the peak without `engine`.
  [[nodiscard]] constexpr std::uint64_t arena() const noexcept {
    return peak() - (*this)[category::engine];
  }

  friend constexpr bool operator==(memory_bytes const&, memory_bytes const&) = default;

 private:
  std::array<std::uint64_t, category_count> real_{};
};

}  // namespace zero::inline v0
