// SPDX-License-Identifier: MIT
#include <zero/comm/run_threads.hpp>
#include <zero/core/partition.hpp>
#include <zero/optim/adam.hpp>
#include <zero/optim/sharded_state.hpp>

#include <cstddef>
#include <cstdio>
#include <span>
#include <vector>

// Four ranks train one vector x of 10 numbers. Each has all of x and a gradient for all of it, but
// Adam's state (m and v) for its own slice only:
//
//                 rank 0    rank 1    rank 2    rank 3
//   x, gradient   0 ... 9   0 ... 9   0 ... 9   0 ... 9
//   m, v          0 1 2     3 4 5     6 7 8     9
//
// A step averages the gradients, each rank keeping its slice of them, updates its slice of x, and
// collects the slices of all ranks.
int main() {
  constexpr std::size_t ranks = 4;
  zero::partition const cut{10, ranks};
  std::vector<std::size_t> state_bytes(ranks);
  std::vector<float> result;

  zero::run_threads(ranks, [&](zero::thread_communicator& comm) {
    auto const rank = static_cast<std::size_t>(comm.rank());
    std::vector<float> x(cut.padded()), gradient(cut.padded());
    auto const slice = std::span{x}.subspan(cut.offset(rank), cut.slice());  // rank 3's is padded
    auto const gradient_slice = std::span{gradient}.subspan(cut.offset(rank), cut.slice());
    auto const mine = slice.first(cut.size(rank));
    auto const my_gradient = gradient_slice.first(mine.size());
    zero::sharded_optimizer_state state{zero::adam{.learning_rate = 0.1}, mine};
    zero::host_stream stream;

    for (int step = 0; step < 500; ++step) {
      for (std::size_t i = 0; i < cut.elements(); ++i) {  // the loss is (x - target)^2 / 2, and
        float const target = static_cast<float>(i + rank) - 1.5F;  // the target is i on average
        gradient[i] = x[i] - target;
      }
      comm.reduce_scatter(std::span{gradient}, gradient_slice, zero::combine::overwrite,
                          zero::reduction::average, stream);
      state.step(mine, my_gradient);
      comm.all_gather(slice, std::span{x}, stream);
    }
    state_bytes[rank] = state.bytes();
    if (rank == 0) result = x;
  });

  for (std::size_t r = 0; r < ranks; ++r) {
    std::printf("rank %zu: m, v of %zu element(s), %zu bytes\n", r, cut.size(r), state_bytes[r]);
  }
  for (std::size_t i = 0; i < cut.elements(); ++i) {
    std::printf("x[%zu] = %.3f\n", i, static_cast<double>(result[i]));
  }
}
