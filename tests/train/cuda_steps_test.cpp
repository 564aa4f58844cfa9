// SPDX-License-Identifier: MIT
// What a step calls of the CUDA runtime: it allocates, frees and waits for nothing.
#include <zero/comm/solo.hpp>
#include <zero/device/cuda.hpp>
#include <zero/optim/adamw.hpp>

#include <doctest/doctest.h>
#include <fake/cuda.hpp>
#include <support/device_engine.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace {

using counts = std::map<std::string, std::uint64_t>;

/// Calls of the third step, after two of the same.
counts calls_of_step(zero::stage at, zero::accumulation policy, zero::options options) {
  zero::basic_solo<zero::cuda> comm;
  zero::cuda_stream stream;
  options.stream = stream.native();
  test::device_engine<zero::cuda, float> engine{stream};
  zero::sharded_model model{comm, engine.units(), at, zero::adamw{}, policy, options};
  test::run_settings const run{};
  counts out;
  for (std::size_t step = 0; step < 3; ++step) {
    model.wait();
    stream.synchronize();
    fake::reset_counts();
    engine.step(model, run, 0, step);
    out = fake::call_counts();
  }
  return out;
}

}  // namespace

TEST_CASE("a step allocates, frees and waits for nothing, in every setting") {
  for (double const clip : {0.0, 1.0}) {
    zero::options options{.bucket_bytes = 0};
    if (clip != 0) {
      options.clip_norm = clip;
    }
    for (test::setting const& how : test::every_setting(options)) {
      counts const calls = calls_of_step(how.stage, how.policy, how.options);
      for (auto const& [name, count] : calls) {
        static std::array<std::string_view, 10> const allowed{
            "zeroFakeLaunch",  "cudaMemsetAsync",          "cudaMemcpyAsync",
            "cudaEventRecord", "cudaStreamWaitEvent",      "cudaEventQuery",
            "cudaGetDevice",   "cudaStreamGetCaptureInfo", "cudaThreadExchangeStreamCaptureMode",
            "cudaSetDevice"};
        CHECK_MESSAGE(std::find(allowed.begin(), allowed.end(), name) != allowed.end(), how.name,
                      ": ", name, " ", count);
      }
    }
  }
}

TEST_CASE("what is launched in a step, by hand") {
  // Two micro-batches of four units, with seven parameters that have elements. Kernels: 2 * 7
  // gradients of the engine; 2 * 4 reductions of one rank; an update of each parameter, and of what
  // isn't whole packs of eight in 37, 130 and 19 elements; and eight more: hyperparameters, begin,
  // flags, message, headers, counts, and the marks around the update. Copies: one message of one
  // rank, two reports; in stage 3 also four gathers in each of four passes. Fills: the padding of
  // three units in two places each, in each micro-batch.
  struct row {
    zero::stage stage;
    std::uint64_t copies;
  };
  for (row const& each : {row{zero::stage0{}, 3}, row{zero::stage1{}, 3}, row{zero::stage2{}, 3},
                          row{zero::stage3{}, 3 + 4 * 4}}) {
    counts calls = calls_of_step(each.stage, zero::reduce_per_microbatch{}, {.bucket_bytes = 0});
    INFO("stage ", each.stage.number());
    CHECK(calls["zeroFakeLaunch"] == 2 * 7 + 2 * 4 + 7 + 3 + 8);
    CHECK(calls["cudaMemcpyAsync"] == each.copies);
    CHECK(calls["cudaMemsetAsync"] == 2 * 3 * 2);
  }
}
