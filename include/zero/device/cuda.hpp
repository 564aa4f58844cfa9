// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/any_span.hpp>
#include <zero/core/error.hpp>
#include <zero/device/concept.hpp>
#include <zero/device/cuda_kernels.hpp>
#include <zero/device/cuda_launch.hpp>
#include <zero/device/cuda_stream.hpp>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <string_view>
#include <type_traits>

/// @file
/// `cuda`: the device whose memory and streams are the CUDA runtime's. Work runs on the device that
/// was current when its stream was made.

namespace zero::inline v0 {

class cuda {
 public:
  using stream = cuda_stream;
  using event = cuda_event;

  static constexpr std::string_view name = "cuda";
  static constexpr std::size_t alignment_bytes = 256;
  static constexpr std::size_t reduce_blocks = detail::cuda_reduce_blocks;
  static constexpr bool has_host_memory = false;
  /// NCCL's kernels of two communicators, started in another order on each rank, may wait for each
  /// other for ever.
  static constexpr bool any_collective_order = false;

  /// The user's stream; null is CUDA's own default.
  [[nodiscard]] static stream engine_stream(void* native) {
    return stream{static_cast<cudaStream_t>(native)};
  }
  /// With `overlap`, one of the library's.
  [[nodiscard]] static stream communication_stream(bool overlap, void* native) {
    if (overlap) {
      return stream{};
    }
    return engine_stream(native);
  }

  /// Memory of the current device, with indeterminate contents; 0 bytes give a null pointer.
  /// @throws zero::error  there is not that much; says how much is free.
  [[nodiscard]] static void* allocate(std::size_t bytes) {
    void* memory = nullptr;
    if (bytes == 0) {
      return memory;
    }
    cudaError_t const code = cudaMalloc(&memory, bytes);
    if (code == cudaErrorMemoryAllocation) {
      throw error{detail::no_memory_text("cudaMalloc", bytes) + detail::rank_suffix()};
    }
    detail::check_cuda(code, "cudaMalloc");
    return memory;
  }
  static void deallocate(void* memory, std::size_t /*bytes*/) noexcept {
    if (memory != nullptr) {
      detail::relaxed_capture const relaxed;
      static_cast<void>(cudaFree(memory));
    }
  }

  /// Memory of the host that a stream can write while the host goes on.
  [[nodiscard]] static void* allocate_host(std::size_t bytes) {
    void* memory = nullptr;
    detail::check_cuda(cudaMallocHost(&memory, bytes), "cudaMallocHost");
    return memory;
  }
  static void deallocate_host(void* memory, std::size_t /*bytes*/) noexcept {
    detail::relaxed_capture const relaxed;
    static_cast<void>(cudaFreeHost(memory));
  }

  /// Call `work()` at an end: it may wait whatever another thread captures, and what it throws is
  /// dropped.
  template <class Work>
  static void clean_up(Work const& work) noexcept {
    detail::relaxed_capture const relaxed;
    try {
      work();
    } catch (...) {  // was thrown before, or the next call throws it
    }
  }

  static void fill_zero(stream& stream, any_span to) {
    if (!to.empty()) {
      detail::device_scope const current{stream.device()};
      detail::check_cuda(cudaMemsetAsync(to.data(), 0, to.bytes(), stream.native()),
                         "cudaMemsetAsync");
    }
  }

  /// Copy elements of one dtype. The spans don't overlap, or are the same.
  /// @throws zero::usage_error  another size or dtype.
  static void copy(stream& stream, const_any_span from, any_span to) {
    check_dtypes("cuda::copy", from, to);
    check_sizes("cuda::copy", from, to);
    if (from.data() != to.data()) {
      move(stream, from, to, cudaMemcpyDeviceToDevice);
    }
  }

  /// Copy from the host, and wait.
  static void upload(stream& stream, const_any_span from, any_span to) {
    move(stream, from, to, cudaMemcpyHostToDevice);
    finish(stream);
  }
  /// Copy to the host, and wait.
  static void download(stream& stream, const_any_span from, any_span to) {
    move(stream, from, to, cudaMemcpyDeviceToHost);
    finish(stream);
  }
  /// Copy to memory of `allocate_host`.
  static void publish(stream& stream, const_any_span from, any_span to) {
    move(stream, from, to, cudaMemcpyDeviceToHost);
  }

  /// Convert elements between dtypes, rounding to nearest, ties to even. The spans don't overlap.
  /// @throws zero::usage_error  another size.
  template <class = void>
  static void convert(stream& stream, const_any_span from, any_span to) {
    check_sizes("cuda::convert", from, to);
    visit(from.dtype(), [&]<class From>(std::type_identity<From>) {
      visit(to.dtype(), [&]<class To>(std::type_identity<To>) {
        launch(stream, to.size(),
               detail::convert_elements<From, To>{static_cast<From const*>(from.data()),
                                                  static_cast<To*>(to.data())});
      });
    });
  }

  /// Add elements to others: `sum` of one source. The spans don't overlap.
  /// @throws zero::usage_error  another size, or dtypes that `sum` doesn't take.
  template <class = void>
  static void add(stream& stream, const_any_span from, any_span to) {
    check_sizes("cuda::add", from, to);
    void const* const source = from.data();
    sum(stream, {&source, 1}, from.dtype(), to, true, 1);
  }

  /// As `host::sum`, of 1 to 256 sources; the list is read before the call returns.
  /// @throws zero::usage_error  no source or too many, or dtypes that can't be summed.
  template <class = void>
  static void sum(stream& stream, std::span<void const* const> sources, dtype source, any_span to,
                  bool add, double scale) {
    detail::check_sum("cuda::sum", sources.size(), source, to.dtype());
    visit(source, [&]<class Source>(std::type_identity<Source>) {
      visit(to.dtype(), [&]<class To>(std::type_identity<To>) {
        if constexpr (can_sum(dtype_of<Source>, dtype_of<To>)) {
          if (add && sources.size() == 1) {
            launch(stream, to.size(),
                   detail::add_elements<Source, To>{static_cast<To*>(to.data()),
                                                    static_cast<Source const*>(sources[0]),
                                                    static_cast<accumulate_type<Source>>(scale)});
            return;
          }
          auto kernel = detail::sum_elements<Source, To>{};
          kernel.to = static_cast<To*>(to.data());
          kernel.scale = static_cast<accumulate_type<Source>>(scale);
          kernel.add = add;
          kernel.count = static_cast<unsigned>(sources.size());
          for (std::size_t s = 0; s < sources.size(); ++s) {
            kernel.sources[s] = static_cast<Source const*>(sources[s]);
          }
          launch(stream, to.size(), kernel);
        }
      });
    });
  }

  /// Run `function(first, count)` over ranges that cover the elements [0, n) once each: a plain
  /// value whose call is compiled for the device (`ZERO_HOST_DEVICE`).
  template <class Function>
  static void launch(stream& stream, std::size_t n, Function function) {
    if (n != 0) {
      detail::device_scope const current{stream.device()};
      detail::cuda_launch(stream.native(), n, function);
    }
  }

  /// Add to `*result` what `function(first, count)` gives over ranges that cover [0, n) once each,
  /// in any order. Scratch has `reduce_blocks` times the result's bytes.
  template <class T, class Function>
  static void accumulate(stream& stream, std::size_t n, Function function, T* result,
                         void* scratch) {
    if (n != 0) {
      detail::device_scope const current{stream.device()};
      detail::cuda_accumulate(stream.native(), n, function, result, scratch);
    }
  }

 private:
  /// Wait; where that fails once more, since the host's memory will be the caller's again.
  static void finish(stream& stream) {
    try {
      stream.synchronize();
    } catch (cuda_error const&) {
      clean_up([&] { stream.synchronize(); });
      throw;
    }
  }

  static void move(stream& stream, const_any_span from, any_span to, cudaMemcpyKind kind) {
    if (!to.empty()) {
      detail::device_scope const current{stream.device()};
      detail::check_cuda(cudaMemcpyAsync(to.data(), from.data(), to.bytes(), kind, stream.native()),
                         "cudaMemcpyAsync");
    }
  }

  static void check_dtypes(std::string_view operation, const_any_span from, any_span to) {
    if (from.dtype() != to.dtype()) {
      throw usage_error{detail::text(operation, ": expected ", zero::name(from.dtype()),
                                     ", actual ", zero::name(to.dtype()), detail::rank_suffix())};
    }
  }

  static void check_sizes(std::string_view operation, const_any_span from, any_span to) {
    if (from.size() != to.size()) {
      throw usage_error{detail::text(operation, ": expected ", from.size(), " elements, actual ",
                                     to.size(), detail::rank_suffix())};
    }
  }
};

}  // namespace zero::inline v0
