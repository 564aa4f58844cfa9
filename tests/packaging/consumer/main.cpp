// SPDX-License-Identifier: MIT
#include "other.hpp"

#include <zero/zero.hpp>

#include <thread>

/// Two translation units with all of zero in them, and threads, link into one program.
int main() {
  std::uint64_t slice = 0;
  std::thread{[&] { slice = zero::partition{10, 4}.slice(); }}.join();
  return slice == other_slice() ? 0 : 1;
}
