// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/config.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

/// @file
/// The bytes that a rank sends, by what they are for.

namespace zero::inline v0 {

/// What bytes on the wire are for.
enum class traffic : std::uint8_t {
  gradients,
  parameters,
  evaluation,
  recomputation,
  mispredicted,
  bind,
  control
};

inline constexpr std::size_t traffic_count = 7;

[[nodiscard]] constexpr std::string_view name(traffic what) noexcept {
  switch (what) {
    case traffic::gradients: return "gradients";
    case traffic::parameters: return "parameters";
    case traffic::evaluation: return "evaluation";
    case traffic::recomputation: return "recomputation";
    case traffic::mispredicted: return "mispredicted";
    case traffic::bind: return "bind";
    case traffic::control: return "control";
  }
  return "unknown";
}

/// Bytes for each kind of traffic.
class traffic_bytes {
 public:
  [[nodiscard]] constexpr std::uint64_t& operator[](traffic what) noexcept {
    return bytes_[static_cast<std::size_t>(what)];
  }
  [[nodiscard]] constexpr std::uint64_t operator[](traffic what) const noexcept {
    return bytes_[static_cast<std::size_t>(what)];
  }

  [[nodiscard]] constexpr std::uint64_t total() const noexcept {
    std::uint64_t sum = 0;
    for (std::uint64_t const bytes : bytes_) {
      sum += bytes;
    }
    return sum;
  }

  friend constexpr bool operator==(traffic_bytes const&, traffic_bytes const&) = default;

 private:
  std::array<std::uint64_t, traffic_count> bytes_{};
};

}  // namespace zero::inline v0
