// SPDX-License-Identifier: MIT
#define DOCTEST_CONFIG_IMPLEMENT
#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include <cstdio>

/// Without a GPU the program says so, and CTest counts it as skipped.
int main(int argc, char** argv) {
  int count = 0;
  if (cudaError_t const found = cudaGetDeviceCount(&count); found != cudaSuccess || count == 0) {
    std::printf("skipped: expected a GPU, actual none (%s)\n", cudaGetErrorString(found));
    return 77;
  }
  return doctest::Context{argc, argv}.run();
}
