// SPDX-License-Identifier: MIT
#pragma once

#include <cuda_runtime_api.h>
#if defined(ZERO_FAKE_CUDA)
#include <fake/cuda.hpp>
#endif

#include <initializer_list>
#include <vector>

/// @file
/// How many ranks a test over GPUs can have, on this machine or over the fake of the CUDA runtime.

namespace test {

/// Those of `ranks` for which there are GPUs; of the fake, all.
[[nodiscard]] inline std::vector<int> ranks_with_gpus(std::initializer_list<int> ranks) {
  int count = 0;
  std::vector<int> out;
  for (int const each : ranks) {
#if defined(ZERO_FAKE_CUDA)
    fake::set_device_count(count = each > count ? each : count);
#else
    static_cast<void>(cudaGetDeviceCount(&count));
#endif
    if (each <= count) {
      out.push_back(each);
    }
  }
  return out;
}

}  // namespace test
