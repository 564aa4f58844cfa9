// SPDX-License-Identifier: MIT
// Every kernel of the library, but for those of AdamW.
#include <zero/cuda.hpp>

void move(zero::cuda_stream& stream, zero::any_span from, zero::any_span to) {
  void const* const source = from.data();
  zero::cuda::convert(stream, from, to);
  zero::cuda::sum(stream, {&source, 1}, from.dtype(), to, false, 1);
}

/// A model over ranks that share a GPU: the kernels of a step, with each optimizer.
template <class Optimizer>
void step(zero::loopback& comm, std::vector<std::vector<zero::any_parameter>> const& units) {
  zero::sharded_model model{
      comm, units, zero::stage3{}, Optimizer{}, zero::reduce_per_microbatch{}, {.clip_norm = 1.0}};
  model.step();
}
template void step<zero::adam>(zero::loopback&,
                               std::vector<std::vector<zero::any_parameter>> const&);
template void step<zero::sgd>(zero::loopback&,
                              std::vector<std::vector<zero::any_parameter>> const&);
template void step<zero::plain_sgd>(zero::loopback&,
                                    std::vector<std::vector<zero::any_parameter>> const&);
