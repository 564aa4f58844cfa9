// SPDX-License-Identifier: MIT
//
// Collectives of `zero::nccl` beside NCCL's own calls, on every GPU of this machine, a thread for
// each. Both run within each iteration; `of_raw` is the median of raw time / time of the library,
// 1 being at the limit. Ordered mode is measured beside the same raw calls. On one GPU a raw call
// does next to nothing, so that it takes two.

#include <zero/comm/nccl.hpp>
#include <zero/device/arena.hpp>

#include <benchmark/benchmark.h>
#include <nccl.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr int pairs = 25;
constexpr int repeats = 10;
constexpr std::size_t elements_of_rank = std::size_t{1} << 23U;  // 32 MiB

int gpus = 0;

void check(ncclResult_t result) {
  if (result != ncclSuccess) {
    throw std::runtime_error{ncclGetErrorString(result)};
  }
}

/// NCCL's communicator of the same ranks, without the library.
class raw_communicator {
 public:
  explicit raw_communicator(zero::nccl& comm) {
    ncclUniqueId mine{};
    check(ncclGetUniqueId(&mine));
    std::vector<std::byte> all(sizeof mine * static_cast<std::size_t>(comm.size()));
    comm.exchange(std::as_bytes(std::span{&mine, 1}), all);
    std::memcpy(&mine, all.data(), sizeof mine);  // rank 0's
    check(ncclCommInitRank(&comm_, comm.size(), mine, comm.rank()));
  }
  raw_communicator(raw_communicator const&) = delete;
  raw_communicator& operator=(raw_communicator const&) = delete;
  ~raw_communicator() { static_cast<void>(ncclCommDestroy(comm_)); }
  [[nodiscard]] ncclComm_t native() const { return comm_; }

 private:
  ncclComm_t comm_ = nullptr;
};

/// Seconds of one of `repeats` calls in a stream.
template <class Call>
double seconds(zero::cuda_stream& stream, Call const& call) {
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  zero::detail::check_cuda(cudaEventCreate(&begin), "cudaEventCreate");
  zero::detail::check_cuda(cudaEventCreate(&end), "cudaEventCreate");
  zero::detail::check_cuda(cudaEventRecord(begin, stream.native()), "cudaEventRecord");
  for (int i = 0; i < repeats; ++i) {
    call();
  }
  zero::detail::check_cuda(cudaEventRecord(end, stream.native()), "cudaEventRecord");
  zero::detail::check_cuda(cudaEventSynchronize(end), "cudaEventSynchronize");
  float milliseconds = 0;
  zero::detail::check_cuda(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
  static_cast<void>(cudaEventDestroy(begin));
  static_cast<void>(cudaEventDestroy(end));
  return static_cast<double>(milliseconds) * 1e-3 / repeats;
}

enum class kind { reduce_scatter, all_gather };

void collective(benchmark::State& state, kind which, zero::nccl_mode mode) {
  std::vector<double> library;
  std::vector<double> raw;
  zero::run_nccl(gpus,
                 [&](zero::nccl& comm) {
                   zero::cuda_stream stream;
                   raw_communicator const other{comm};
                   std::size_t const size =
                       elements_of_rank * static_cast<std::size_t>(comm.size());
                   zero::arena<zero::cuda> memory{size * sizeof(float)};
                   auto* const data = reinterpret_cast<float*>(memory.take(
                       zero::category::engine, size * sizeof(float), size * sizeof(float)));
                   std::span<float> const full{data, size};
                   auto const shard = full.subspan(
                       elements_of_rank * static_cast<std::size_t>(comm.rank()), elements_of_rank);
                   zero::cuda::fill_zero(stream, full);
                   auto const ours = [&] {
                     if (which == kind::reduce_scatter) {
                       comm.reduce_scatter(full, shard, zero::combine::overwrite,
                                           zero::reduction::sum, stream);
                     } else {
                       comm.all_gather(shard, full, stream);
                     }
                   };
                   auto const theirs = [&] {
                     if (which == kind::reduce_scatter) {
                       check(ncclReduceScatter(full.data(), shard.data(), shard.size(), ncclFloat,
                                               ncclSum, other.native(), stream.native()));
                     } else {
                       check(ncclAllGather(shard.data(), full.data(), shard.size(), ncclFloat,
                                           other.native(), stream.native()));
                     }
                   };
                   ours();
                   theirs();
                   stream.synchronize();
                   for (int pair = 0; pair < pairs; ++pair) {
                     double const mine = seconds(stream, ours);
                     double const plain = seconds(stream, theirs);
                     if (comm.rank() == 0) {
                       library.push_back(mine);
                       raw.push_back(plain);
                     }
                   }
                 },
                 {.mode = mode});
  std::vector<double> ratios;
  for (std::size_t i = 0; i < library.size(); ++i) {
    ratios.push_back(raw[i] / library[i]);
  }
  auto const median = [](std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
  };
  for (auto _ : state) {
    state.SetIterationTime(median(library));
  }
  state.counters["of_raw"] = median(ratios);
  state.counters["raw_ms"] = median(raw) * 1e3;
  state.counters["gpus"] = gpus;
}

void register_one(std::string const& name, kind which, zero::nccl_mode mode) {
  benchmark::RegisterBenchmark(
      name.c_str(), [which, mode](benchmark::State& state) { collective(state, which, mode); })
      ->UseManualTime()
      ->Iterations(1);
}

}  // namespace

int main(int argc, char** argv) {
  if (cudaError_t const found = cudaGetDeviceCount(&gpus); found != cudaSuccess || gpus == 0) {
    std::fprintf(stderr, "nccl_benchmark: expected a GPU, actual none (%s)\n",
                 cudaGetErrorString(found));
    return 1;
  }
  if (gpus < 2) {
    std::printf("skipped: nccl_benchmark, which needs 2 GPUs (1 is here)\n");
    return 0;
  }
  register_one("reduce_scatter/fast", kind::reduce_scatter, zero::nccl_mode::fast);
  register_one("reduce_scatter/ordered", kind::reduce_scatter, zero::nccl_mode::ordered);
  register_one("all_gather", kind::all_gather, zero::nccl_mode::fast);
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
