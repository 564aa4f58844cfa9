// SPDX-License-Identifier: MIT
// Whole steps captured into a CUDA graph, and replayed.
#include <zero/comm/solo.hpp>
#include <zero/device/cuda.hpp>
#include <zero/optim/adamw.hpp>

#include <doctest/doctest.h>
#if defined(ZERO_FAKE_CUDA)
#include <fake/cuda.hpp>
#endif
#include <support/device_engine.hpp>
#include <support/same_bits.hpp>
#include <support/thrown.hpp>

#include <cstddef>
#include <string>
#include <vector>

namespace {

constexpr std::size_t steps = 10;

/// A rank with a model on a stream of its own.
struct rank_of_one {
  explicit rank_of_one(test::setting const& how)
      : model{comm,       engine.units(),          how.stage, zero::adamw{.learning_rate = rate(0)},
              how.policy, with_stream(how.options)} {}

  /// A schedule: another learning rate in each step.
  static double rate(std::size_t step) { return 0.01 / static_cast<double>(step + 1); }

  zero::options with_stream(zero::options options) const {
    options.stream = stream.native();
    return options;
  }

  void step() { engine.step(model, run, 0, 0); }

  std::vector<float> values() { return engine.values(model); }

  test::run_settings run{.microbatches = 2};
  zero::basic_solo<zero::cuda> comm;
  zero::cuda_stream stream;
  test::device_engine<zero::cuda, float> engine{stream};
  zero::sharded_model<zero::basic_solo<zero::cuda>, zero::adamw> model;
};

/// A captured graph, ready to launch.
class graph {
 public:
  template <class Work>
  graph(cudaStream_t stream, Work work) {
    zero::detail::check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "begin");
    try {
      work();
    } catch (...) {
      static_cast<void>(cudaStreamEndCapture(stream, &graph_));
      throw;
    }
    zero::detail::check_cuda(cudaStreamEndCapture(stream, &graph_), "end");
    zero::detail::check_cuda(cudaGraphInstantiate(&exec_, graph_, 0), "instantiate");
  }
  graph(graph const&) = delete;
  graph& operator=(graph const&) = delete;
  ~graph() {
    static_cast<void>(cudaGraphExecDestroy(exec_));
    static_cast<void>(cudaGraphDestroy(graph_));
  }
  void launch(cudaStream_t stream) {
    zero::detail::check_cuda(cudaGraphLaunch(exec_, stream), "launch");
  }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

std::vector<float> eager(test::setting const& how) {
  rank_of_one rank{how};
  for (std::size_t step = 0; step < steps; ++step) {
    rank.model.optimizer().learning_rate = rank_of_one::rate(step);
    rank.step();
  }
  return rank.values();
}

}  // namespace

TEST_CASE("ten replays of a step have the bits of ten eager steps, learning rates included") {
  for (zero::options const& options :
       {zero::options{.bucket_bytes = 0}, zero::options{.clip_norm = 2.0, .bucket_bytes = 0}}) {
    for (test::setting const& how : test::every_setting(options)) {
      INFO(how.name);
      rank_of_one rank{how};
      rank.step();  // eager
      auto const sent = rank.model.sent();
      rank.model.wait();
      rank.stream.synchronize();
      graph captured{rank.stream.native(), [&] {
                       rank.step();
                       rank.model.wait();
                     }};
      CHECK(rank.model.sent() == sent);
      for (std::size_t step = 1; step + 1 < steps; ++step) {
        rank.model.optimizer().learning_rate = rank_of_one::rate(step);
        rank.model.write_hyperparameters();
        captured.launch(rank.stream.native());
        rank.model.replayed(1);
      }
      CHECK(rank.model.steps(0) == steps - 1);
      rank.model.optimizer().learning_rate = rank_of_one::rate(steps - 1);
      rank.step();  // and eager again
      CHECK(test::same_bits(rank.values(), eager(how)));
      CHECK(rank.model.steps(0) == steps);
    }
  }
}

TEST_CASE("what a capture can't hold throws when it is tried") {
  test::setting const how{
      "", zero::stage3{}, zero::reduce_per_microbatch{}, {.clip_norm = 2.0, .bucket_bytes = 0}};
  auto const tried = [&](auto attempt) {
    rank_of_one rank{how};
    rank.step();
    rank.model.wait();
    rank.stream.synchronize();
    auto const failure = test::message_of<zero::error>([&] {
      graph{rank.stream.native(), [&] { attempt(rank); }};
    });
    return failure;
  };
  std::string const no_wait = "expected no wait of the host in a capture, actual one";
  CHECK(tried([](rank_of_one& rank) {
          rank.step();
          static_cast<void>(rank.model.steps(0));
        }).find(no_wait) != std::string::npos);
  CHECK(tried([](rank_of_one& rank) {
          for (std::size_t m = 0; m < 1; ++m) {
            rank.engine.step(rank.model, rank.run, 0, 0);
          }
          static_cast<void>(rank.model.step().norm());
        }) != "");
  CHECK(tried([](rank_of_one& rank) {
          rank.model.replayed(1);
        }).find("replayed: expected a graph that was launched") != std::string::npos);
}

#if defined(ZERO_FAKE_CUDA)
TEST_CASE("a capture that begins with work in flight is refused") {
  rank_of_one rank{{"", zero::stage1{}, zero::local_accumulate{}, {}}};
  fake::delay_all(std::chrono::milliseconds{5});
  rank.step();
  CHECK(test::message_of<zero::error>([&] {
          graph{rank.stream.native(), [&] { rank.step(); }};
        }).find("expected nothing in flight where a capture begins") != std::string::npos);
  fake::delay_all(std::chrono::microseconds{0});
}
#endif
