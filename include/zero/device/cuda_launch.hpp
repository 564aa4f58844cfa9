// SPDX-License-Identifier: MIT
#pragma once

#include <zero/device/cuda_error.hpp>
#include <zero/device/pack_kernel.hpp>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>

#if defined(__CUDACC__)
#include <cub/block/block_reduce.cuh>
#include <cub/device/device_for.cuh>
#if CUB_VERSION >= 300000
#include <thrust/iterator/tabulate_output_iterator.h>
#include <cub/device/device_transform.cuh>
#include <cuda/std/tuple>
#endif
#elif defined(ZERO_FAKE_CUDA)
extern "C" cudaError_t zeroFakeLaunch(cudaStream_t stream, void (*run)(void const*),
                                      void const* function, std::size_t bytes);
#endif

/// @file
/// The one place where kernels are launched. A kernel is a plain value, called as
/// function(first, count) for ranges of `Function::grain` elements (1 where it names none), a
/// thread each. The whole packs of a `pack_kernel` go through CUB's transform, which copies inputs
/// in bulk where the GPU can (sm_90 and later). Without a CUDA compiler only tests can launch, over
/// a fake of the runtime.

namespace zero::inline v0::detail {

template <class Function>
inline constexpr std::size_t grain_of = 1;
template <class Function>
  requires requires { Function::grain; }
inline constexpr std::size_t grain_of<Function> = Function::grain;

/// Blocks whose sums `cuda_accumulate` keeps in its scratch.
inline constexpr std::size_t cuda_reduce_blocks = 256;

#if defined(__CUDACC__)

template <class Function>
struct call_of_thread {
  Function function;
  std::size_t begin;
  std::size_t n;

  __device__ void operator()(std::size_t i) const {
    std::size_t const first = begin + i * grain_of<Function>;
    std::size_t const rest = n - first;
    function(first, rest < grain_of<Function> ? rest : grain_of<Function>);
  }
};

/// The elements [begin, n), a thread for each `grain`.
template <class Function>
void launch_ranges(cudaStream_t stream, std::size_t begin, std::size_t n, Function function) {
  std::size_t const threads = (n - begin + grain_of<Function> - 1) / grain_of<Function>;
  check_cuda(cub::DeviceFor::Bulk(threads, call_of_thread<Function>{function, begin, n}, stream),
             "cub::DeviceFor::Bulk");
}

/// The first `packs` packs.
#if CUB_VERSION >= 300000
template <pack_kernel Kernel>
void launch_packs(cudaStream_t stream, std::size_t packs, Kernel kernel) {
  using real = typename Kernel::real;
  auto const run = [&]<class... From>(From const*... from) {
    return cub::DeviceTransform::Transform(
        ::cuda::std::make_tuple(reinterpret_cast<wide_elements<real, From> const*>(from)...),
        thrust::make_tabulate_output_iterator(put_packs<Kernel>{kernel}),
        static_cast<std::int64_t>(packs), transform_packs<Kernel>{kernel}, stream);
  };
  check_cuda(std::apply(run, kernel.inputs()), "cub::DeviceTransform::Transform");
}
#else
template <pack_kernel Kernel>
void launch_packs(cudaStream_t stream, std::size_t packs, Kernel kernel) {
  launch_ranges(stream, 0, packs * width_of<typename Kernel::real>, kernel);
}
#endif

inline constexpr int reduce_threads = 256;

struct add_up {
  template <class T>
  __device__ T operator()(T a, T const& b) const {
    a += b;
    return a;
  }
};

template <class T, class Function>
__global__ void accumulate_blocks(Function function, std::size_t n, T* blocks) {
  using reduce = cub::BlockReduce<T, reduce_threads>;
  __shared__ typename reduce::TempStorage storage;
  T sum{};
  std::size_t const step = std::size_t{gridDim.x} * reduce_threads * grain_of<Function>;
  std::size_t first = (std::size_t{blockIdx.x} * reduce_threads + threadIdx.x) * grain_of<Function>;
  for (; first < n; first += step) {
    std::size_t const rest = n - first;
    sum += function(first, rest < grain_of<Function> ? rest : grain_of<Function>);
  }
  T const total = reduce(storage).Reduce(sum, add_up{});
  if (threadIdx.x == 0) {
    blocks[blockIdx.x] = total;
  }
}

template <class T>
__global__ void add_blocks(T const* blocks, unsigned count, T* result) {
  using reduce = cub::BlockReduce<T, reduce_threads>;
  __shared__ typename reduce::TempStorage storage;
  T const mine = threadIdx.x < count ? blocks[threadIdx.x] : T{};
  T const total = reduce(storage).Reduce(mine, add_up{});
  if (threadIdx.x == 0) {
    *result += total;
  }
}

/// *result += the sum of function(first, count). `T`'s sum must not depend on order.
template <class T, class Function>
void cuda_accumulate(cudaStream_t stream, std::size_t n, Function function, T* result,
                     void* scratch) {
  static_assert(cuda_reduce_blocks <= reduce_threads);
  std::size_t const most =
      (n + reduce_threads * grain_of<Function> - 1) / (reduce_threads * grain_of<Function>);
  auto const blocks = static_cast<unsigned>(std::min(most, cuda_reduce_blocks));
  auto* const sums = static_cast<T*>(scratch);
  accumulate_blocks<<<blocks, reduce_threads, 0, stream>>>(function, n, sums);
  check_cuda(cudaGetLastError(), "accumulate_blocks");
  add_blocks<<<1, reduce_threads, 0, stream>>>(sums, blocks, result);
  check_cuda(cudaGetLastError(), "add_blocks");
}

#elif defined(ZERO_FAKE_CUDA)

template <class Work>
void fake_launch(cudaStream_t stream, Work const& work) {
  static_assert(std::is_trivially_copyable_v<Work>);
  check_cuda(zeroFakeLaunch(
                 stream, [](void const* self) { (*static_cast<Work const*>(self))(); }, &work,
                 sizeof work),
             "zeroFakeLaunch");
}

template <class Function>
struct range_launch {
  Function function;
  std::size_t begin;
  std::size_t n;
  void operator()() const { function(begin, n - begin); }
};

/// What CUB does with each pack.
template <pack_kernel Kernel>
struct packs_launch {
  Kernel kernel;
  std::size_t packs;

  void operator()() const {
    for (std::size_t i = 0; i < packs; ++i) {
      put_packs<Kernel>{kernel}(i, std::apply(
                                       [&](auto const*... from) {
                                         return transform_packs<Kernel>{kernel}(read(from, i)...);
                                       },
                                       kernel.inputs()));
    }
  }

 private:
  /// Word by word: g++'s ThreadSanitizer doesn't see a read that is copied into an argument.
  template <class From>
  static auto read(From const* from, std::size_t i) {
    wide_elements<typename Kernel::real, From> out;
    auto const* at = reinterpret_cast<std::byte const*>(from + i * out.size);
    for (std::uint32_t& word : out.words) {
      std::memcpy(&word, at, sizeof word);
      at += sizeof word;
    }
    return out;
  }
};

template <class T, class Function>
struct whole_accumulate {
  Function function;
  std::size_t n;
  T* result;
  void operator()() const { *result += function(std::size_t{0}, n); }
};

template <class Function>
void launch_ranges(cudaStream_t stream, std::size_t begin, std::size_t n, Function function) {
  fake_launch(stream, range_launch<Function>{function, begin, n});
}

template <pack_kernel Kernel>
void launch_packs(cudaStream_t stream, std::size_t packs, Kernel kernel) {
  fake_launch(stream, packs_launch<Kernel>{kernel, packs});
}

template <class T, class Function>
void cuda_accumulate(cudaStream_t stream, std::size_t n, Function function, T* result,
                     void* /*scratch*/) {
  fake_launch(stream, whole_accumulate<T, Function>{function, n, result});
}

#else

template <class Function>
void cuda_launch(cudaStream_t /*stream*/, std::size_t /*n*/, Function /*function*/) {
  static_assert(!std::is_same_v<Function, Function>,
                "a model on a CUDA device needs a CUDA compiler here: compile this file with nvcc");
}

template <class T, class Function>
void cuda_accumulate(cudaStream_t /*stream*/, std::size_t /*n*/, Function /*function*/,
                     T* /*result*/, void* /*scratch*/) {
  static_assert(!std::is_same_v<Function, Function>,
                "a model on a CUDA device needs a CUDA compiler here: compile this file with nvcc");
}

#endif

#if defined(__CUDACC__) || defined(ZERO_FAKE_CUDA)
template <class Function>
void cuda_launch(cudaStream_t stream, std::size_t n, Function function) {
  std::size_t in_packs = 0;
  if constexpr (pack_kernel<Function>) {
    in_packs = elements_in_packs(function, n);
    if (in_packs != 0) {
      launch_packs(stream, in_packs / width_of<typename Function::real>, function);
    }
  }
  if (in_packs != n) {
    launch_ranges(stream, in_packs, n, function);
  }
}
#endif

}  // namespace zero::inline v0::detail
