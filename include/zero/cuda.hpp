// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/loopback.hpp>
#include <zero/device/cuda.hpp>
#include <zero/zero.hpp>

#if __has_include(<nccl.h>)
#include <zero/comm/nccl.hpp>
#endif

/// @file
/// All of the library for CUDA devices, and for NCCL where that is installed. It needs the CUDA
/// toolkit, and a CUDA compiler where a model is made.
