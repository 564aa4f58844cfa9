// SPDX-License-Identifier: MIT
#pragma once

#include "products.hpp"
#include "tensor.hpp"

#include <zero/device/cuda.hpp>

#include <cublas_v2.h>

#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>

/// @file
/// The products on a GPU, by cuBLAS, whose matrices are stored column after column: what it takes
/// for a matrix is the transpose of this example's.

namespace mlp {

inline void check_cublas(cublasStatus_t status, char const* call) {
  if (status != CUBLAS_STATUS_SUCCESS) {
    throw std::runtime_error{std::string{call} + ": expected success, actual " +
                             cublasGetStatusString(status)};
  }
}

/// T is float or a bfloat16, which cuBLAS multiplies with its like only: activations are rounded to
/// it first.
template <class T>
class products<T, zero::cuda> {
 public:
  explicit products(zero::cuda_stream& stream) : stream_{stream} {
    cublasHandle_t handle = nullptr;
    check_cublas(cublasCreate(&handle), "cublasCreate");
    handle_.reset(handle);
    check_cublas(cublasSetStream(handle, stream.native()), "cublasSetStream");
  }

  void forward(product_shape of, float const* input, T const* weight, float* output) {
    multiply({CUBLAS_OP_N, weight, of.outputs},
             {CUBLAS_OP_N, narrow(input, of.rows * of.inputs, narrow_input_), of.inputs},
             {of.outputs, of.rows, of.inputs}, output, false);
  }

  void weight_gradient(product_shape of, float const* input, float const* output_gradient,
                       T* gradient, bool accumulate) {
    if (of.rows == 0 && !accumulate) {
      zero::cuda::fill_zero(stream_, std::span{gradient, of.inputs * of.outputs});
    }
    multiply(
        {CUBLAS_OP_N, narrow(output_gradient, of.rows * of.outputs, narrow_output_), of.outputs},
        {CUBLAS_OP_T, narrow(input, of.rows * of.inputs, narrow_input_), of.inputs},
        {of.outputs, of.inputs, of.rows}, gradient, accumulate);
  }

  void input_gradient(product_shape of, float const* output_gradient, T const* weight,
                      float* gradient) {
    multiply(
        {CUBLAS_OP_T, weight, of.outputs},
        {CUBLAS_OP_N, narrow(output_gradient, of.rows * of.outputs, narrow_output_), of.outputs},
        {of.inputs, of.rows, of.outputs}, gradient, false);
  }

 private:
  struct destroy {
    void operator()(cublasHandle_t handle) const { cublasDestroy(handle); }
  };
  struct factor {
    cublasOperation_t operation;
    T const* data;
    std::size_t leading;
  };
  struct sizes {
    std::size_t m;
    std::size_t n;
    std::size_t k;
  };

  /// The floats at `from`, or a copy in T.
  T const* narrow(float const* from, std::size_t size, tensor<T, zero::cuda>& copy) {
    if constexpr (std::is_same_v<T, float>) {
      return from;
    } else {
      copy.grow(size);
      zero::cuda::convert(stream_, std::span{from, size}, std::span{copy.data(), size});
      return copy.data();
    }
  }

  /// c [m, n] = a [m, k] * b [k, n], or that much more.
  template <class Result>
  void multiply(factor a, factor b, sizes of, Result* c, bool accumulate) {
    if (of.m == 0 || of.n == 0 || of.k == 0) {
      return;
    }
    auto const integer = [](std::size_t size) { return static_cast<int>(size); };
    float const one = 1;
    float const before = accumulate ? 1 : 0;
    if constexpr (std::is_same_v<T, float>) {
      check_cublas(cublasSgemm(handle_.get(), a.operation, b.operation, integer(of.m),
                               integer(of.n), integer(of.k), &one, a.data, integer(a.leading),
                               b.data, integer(b.leading), &before, c, integer(of.m)),
                   "cublasSgemm");
    } else {
      auto const type = std::is_same_v<Result, float> ? CUDA_R_32F : CUDA_R_16BF;
      check_cublas(
          cublasGemmEx(handle_.get(), a.operation, b.operation, integer(of.m), integer(of.n),
                       integer(of.k), &one, a.data, CUDA_R_16BF, integer(a.leading), b.data,
                       CUDA_R_16BF, integer(b.leading), &before, c, type, integer(of.m),
                       CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
          "cublasGemmEx");
    }
  }

  zero::cuda_stream& stream_;
  std::unique_ptr<cublasContext, destroy> handle_;
  tensor<T, zero::cuda> narrow_input_;
  tensor<T, zero::cuda> narrow_output_;
};

}  // namespace mlp
