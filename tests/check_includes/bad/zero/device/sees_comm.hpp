// SPDX-License-Identifier: MIT
#pragma once
#include <zero/comm/good.hpp>
#include <zero/core/good.hpp>
