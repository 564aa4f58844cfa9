// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/run_threads.hpp>
#include <zero/train/accumulation.hpp>
#include <zero/train/options.hpp>
#include <zero/train/stage.hpp>

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

/// @file
/// The ways of running one training loop that must all give the same: stages, policies, overlap.

namespace test {

/// One way of running a model.
struct setting {
  std::string name;
  zero::stage stage;
  zero::accumulation policy;
  zero::options options;
};

/// A stage and what to call it in a message.
using named_stage = std::pair<std::string, zero::stage>;

[[nodiscard]] inline std::vector<named_stage> every_stage() {
  return {{"stage 0", zero::stage0{}},
          {"stage 1", zero::stage1{}},
          {"stage 1, all-reduce", zero::stage1{zero::gradient_collective::all_reduce}},
          {"stage 2", zero::stage2{}},
          {"stage 3, no prefetch", zero::stage3{.prefetch = 0}},
          {"stage 3, prefetch 2", zero::stage3{.prefetch = 2}},
          {"stage 3, kept after forward", zero::stage3{.keep_after_forward = true}},
          {"stage 3, last kept", zero::stage3{.prefetch = 0, .keep_last = true}}};
}

/// Every stage, policy, and setting of overlap; the other options as in `options`.
[[nodiscard]] inline std::vector<setting> every_setting(zero::options const& options = {}) {
  std::vector<setting> out;
  for (auto const& [name, stage] : every_stage()) {
    for (bool const overlap : {false, true}) {
      zero::options chosen = options;
      chosen.overlap = overlap;
      std::string const how = overlap ? ", overlapping" : ", inline";
      out.push_back({name + ", local" + how, stage, zero::local_accumulate{}, chosen});
      out.push_back(
          {name + ", per micro-batch" + how, stage, zero::reduce_per_microbatch{}, chosen});
    }
  }
  return out;
}

/// Call `body(comm, setting)` on every rank of each world size, for every setting.
template <class Body>
void everywhere(std::initializer_list<int> world_sizes, zero::options const& options, Body body) {
  for (int const ranks : world_sizes) {
    for (setting each : every_setting(options)) {
      each.name += ", " + std::to_string(ranks) + " ranks";
      zero::run_threads(ranks, [&](zero::thread_communicator& comm) { body(comm, each); });
    }
  }
}

}  // namespace test
