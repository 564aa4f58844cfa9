// SPDX-License-Identifier: MIT
// A call of NCCL or the CUDA runtime fails under a model over NCCL: an exception on every rank, no
// leak, no hang.
#include <zero/comm/nccl.hpp>
#include <zero/optim/adamw.hpp>

#include <doctest/doctest.h>
#include <comm/ranks.hpp>
#include <fake/cuda.hpp>
#include <fake/nccl.hpp>
#include <support/device_engine.hpp>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <string>

namespace {

/// What each rank's life threw; empty where it threw nothing.
using messages = std::array<std::string, 2>;

/// Build a model on two ranks, train a step, read the values, and part together.
messages live(zero::nccl_options const& how) {
  messages out;
  auto const body = [&](zero::nccl& comm) {
    zero::cuda_stream stream;
    test::device_engine<zero::cuda, float> engine{stream};
    zero::sharded_model model{comm,
                              engine.units(),
                              zero::stage3{},
                              zero::adamw{},
                              zero::reduce_per_microbatch{},
                              {.clip_norm = 1.0, .stream = stream.native()}};
    engine.step(model, {.microbatches = 1}, comm.rank(), 0);
    static_cast<void>(model.steps(0));
    static_cast<void>(engine.values(model));
    std::array<std::byte, 2> all{};
    comm.exchange(std::array{std::byte{1}}, all);  // a rank that throws isn't here
  };
  try {
    zero::run_nccl(
        2,
        [&](zero::nccl& comm) {
          try {
            body(comm);
          } catch (std::exception const& failure) {
            out[static_cast<std::size_t>(comm.rank())] = failure.what();
            throw;
          }
        },
        how);
  } catch (std::exception const& failure) {
    for (std::string& each : out) {
      each = each.empty() ? failure.what() : each;  // before the ranks began
    }
  }
  return out;
}

}  // namespace

TEST_CASE("calls fail one after another, every fifth of a model's life") {
  for (zero::nccl_mode const mode : {zero::nccl_mode::ordered, zero::nccl_mode::fast}) {
    test::watchdog const limit{std::chrono::seconds{280}};
    std::uint64_t runs = 0;
    for (std::uint64_t n = 1;; n += 5) {
      std::string called;
      std::uint64_t left = n;
      std::mutex mutex;
      fake::set_device_count(2);
      fake::protect_device_memory(false);  // for speed
      fake::fail_call(1, cudaErrorUnknown, [&](char const* function) {
        std::lock_guard const lock{mutex};
        bool const now = left != 0 && --left == 0;
        called = now ? function : called;
        return now;
      });
      messages const thrown = live({.mode = mode,
                                    .scratch_bytes = std::size_t{1} << 20U,
                                    .deadline = std::chrono::seconds{10}});
      fake::reset();
      if (called.empty()) {
        break;
      }
      ++runs;
      CHECK_MESSAGE(thrown[0].empty() == thrown[1].empty(), n, ": ", called, ": ", thrown[0], " | ",
                    thrown[1]);
      CHECK_MESSAGE(fake::live() == fake::live_counts{}, n, ": ", called);
      CHECK_MESSAGE(fake::live_communicators() == 0, n, ": ", called);
    }
    CHECK(runs > 100);
  }
}
