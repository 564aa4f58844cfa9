// SPDX-License-Identifier: MIT
#pragma once
#include <cstddef>
