// SPDX-License-Identifier: MIT
#pragma once

#include <doctest/doctest.h>
#include <fake/cuda.hpp>
#include <support/device_engine.hpp>
#include <support/same_bits.hpp>
#include <support/thrown.hpp>
#include <zero/device/cuda.hpp>
#include <zero/optim/adamw.hpp>

#include <chrono>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <vector>

/// @file
/// What a step finds on the device, for which no host waits: a norm that isn't finite, and ranks
/// that disagree.

namespace test {

/// Every stage and policy, with communication beside the engine's work.
[[nodiscard]] inline std::vector<setting> overlapping_settings(zero::options const& options) {
  std::vector<setting> out = every_setting(options);
  std::erase_if(out, [](setting const& each) { return !each.options.overlap; });
  return out;
}

/// A rank's engine and model.
template <class Communicator>
struct reporting_rank {
  reporting_rank(Communicator& on, setting const& how)
      : model{on, engine.units(), how.stage, zero::adamw{}, how.policy, with_stream(how.options)} {}

  zero::options with_stream(zero::options options) const {
    options.stream = stream.native();
    return options;
  }

  zero::cuda_stream stream;
  device_engine<zero::cuda, float> engine{stream};
  zero::sharded_model<Communicator, zero::adamw> model;
};

/// apex#347: one rank's gradient overflows, so no rank updates. The ranks end where they do without
/// that step, whether the report is read or not.
template <class Communicator>
void check_overflow(Communicator& comm, setting const& how) {
  auto const train = [&](bool overflows, bool reads, float extra) {
    reporting_rank rank{comm, how};
    for (std::size_t step = 0; step < 3; ++step) {
      bool const bad = step == 1;
      if (bad && !overflows) {
        continue;
      }
      auto const result =
          rank.engine.step(rank.model, {.extra = bad && comm.rank() + 1 == comm.size() ? extra : 0},
                           comm.rank(), step);
      if (reads) {
        CHECK_MESSAGE(result.skipped() == bad, how.name);
        CHECK_MESSAGE(std::isfinite(result.norm()) != bad, how.name);
      }
    }
    CHECK_MESSAGE(rank.model.steps(0) == 2, how.name);
    return rank.engine.values(rank.model);
  };
  std::vector<float> const expected = train(false, false, 0);
  for (bool const reads : {false, true}) {
    CHECK_MESSAGE(same_bits(train(true, reads, std::numeric_limits<float>::infinity()), expected),
                  how.name);
    CHECK_MESSAGE(same_bits(train(true, reads, std::numeric_limits<float>::quiet_NaN()), expected),
                  how.name);
  }
}

/// One rank has another learning rate in one step, and the host is steps ahead of the device when
/// that finds it: all ranks are told, and nothing was updated from there on (of stage 3 no value
/// can be read any more).
template <class Communicator>
void check_late_disagreement(Communicator& comm, setting const& how) {
  reporting_rank rank{comm, how};
  auto const step = [&](std::size_t number) {
    rank.engine.step(rank.model, {}, comm.rank(), number);
  };
  step(0);
  rank.model.wait();
  std::vector<float> const expected = rank.engine.values(rank.model);
  fake::delay_all(std::chrono::microseconds{300});
  double const rate = rank.model.optimizer().learning_rate;
  std::string const message = message_of<zero::error>([&] {
    rank.model.optimizer().learning_rate = comm.rank() == 1 ? 2 * rate : rate;
    step(1);
    rank.model.optimizer().learning_rate = rate;
    step(2);
    step(3);
    static_cast<void>(rank.model.steps(0));
  });
  CHECK_MESSAGE(message.find("step: expected one optimizer on all ranks, actual other "
                             "hyperparameters on rank ") != std::string::npos,
                how.name, ": ", message);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  if (!how.stage.shards_parameters()) {
    CHECK_MESSAGE(same_bits(rank.engine.values(), expected), how.name);
  }
}

}  // namespace test
