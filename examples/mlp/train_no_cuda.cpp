// SPDX-License-Identifier: MIT
#include "train.hpp"

#include <stdexcept>

// Takes the place of train_cuda.cpp where there is no CUDA compiler.

namespace mlp {

std::vector<outcome> train_on_cuda(settings const& /*settings*/, int /*stage*/,
                                   step_observer const& /*after_step*/) {
  throw std::runtime_error{
      "--device cuda: expected a build by a CUDA compiler, actual one without CUDA; the CMake "
      "preset cuda makes one"};
}

}  // namespace mlp
