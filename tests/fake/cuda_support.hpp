// SPDX-License-Identifier: MIT
#pragma once

#include <fake/cuda.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <string>
#include <type_traits>

/// @file
/// Shorthands for tests of the fake CUDA runtime.

namespace cuda_test {

template <class F>
cudaError_t launch(cudaStream_t stream, F functor) {
  static_assert(std::is_trivially_copyable_v<F>);
  return zeroFakeLaunch(
      stream, [](void const* stored) { (*static_cast<F const*>(stored))(); }, &functor, sizeof(F));
}

inline void ok(cudaError_t error) {
  REQUIRE(std::string{cudaGetErrorName(error)} == "cudaSuccess");
}

inline cudaStream_t make_stream(unsigned int flags = cudaStreamNonBlocking) {
  cudaStream_t stream = nullptr;
  ok(cudaStreamCreateWithFlags(&stream, flags));
  return stream;
}

inline cudaEvent_t make_event(unsigned int flags = cudaEventDisableTiming) {
  cudaEvent_t event = nullptr;
  ok(cudaEventCreateWithFlags(&event, flags));
  return event;
}

template <class T>
T* make_device(std::size_t count) {
  void* memory = nullptr;
  ok(cudaMalloc(&memory, count * sizeof(T)));
  return static_cast<T*>(memory);
}

template <class T>
T* make_pinned(std::size_t count) {
  void* memory = nullptr;
  ok(cudaMallocHost(&memory, count * sizeof(T)));
  return static_cast<T*>(memory);
}

}  // namespace cuda_test
