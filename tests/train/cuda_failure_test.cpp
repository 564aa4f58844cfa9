// SPDX-License-Identifier: MIT
// A call of the CUDA runtime fails, each in turn: an exception on every rank, no leak, no hang.
#include <zero/comm/loopback.hpp>
#include <zero/optim/adamw.hpp>

#include <doctest/doctest.h>
#include <fake/cuda.hpp>
#include <support/device_engine.hpp>
#include <support/watchdog.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <string>
#include <string_view>

namespace {

constexpr std::chrono::seconds deadline{20};

/// What a rank's life threw; empty where it threw nothing.
using messages = std::array<std::string, 2>;

/// Build a model on two ranks, train a step, read the values, and part together.
messages live(zero::stage at, zero::options options, zero::accumulation policy) {
  messages out;
  auto const body = [&](zero::loopback& comm) {
    zero::cuda_stream stream;
    zero::options mine = options;
    mine.stream = stream.native();
    test::device_engine<zero::cuda, float> engine{stream};
    zero::sharded_model model{comm, engine.units(), at, zero::adamw{}, policy, mine};
    engine.step(model, {.microbatches = 1}, comm.rank(), 0);
    static_cast<void>(model.steps(0));
    static_cast<void>(engine.values(model));
    std::array<std::byte, 2> all{};
    std::byte const one{1};
    comm.exchange({&one, 1}, all);  // a rank that throws isn't here
  };
  try {
    zero::run_loopback(2,
                       [&](zero::loopback& comm) {
                         try {
                           body(comm);
                         } catch (std::exception const& failure) {
                           out[static_cast<std::size_t>(comm.rank())] = failure.what();
                           throw;
                         }
                       },
                       {.deadline = deadline});
  } catch (std::exception const& failure) {
    for (std::string& each : out) {
      each = each.empty() ? failure.what() : each;  // before the ranks began
    }
  }
  return out;
}

bool says(std::string const& message, std::string const& part) {
  return message.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("each call of the runtime fails once") {
  // What a destructor calls can't throw, and a query that fails is as one that isn't ready.
  static std::array<std::string_view, 9> const quiet{"cudaFree",
                                                     "cudaFreeHost",
                                                     "cudaStreamDestroy",
                                                     "cudaEventDestroy",
                                                     "cudaEventQuery",
                                                     "cudaThreadExchangeStreamCaptureMode",
                                                     "cudaStreamSynchronize",
                                                     "cudaSetDevice",
                                                     "cudaGetDevice"};
  struct row {
    zero::stage stage;
    zero::accumulation policy;
    zero::options options;
  };
  for (row const& each :
       {row{zero::stage3{}, zero::reduce_per_microbatch{}, {.clip_norm = 1.0, .overlap = true}},
        row{zero::stage1{}, zero::local_accumulate{}, {.overlap = false}}}) {
    test::watchdog const limit{std::chrono::seconds{280}};
    std::uint64_t n = 1;
    for (bool failed = true; failed; ++n) {
      std::string called;
      std::uint64_t left = n;
      std::mutex mutex;
      fake::fail_call(1, cudaErrorUnknown, [&](char const* function) {
        std::lock_guard const lock{mutex};
        bool const now = left != 0 && --left == 0;
        called = now ? function : called;
        return now;
      });
      fake::protect_device_memory(false);  // for speed
      messages const thrown = live(each.stage, each.options, each.policy);
      fake::reset();
      failed = !called.empty();
      if (!failed) {
        break;
      }
      bool const is_quiet = std::find(quiet.begin(), quiet.end(), called) != quiet.end();
      for (std::string const& message : thrown) {
        CHECK_MESSAGE((is_quiet || !message.empty()), n, ": ", called);
      }
      CHECK_MESSAGE((thrown[0].empty() || says(thrown[0], called) || says(thrown[1], called)), n,
                    ": ", called, ": ", thrown[0], " | ", thrown[1]);
      CHECK_MESSAGE(thrown[0].empty() == thrown[1].empty(), n, ": ", called);
      CHECK_MESSAGE(fake::live() == fake::live_counts{}, n, ": ", called);
    }
    CHECK(n > 300);
  }
}
