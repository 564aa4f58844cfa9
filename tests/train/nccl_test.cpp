// SPDX-License-Identifier: MIT
// Models over NCCL end with the bits of models on the host in ordered mode, and near them in fast
// mode.
#include <zero/comm/nccl.hpp>
#include <zero/comm/run_threads.hpp>
#include <zero/optim/adamw.hpp>
#include <zero/optim/sgd.hpp>

#include <doctest/doctest.h>
#include <comm/ranks.hpp>
#include <fake/cuda.hpp>
#include <fake/nccl.hpp>
#include <support/device_engine.hpp>

#include <cmath>
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

/// Whether all values are as near as roundings of `T` on the way leave them.
template <class T>
bool near(std::vector<T> const& a, std::vector<T> const& b, double tolerance) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    auto const x = static_cast<double>(static_cast<float>(a[i]));
    auto const y = static_cast<double>(static_cast<float>(b[i]));
    if (!(std::abs(x - y) <= tolerance * (1 + std::abs(y)))) {
      return false;
    }
  }
  return a.size() == b.size();
}

/// Some steps in every setting over NCCL, against the host's stage 0.
template <class T, class Optimizer>
void check(zero::nccl_mode mode, double tolerance, zero::options const& options,
           Optimizer const& optimizer, test::run_settings const& run) {
  fake::set_device_count(4);
  for (int const ranks : {1, 2, 3, 4}) {
    for (test::setting const& how : test::every_setting(options)) {
      std::vector<T> const expected =
          on_host<T>(ranks, {"", zero::stage0{}, how.policy, options}, optimizer, run);
      test::watchdog const limit;
      zero::run_nccl(
          ranks,
          [&](zero::nccl& comm) {
            std::vector<T> const actual = train<T, cuda_engine_stream>(comm, how, optimizer, run);
            CHECK_MESSAGE(
                (tolerance == 0 ? same_bits(actual, expected) : near(actual, expected, tolerance)),
                how.name, ", ", ranks, " ranks");
          },
          {.mode = mode, .scratch_bytes = std::size_t{1} << 20U});
      CHECK(fake::live_communicators() == 0);
    }
  }
}

}  // namespace

TEST_CASE("steps of adamw in ordered mode have the bits of the host, in every setting") {
  check<float>(zero::nccl_mode::ordered, 0, {.clip_norm = 5.0, .bucket_bytes = 0},
               zero::adamw{.learning_rate = 0.01}, {.steps = 4});
}

TEST_CASE("so have bfloat16 parameters with master weights") {
  check<zero::bfloat16>(
      zero::nccl_mode::ordered, 0,
      {.clip_norm = 5.0, .bucket_bytes = 500, .alignment = 1, .precision = zero::bf16},
      zero::sgd{.learning_rate = 0.01, .momentum = 0.9}, {.steps = 3});
}

TEST_CASE("in fast mode they are near the host's, within what the wire rounds") {
  check<float>(zero::nccl_mode::fast, 1e-5, {.bucket_bytes = 0}, zero::sgd{.learning_rate = 0.01},
               {.steps = 3});
  check<zero::bfloat16>(zero::nccl_mode::fast, 2e-2, {.bucket_bytes = 0, .precision = zero::bf16},
                        zero::sgd{.learning_rate = 0.01}, {.steps = 3});
}
