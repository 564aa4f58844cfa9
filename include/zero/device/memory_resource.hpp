// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/config.hpp>

#include <cstddef>
#include <cstdint>

/// @file
/// `memory_resource`: a user's allocator, for the one allocation of an arena.

namespace zero::inline v0 {

/// What a communicator that can does with an arena's memory.
enum class memory_registration : std::uint8_t {
  none,
  buffer,  ///< it registers all of it
  window   ///< and what has the same offset on every rank as a symmetric window, where it has
           ///< them: memory that peers can map, as that of `ncclMemAlloc`
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
