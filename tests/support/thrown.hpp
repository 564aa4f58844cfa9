// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/error.hpp>

#include <algorithm>
#include <chrono>
#include <exception>
#include <initializer_list>
#include <string>
#include <string_view>

/// @file
/// What a call throws.

namespace test {

enum class kind { nothing, usage, communication, other };

/// What a call threw.
struct thrown {
  test::kind kind = test::kind::nothing;
  std::string message;  ///< empty where nothing was thrown
  int origin = -2;      ///< of a communication error
  std::chrono::milliseconds after{};

  [[nodiscard]] bool says(std::string_view part) const {
    return message.find(part) != std::string::npos;
  }
  [[nodiscard]] bool says(std::initializer_list<std::string_view> parts) const {
    return std::all_of(parts.begin(), parts.end(),
                       [this](std::string_view part) { return says(part); });
  }
  /// As a refusal must read: `operation`, once, a colon, what was expected, what is actual, and on
  /// which rank.
  [[nodiscard]] bool refuses(std::string const& operation, int rank) const {
    return message.rfind(operation + ": ") == 0 &&
           says({"expected", "actual", "(rank " + std::to_string(rank) + ")"});
  }
};

/// The `Error` that `call()` throws, and when; what isn't one goes on to the caller.
template <class Error = std::exception, class Call>
[[nodiscard]] thrown what_throws(Call&& call) {
  using clock = std::chrono::steady_clock;
  thrown out;
  auto const start = clock::now();
  try {
    call();
  } catch (Error const& caught) {
    std::exception const& error = caught;
    out.kind = kind::other;
    out.message = error.what();
    if (dynamic_cast<zero::usage_error const*>(&error) != nullptr) {
      out.kind = kind::usage;
    } else if (auto const* const failure = dynamic_cast<zero::communication_error const*>(&error)) {
      out.kind = kind::communication;
      out.origin = failure->origin();
    }
  }
  out.after = std::chrono::duration_cast<std::chrono::milliseconds>(clock::now() - start);
  return out;
}

/// The communication error that `call()` throws.
template <class Call>
[[nodiscard]] thrown failure_of(Call&& call) {
  return what_throws<zero::communication_error>(call);
}

/// The text of the `Error` that `call()` throws; empty where it throws nothing.
template <class Error = zero::usage_error, class Call>
[[nodiscard]] std::string message_of(Call&& call) {
  return what_throws<Error>(call).message;
}

}  // namespace test
