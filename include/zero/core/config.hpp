// SPDX-License-Identifier: MIT
#pragma once

/// @file
/// The library's version. Everything public lives in `zero::`, inside the inline namespace `v0`, so
/// that two major versions can be linked into one program.

#define ZERO_VERSION_MAJOR 0
#define ZERO_VERSION_MINOR 1
#define ZERO_VERSION_PATCH 0

/// What a kernel calls is compiled for the device, too, where the compiler can.
#if defined(__CUDACC__)
#define ZERO_HOST_DEVICE __host__ __device__
#else
#define ZERO_HOST_DEVICE
#endif

namespace zero::inline v0 {

/// The version of the headers that a translation unit was compiled with.
struct version_number {
  int major;
  int minor;
  int patch;
};

inline constexpr version_number version{ZERO_VERSION_MAJOR, ZERO_VERSION_MINOR, ZERO_VERSION_PATCH};

}  // namespace zero::inline v0
