// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/nccl_options.hpp>
#include <zero/core/error.hpp>
#include <zero/device/cuda_error.hpp>
#include <zero/device/cuda_stream.hpp>
#include <zero/device/memory_resource.hpp>

#include <nccl.h>

#include <cstddef>

/// @file
/// `nccl_memory`: an arena that NCCL allocates, for `zero::options::memory`.

namespace zero::inline v0 {
namespace detail {

/// @throws zero::error  NCCL has no memory; says how much is free, and what NCCL says.
inline void* nccl_allocate(std::size_t bytes, void* /*context*/ = nullptr) {
  void* memory = nullptr;
  if (ncclResult_t const code = ncclMemAlloc(&memory, bytes); code != ncclSuccess) {
    throw error{text(no_memory_text("ncclMemAlloc", bytes), ": ", nccl_reason(code, nullptr),
                     rank_suffix())};
  }
  return memory;
}

inline void nccl_deallocate(void* memory, std::size_t /*bytes*/,
                            void* /*context*/ = nullptr) noexcept {
  relaxed_capture const relaxed;
  static_cast<void>(ncclMemFree(memory));
}

}  // namespace detail

/// Memory of `ncclMemAlloc`, which the model's communicator registers, as a symmetric window, too.
[[nodiscard]] inline memory_resource nccl_memory() noexcept {
  return {detail::nccl_allocate, detail::nccl_deallocate, nullptr, memory_registration::window};
}

}  // namespace zero::inline v0
