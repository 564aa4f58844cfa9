// SPDX-License-Identifier: MIT
#pragma once

#include <fake/cuda.hpp>
#include <support/device_engine.hpp>
#include <zero/comm/concept.hpp>
#include <zero/device/cuda.hpp>
#include <zero/optim/adamw.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

/// @file
/// What a rank calls of the CUDA runtime and of NCCL in a step, over the fakes of both.

namespace test {

using counts = std::map<std::string, std::uint64_t>;

/// Calls that only ask.
inline void erase_questions(counts& calls) {
  for (char const* const asks :
       {"cudaEventQuery", "cudaGetDevice", "cudaSetDevice", "cudaStreamGetCaptureInfo",
        "cudaThreadExchangeStreamCaptureMode", "ncclCommGetAsyncError"}) {
    calls.erase(asks);
  }
}

/// The calls of this thread in the third step, after two of the same, but for those that only ask:
/// how often an event is asked for, until it is done, varies.
template <zero::communicator Communicator>
[[nodiscard]] counts calls_of_step(Communicator& comm, setting const& how) {
  auto const meet = [&] {
    std::vector<std::byte> all(static_cast<std::size_t>(comm.size()));
    comm.exchange(std::array{std::byte{1}}, all);
  };
  auto const log = [&](bool on) {
    meet();
    if (comm.rank() == 0) {
      fake::log(on);
    }
    meet();
  };
  zero::cuda_stream stream;
  device_engine<zero::cuda, float> engine{stream};
  zero::options options = how.options;
  options.stream = stream.native();
  zero::sharded_model model{comm, engine.units(), how.stage, zero::adamw{}, how.policy, options};
  counts out;
  for (std::size_t step = 0; step < 3; ++step) {
    model.wait();
    stream.synchronize();
    log(true);
    engine.step(model, {}, comm.rank(), step);
    out.clear();
    for (std::string const& name : fake::logged()) {
      ++out[name];
    }
  }
  log(false);
  erase_questions(out);
  return out;
}

/// In words, for comparisons.
[[nodiscard]] inline std::string in_words(counts const& calls) {
  std::string out;
  for (auto const& [name, count] : calls) {
    out += count == 0 ? "" : name + " " + std::to_string(count) + "\n";
  }
  return out;
}

/// What any step may call, but for what asks: nothing that allocates, frees or waits.
[[nodiscard]] inline std::string other_calls(counts calls) {
  for (char const* const enqueues :
       {"zeroFakeLaunch", "cudaMemsetAsync", "cudaMemcpyAsync", "cudaEventRecord",
        "cudaStreamWaitEvent", "ncclGroupStart", "ncclGroupEnd", "ncclSend", "ncclRecv",
        "ncclAllGather", "ncclAllReduce", "ncclReduceScatter"}) {
    calls.erase(enqueues);
  }
  return in_words(calls);
}

/// Every setting, with and without clipping.
[[nodiscard]] inline std::vector<setting> clipped_or_not() {
  std::vector<setting> out = every_setting({.bucket_bytes = 0});
  for (setting const& each : every_setting({.clip_norm = 1.0, .bucket_bytes = 0})) {
    out.push_back(each);
  }
  return out;
}

/// Stages 0 to 3, each reducing per micro-batch in buckets of one unit.
[[nodiscard]] inline std::vector<setting> plain_stages() {
  zero::options const options{.bucket_bytes = 0};
  zero::reduce_per_microbatch const policy;
  return {{"stage 0", zero::stage0{}, policy, options},
          {"stage 1", zero::stage1{}, policy, options},
          {"stage 2", zero::stage2{}, policy, options},
          {"stage 3", zero::stage3{}, policy, options}};
}

// What is in two micro-batches of the engine's four units, in stages 0 to 3, by hand.
//
// Seven parameters have elements; an update's kernel takes whole packs of eight, and another one
// what is left. Alone, a rank updates 37 + 5, 64, 1 + 130 and 19 + 3 elements: 10 kernels. Of two
// ranks the first has 37, 64, 1 + 64 and 19 of them, the second 5, none, 66 and 3, since parameters
// and slices begin at multiples of 64 elements: 7 and 4 kernels.

/// Collectives: a reduction of each unit in each micro-batch; in stages 1 and 2 the update gathers
/// each unit, in stage 3 each of four passes does; and the ranks' messages.
inline constexpr std::array<std::uint64_t, 4> gathers{0, 4, 4, 4 * 4};
inline constexpr std::uint64_t reductions = 2 * 4;

/// Kernels: the engine's gradients; a sum for each reduction; updates; hyperparameters, begin,
/// flags, message, headers and counts.
[[nodiscard]] constexpr std::uint64_t launches_with(std::uint64_t updates) {
  return 2 * 7 + reductions + updates + 6;
}
[[nodiscard]] constexpr std::uint64_t launches_of_two(std::size_t stage, int rank) {
  return launches_with(stage == 0 ? 10 : rank == 0 ? 7 : 4);
}

/// Copies to the host: a report after the update.
inline constexpr std::uint64_t reports = 1;

/// Fills: what follows parameters in three of the units, in two places each; with two ranks also
/// the second one's slice of the unit of 64.
[[nodiscard]] constexpr std::uint64_t fills_of(int ranks) {
  return 2 * (3 * 2 + (ranks == 2 ? 1U : 0U));
}

/// Records: what the engine wrote before a reduction, and the slot that is free after it; what it
/// did before the update, the units' updates, and the last one's end. In stage 3, with each gather,
/// what the engine has read before, and its end.
[[nodiscard]] constexpr std::uint64_t records_in(std::size_t stage) {
  return 2 * reductions + 1 + 4 + 1 + (stage == 3 ? 2 * gathers[3] : 0);
}

/// Waits: of a reduction for the engine, of the engine for a slot; of each of 16 leases for its
/// unit; of the update for the engine; in stage 3 of each gather for the engine.
[[nodiscard]] constexpr std::uint64_t waits_in(std::size_t stage) {
  return 2 * reductions + 16 + 1 + (stage == 3 ? gathers[3] : 0);
}

}  // namespace test
