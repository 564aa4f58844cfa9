// SPDX-License-Identifier: MIT
#include "products_host.hpp"
#include "train_rank.hpp"

#include <zero/comm/run_threads.hpp>

#include <Eigen/Core>

// Training on the host: products by Eigen, whose bfloat16 zero is told to be one.

template <>
struct zero::dtype_traits<Eigen::bfloat16> {
  static constexpr dtype value = dtype::bfloat16;
};

namespace mlp {

std::vector<outcome> train_on_host(settings const& settings, int stage,
                                   step_observer const& after_step) {
  std::vector<outcome> out(static_cast<std::size_t>(settings.ranks));
  auto const on_rank = rank_function<Eigen::bfloat16>(settings, stage, after_step, out);
  zero::run_threads(settings.ranks, [&](zero::thread_communicator& comm) { on_rank(comm); });
  return out;
}

}  // namespace mlp
