// SPDX-License-Identifier: MIT
#pragma once

#include <doctest/doctest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <string>

/// @file
/// A test case of this program in a process of its own: it may crash, race, or end.

#if defined(__SANITIZE_THREAD__)
#define FAKE_HAS_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define FAKE_HAS_TSAN 1
#endif
#endif
#if !defined(FAKE_HAS_TSAN)
#define FAKE_HAS_TSAN 0
#endif

namespace fake {

/// Runs the skipped test case `name` with `variables` in its environment.
class child {
 public:
  int status = 0;
  std::string output;

  explicit child(std::string const& name, std::string const& variables = "FAKE_CHILD=1") {
    std::array<char, 4096> self{};
    REQUIRE(readlink("/proc/self/exe", self.data(), self.size() - 1) > 0);
    std::string const command = variables + " timeout 60 '" + std::string{self.data()} +
                                "' --no-skip --test-case=\"" + name + "\" 2>&1";
    FILE* const pipe = popen(command.c_str(), "r");
    REQUIRE(pipe != nullptr);
    std::array<char, 4096> part{};
    while (std::size_t const got = std::fread(part.data(), 1, part.size(), pipe)) {
      output.append(part.data(), got);
    }
    status = pclose(pipe);
  }
};

}  // namespace fake
