// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/config.hpp>
#include <zero/core/dtype.hpp>
#include <zero/optim/fused_update.hpp>
#include <zero/optim/gradient_norm.hpp>
#include <zero/train/control.hpp>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

/// @file
/// The kernels of a step. Each is a plain value that `Device::launch` or `accumulate` runs over
/// ranges; those over [0, 1) run once.

namespace zero::inline v0::detail {

/// The hyperparameters of a step.
template <class Optimizer>
struct write_optimizer {
  Optimizer* to;
  Optimizer value;
  ZERO_HOST_DEVICE void operator()(std::size_t /*first*/, std::size_t /*count*/) const {
    *to = value;
  }
};

/// Forget the last step, but for a fault, which the host may not have seen and which no later
/// update follows; what this rank tells its peers of this one.
struct begin_step {
  step_state* state;
  norm_sum* sum;
  step_header mine;
  ZERO_HOST_DEVICE void operator()(std::size_t /*first*/, std::size_t /*count*/) const {
    step_report const last = state->report;
    *state = {};
    if (last.fault != step_fault::none) {
      state->report = last;
    }
    state->mine = mine;
    *sum = {};
  }
};

/// This rank's flags of up to 768 parameters.
struct write_flags {
  static constexpr std::size_t most = 768;

  std::uint8_t* to;
  std::uint32_t size;
  std::array<std::uint64_t, most / 64> bits;

  ZERO_HOST_DEVICE void operator()(std::size_t /*first*/, std::size_t /*count*/) const {
    for (std::uint32_t i = 0; i < size; ++i) {
      to[i] = static_cast<std::uint8_t>(bits[i / 64] >> (i % 64) & 1U);
    }
  }
};

/// The largest magnitude of a part of the gradient.
struct find_magnitude {
  static constexpr std::size_t grain = 8;

  void const* gradient;
  dtype type;
  ZERO_HOST_DEVICE largest_value operator()(std::size_t first, std::size_t count) const {
    auto const* const bytes = static_cast<std::byte const*>(gradient);
    return {magnitude_of(bytes + first * size_bytes(type), count, type)};
  }
};

/// Put the header in front of the flags.
struct write_message {
  step_state* state;
  std::byte* message;
  ZERO_HOST_DEVICE void operator()(std::size_t /*first*/, std::size_t /*count*/) const {
    state->mine.magnitude = state->largest.value;
    std::memcpy(message, &state->mine, sizeof state->mine);
  }
};

/// What all ranks have told each other.
struct step_messages {
  std::byte const* first;
  std::uint64_t bytes;  // of each
  std::uint32_t ranks;

  [[nodiscard]] ZERO_HOST_DEVICE step_header header(std::uint32_t rank) const {
    step_header out;
    std::memcpy(&out, first + rank * bytes, sizeof out);
    return out;
  }
  [[nodiscard]] ZERO_HOST_DEVICE bool flag(std::uint32_t rank, std::size_t id) const {
    return first[rank * bytes + sizeof(step_header) + id] != std::byte{0};
  }
};

/// Compare the headers, and find the largest magnitude over all ranks.
struct combine_headers {
  step_state* state;
  step_messages messages;
  ZERO_HOST_DEVICE void operator()(std::size_t /*first*/, std::size_t /*count*/) const {
    step_header& mine = state->mine;
    for (std::uint32_t rank = 0; rank < messages.ranks; ++rank) {
      step_header const peer = messages.header(rank);
      find_fault(mine, peer, rank);
      mine.magnitude = peer.magnitude > mine.magnitude ? peer.magnitude : mine.magnitude;
    }
    state->multiplier = 1.0 / static_cast<double>(mine.over.microbatches);
  }

 private:
  ZERO_HOST_DEVICE void find_fault(step_header const& mine, step_header const& peer,
                                   std::uint32_t rank) const {
    check(step_fault::microbatches, mine.over.microbatches, peer.over.microbatches, rank);
    check(step_fault::announced, mine.over.announced, peer.over.announced, rank);
    check(step_fault::order, mine.over.order, peer.over.order, rank);
    check(step_fault::optimizer, mine.optimizer, peer.optimizer, rank);
  }
  ZERO_HOST_DEVICE void check(step_fault fault, std::uint64_t mine, std::uint64_t peer,
                              std::uint32_t rank) const {
    step_report& report = state->report;
    if (mine != peer && report.fault == step_fault::none) {
      report.fault = fault;
      report.rank = static_cast<std::int32_t>(rank);
      report.expected = mine;
      report.actual = peer;
    }
  }
};

/// A part of the sum of squares.
struct sum_squares {
  static constexpr std::size_t grain = 8;

  step_state const* state;
  void const* gradient;
  dtype type;
  ZERO_HOST_DEVICE norm_sum operator()(std::size_t first, std::size_t count) const {
    auto const* const bytes = static_cast<std::byte const*>(gradient);
    return squares_of(bytes + first * size_bytes(type), count, type, state->mine.magnitude);
  }
};

/// The global norm: exact sums of slices, added, so that every cut gives the same bits.
struct clip_gradient {
  step_state* state;
  norm_sum const* sums;
  std::uint32_t ranks;
  double largest_norm;
  ZERO_HOST_DEVICE void operator()(std::size_t /*first*/, std::size_t /*count*/) const {
    step_report& report = state->report;
    double const anchor = state->mine.magnitude;
    if (!std::isfinite(anchor)) {
      report.norm = anchor;
      report.skipped = 1;
      return;
    }
    norm_sum total{};
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      total += sums[rank];
    }
    report.norm = norm(total, anchor) * state->multiplier;
    if (report.norm > largest_norm) {
      state->multiplier *= largest_norm / report.norm;
    }
  }
};

/// Nothing is updated after a fault, which the host reports, or where the norm was not finite.
[[nodiscard]] ZERO_HOST_DEVICE inline bool may_update(step_state const& state) {
  return state.report.fault == step_fault::none && state.report.skipped == 0;
}

struct mark_updating {
  step_state* state;
  std::uint32_t updating;
  ZERO_HOST_DEVICE void operator()(std::size_t /*first*/, std::size_t /*count*/) const {
    if (state->report.fault == step_fault::none) {
      state->report.updating = updating;
    }
  }
};

/// Learn which parameters had a gradient on any rank, count their updates, and find what of an
/// update depends on the count alone.
template <class Map, class Optimizer>
struct count_updates {
  step_state const* state;
  Optimizer const* optimizer;
  step_messages messages;
  std::byte* constants;           // per parameter
  std::uint64_t constants_bytes;  // of one
  std::int64_t* steps;
  std::uint8_t* had;
  std::uint8_t const* types;

  ZERO_HOST_DEVICE void operator()(std::size_t first, std::size_t count) const {
    for (std::size_t id = first; id < first + count; ++id) {
      bool any = false;
      for (std::uint32_t rank = 0; rank < messages.ranks; ++rank) {
        any = any || messages.flag(rank, id);
      }
      had[id] = any && may_update(*state) ? 1 : 0;
      if (had[id] == 0) {
        continue;
      }
      ++steps[id];
      std::byte* const to = constants + id * constants_bytes;
      if (types[id] == static_cast<std::uint8_t>(dtype::float64)) {
        write<double>(to, steps[id]);
      } else {
        write<float>(to, steps[id]);
      }
    }
  }

 private:
  template <class Real>
  ZERO_HOST_DEVICE void write(std::byte* to, std::int64_t step) const {
    *reinterpret_cast<typename Map::template constants<Real>*>(to) =
        optimizer->template at<pack<Real>>(step);
  }
};

/// Update elements of one parameter.
template <class Optimizer, class Parameter, class Gradient>
struct update_elements : update_streams<Optimizer, Parameter, Gradient> {
  using update = update_operation<Optimizer, Parameter>;
  using value = typename update::value;
  static constexpr std::size_t grain = 8;

  step_state const* state;
  std::uint8_t const* had;
  update_constants<Optimizer, value> const* constants;

  [[nodiscard]] ZERO_HOST_DEVICE bool active() const { return *had != 0; }
  [[nodiscard]] ZERO_HOST_DEVICE update operation() const {
    return {value(state->multiplier), *constants};
  }
  ZERO_HOST_DEVICE void operator()(std::size_t first, std::size_t count) const {
    run_kernel(*this, first, count);
  }
};

}  // namespace zero::inline v0::detail
