// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/partition.hpp>
#include <zero/optim/concept.hpp>
#include <zero/optim/gradient_norm.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

/// @file
/// What a step keeps beside tensors, in the device's memory, so that no step waits for the host:
/// what ranks tell each other, step counts, the multiplier, whether the update is skipped.

namespace zero::inline v0::detail {

/// What ranks must agree on about the micro-batches since the last step.
struct window {
  std::uint64_t microbatches;  ///< that ran
  std::uint64_t announced;
  std::uint64_t order;  ///< a hash of the order in which buckets were gathered and reduced
};

/// What a rank tells its peers in a step; a flag for each parameter follows.
struct step_header {
  window over;
  std::uint64_t optimizer;  ///< a fingerprint of its hyperparameters
  double magnitude;         ///< the largest of its gradient; with clipping only
};

/// How a peer's step differs from this rank's.
enum class step_fault : std::uint32_t { none, microbatches, announced, order, optimizer };

/// What a step found. Plain bytes, which the device writes and the host reads.
struct step_report {
  double norm;             ///< of the mean gradient, before clipping; with clipping only
  std::uint32_t skipped;   ///< the norm was not finite: nothing was updated
  std::uint32_t updating;  ///< an update has begun and not ended
  step_fault fault;
  std::int32_t rank;  ///< of the peer with the fault
  std::uint64_t expected;
  std::uint64_t actual;
};

struct step_state {
  step_header mine;
  step_report report;
  double multiplier;
  largest_value largest;
};
static_assert(sizeof(step_state) == 96 && std::is_trivially_copyable_v<step_state>);

/// Where each of them is: bytes from the start of the control memory.
template <class Device, class Optimizer>
struct control_map {
  template <class Real>
  using constants = decltype(std::declval<Optimizer const&>().template at<pack<Real>>(1));

  std::uint64_t bytes = 0;
  std::uint64_t state = take(sizeof(step_state));
  std::uint64_t optimizer = take(sizeof(Optimizer));
  std::uint64_t constants_bytes =  ///< of one parameter
      round_up(std::max(sizeof(constants<float>), sizeof(constants<double>)), align);
  std::uint64_t constants_of;   ///< per parameter, for this step
  std::uint64_t steps;          ///< per parameter: updates that it has had
  std::uint64_t had;            ///< per parameter: a gradient on any rank
  std::uint64_t types;          ///< per parameter: its accumulate dtype
  std::uint64_t message_bytes;  ///< of one rank
  std::uint64_t message;
  std::uint64_t messages;  ///< of all ranks
  std::uint64_t sum;
  std::uint64_t sums;  ///< of all ranks
  std::uint64_t scratch;

  control_map(std::uint64_t parameters, std::uint64_t ranks)
      : constants_of{take(parameters * constants_bytes)},
        steps{take(parameters * sizeof(std::int64_t))}, had{take(parameters)},
        types{take(parameters)}, message_bytes{round_up(sizeof(step_header) + parameters, align)},
        message{take(message_bytes)}, messages{take(message_bytes * ranks)},
        sum{take(sizeof(norm_sum))}, sums{take(sizeof(norm_sum) * ranks)},
        scratch{take(sizeof(norm_sum) * Device::reduce_blocks)} {}

 private:
  static constexpr std::uint64_t align = 16;

  std::uint64_t take(std::uint64_t size) {
    return std::exchange(bytes, bytes + round_up(size, align));
  }
};

}  // namespace zero::inline v0::detail
