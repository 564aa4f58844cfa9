// SPDX-License-Identifier: MIT
#pragma once
#include <zero/interop/sees_device.hpp>
