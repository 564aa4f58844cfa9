// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>

/// @file
/// Kernels as a GPU runs them: a thread for each range of `grain` elements, in no order. (A launch
/// on the host, or over the fake of the CUDA runtime, is one range.)

namespace test {

/// Call `kernel(first, count)` for each range, here the last one first.
template <class Kernel>
void by_grain(Kernel const& kernel, std::size_t n) {
  for (std::size_t first = (n + Kernel::grain - 1) / Kernel::grain * Kernel::grain; first != 0;) {
    first -= Kernel::grain;
    kernel(first, std::min(Kernel::grain, n - first));
  }
}

/// The sum of what the kernel returns for each range.
template <class Sum, class Kernel>
[[nodiscard]] Sum sum_by_grain(Kernel const& kernel, std::size_t n) {
  Sum sum{};
  for (std::size_t first = 0; first < n; first += Kernel::grain) {
    sum += kernel(first, std::min(Kernel::grain, n - first));
  }
  return sum;
}

}  // namespace test
