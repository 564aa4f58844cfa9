// SPDX-License-Identifier: MIT
// Models over NCCL end with the bits of models on the host in ordered mode, and near them in fast
// mode.
#include <zero/comm/nccl.hpp>
#include <zero/optim/adamw.hpp>
#include <zero/optim/sgd.hpp>

#include <doctest/doctest.h>
#include <support/device_engine.hpp>
#include <support/gpus.hpp>
#include <support/same_bits.hpp>
#include <support/thrown.hpp>
#include <support/watchdog.hpp>
#if defined(ZERO_FAKE_CUDA)
#include <fake/child.hpp>
#include <fake/cuda.hpp>
#include <fake/nccl.hpp>
#endif

#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace {

/// How far an element may be from the host's: `absolute` + `relative` * |host's|.
struct bound {
  double absolute = 0;
  double relative = 0;
};

/// Whether all values are within the bound; none: the same bits.
template <class T>
bool near(std::vector<T> const& a, std::vector<T> const& b, bound const& within) {
  if (within.absolute == 0) {
    return test::same_bits(a, b);
  }
  for (std::size_t i = 0; i < a.size(); ++i) {
    auto const x = static_cast<double>(static_cast<float>(a[i]));
    auto const y = static_cast<double>(static_cast<float>(b[i]));
    if (!(std::abs(x - y) <= within.absolute + within.relative * std::abs(y))) {
      return false;
    }
  }
  return a.size() == b.size();
}

/// Some steps in every setting over NCCL, against the host's stage 0. In fast mode the arena is
/// NCCL's, and most of it a symmetric window.
template <class T, class Optimizer>
void check(zero::nccl_mode mode, bound const& within, zero::options const& options,
           Optimizer const& optimizer, test::run_settings const& run) {
#if defined(ZERO_FAKE_CUDA)
  fake::protect_device_memory(FAKE_HAS_TSAN == 0);  // for speed
#endif
  for (int const ranks : test::ranks_with_gpus({1, 2, 3, 4})) {
    test::host_values<T> const host{ranks, options, optimizer, run};
    for (test::setting const& how : test::every_setting(options)) {
      std::vector<T> const& expected = host.of(how);
      test::watchdog const limit;
      test::setting there = how;
      if (mode == zero::nccl_mode::fast) {
        there.options.memory = zero::nccl_memory();
      }
      zero::run_nccl(ranks,
                     [&](zero::nccl& comm) {
                       std::vector<T> const actual = test::train<T>(comm, there, optimizer, run);
                       CHECK_MESSAGE(near(actual, expected, within), how.name, ", ", ranks,
                                     " ranks");
                     },
                     {.mode = mode, .scratch_bytes = std::size_t{1} << 20U});
#if defined(ZERO_FAKE_CUDA)
      CHECK(fake::live_communicators() == 0);
      CHECK_MESSAGE(fake::nccl_misuse().empty(), fake::nccl_misuse());
#endif
    }
  }
}

/// A step of stage 2 whose gradients come in another order on rank 1, through one unit that waits.
void step_in_own_order(zero::nccl& comm) {
  using tensor = test::device_tensor<zero::cuda, float>;
  zero::cuda_stream stream;
  std::vector<std::unique_ptr<tensor>> tensors;
  std::vector<std::vector<zero::any_parameter>> units;
  for (std::size_t u = 0; u < 4; ++u) {
    std::vector<float> const zeros(10 + 3 * u);
    tensor& value = *tensors.emplace_back(std::make_unique<tensor>(stream, zeros));
    tensor& gradient = *tensors.emplace_back(std::make_unique<tensor>(stream, zeros));
    units.push_back({zero::parameter(std::to_string(u), value, gradient)});
  }
  zero::sharded_model model{
      comm,
      units,
      zero::stage2{},
      zero::plain_sgd{.learning_rate = 1},
      zero::reduce_per_microbatch{.open_buckets = 2},
      {.bucket_bytes = 0, .stream = stream.native(), .memory = zero::nccl_memory()}};
  {
    auto micro = model.microbatch(0, 1);
    for (std::size_t u = 4; u-- > 0;) {
      auto const lease = micro.backward(u, zero::by_parameter);
    }
    auto const write = [&](std::size_t u) {
      std::vector<float> const values(10 + 3 * u, static_cast<float>(comm.rank() + 1));
      zero::cuda::upload(stream, std::span{values}, micro.gradient(u).span.as<float>());
    };
    bool const odd = comm.rank() == 1;
    write(3);
    write(odd ? 1 : 2);
    micro.gradient_ready(3);
    micro.gradient_ready(odd ? 1 : 2);
    write(odd ? 2 : 1);
    micro.gradient_ready(odd ? 2 : 1);
    write(0);
    micro.gradient_ready(0);
  }
  model.step();
  model.wait();
  for (std::size_t u = 0; u < 4; ++u) {
    std::vector<float> values(10 + 3 * u);
    zero::cuda::download(stream, tensors[2 * u]->view(), std::span{values});
    CHECK(values == std::vector<float>(10 + 3 * u, -static_cast<float>(comm.size() + 1) / 2));
  }
}

}  // namespace

TEST_CASE("gradients may come in another order on each rank, with symmetric windows, too") {
  for (zero::nccl_mode const mode : {zero::nccl_mode::ordered, zero::nccl_mode::fast}) {
    for (int const ranks : test::ranks_with_gpus({2, 3})) {
      test::watchdog const limit;
      zero::run_nccl(ranks, step_in_own_order, {.mode = mode});
#if defined(ZERO_FAKE_CUDA)
      CHECK_MESSAGE(fake::nccl_misuse().empty(), fake::nccl_misuse());
#endif
    }
  }
}

TEST_CASE("ten steps of adamw in ordered mode have the bits of the host, in every setting") {
  check<float>(zero::nccl_mode::ordered, {}, {.clip_norm = 5.0, .bucket_bytes = 0},
               zero::adamw{.learning_rate = 0.01}, {});
}

TEST_CASE("so have bfloat16 parameters with master weights") {
  check<zero::bfloat16>(
      zero::nccl_mode::ordered, {},
      {.clip_norm = 5.0, .bucket_bytes = 500, .alignment = 1, .precision = zero::bf16},
      zero::sgd{.learning_rate = 0.01, .momentum = 0.9}, {.steps = 3});
}

// By arithmetic. |value| <= 3.5 at the start; |gradient| <= |value| / 2 + 2 + 1.875 < 6, so that
// ten steps of 0.01 move a value by at most 0.6, to 4.1. u is the unit roundoff.
TEST_CASE("in fast mode parameters after ten steps are the host's, but for roundings of the wire") {
  // float32, u = 2^-24. The mean over 4 ranks of the sum over 2 micro-batches is at most 12. NCCL
  // and the host each round three additions and a scale: (3 + 1) * 12 u, together 96 u, over 2
  // micro-batches 48 u, in a value 0.48 u. Each side rounds the value, 4.1 u, its step, 0.06 u, and
  // what the gradient is computed of, 4 * 12 u * 0.01: together less than 9.8 u. Ten steps, whose
  // gradients repeat half of the distance (1.005^10): 98 u * 1.06 < 104 u.
  constexpr double single = 0x1p-24;
  check<float>(zero::nccl_mode::fast, {.absolute = 104 * single}, {.bucket_bytes = 0},
               zero::sgd{.learning_rate = 0.01}, {});
  // bfloat16 parameters with master weights, u = 2^-8. NCCL rounds three additions: 3 * 12 u. Each
  // side's parameters round, 4.1 u, of which a gradient has half; it rounds, 6 u, twice, and its
  // sum, 12 u: together 2 * (4.1 + 2 * 6 + 12) u. 92.2 u over 2 micro-batches, times 0.01: less
  // than 0.47 u in a master weight, in ten steps 4.7 u * 1.06 < 5 u. Then both round once more.
  constexpr double brief = 0x1p-8;
  check<zero::bfloat16>(zero::nccl_mode::fast, {.absolute = 5 * brief, .relative = 2.1 * brief},
                        {.bucket_bytes = 0, .precision = zero::bf16},
                        zero::sgd{.learning_rate = 0.01}, {});
}

TEST_CASE("an arena of NCCL's memory is registered, and given back") {
  for (bool const releases : {false, true}) {
    test::watchdog const limit;
    int const ranks = test::ranks_with_gpus({1, 2}).back();
    zero::run_nccl(ranks, [&](zero::nccl& comm) {
      zero::cuda_stream stream;
      test::device_engine<zero::cuda, float> engine{stream};
      zero::options options{.stream = stream.native(), .memory = zero::nccl_memory()};
      zero::sharded_model model{
          comm,   engine.units(), zero::stage3{}, zero::adamw{}, zero::reduce_per_microbatch{},
          options};
#if defined(ZERO_FAKE_CUDA)
      CHECK(fake::live_registrations() >= 1);
      CHECK(fake::live_windows() >= 1);
#endif
      engine.step(model, {}, comm.rank(), 0);
      model.wait();
      if (releases) {
        model.release();
      }
    });
#if defined(ZERO_FAKE_CUDA)
    CHECK(fake::live_registrations() == 0);
    CHECK(fake::live_windows() == 0);
    CHECK(fake::live_nccl_allocations() == 0);
    CHECK(fake::nccl_misuse().empty());
#endif
  }
}

#if defined(ZERO_FAKE_CUDA)
TEST_CASE("a rank that fails while an update may run leaves a model that says so") {
  fake::set_device_count(2);
  test::watchdog const limit;
  std::array<std::string, 2> later;
  try {
    zero::run_nccl(2, [&](zero::nccl& comm) {
      zero::cuda_stream stream;
      test::device_engine<zero::cuda, float> engine{stream};
      zero::sharded_model model{
          comm,          engine.units(),           zero::stage1{},
          zero::adamw{}, zero::local_accumulate{}, {.stream = stream.native()}};
      fake::delay(stream.native(), std::chrono::milliseconds{20});  // so that the update waits
      engine.step(model, {}, comm.rank(), 0);
      std::array<std::byte, 2> all{};
      comm.exchange(std::array{std::byte{1}}, all);  // both have enqueued it
      comm.abort("a fault");  // reaches the model's communicator, which was split from this one
      while (test::what_throws([&] { model.wait(); }).message.empty()) {
        std::this_thread::sleep_for(std::chrono::milliseconds{1});
      }
      later[static_cast<std::size_t>(comm.rank())] =
          test::what_throws([&] { model.wait(); }).message;
    });
  } catch (std::exception const&) {
  }
  for (std::string const& message : later) {
    CHECK_MESSAGE(message.find("may have failed midway") != std::string::npos, message);
  }
}
#endif
