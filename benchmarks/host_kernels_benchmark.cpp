// SPDX-License-Identifier: MIT
//
// The kernels of collectives beside their limit, a bare loop with the same reads and writes, on one
// core and on two at once. Each rank has 64 MiB, in huge pages where the system gives them.
//
//   sum<type, p>/cores   each rank sums p slices, one of them its own, in place
//   copy/cores           each rank copies 32 MiB; the limits are memcpy and non-temporal stores
//
// Contenders and limits alternate within each iteration, in an order that changes from one to the
// next.

#include "paired.hpp"

#include <zero/device/host.hpp>
#include <zero/device/host_copy.hpp>
#include <zero/device/ordered_sum.hpp>
#include <zero/device/pack.hpp>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace {

using zero::detail::pack;

constexpr std::size_t buffer_bytes = std::size_t{64} << 20U;

/// Memory for the data of one rank.
class buffer {
 public:
  buffer() : memory_{zero::host::allocate(buffer_bytes)} {
    std::memset(memory_.get(), 0, buffer_bytes);
  }
  template <class T>
  [[nodiscard]] T* as() const {
    return static_cast<T*>(memory_.get());
  }

 private:
  struct free_memory {
    void operator()(void* memory) const { zero::host::deallocate(memory, buffer_bytes); }
  };
  std::unique_ptr<void, free_memory> memory_;
};

/// All that a rank reads of p others, and its own, added; without scale, rounding or tail.
template <std::size_t P>
[[gnu::noinline]] void bare_sum(std::span<void const* const> sources, float* to, std::size_t size) {
  std::array<float const*, P> from;
  for (std::size_t s = 0; s < P; ++s) {
    from[s] = static_cast<float const*>(sources[s]);
  }
  for (std::size_t i = 0; i < size; i += 16) {
    std::array<pack<float>, 4> sum;
    for (std::size_t k = 0; k < 4; ++k) {
      sum[k] = pack<float>::load(from[0] + i + 4 * k);
      for (std::size_t s = 1; s < P; ++s) {
        sum[k] += pack<float>::load(from[s] + i + 4 * k);
      }
    }
    for (std::size_t k = 0; k < 4; ++k) {
      sum[k].store(to + i + 4 * k);
    }
  }
}

/// The same reads and writes of 16-bit numbers, added as integers.
template <std::size_t P>
[[gnu::noinline]] void bare_sum(std::span<void const* const> sources, zero::bfloat16* to,
                                std::size_t size) {
  using halves [[gnu::vector_size(16)]] = std::uint16_t;
  std::array<zero::bfloat16 const*, P> from;
  for (std::size_t s = 0; s < P; ++s) {
    from[s] = static_cast<zero::bfloat16 const*>(sources[s]);
  }
  for (std::size_t i = 0; i < size; i += 32) {
    std::array<halves, 4> sum;
    for (std::size_t k = 0; k < 4; ++k) {
      sum[k] = zero::detail::load_vector<halves>(from[0] + i + 8 * k);
      for (std::size_t s = 1; s < P; ++s) {
        sum[k] += zero::detail::load_vector<halves>(from[s] + i + 8 * k);
      }
    }
    for (std::size_t k = 0; k < 4; ++k) {
      std::memcpy(static_cast<void*>(to + i + 8 * k), &sum[k], 16);
    }
  }
}

[[gnu::noinline]] void bare_streaming_copy(float* to, float const* from, std::size_t size) {
#if defined(__SSE2__)
  for (std::size_t i = 0; i < size; i += 16) {
    for (std::size_t k = 0; k < 16; k += 4) {
      _mm_stream_ps(to + i + k, _mm_loadu_ps(from + i + k));
    }
  }
  _mm_sfence();
#else
  std::memcpy(to, from, size * sizeof(float));
#endif
}

/// Time the library and a limit `pairs` times, either one first.
void compare(benchmark::State& state, paired::team& team, paired::comparison& result,
             std::function<void(std::size_t)> const& library,
             std::function<void(std::size_t)> const& limit, bool library_first) {
  double library_seconds = library_first ? team.seconds(library) : 0;
  double const limit_seconds = team.seconds(limit);
  if (!library_first) {
    library_seconds = team.seconds(library);
  }
  result.add(library_seconds, limit_seconds);
  state.SetIterationTime(library_seconds);
}

template <class T, std::size_t P>
void sum(benchmark::State& state) {
  auto const cores = static_cast<std::size_t>(state.range(0));
  std::vector<buffer> const buffers(P);
  constexpr std::size_t slice = buffer_bytes / sizeof(T) / P;
  auto const slices = [&](std::size_t rank) {
    std::array<void const*, P> out;
    for (std::size_t s = 0; s < P; ++s) {
      out[s] = buffers[s].template as<T>() + rank * slice;
    }
    return out;
  };
  auto const library = [&](std::size_t rank) {
    zero::detail::ordered_sum(slices(rank), zero::dtype_of<T>,
                              std::span<T>{buffers[rank].template as<T>() + rank * slice, slice},
                              false, 1.0 / static_cast<double>(P));
  };
  auto const limit = [&](std::size_t rank) {
    bare_sum<P>(slices(rank), buffers[rank].template as<T>() + rank * slice, slice);
  };
  paired::team team{cores};
  paired::comparison result;
  bool library_first = false;
  for (auto _ : state) {
    compare(state, team, result, library, limit, library_first);
    library_first = !library_first;
  }
  result.report(state, "limit");
}

void copy(benchmark::State& state) {
  auto const cores = static_cast<std::size_t>(state.range(0));
  std::array<buffer, 2> const buffers;
  constexpr std::size_t slice = buffer_bytes / sizeof(float) / 2;
  auto const copy_by = [&](auto kernel) {
    return [&buffers, kernel](std::size_t rank) {  // the slice of the other rank
      std::size_t const first = (1 - rank) * slice;
      kernel(buffers[rank].as<float>() + first, buffers[1 - rank].as<float>() + first, slice);
    };
  };
  auto const library = copy_by([](float* to, float const* from, std::size_t size) {
    zero::detail::host_copy(to, from, size * sizeof(float));
  });
  auto const plain = copy_by([](float* to, float const* from, std::size_t size) {
    std::memcpy(to, from, size * sizeof(float));
  });
  auto const streaming = copy_by(bare_streaming_copy);
  paired::team team{cores};
  paired::comparison beside_plain;
  paired::comparison beside_streaming;
  bool library_first = false;
  for (auto _ : state) {
    compare(state, team, beside_plain, library, plain, library_first);
    compare(state, team, beside_streaming, library, streaming, library_first);
    library_first = !library_first;
  }
  beside_plain.report(state, "memcpy");
  beside_streaming.report(state, "streaming");
}

void configure(benchmark::internal::Benchmark* benchmark) {
  benchmark->Arg(1)
      ->Arg(2)
      ->ArgName("cores")
      ->Iterations(2 * paired::pairs)
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond);
}

BENCHMARK(sum<float, 2>)->Apply(configure);
BENCHMARK(sum<float, 4>)->Apply(configure);
BENCHMARK(sum<float, 8>)->Apply(configure);
BENCHMARK(sum<zero::bfloat16, 2>)->Apply(configure);
BENCHMARK(sum<zero::bfloat16, 4>)->Apply(configure);
BENCHMARK(copy)->Apply(configure);

}  // namespace

BENCHMARK_MAIN();
