// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/any_span.hpp>
#include <zero/core/bfloat16.hpp>
#include <zero/core/config.hpp>
#include <zero/core/dtype.hpp>
#include <zero/core/error.hpp>
#include <zero/core/float16.hpp>
#include <zero/core/partition.hpp>

/// @file
/// All of the library that a plain C++20 compiler can use, but for checkpoints and `interop/`.
