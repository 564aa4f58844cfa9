// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/config.hpp>

#include <cstddef>
#include <cstring>

/// @file
/// Copies on the host, at the speed of its memory.

namespace zero::inline v0::detail {

/// Copy `bytes` bytes. The ranges don't overlap, or are the same.
inline void host_copy(void* to, void const* from, std::size_t bytes) noexcept {
  if (bytes != 0 && to != from) {
    std::memcpy(to, from, bytes);
  }
}

}  // namespace zero::inline v0::detail
