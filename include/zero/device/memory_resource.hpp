// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/config.hpp>

#include <cstddef>

/// @file
/// `memory_resource`: a user's allocator, for the one allocation of an arena.

namespace zero::inline v0 {

/// Where an arena's memory comes from. Without functions, from `Device::allocate`.
struct memory_resource {
  /// Memory at a multiple of `Device::alignment_bytes`; throws where there is none.
  void* (*allocate)(std::size_t bytes, void* context) = nullptr;
  /// Throws nothing.
  void (*deallocate)(void* memory, std::size_t bytes, void* context) = nullptr;
  void* context = nullptr;
  /// A communicator that can may register it (`zero::nccl_memory`).
  bool may_be_registered = false;
};

}  // namespace zero::inline v0
