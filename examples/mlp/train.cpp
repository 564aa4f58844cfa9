// SPDX-License-Identifier: MIT
#include "train.hpp"

namespace mlp {

std::vector<outcome> train(settings const& settings, int stage, step_observer const& after_step) {
  return settings.device == device::cuda ? train_on_cuda(settings, stage, after_step)
                                         : train_on_host(settings, stage, after_step);
}

}  // namespace mlp
