// SPDX-License-Identifier: MIT
#pragma once
#include <zero/core/good.hpp>
#include <cstddef>
