// SPDX-License-Identifier: MIT
#include <zero/zero.hpp>

#include <cstdio>

int main() {
  zero::run_threads(4, [](zero::thread_communicator& comm) {  // ranks are threads
    auto ones = [](std::span<float> out, std::size_t) { std::ranges::fill(out, 1.0F); };
    std::vector<std::vector<zero::any_parameter>> units{
        {zero::parameter<float>("w", {500, 500}, ones)}};
    zero::sharded_model model{comm, units, zero::stage3{}, zero::adamw{.learning_rate = 0.1},
                              zero::reduce_per_microbatch{}};
    for (int i = 0; i < 100; ++i) {
      {
        auto micro = model.microbatch(0, 1);
        auto lease = micro.backward(0);  // w is whole while the lease lives
        auto w = lease.parameter<float>(0), gradient = lease.gradient<float>(0);
        for (std::size_t j = 0; j < w.size(); ++j) {  // this rank's loss is |w - 2 rank|^2 / 2
          gradient[j] = w[j] - 2.0F * static_cast<float>(comm.rank());
        }
      }
      model.step();
    }
    auto evaluation = model.evaluation();
    float const w0 = evaluation.forward(0).parameter<float>(0)[0];
    if (comm.rank() == 0) std::printf("w[0] = %.2f\n%s", w0, model.plan().describe().c_str());
  });
}
