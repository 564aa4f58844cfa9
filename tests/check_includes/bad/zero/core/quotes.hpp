// SPDX-License-Identifier: MIT
#pragma once
#include "good.hpp"
