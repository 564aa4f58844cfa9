// SPDX-License-Identifier: MIT
#pragma once
#include <zero/core/missing.hpp>
