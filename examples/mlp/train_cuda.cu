// SPDX-License-Identifier: MIT
// The same for the CUDA compiler.
#include "train_cuda.cpp"
