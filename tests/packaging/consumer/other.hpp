// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>

std::uint64_t other_slice();
