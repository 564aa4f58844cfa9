// SPDX-License-Identifier: MIT
#include "other.hpp"

#include <zero/zero.hpp>

std::uint64_t other_slice() { return zero::partition{10, 4}.slice(); }
