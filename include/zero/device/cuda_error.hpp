// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/error.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string_view>

/// @file
/// What a failed call of the CUDA runtime throws.

namespace zero::inline v0 {

/// A call of the CUDA runtime failed. The message names it, the error and the rank.
class cuda_error : public error {
 public:
  cuda_error(std::string const& message, cudaError_t code) : error{message}, code_{code} {}

  [[nodiscard]] cudaError_t code() const noexcept { return code_; }

 private:
  cudaError_t code_;
};

namespace detail {

/// The rank that this thread works for, or -1: communicators set it where they are made or used.
inline thread_local int rank_of_thread = -1;

[[nodiscard]] inline std::string rank_suffix() {
  return rank_of_thread < 0 ? std::string{} : text(" (rank ", rank_of_thread, ")");
}

/// Versions of CUDA are 1000 * major + 10 * minor; 0 is none.
[[nodiscard]] inline std::string cuda_version_text(int version) {
  return version == 0 ? std::string{"no CUDA"}
                      : text("CUDA ", version / 1000, ".", version % 1000 / 10);
}

/// With the versions where the driver is too old for the runtime that the program has.
[[nodiscard]] inline std::string version_suffix(cudaError_t code) {
  int driver = 0;
  int runtime = 0;
  if (code != cudaErrorInsufficientDriver || cudaDriverGetVersion(&driver) != cudaSuccess ||
      cudaRuntimeGetVersion(&runtime) != cudaSuccess) {
    return {};
  }
  return text("; expected a driver of ", cuda_version_text(runtime), ", as the program, actual ",
              cuda_version_text(driver));
}

[[noreturn]] inline void throw_cuda(cudaError_t code, std::string_view call) {
  static_cast<void>(cudaGetLastError());  // one that isn't sticky is done with
  throw cuda_error{text(call, ": expected success, actual ", cudaGetErrorName(code), ": ",
                        cudaGetErrorString(code), version_suffix(code), rank_suffix()),
                   code};
}

/// @throws zero::cuda_error  `code` is no success.
inline void check_cuda(cudaError_t code, std::string_view call) {
  if (code != cudaSuccess) {
    throw_cuda(code, call);
  }
}

/// What a call says that found too little memory on the current device.
/// @throws zero::cuda_error  CUDA doesn't tell how much is free.
[[nodiscard]] inline std::string no_memory_text(std::string_view call, std::size_t bytes) {
  static_cast<void>(cudaGetLastError());
  std::size_t free = 0;
  std::size_t total = 0;
  check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return text(call, ": expected memory for ", bytes, " bytes, actual ", free, " free of ", total);
}

}  // namespace detail
}  // namespace zero::inline v0
