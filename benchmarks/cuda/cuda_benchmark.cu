// SPDX-License-Identifier: MIT
//
// What the library does on a GPU beside its limit, a copy from device to device, which reads and
// writes each byte once. Both run within each iteration; `of_copy` is the median of the bytes per
// second of the library / those of the copy, 1 being at the limit.
//
//   adamw<float, float>         reads p g m v, writes p m v               28 bytes an element
//   adamw<bfloat16, bfloat16>   reads g master m v, writes p master m v   28 bytes an element
//   adamw<bfloat16, float>      the same                                  30 bytes an element
//                     `of_copy` is that of CUB's transform, which whole packs go through;
//                     `loop_of_copy` that of its loop, right after it, which takes the rest
//   loopback_*        two ranks that share the GPU, 64 MiB of float: what both read and write
//   overlap           a backward of stage 2 that takes as long as its reductions: `hidden` is the
//                     part of them that costs no time. The update and the gathers come after any
//                     backward, and are not counted
//
// A transform asks the runtime for the current device at each launch, as a loop does. At the first
// launch of a kernel it also asks for the GPU's shared memory and the kernel's occupancy, and keeps
// how many packs a thread takes. A small first launch keeps that at one: enough for AdamW, and only
// conversions from 16 bits, which read less than 24 bytes a pack, would take two.

#include <zero/cuda.hpp>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

namespace {

constexpr int pairs = 25;
constexpr std::size_t elements = std::size_t{1} << 26U;

using zero::detail::check_cuda;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// Device memory, zero at first.
template <class T>
class array {
 public:
  explicit array(std::size_t n) : size_{n}, data_{static_cast<T*>(zero::cuda::allocate(bytes()))} {
    check_cuda(cudaMemset(data_, 0, bytes()), "cudaMemset");
  }
  array(array const&) = delete;
  array& operator=(array const&) = delete;
  ~array() { zero::cuda::deallocate(data_, bytes()); }

  [[nodiscard]] T* data() const { return data_; }
  [[nodiscard]] std::span<T> span() const { return {data_, size_}; }
  [[nodiscard]] std::size_t bytes() const { return size_ * sizeof(T); }

 private:
  std::size_t size_;
  T* data_;
};

/// Seconds that work takes on a stream.
class timer {
 public:
  timer() {
    check_cuda(cudaEventCreate(&begin_), "cudaEventCreate");
    check_cuda(cudaEventCreate(&end_), "cudaEventCreate");
  }
  timer(timer const&) = delete;
  timer& operator=(timer const&) = delete;
  ~timer() {
    static_cast<void>(cudaEventDestroy(begin_));
    static_cast<void>(cudaEventDestroy(end_));
  }

  template <class Work>
  double seconds(zero::cuda_stream& stream, Work const& work) {
    check_cuda(cudaEventRecord(begin_, stream.native()), "cudaEventRecord");
    work();
    check_cuda(cudaEventRecord(end_, stream.native()), "cudaEventRecord");
    check_cuda(cudaEventSynchronize(end_), "cudaEventSynchronize");
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
    return static_cast<double>(milliseconds) * 1e-3;
  }

 private:
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

/// The limit: a copy of 512 MiB.
class copy {
 public:
  double bytes_per_second(zero::cuda_stream& stream) {
    double const took =
        timer_.seconds(stream, [&] { zero::cuda::copy(stream, from_.span(), to_.span()); });
    return 2.0 * static_cast<double>(from_.bytes()) / took;
  }

 private:
  array<float> from_{std::size_t{1} << 27U};
  array<float> to_{std::size_t{1} << 27U};
  timer timer_;
};

void report(benchmark::State& state, std::string const& which, std::vector<double> const& speeds,
            std::vector<double> const& limits) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < speeds.size(); ++i) {
    ratios.push_back(speeds[i] / limits[i]);
  }
  state.counters[which + "of_copy"] = median(ratios);
  state.counters[which + "GB_per_s"] = median(speeds) * 1e-9;
  state.counters["copy_GB_per_s"] = median(limits) * 1e-9;
}

template <class Parameter, class Gradient>
void adamw(benchmark::State& state) {
  using kernel = zero::detail::update_elements<zero::adamw, Parameter, Gradient>;
  constexpr std::size_t width = zero::detail::width_of<float>;
  constexpr double bytes =
      sizeof(Gradient) + 6.0 * sizeof(float) + (kernel::has_master ? sizeof(Parameter) : 0);
  zero::cuda_stream stream;
  copy limit;
  timer clock;
  array<Parameter> parameter{elements};
  array<Gradient> gradient{elements};
  array<float> m{elements};
  array<float> v{elements};
  array<float> master{kernel::has_master ? elements : 1};
  array<zero::detail::step_state> control{1};
  array<std::uint8_t> had{16};
  array<std::byte> constants{sizeof(*kernel::constants)};
  check_cuda(cudaMemset(had.data(), 1, 1), "cudaMemset");
  kernel update{};
  update.state = control.data();
  update.had = had.data();
  update.constants = reinterpret_cast<decltype(update.constants)>(constants.data());
  update.parameter = parameter.data();
  update.gradient = gradient.data();
  update.master = kernel::has_master ? master.data() : nullptr;
  update.states = {m.data(), v.data()};
  std::vector<double> speeds;
  std::vector<double> loop_speeds;
  std::vector<double> limits;
  for (auto _ : state) {
    double const took = clock.seconds(
        stream, [&] { zero::detail::launch_packs(stream.native(), elements / width, update); });
    double const loop = clock.seconds(
        stream, [&] { zero::detail::launch_ranges(stream.native(), 0, elements, update); });
    state.SetIterationTime(took);
    speeds.push_back(bytes * static_cast<double>(elements) / took);
    loop_speeds.push_back(bytes * static_cast<double>(elements) / loop);
    limits.push_back(limit.bytes_per_second(stream));
  }
  report(state, "", speeds, limits);
  report(state, "loop_", loop_speeds, limits);
}

/// `call(comm, full, shard, stream)` on two ranks, which reads and writes `bytes` in all.
template <class Call>
void loopback(benchmark::State& state, double bytes, Call call) {
  constexpr std::size_t size = std::size_t{1} << 24U;  // 64 MiB
  zero::cuda_stream alone;
  copy limit;
  std::vector<double> speeds;
  std::vector<double> limits;
  for (auto _ : state) {
    double took = 0;
    zero::run_loopback(2, [&](zero::loopback& comm) {
      zero::cuda_stream stream;
      timer clock;
      array<float> full{size};
      auto const shard =
          full.span().subspan(size / 2 * static_cast<std::size_t>(comm.rank()), size / 2);
      call(comm, full.span(), shard, stream);  // warm
      constexpr int repeats = 10;
      double const mine = clock.seconds(stream, [&] {
        for (int i = 0; i < repeats; ++i) {
          call(comm, full.span(), shard, stream);
        }
      });
      if (comm.rank() == 0) {
        took = mine / repeats;
      }
    });
    state.SetIterationTime(took);
    speeds.push_back(bytes / took);
    limits.push_back(limit.bytes_per_second(alone));
  }
  report(state, "", speeds, limits);
}

void loopback_reduce_scatter(benchmark::State& state) {
  constexpr double mib = 1 << 20;
  loopback(state, 2 * (2 * 32 + 32) * mib, [](auto& comm, auto full, auto shard, auto& stream) {
    comm.reduce_scatter(full, shard, zero::combine::overwrite, zero::reduction::average, stream);
  });
}

void loopback_all_gather(benchmark::State& state) {
  constexpr double mib = 1 << 20;
  loopback(state, 2 * (32 + 32) * mib, [](auto& comm, auto full, auto shard, auto& stream) {
    comm.all_gather(shard, full, stream);
  });
}

/// Keeps one multiprocessor busy for some time.
__global__ void spin(long long nanoseconds) {
  long long start = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  long long now = start;
  while (now - start < nanoseconds) {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  }
}

/// Seconds of a backward of eight units over two ranks: with its computation, its reductions.
double backward_seconds(double compute_seconds, bool communicates) {
  double took = 0;
  zero::run_loopback(2, [&](zero::loopback& comm) {
    constexpr std::size_t units = 8;
    zero::cuda_stream stream;
    timer clock;
    std::vector<std::vector<zero::any_parameter>> declared;
    for (std::size_t u = 0; u < units; ++u) {
      declared.push_back({zero::parameter<float>(
          "p" + std::to_string(u), {std::size_t{1} << 22U},
          [](std::span<float> out, std::size_t) { std::fill(out.begin(), out.end(), 0.0F); })});
    }
    zero::sharded_model model{comm,
                              declared,
                              zero::stage2{},
                              zero::plain_sgd{},
                              zero::reduce_per_microbatch{},
                              {.bucket_bytes = 0, .stream = stream.native()}};
    auto const run = [&] {
      auto const compute = [&] {
        if (compute_seconds > 0) {
          spin<<<1, 1, 0, stream.native()>>>(static_cast<long long>(compute_seconds / units * 1e9));
        }
      };
      if (!communicates) {
        for (std::size_t u = 0; u < units; ++u) {
          compute();
        }
        return;
      }
      auto micro = model.microbatch(0, 1);
      for (std::size_t u = units; u-- > 0;) {
        auto const lease = micro.backward(u);
        compute();
      }
    };
    auto const step = [&] {
      if (communicates) {
        model.step();
      }
      model.wait();
    };
    run();
    step();
    run();
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    double const after = clock.seconds(stream, step);
    double const mine = clock.seconds(stream, [&] {
      run();
      step();
    }) - after;
    if (comm.rank() == 0) {
      took = mine;
    }
  });
  return took;
}

void overlap(benchmark::State& state) {
  std::vector<double> hidden;
  for (auto _ : state) {
    double const communication = backward_seconds(0, true);
    double const compute = backward_seconds(communication, false);
    double const both = backward_seconds(communication, true);
    state.SetIterationTime(both);
    hidden.push_back((communication + compute - both) / communication);
  }
  state.counters["hidden"] = median(hidden);
}

BENCHMARK(adamw<float, float>)->UseManualTime()->Iterations(pairs);
BENCHMARK(adamw<zero::bfloat16, zero::bfloat16>)->UseManualTime()->Iterations(pairs);
BENCHMARK(adamw<zero::bfloat16, float>)->UseManualTime()->Iterations(pairs);
BENCHMARK(loopback_reduce_scatter)->UseManualTime()->Iterations(pairs);
BENCHMARK(loopback_all_gather)->UseManualTime()->Iterations(pairs);
BENCHMARK(overlap)->UseManualTime()->Iterations(pairs);

}  // namespace

int main(int argc, char** argv) {
  int count = 0;
  if (cudaError_t const found = cudaGetDeviceCount(&count); found != cudaSuccess || count == 0) {
    std::fprintf(stderr, "cuda_benchmark: expected a GPU, actual none (%s)\n",
                 cudaGetErrorString(found));
    return 1;
  }
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
