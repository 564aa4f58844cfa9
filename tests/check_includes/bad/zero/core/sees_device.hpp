// SPDX-License-Identifier: MIT
#pragma once
#include <zero/device/good.hpp>
