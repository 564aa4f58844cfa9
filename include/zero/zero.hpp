// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/any_span.hpp>
#include <zero/core/bfloat16.hpp>
#include <zero/core/config.hpp>
#include <zero/core/dtype.hpp>
#include <zero/core/error.hpp>
#include <zero/core/float16.hpp>
#include <zero/core/partition.hpp>
#include <zero/device/arena.hpp>
#include <zero/device/concept.hpp>
#include <zero/device/host.hpp>
#include <zero/device/host_convert.hpp>
#include <zero/device/host_copy.hpp>
#include <zero/device/host_kernels.hpp>
#include <zero/device/host_queue.hpp>
#include <zero/device/host_stream.hpp>
#include <zero/device/ledger.hpp>
#include <zero/device/ordered_sum.hpp>
#include <zero/device/pack.hpp>
#include <zero/device/vector.hpp>
#include <zero/device/wait.hpp>

/// @file
/// All of the library that a plain C++20 compiler can use, but for checkpoints and `interop/`.
