// SPDX-License-Identifier: MIT
#if __has_include(<cublas_v2.h>)

#include <fake/cuda.hpp>

#include <cublas_v2.h>
#include <cuda_bf16.h>

#include <cstddef>
#include <vector>

// The functions of cuBLAS that the examples call: loops that run in the order of the handle's
// stream. Sums are floats in the order of k.

struct cublasContext {
  cudaStream_t stream = nullptr;
};

namespace {

/// A matrix of cuBLAS, stored column after column, transposed or not.
template <class T>
struct matrix {
  T* data;
  std::size_t leading;
  bool transposed = false;

  [[nodiscard]] T& operator()(std::size_t row, std::size_t column) const {
    return transposed ? data[column + row * leading] : data[row + column * leading];
  }
};

struct sizes {
  std::size_t m;
  std::size_t n;
  std::size_t k;
};

template <class T, class Result>
void multiply(sizes of, float alpha, matrix<T const> a, matrix<T const> b, float beta,
              matrix<Result> c) {
  std::vector<float> left(of.m * of.k);  // a, row after row
  std::vector<float> sums(of.m);
  for (std::size_t k = 0; k < of.k; ++k) {
    for (std::size_t i = 0; i < of.m; ++i) {
      left[k * of.m + i] = static_cast<float>(a(i, k));
    }
  }
  for (std::size_t j = 0; j < of.n; ++j) {
    sums.assign(of.m, 0);
    for (std::size_t k = 0; k < of.k; ++k) {
      float const right = static_cast<float>(b(k, j));
      for (std::size_t i = 0; i < of.m; ++i) {
        sums[i] += left[k * of.m + i] * right;
      }
    }
    for (std::size_t i = 0; i < of.m; ++i) {
      float const before = beta == 0 ? 0 : beta * static_cast<float>(c(i, j));
      c(i, j) = static_cast<Result>(alpha * sums[i] + before);
    }
  }
}

/// As cuBLAS checks them: rows of what is stored, at most the leading dimension.
bool legal(cublasOperation_t operation, int rows, int columns, int leading) {
  return rows >= 0 && columns >= 0 && leading >= 1 &&
         leading >= (operation == CUBLAS_OP_N ? rows : columns);
}

template <class T, class Result>
cublasStatus_t enqueue(char const* call, cublasHandle_t handle, cublasOperation_t ta,
                       cublasOperation_t tb, int m, int n, int k, float alpha, void const* a,
                       int lda, void const* b, int ldb, float beta, void* c, int ldc) {
  fake::count(call);
  if (fake::fail_if_told(call) != cudaSuccess) {
    return CUBLAS_STATUS_EXECUTION_FAILED;
  }
  if (handle == nullptr) {
    return CUBLAS_STATUS_NOT_INITIALIZED;
  }
  if (!legal(ta, m, k, lda) || !legal(tb, k, n, ldb) || !legal(CUBLAS_OP_N, m, n, ldc)) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  auto const size = [](int value) { return static_cast<std::size_t>(value); };
  sizes const of{size(m), size(n), size(k)};
  matrix<T const> const left{static_cast<T const*>(a), size(lda), ta != CUBLAS_OP_N};
  matrix<T const> const right{static_cast<T const*>(b), size(ldb), tb != CUBLAS_OP_N};
  matrix<Result> const result{static_cast<Result*>(c), size(ldc)};
  cudaError_t const error =
      fake::enqueue(handle->stream, [=] { multiply(of, alpha, left, right, beta, result); });
  return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

}  // namespace

extern "C" {

cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  fake::count("cublasCreate");
  if (fake::fail_if_told("cublasCreate") != cudaSuccess) {
    return CUBLAS_STATUS_ALLOC_FAILED;
  }
  *handle = new cublasContext;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
  fake::count("cublasDestroy");
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  fake::count("cublasSetStream");
  if (fake::fail_if_told("cublasSetStream") != cudaSuccess) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  handle->stream = stream;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSgemm_v2(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb,
                              int m, int n, int k, float const* alpha, float const* a, int lda,
                              float const* b, int ldb, float const* beta, float* c, int ldc) {
  return enqueue<float, float>("cublasSgemm", handle, ta, tb, m, n, k, *alpha, a, lda, b, ldb,
                               *beta, c, ldc);
}

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb,
                            int m, int n, int k, void const* alpha, void const* a,
                            cudaDataType type_a, int lda, void const* b, cudaDataType type_b,
                            int ldb, void const* beta, void* c, cudaDataType type_c, int ldc,
                            cublasComputeType_t compute, cublasGemmAlgo_t /*algorithm*/) {
  if (type_a != CUDA_R_16BF || type_b != CUDA_R_16BF || compute != CUBLAS_COMPUTE_32F) {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  float const scale = *static_cast<float const*>(alpha);
  float const keep = *static_cast<float const*>(beta);
  if (type_c == CUDA_R_16BF) {
    return enqueue<__nv_bfloat16, __nv_bfloat16>("cublasGemmEx", handle, ta, tb, m, n, k, scale, a,
                                                 lda, b, ldb, keep, c, ldc);
  }
  if (type_c == CUDA_R_32F) {
    return enqueue<__nv_bfloat16, float>("cublasGemmEx", handle, ta, tb, m, n, k, scale, a, lda, b,
                                         ldb, keep, c, ldc);
  }
  return CUBLAS_STATUS_NOT_SUPPORTED;
}

char const* cublasGetStatusString(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "the operation completed successfully";
    case CUBLAS_STATUS_NOT_INITIALIZED: return "the library was not initialized";
    case CUBLAS_STATUS_ALLOC_FAILED: return "the resource allocation failed";
    case CUBLAS_STATUS_INVALID_VALUE: return "an invalid value was passed";
    case CUBLAS_STATUS_EXECUTION_FAILED: return "the function failed to launch on the GPU";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "the functionality is not supported";
    default: return "unknown error";
  }
}

}  // extern "C"

#endif
