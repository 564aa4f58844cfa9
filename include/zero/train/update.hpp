// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/concept.hpp>
#include <zero/comm/metered.hpp>
#include <zero/optim/fused_update.hpp>
#include <zero/optim/gradient_norm.hpp>
#include <zero/shard/bucketed.hpp>
#include <zero/train/agreement.hpp>
#include <zero/train/binding.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

/// @file
/// `update`: what a step does once every gradient is reduced, all of it on the communication
/// stream: the ranks' flags are combined, the norm is taken, each bucket is updated in one pass and
/// gathered.

namespace zero::inline v0::detail {

/// What a step found.
struct step_outcome {
  double norm = 0;       ///< of the mean gradient, before clipping; only with clipping
  bool skipped = false;  ///< the norm was not finite: nothing was updated
};

/// What ranks must agree on about the micro-batches since the last step.
struct window {
  std::uint64_t microbatches;  ///< that ran
  std::uint64_t announced;
  std::uint64_t order;  ///< a hash of the order in which buckets were gathered and reduced
};

template <communicator Communicator, elementwise_optimizer Optimizer>
class update {
  using device = typename Communicator::device;
  using stream = typename device::stream;
  using event = typename device::event;

 public:
  update(binding<device>& bound, metered<Communicator>& comm, stream& communication,
         std::optional<double> clip_norm)
      : bound_{&bound}, comm_{&comm}, stream_{&communication}, clip_norm_{clip_norm},
        steps_(bound.of().parameters().size(), 0), had_(steps_.size(), 0),
        message_(round_up(sizeof(header) + steps_.size(), sizeof(float))),
        messages_(message_.size() * static_cast<std::size_t>(comm.size())),
        sums_(static_cast<std::size_t>(comm.size())), ready_(bound.of().buckets().size()) {}

  /// Enqueue a step; `had_gradient(id)` is this rank's flag.
  template <class HadGradient>
  void enqueue(Optimizer const& optimizer, window const& over, HadGradient had_gradient) {
    finished_.wait();
    optimizer_ = optimizer;
    header_ = {over, fingerprint(optimizer), 0};
    for (std::size_t id = 0; id < steps_.size(); ++id) {
      message_[sizeof(header) + id] = static_cast<std::byte>(had_gradient(id) ? 1 : 0);
    }
    run([this] { write_header(); });
    collect(message_.data(), message_.size(), messages_.data());
    run([this] { combine_headers(); });
    if (clip_norm_) {
      run([this] { sum_squares(); });
      collect(&sum_, sizeof sum_, sums_.data());
      run([this] { clip(); });
    }
    run([this] {
      updating_.store(true);
      if (!outcome_.skipped) {
        for (std::size_t id = 0; id < steps_.size(); ++id) {
          steps_[id] += had_[id];
        }
      }
    });
    for (std::size_t b = 0; b < ready_.size(); ++b) {
      if (bound_->of().buckets()[b].trainable) {
        run([this, b] { update_bucket(b); });
        gather(b);
        ready_[b] = stream_->record();
      }
    }
    run([this] { updating_.store(false); });
    finished_ = stream_->record();
  }

  /// Wait until the parameters of bucket `b` are those after the last step.
  void wait(std::size_t b) const { ready_[b].wait(); }
  void wait() const { finished_.wait(); }

  /// True once an update failed midway: parameters are neither old nor new.
  [[nodiscard]] bool broken() const noexcept { return finished_.ready() && updating_.load(); }

  /// Waits for the last step.
  [[nodiscard]] step_outcome const& outcome() const {
    finished_.wait();
    return outcome_;
  }

  /// How many updates a parameter has had. Waits for the last step.
  [[nodiscard]] std::int64_t steps(std::size_t id) const {
    finished_.wait();
    return steps_[id];
  }

 private:
  struct header {
    window over;
    std::uint64_t optimizer;
    double magnitude;
  };
  static_assert(sizeof(norm_sum) % sizeof(float) == 0);

  /// Run work on the stream; what it throws is thrown by every rank.
  template <class Work>
  void run(Work work) {
    stream_->enqueue([this, work] {
      try {
        work();
      } catch (std::exception const& failure) {
        comm_->abort(failure.what());
        throw;
      }
    });
  }

  /// Call visit(gradient) for each piece of this rank's slices of the reduced gradient.
  template <class Visit>
  void for_each_own_gradient(Visit visit) const {
    for (std::size_t s = 0; s < bound_->of().segments().size(); ++s) {
      layout::segment const& segment = bound_->of().segments()[s];
      if (segment.trainable) {
        std::uint64_t const begin = segment.cut.offset(bound_->rank());
        bound_->of().for_each_piece(
            segment, begin, begin + segment.cut.slice(),
            [&](std::size_t id, std::uint64_t first, std::uint64_t offset, std::uint64_t count) {
              visit(const_any_span{bound_->reduced_piece(id, first, offset, count)});
            });
      }
    }
  }

  /// Collect a few bytes of every rank, in line with the other collectives: a rank that is
  /// elsewhere is an error at once.
  void collect(void const* mine, std::size_t bytes, void* all) {
    std::size_t const words = bytes / sizeof(float);
    comm_->label(traffic::control);
    comm_->all_gather(
        const_any_span{mine, words, dtype::float32},
        any_span{all, words * static_cast<std::size_t>(comm_->size()), dtype::float32}, *stream_);
  }

  void write_header() {
    if (clip_norm_) {
      for_each_own_gradient([this](const_any_span gradient) {
        header_.magnitude = std::max(header_.magnitude, largest_magnitude(gradient));
      });
    }
    std::memcpy(message_.data(), &header_, sizeof header_);
  }

  /// Learn which parameters had a gradient on any rank, and the largest magnitude over all ranks.
  void combine_headers() {
    outcome_ = {};
    std::fill(had_.begin(), had_.end(), std::uint8_t{0});
    for (std::size_t rank = 0; rank < sums_.size(); ++rank) {
      std::byte const* const message = messages_.data() + rank * message_.size();
      header other{};
      std::memcpy(&other, message, sizeof other);
      check_peer(other, rank);
      header_.magnitude = std::max(header_.magnitude, other.magnitude);
      for (std::size_t id = 0; id < had_.size(); ++id) {
        had_[id] |= static_cast<std::uint8_t>(message[sizeof(header) + id]);
      }
    }
    multiplier_ = 1.0 / static_cast<double>(header_.over.microbatches);
  }

  void check_peer(header const& peer, std::size_t rank) const {
    check_count(header_.over.microbatches, peer.over.microbatches, " micro-batches", rank);
    check_count(header_.over.announced, peer.over.announced, " announced micro-batches", rank);
    if (peer.over.order != header_.over.order) {
      throw usage_error{
          text("step: expected units in one order on all ranks, actual another on rank ", rank,
               " than here (rank ", comm_->rank(), ")")};
    }
    if (peer.optimizer != header_.optimizer) {
      throw usage_error{
          text("step: expected one optimizer on all ranks, actual other hyperparameters on rank ",
               rank, " than here (rank ", comm_->rank(), ")")};
    }
  }

  void check_count(std::uint64_t mine, std::uint64_t other, std::string_view what,
                   std::size_t rank) const {
    if (mine != other) {
      throw usage_error{text("step: expected a window of ", mine, what, " as here (rank ",
                             comm_->rank(), "), actual ", other, " (rank ", rank, ")")};
    }
  }

  void sum_squares() {
    sum_ = {};
    if (std::isfinite(header_.magnitude)) {
      for_each_own_gradient(
          [this](const_any_span gradient) { sum_ += sum_of_squares(gradient, header_.magnitude); });
    }
  }

  /// The global norm: exact sums of slices, added, so that every cut gives the same bits.
  void clip() {
    if (!std::isfinite(header_.magnitude)) {
      outcome_ = {header_.magnitude, true};
      return;
    }
    norm_sum total{};
    for (norm_sum const& each : sums_) {
      total += each;
    }
    outcome_.norm = norm(total, header_.magnitude) * multiplier_;
    if (outcome_.norm > *clip_norm_) {
      multiplier_ *= *clip_norm_ / outcome_.norm;
    }
  }

  void update_bucket(std::size_t b) {
    if (outcome_.skipped) {
      return;
    }
    for (std::size_t const s : bound_->of().buckets()[b].segments) {
      if (bound_->of().segments()[s].trainable) {
        update_segment(s);
      }
    }
  }

  void update_segment(std::size_t s) {
    layout::segment const& segment = bound_->of().segments()[s];
    std::size_t const master = has_master(segment.value) ? 1 : 0;
    bound_->of().for_each_piece(
        segment, bound_->update_begin(s), bound_->update_end(s),
        [&](std::size_t id, std::uint64_t first, std::uint64_t offset, std::uint64_t count) {
          if (had_[id] == 0) {
            return;
          }
          update_piece<Optimizer> piece{};
          piece.parameter = bound_->value_piece(id, first, offset, count);
          piece.gradient = bound_->reduced_piece(id, first, offset, count);
          piece.master = master != 0 ? bound_->state_piece(s, 0, offset) : nullptr;
          for (std::size_t k = 0; k < piece.states.size(); ++k) {
            piece.states[k] = bound_->state_piece(s, k + master, offset);
          }
          fused_update(optimizer_, steps_[id], multiplier_, piece);
        });
  }

  [[nodiscard]] std::byte* staging(std::size_t s) const noexcept {
    return bound_->at_offset(bound_->map().staging + bound_->map().segments[s].value_staging);
  }

  [[nodiscard]] bool staged(std::size_t s) const noexcept {
    return bound_->map().segments[s].staged_values;
  }

  /// Stages 1 and 2: make the updated parameters whole, through staging where they stay in their
  /// tensors.
  void gather(std::size_t b) {
    if (bound_->at().replicates_updates() || bound_->at().shards_parameters()) {
      return;
    }
    comm_->label(traffic::parameters);
    copy_staged(b,
                [this](any_span value, any_span place) { device::copy(*stream_, value, place); });
    all_gather_bucket(
        *comm_, bound_->of(), b,
        [this](std::size_t s) {
          layout::segment const& segment = bound_->of().segments()[s];
          return staged(s)
                     ? staging(s) + segment.cut.offset(bound_->rank()) * size_bytes(segment.value)
                     : bound_->value_shard(s);
        },
        [this](std::size_t s) { return staged(s) ? staging(s) : bound_->whole_values(s); },
        segments::trainable, *stream_);
    copy_staged(b,
                [this](any_span value, any_span place) { device::copy(*stream_, place, value); });
  }

  template <class Copy>
  void copy_staged(std::size_t b, Copy copy) {
    for_each_segment(bound_->of(), b, true, [&](std::size_t s, layout::segment const& segment) {
      if (staged(s)) {
        any_span const all{staging(s), segment.cut.padded(), segment.value};
        for (std::size_t const id : segment.parameters) {
          any_span const value = bound_->value(id);
          copy(value, all.subspan(bound_->of().parameters()[id].offset, value.size()));
        }
      }
    });
  }

  binding<device>* bound_;
  metered<Communicator>* comm_;
  stream* stream_;
  std::optional<double> clip_norm_;
  Optimizer optimizer_{};
  std::vector<std::int64_t> steps_;  // updates of each parameter
  std::vector<std::uint8_t> had_;    // a gradient on any rank
  header header_{};
  std::vector<std::byte> message_;   // header, then a flag per parameter
  std::vector<std::byte> messages_;  // of all ranks
  norm_sum sum_{};
  std::vector<norm_sum> sums_;  // of all ranks
  double multiplier_ = 1;
  step_outcome outcome_;
  std::vector<event> ready_;  // per bucket
  event finished_;
  std::atomic<bool> updating_{false};
};

}  // namespace zero::inline v0::detail
