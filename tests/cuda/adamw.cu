// SPDX-License-Identifier: MIT
// AdamW's kernels, which check_ptx.py reads.
#include <zero/cuda.hpp>

template <class Parameter, class Gradient>
using update = zero::detail::update_elements<zero::adamw, Parameter, Gradient>;

void launch(zero::cuda_stream& stream, std::size_t n, update<float, float> const& fp32,
            update<zero::bfloat16, zero::bfloat16> const& bf16,
            update<zero::bfloat16, float> const& mixed) {
  zero::cuda::launch(stream, n, fp32);
  zero::cuda::launch(stream, n, bf16);
  zero::cuda::launch(stream, n, mixed);
}
