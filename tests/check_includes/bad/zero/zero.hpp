// SPDX-License-Identifier: MIT
#pragma once
#include <zero/core/sees_device.hpp>
#include <zero/interop/sees_device.hpp>
