// SPDX-License-Identifier: MIT
// Models on the CUDA device end with the bits of models on the host.
#include <zero/comm/loopback.hpp>
#include <zero/comm/run_threads.hpp>
#include <zero/comm/solo.hpp>
#include <zero/optim/adamw.hpp>
#include <zero/optim/sgd.hpp>

#include <doctest/doctest.h>
#include <comm/ranks.hpp>
#include <support/device_engine.hpp>

#include <cstddef>
#include <cstring>
#include <mutex>
#include <vector>

namespace {

/// The engine's stream on the host: nothing to name.
struct host_engine_stream {
  zero::host_stream stream;
  [[nodiscard]] void* native() const { return nullptr; }
};

struct cuda_engine_stream {
  zero::cuda_stream stream;
  [[nodiscard]] void* native() const { return stream.native(); }
};

template <class T, class EngineStream, class Communicator, class Optimizer>
std::vector<T> train(Communicator& comm, test::setting const& how, Optimizer const& optimizer,
                     test::run_settings const& run) {
  using device = typename Communicator::device;
  EngineStream engine_stream;
  test::device_engine<device, T> engine{engine_stream.stream};
  zero::options options = how.options;
  options.stream = engine_stream.native();
  zero::sharded_model model{comm, engine.units(), how.stage, optimizer, how.policy, options};
  CHECK(model.ledger() == model.plan().bytes);
  for (std::size_t step = 0; step < run.steps; ++step) {
    engine.step(model, run, comm.rank(), step);
  }
  model.wait();
  return engine.values(model);
}

template <class T>
bool same_bits(std::vector<T> const& a, std::vector<T> const& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

template <class T, class Optimizer>
std::vector<T> on_host(int ranks, test::setting const& how, Optimizer const& optimizer,
                       test::run_settings const& run) {
  std::vector<T> out;
  test::run_ranks(ranks, [&](zero::thread_communicator& comm) {
    auto values = train<T, host_engine_stream>(comm, how, optimizer, run);
    if (comm.rank() == 0) {
      out = std::move(values);
    }
  });
  return out;
}

/// Ten steps in every setting on the device, against the host's stage 0.
template <class T, class Optimizer>
void check_bits(zero::options const& options, Optimizer const& optimizer,
                test::run_settings const& run) {
  for (int const ranks : {1, 2, 3, 4}) {
    for (test::setting const& how : test::every_setting(options)) {
      std::vector<T> const expected =
          on_host<T>(ranks, {"", zero::stage0{}, how.policy, options}, optimizer, run);
      test::watchdog const limit;
      zero::run_loopback(ranks, [&](zero::loopback& comm) {
        std::vector<T> const actual = train<T, cuda_engine_stream>(comm, how, optimizer, run);
        CHECK_MESSAGE(same_bits(actual, expected), how.name, ", ", ranks, " ranks");
      });
    }
  }
}

}  // namespace

TEST_CASE("ten steps of adamw on the device have the bits of the host, in every setting") {
  check_bits<float>({.bucket_bytes = 0}, zero::adamw{.learning_rate = 0.01}, {});
}

TEST_CASE("so have those with clipping, buckets of several units, and no alignment") {
  check_bits<float>({.clip_norm = 5.0, .bucket_bytes = 500, .alignment = 1},
                    zero::adamw{.learning_rate = 0.01}, {.steps = 4});
}

TEST_CASE("so have bfloat16 parameters with master weights") {
  check_bits<zero::bfloat16>({.clip_norm = 5.0, .bucket_bytes = 0, .precision = zero::bf16},
                             zero::sgd{.learning_rate = 0.01, .momentum = 0.9}, {.steps = 4});
}

TEST_CASE("so have gradients that come one by one") {
  check_bits<float>({.bucket_bytes = 0}, zero::adamw{.learning_rate = 0.01},
                    {.steps = 3, .by_parameter = true});
}

TEST_CASE("a model of one rank runs over solo on the device") {
  for (test::setting const& how : test::every_setting()) {
    test::run_settings const run{.steps = 3};
    std::vector<float> const expected = on_host<float>(1, how, zero::adamw{}, run);
    zero::basic_solo<zero::cuda> comm;
    CHECK_MESSAGE(
        same_bits(train<float, cuda_engine_stream>(comm, how, zero::adamw{}, run), expected),
        how.name);
  }
}
