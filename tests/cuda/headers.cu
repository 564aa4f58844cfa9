// SPDX-License-Identifier: MIT
// All of the library goes through the CUDA compiler, and its host code runs.
#include <zero/zero.hpp>

int main() { return zero::partition{10, 4}.slice() == 3 ? 0 : 1; }
