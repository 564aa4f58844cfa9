// SPDX-License-Identifier: MIT
#pragma once
#include <iostream>
