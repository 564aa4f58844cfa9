// SPDX-License-Identifier: MIT
#pragma once

#include <doctest/doctest.h>
#include <support/device_engine.hpp>
#include <support/same_bits.hpp>
#include <zero/comm/concept.hpp>
#include <zero/device/cuda.hpp>
#include <zero/optim/adamw.hpp>

#include <array>
#include <cstddef>
#include <utility>
#include <vector>

/// @file
/// Whole steps in a CUDA graph, and the check that its replays have the bits of eager steps.

namespace test {

/// A captured graph, ready to launch.
class graph {
 public:
  /// In the mode `global` other threads, too, may wait for nothing and take no memory.
  template <class Work>
  graph(cudaStream_t stream, Work work, cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal)
      : graph{} {
    zero::detail::check_cuda(cudaStreamBeginCapture(stream, mode), "cudaStreamBeginCapture");
    try {
      work();
      zero::detail::check_cuda(cudaStreamEndCapture(stream, &graph_), "cudaStreamEndCapture");
    } catch (...) {
      static_cast<void>(cudaStreamEndCapture(stream, &graph_));
      static_cast<void>(cudaGetLastError());
      throw;
    }
    zero::detail::check_cuda(cudaGraphInstantiate(&exec_, graph_, 0), "cudaGraphInstantiate");
  }
  graph(graph const&) = delete;
  graph& operator=(graph const&) = delete;
  ~graph() {
    if (exec_ != nullptr) {
      static_cast<void>(cudaGraphExecDestroy(exec_));
    }
    if (graph_ != nullptr) {
      static_cast<void>(cudaGraphDestroy(graph_));
    }
  }
  void launch(cudaStream_t stream) {
    zero::detail::check_cuda(cudaGraphLaunch(exec_, stream), "cudaGraphLaunch");
  }

 private:
  graph() = default;

  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

inline constexpr std::size_t replays = 10;

/// A rank with a model on a stream of its own.
template <zero::communicator Communicator>
struct graph_rank {
  graph_rank(Communicator& on, setting const& how)
      : comm{on},
        model{on,         engine.units(),          how.stage, zero::adamw{.learning_rate = rate(0)},
              how.policy, with_stream(how.options)} {}

  /// A schedule: another learning rate in each step, but that the last two replays have one.
  static double rate(std::size_t step) {
    return 0.01 / static_cast<double>((step == replays ? step - 1 : step) + 1);
  }

  zero::options with_stream(zero::options options) const {
    options.stream = stream.native();
    return options;
  }

  void set_rate(std::size_t step) { model.optimizer().learning_rate = rate(step); }
  auto step() { return engine.step(model, run, comm.rank(), 0); }
  std::vector<float> values() { return engine.values(model); }

  /// Wait until nothing is in flight, here and on the other ranks, whose waits a capture forbids.
  void settle() {
    model.wait();
    stream.synchronize();
    meet();
  }
  void meet() {
    std::vector<std::byte> all(static_cast<std::size_t>(comm.size()));
    comm.exchange(std::array{std::byte{1}}, all);
  }

  Communicator& comm;
  run_settings run{.microbatches = 2};
  zero::cuda_stream stream;
  device_engine<zero::cuda, float> engine{stream};
  zero::sharded_model<Communicator, zero::adamw> model;
};

/// The values after a first step and ten more, and after a last one.
template <class Communicator>
std::array<std::vector<float>, 2> eager_values(Communicator& comm, setting const& how) {
  graph_rank rank{comm, how};
  for (std::size_t step = 0; step <= replays; ++step) {
    rank.set_rate(step);
    rank.step();
  }
  std::vector<float> first = rank.values();
  rank.set_rate(replays + 1);
  rank.step();
  return {std::move(first), rank.values()};
}

/// The same steps, of which a graph replays the ten, learning rates included.
template <class Communicator>
void check_replays(Communicator& comm, setting const& how) {
  auto const expected = eager_values(comm, how);
  graph_rank rank{comm, how};
  zero::traffic_bytes const bound = rank.model.sent();
  rank.step();  // eager
  zero::traffic_bytes const sent = rank.model.sent();
  rank.settle();
  graph captured{rank.stream.native(), [&] {
                   rank.step();
                   rank.model.wait();
                 }};
  rank.meet();
  CHECK_MESSAGE(rank.model.sent() == sent, how.name);  // a capture sends nothing
  for (std::size_t step = 1; step < replays; ++step) {
    rank.set_rate(step);
    rank.model.write_hyperparameters();
    captured.launch(rank.stream.native());
    if (step == replays - 1) {
      captured.launch(rank.stream.native());
    }
    rank.model.replayed(step == replays - 1 ? 2 : 1);
  }
  for (std::size_t kind = 0; kind < zero::traffic_count; ++kind) {
    auto const each = static_cast<zero::traffic>(kind);
    CHECK_MESSAGE(rank.model.sent()[each] == sent[each] + replays * (sent[each] - bound[each]),
                  how.name);
  }
  CHECK_MESSAGE(rank.model.steps(0) == replays + 1, how.name);
  CHECK_MESSAGE(same_bits(rank.values(), expected[0]), how.name);
  rank.set_rate(replays + 1);
  rank.step();  // and eager again
  CHECK_MESSAGE(same_bits(rank.values(), expected[1]), how.name);
  CHECK_MESSAGE(rank.model.steps(0) == replays + 2, how.name);
}

/// Every setting, with and without clipping.
[[nodiscard]] inline std::vector<setting> captured_settings() {
  std::vector<setting> out = every_setting({.bucket_bytes = 0});
  for (setting& each : every_setting({.clip_norm = 2.0, .bucket_bytes = 0})) {
    each.name += ", clipping";
    out.push_back(std::move(each));
  }
  return out;
}

}  // namespace test
