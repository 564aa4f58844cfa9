// SPDX-License-Identifier: MIT
#pragma once

#include <zero/device/host_convert.hpp>
#include <zero/device/host_copy.hpp>
#include <zero/device/ordered_sum.hpp>

/// @file
/// The host kernels of collectives: `detail::ordered_sum`, `detail::host_copy` and
/// `detail::host_convert`. They run in the caller.
