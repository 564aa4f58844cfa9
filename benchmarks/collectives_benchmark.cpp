// SPDX-License-Identifier: MIT
//
// Collectives over threads, two ranks, beside their limit: a bare loop in the same threads with the
// same reads and writes. 64 MiB of fp32, in place, in huge pages where the system gives them.
//
//   reduce_scatter  each rank reads 2 x 32 MiB and writes 32 over what it read
//   all_gather      each rank reads 32 MiB and writes 32; its limits are memcpy and non-temporal
//                   stores
//
//   small/...       calls of 4 KiB, one after the other: `us` is what one takes, `barrier_us` what
//                   a std::barrier takes on the same threads
//
// The library and its limit alternate within each iteration, in an order that changes from one to
// the next. `mpi_collectives` measures the same in MPI, between two processes.

#include "paired.hpp"

#include <zero/comm/threads.hpp>
#include <zero/device/host.hpp>
#include <zero/device/pack.hpp>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace {

using zero::combine;
using zero::reduction;
using zero::detail::pack;

constexpr std::size_t ranks = 2;
constexpr std::size_t elements = std::size_t{16} << 20U;  // 64 MiB
constexpr std::size_t slice = elements / ranks;
constexpr std::size_t small_elements = 1024;  // 4 KiB
constexpr int small_calls = 1000;

/// Two ranks, each with 64 MiB and a thread of its own.
class world {
 public:
  world() {
    for (auto& data : data_) {
      data.reset(static_cast<float*>(zero::host::allocate(elements * sizeof(float))));
      std::fill_n(data.get(), elements, 0.0F);
    }
  }

  [[nodiscard]] std::span<float> full(std::size_t rank) const {
    return {data_[rank].get(), elements};
  }
  [[nodiscard]] std::span<float> shard(std::size_t rank) const {
    return full(rank).subspan(rank * slice, slice);
  }

  void reduce_scatter(std::size_t rank) {
    comms_[rank].reduce_scatter(full(rank), shard(rank), combine::overwrite, reduction::sum,
                                streams_[rank]);
  }
  void all_gather(std::size_t rank) {
    comms_[rank].all_gather(shard(rank), full(rank), streams_[rank]);
  }

  void small_reduce_scatter(std::size_t rank) {
    auto const some = full(rank).first(small_elements);
    comms_[rank].reduce_scatter(some,
                                some.subspan(rank * small_elements / ranks, small_elements / ranks),
                                combine::overwrite, reduction::sum, streams_[rank]);
  }
  void small_all_gather(std::size_t rank) {
    auto const some = full(rank).first(small_elements);
    comms_[rank].all_gather(some.subspan(rank * small_elements / ranks, small_elements / ranks),
                            some, streams_[rank]);
  }
  void small_all_reduce(std::size_t rank) {
    auto const some = full(rank).first(small_elements);
    comms_[rank].all_reduce(some, some, combine::overwrite, reduction::sum, streams_[rank]);
  }
  void barrier(std::size_t rank) { comms_[rank].barrier(streams_[rank]); }

  paired::team threads{ranks};

 private:
  struct free_memory {
    void operator()(float* memory) const {
      zero::host::deallocate(memory, elements * sizeof(float));
    }
  };

  std::vector<zero::thread_communicator> comms_ =
      zero::thread_communicator::create(static_cast<int>(ranks));
  std::array<zero::host_stream, ranks> streams_;
  std::array<std::unique_ptr<float, free_memory>, ranks> data_;
};

/// What a reduce-scatter of two ranks reads and writes, and nothing else.
[[gnu::noinline]] void bare_sum(float* to, float const* first, float const* second) {
  for (std::size_t i = 0; i < slice; i += 16) {
    std::array<pack<float>, 4> sum;
    for (std::size_t k = 0; k < 4; ++k) {
      sum[k] = pack<float>::load(first + i + 4 * k) + pack<float>::load(second + i + 4 * k);
    }
    for (std::size_t k = 0; k < 4; ++k) {
      sum[k].store(to + i + 4 * k);
    }
  }
}

[[gnu::noinline]] void bare_streaming_copy(float* to, float const* from) {
#if defined(__SSE2__)
  for (std::size_t i = 0; i < slice; i += 16) {
    for (std::size_t k = 0; k < 16; k += 4) {
      _mm_stream_ps(to + i + k, _mm_loadu_ps(from + i + k));
    }
  }
  _mm_sfence();
#else
  std::memcpy(to, from, slice * sizeof(float));
#endif
}

using rank_work = std::function<void(std::size_t)>;

/// One pair: the library and a limit, either one first. Returns the library's seconds.
double compare(world& all, paired::comparison& result, rank_work const& library,
               rank_work const& limit, bool library_first) {
  double library_seconds = library_first ? all.threads.seconds(library) : 0;
  double const limit_seconds = all.threads.seconds(limit);
  if (!library_first) {
    library_seconds = all.threads.seconds(library);
  }
  result.add(library_seconds, limit_seconds);
  return library_seconds;
}

void reduce_scatter(benchmark::State& state) {
  world all;
  rank_work const library = [&](std::size_t rank) { all.reduce_scatter(rank); };
  rank_work const limit = [&](std::size_t rank) {
    std::size_t const first = rank * slice;
    bare_sum(all.full(rank).data() + first, all.full(0).data() + first, all.full(1).data() + first);
  };
  paired::comparison result;
  bool library_first = false;
  for (auto _ : state) {
    state.SetIterationTime(compare(all, result, library, limit, library_first));
    library_first = !library_first;
  }
  result.report(state, "limit");
}

void all_gather(benchmark::State& state) {
  world all;
  rank_work const library = [&](std::size_t rank) { all.all_gather(rank); };
  auto const copy_by = [&](auto kernel) -> rank_work {
    return [&all, kernel](std::size_t rank) {
      std::size_t const first = (1 - rank) * slice;
      kernel(all.full(rank).data() + first, all.full(1 - rank).data() + first);
    };
  };
  rank_work const plain =
      copy_by([](float* to, float const* from) { std::memcpy(to, from, slice * sizeof(float)); });
  rank_work const streaming = copy_by(bare_streaming_copy);
  paired::comparison beside_plain;
  paired::comparison beside_streaming;
  bool library_first = false;
  for (auto _ : state) {
    double const first = compare(all, beside_plain, library, plain, library_first);
    double const second = compare(all, beside_streaming, library, streaming, library_first);
    state.SetIterationTime((first + second) / 2);
    library_first = !library_first;
  }
  beside_plain.report(state, "memcpy");
  beside_streaming.report(state, "streaming");
}

/// Many small calls in a row, beside as many barriers of the standard library.
void small(benchmark::State& state, void (world::*call)(std::size_t)) {
  world all;
  std::barrier<> meet{ranks};
  rank_work const library = [&](std::size_t rank) {
    for (int i = 0; i < small_calls; ++i) {
      (all.*call)(rank);
    }
  };
  rank_work const limit = [&](std::size_t) {
    for (int i = 0; i < small_calls; ++i) {
      meet.arrive_and_wait();
    }
  };
  paired::comparison result;
  bool library_first = false;
  for (auto _ : state) {
    state.SetIterationTime(compare(all, result, library, limit, library_first));
    library_first = !library_first;
  }
  state.counters["us"] = result.library_seconds() * 1e6 / small_calls;
  state.counters["barrier_us"] = result.other_seconds() * 1e6 / small_calls;
}

void configure(benchmark::internal::Benchmark* benchmark) {
  benchmark->Iterations(2 * paired::pairs)->UseManualTime()->Unit(benchmark::kMillisecond);
}

BENCHMARK(reduce_scatter)->Apply(configure);
BENCHMARK(all_gather)->Apply(configure);
BENCHMARK_CAPTURE(small, reduce_scatter, &world::small_reduce_scatter)->Apply(configure);
BENCHMARK_CAPTURE(small, all_gather, &world::small_all_gather)->Apply(configure);
BENCHMARK_CAPTURE(small, all_reduce, &world::small_all_reduce)->Apply(configure);
BENCHMARK_CAPTURE(small, barrier, &world::barrier)->Apply(configure);

}  // namespace

BENCHMARK_MAIN();
