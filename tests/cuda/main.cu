// SPDX-License-Identifier: MIT
#define DOCTEST_CONFIG_IMPLEMENT
#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include <cstdio>

#if !defined(ZERO_TEST_GPUS)
#define ZERO_TEST_GPUS 1
#endif

/// With fewer GPUs than the program needs it says so, and CTest counts it as skipped.
int main(int argc, char** argv) {
  int count = 0;
  if (cudaError_t const found = cudaGetDeviceCount(&count);
      found != cudaSuccess || count < ZERO_TEST_GPUS) {
    std::printf("skipped: expected at least %d GPUs, actual %d (%s)\n", ZERO_TEST_GPUS, count,
                cudaGetErrorString(found));
    return 77;
  }
  return doctest::Context{argc, argv}.run();
}
