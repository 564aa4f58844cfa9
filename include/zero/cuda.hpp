// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/loopback.hpp>
#include <zero/device/cuda.hpp>
#include <zero/zero.hpp>

/// @file
/// All of the library for CUDA devices. It needs the CUDA toolkit, and a CUDA compiler where a
/// model is made.
