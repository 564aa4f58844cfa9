// SPDX-License-Identifier: MIT
#pragma once
#include <cstddef>
#include <zero/core/good.hpp>
