// SPDX-License-Identifier: MIT
#include "products_cuda.hpp"
#include "train_rank.hpp"

#include <zero/cuda.hpp>
#if defined(MLP_NCCL)
#include <zero/comm/nccl.hpp>
#endif

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

// Training on GPUs: products by cuBLAS, whose bfloat16 zero is told to be one.

template <>
struct zero::dtype_traits<__nv_bfloat16> {
  static constexpr dtype value = dtype::bfloat16;
};

namespace mlp {
namespace {

/// What is wrong with a driver that there is, zero says.
void check_gpu() {
  int driver = 0;
  int count = 0;
  if (cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0) {
    throw std::runtime_error{"--device cuda: expected a GPU, actual none: no CUDA driver"};
  }
  cudaError_t const error = cudaGetDeviceCount(&count);
  if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0)) {
    throw std::runtime_error{"--device cuda: expected a GPU, actual none"};
  }
}

}  // namespace

std::vector<outcome> train_on_cuda(settings const& settings, int stage,
                                   step_observer const& after_step) {
  check_gpu();
  std::vector<outcome> out(static_cast<std::size_t>(settings.ranks));
  auto const on_rank = rank_function<__nv_bfloat16>(settings, stage, after_step, out);
  switch (settings.communicator) {
    case communicator::loopback: zero::run_loopback(settings.ranks, on_rank); break;
    case communicator::nccl:
#if defined(MLP_NCCL)
      zero::run_nccl(settings.ranks, on_rank);
      break;
#else
      throw std::runtime_error{
          "--communicator nccl: expected a build with NCCL, actual one without"};
#endif
    case communicator::threads: break;  // on the host only
  }
  return out;
}

}  // namespace mlp
