// SPDX-License-Identifier: MIT
#pragma once
#include <zero/zero.hpp>
