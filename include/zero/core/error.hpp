// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/config.hpp>

#include <array>
#include <concepts>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <string_view>

/// @file
/// The exceptions that the library throws. A message names the operation, what was expected, what
/// was found, and the rank: `reduce_scatter: expected a multiple of 4 elements, actual 10
/// (rank 2)`.

namespace zero::inline v0 {

/// The base of every exception that the library throws.
class error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A broken precondition, found before any communication: nothing was changed.
class usage_error : public error {
 public:
  using error::error;
};

/// A peer failed, left, disagreed, or missed the deadline; the communicator can't be used any more.
class communication_error : public error {
 public:
  explicit communication_error(std::string const& message, int origin = -1)
      : error{message}, origin_{origin} {}

  /// The rank that failed first, or -1 where the transport can't know it.
  [[nodiscard]] int origin() const noexcept { return origin_; }

 private:
  int origin_;
};

namespace detail {

inline void append(std::string& out, std::string_view part) { out += part; }
inline void append(std::string& out, std::integral auto part) { out += std::to_string(part); }
inline void append(std::string& out, std::floating_point auto part) {
  std::array<char, 32> digits;
  std::snprintf(digits.data(), digits.size(), "%g", static_cast<double>(part));
  out += digits.data();
}

/// Join text and numbers into one message (no streams: they are slow to include).
template <class... Parts>
[[nodiscard]] std::string text(Parts const&... parts) {
  std::string out;
  (append(out, parts), ...);
  return out;
}

}  // namespace detail
}  // namespace zero::inline v0
