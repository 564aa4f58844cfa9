// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/config.hpp>

#include <cstddef>
#include <cstdint>

/// @file
/// `memory_resource`: a user's allocator, for the one allocation of an arena.

namespace zero::inline v0 {

/// What NCCL gets to know of an arena; other communicators nothing.
enum class memory_registration : std::uint8_t {
  none,
  buffer,  ///< it is registered
  window   ///< and is a symmetric window, too, but for gradient slots (`nccl::register_memory`).
           ///< The memory is that of `ncclMemAlloc`, at a multiple of 4096 bytes (`nccl_memory`)
};

/// Where an arena's memory comes from. Without functions, from `Device::allocate`.
struct memory_resource {
  /// Memory at a multiple of `Device::alignment_bytes`; throws where there is none.
  void* (*allocate)(std::size_t bytes, void* context) = nullptr;
  /// Throws nothing.
  void (*deallocate)(void* memory, std::size_t bytes, void* context) = nullptr;
  void* context = nullptr;
  memory_registration registration = memory_registration::none;  ///< the same on every rank
};

}  // namespace zero::inline v0
