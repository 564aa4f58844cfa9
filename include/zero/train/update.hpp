// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/concept.hpp>
#include <zero/comm/metered.hpp>
#include <zero/shard/bucketed.hpp>
#include <zero/train/agreement.hpp>
#include <zero/train/binding.hpp>
#include <zero/train/control.hpp>
#include <zero/train/step_kernels.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <string_view>
#include <type_traits>
#include <vector>

/// @file
/// `update`: what a step does once every gradient is reduced, all of it on the communication
/// stream and in the device's memory: the ranks' flags are combined, the norm is taken, each bucket
/// is updated in one pass and gathered.

namespace zero::inline v0::detail {

/// What a step found.
struct step_outcome {
  double norm = 0;       ///< of the mean gradient, before clipping; only with clipping
  bool skipped = false;  ///< the norm was not finite: nothing was updated
};

template <communicator Communicator, elementwise_optimizer Optimizer>
class update {
  using device = typename Communicator::device;
  using stream = typename device::stream;
  using event = typename device::event;
  using map = control_map<device, Optimizer>;

 public:
  update(binding<device>& bound, metered<Communicator>& comm, stream& communication, stream& engine,
         std::optional<double> clip_norm)
      : bound_{&bound}, comm_{&comm}, stream_{&communication}, engine_{&engine},
        clip_norm_{clip_norm},
        map_{bound.of().parameters().size(), static_cast<std::uint64_t>(comm.size())},
        control_{bound.at_offset(bound.map().control)}, ready_(bound.of().buckets().size()) {
    if constexpr (!device::has_host_memory) {
      report_.reset(new (device::allocate_host(sizeof(step_report))) step_report{});
    }
  }

  /// What the kernels need in the control memory from the start; the rest is zero.
  void initialise() {
    std::vector<std::byte> types(round_up(parameters().size(), sizeof(float)));
    for (std::size_t id = 0; id < parameters().size(); ++id) {
      types[id] = static_cast<std::byte>(accumulate_dtype(parameters()[id].spec.value));
    }
    stream binding{};
    device::upload(binding, words(types.data(), types.size()),
                   words(at<std::byte>(map_.types), types.size()));
  }

  /// Enqueue a step; `had_gradient(id)` is this rank's flag.
  template <class HadGradient>
  void enqueue(Optimizer const& optimizer, window const& over, HadGradient had_gradient) {
    recorded_ = false;
    std::uint32_t const ranks = static_cast<std::uint32_t>(comm_->size());
    step_messages const messages{at<std::byte>(map_.messages), map_.message_bytes, ranks};
    if (!engine_->capturing()) {
      once(write_optimizer<Optimizer>{at<Optimizer>(map_.optimizer), optimizer});
    }
    once(begin_step{state(), at<norm_sum>(map_.sum), {over, fingerprint(optimizer), 0}});
    write_own_flags(had_gradient);
    if (clip_norm_) {
      for_each_own_gradient([this](const_any_span gradient) {
        device::accumulate(*stream_, gradient.size(),
                           find_magnitude{gradient.data(), gradient.dtype()}, &state()->largest,
                           at<std::byte>(map_.scratch));
      });
    }
    once(write_message{state(), at<std::byte>(map_.message)});
    collect(map_.message, map_.message_bytes, map_.messages);
    once(combine_headers{state(), messages});
    report_fault();
    if (clip_norm_) {
      for_each_own_gradient([this](const_any_span gradient) {
        device::accumulate(*stream_, gradient.size(),
                           sum_squares{state(), gradient.data(), gradient.dtype()},
                           at<norm_sum>(map_.sum), at<std::byte>(map_.scratch));
      });
      collect(map_.sum, sizeof(norm_sum), map_.sums);
      once(clip_gradient{state(), at<norm_sum>(map_.sums), ranks, *clip_norm_});
    }
    done_ = false;
    mark(1);
    device::launch(
        *stream_, parameters().size(),
        count_updates<map, Optimizer>{state(), at<Optimizer>(map_.optimizer), messages,
                                      at<std::byte>(map_.constants_of), map_.constants_bytes,
                                      at<std::int64_t>(map_.steps), at<std::uint8_t>(map_.had),
                                      at<std::uint8_t>(map_.types)});
    for (std::size_t b = 0; b < ready_.size(); ++b) {
      if (bound_->of().buckets()[b].trainable) {
        update_bucket(b);
        gather(b);
        stream_->record(ready_[b]);
      }
    }
    mark(0);
    publish();
    stream_->record(finished_);
    recorded_ = true;
  }

  /// Write the hyperparameters of the steps of a captured graph, in the engine's order.
  void write_hyperparameters(Optimizer const& optimizer) {
    engine_->wait(finished_);
    device::launch(*engine_, 1,
                   write_optimizer<Optimizer>{at<Optimizer>(map_.optimizer), optimizer});
  }

  /// Captured steps ran, in the engine's order.
  void replayed() {
    for (event& each : ready_) {
      engine_->record(each);
    }
    engine_->record(finished_);
    done_ = false;
    recorded_ = true;
  }

  /// Let the engine wait until the parameters of bucket `b`, or all, are those after the last step.
  void wait(std::size_t b) { engine_->wait(ready_[b]); }
  void wait() { engine_->wait(finished_); }

  /// Where the stream runs host code: true once an update failed midway, so that parameters are
  /// neither old nor new. Waits for the stream after a step that wasn't enqueued whole.
  [[nodiscard]] bool broken() const noexcept {
    if constexpr (device::has_host_memory) {
      if (!recorded_) {
        device::clean_up([this] { stream_->synchronize(); });
      }
      return finished_.ready() && found().updating != 0;
    } else {
      return false;
    }
  }

  /// Whether the last step is done; asked of the device until it is.
  [[nodiscard]] bool done() const noexcept {
    done_ = done_ || (recorded_ && finished_.ready());
    return done_;
  }

  /// Where the stream runs no host code: whether a failure now may be one of an update.
  [[nodiscard]] bool in_flight() const noexcept { return !device::has_host_memory && !done_; }

  /// Where the stream runs no host code: throw what the last step found, if it is done.
  /// @throws zero::usage_error  ranks disagreed; nothing was updated.
  void check() const {
    if constexpr (!device::has_host_memory) {
      if (done()) {
        throw_fault(*report_, comm_->rank());
      }
    }
  }

  /// Waits for the last step, once.
  /// @throws zero::usage_error  ranks disagreed; nothing was updated.
  [[nodiscard]] step_outcome outcome() const {
    if (!done_) {
      finished_.wait();
      done_ = recorded_;
    }
    throw_fault(found(), comm_->rank());
    return {found().norm, found().skipped != 0};
  }

  /// How many updates a parameter has had. Waits for the last step.
  /// @throws zero::usage_error  ranks disagreed; nothing was updated.
  [[nodiscard]] std::int64_t steps(std::size_t id) const {
    static_cast<void>(outcome());
    std::int64_t out = 0;
    device::download(*stream_, words(at<std::int64_t>(map_.steps) + id, sizeof out),
                     words(&out, sizeof out));
    return out;
  }

 private:
  struct give_back {
    void operator()(step_report* report) const noexcept {
      device::deallocate_host(report, sizeof *report);
    }
  };

  [[nodiscard]] auto const& parameters() const noexcept { return bound_->of().parameters(); }

  template <class T>
  [[nodiscard]] T* at(std::uint64_t offset) const noexcept {
    return reinterpret_cast<T*>(control_ + offset);
  }
  [[nodiscard]] step_state* state() const noexcept { return at<step_state>(map_.state); }

  /// The report of the last step, once it is done.
  [[nodiscard]] step_report const& found() const noexcept {
    return device::has_host_memory ? state()->report : *report_;
  }

  /// Bytes, as what a collective and a copy take.
  [[nodiscard]] static any_span words(void* first, std::uint64_t bytes) noexcept {
    return {first, bytes / sizeof(float), dtype::float32};
  }

  template <class Kernel>
  void once(Kernel kernel) {
    device::launch(*stream_, 1, kernel);
  }

  template <class HadGradient>
  void write_own_flags(HadGradient had_gradient) {
    auto* const flags = at<std::uint8_t>(map_.message + sizeof(step_header));
    std::size_t const size = parameters().size();
    for (std::size_t first = 0; first < size; first += write_flags::most) {
      write_flags chunk{
          flags + first, static_cast<std::uint32_t>(std::min(write_flags::most, size - first)), {}};
      for (std::uint32_t i = 0; i < chunk.size; ++i) {
        chunk.bits[i / 64] |= std::uint64_t{had_gradient(first + i) ? 1U : 0U} << (i % 64);
      }
      once(chunk);
    }
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
  void collect(std::uint64_t mine, std::uint64_t bytes, std::uint64_t all) {
    comm_->label(traffic::control);
    comm_->all_gather(words(control_ + mine, bytes),
                      words(control_ + all, bytes * static_cast<std::uint64_t>(comm_->size())),
                      *stream_);
  }

  /// Where the stream runs host code, which may end an update midway.
  void mark(std::uint32_t updating) {
    if constexpr (device::has_host_memory) {
      once(mark_updating{state(), updating});
    }
  }

  void publish() {
    if constexpr (!device::has_host_memory) {
      device::publish(*stream_, words(&state()->report, sizeof(step_report)),
                      words(report_.get(), sizeof(step_report)));
    }
  }

  /// Where the stream runs host code, a fault ends it there, on every rank.
  void report_fault() {
    if constexpr (device::has_host_memory) {
      device::launch(*stream_, 1, [this](std::size_t /*first*/, std::size_t /*count*/) {
        try {
          throw_fault(found(), comm_->rank());
        } catch (usage_error const& failure) {
          comm_->abort(failure.what());
          throw;
        }
      });
    }
  }

  static void throw_fault(step_report const& report, int here) {
    auto const count = [&](std::string_view what) {
      return text("step: expected a window of ", report.expected, what, " as here (rank ", here,
                  "), actual ", report.actual, " (rank ", report.rank, ")");
    };
    switch (report.fault) {
      case step_fault::none: return;
      case step_fault::microbatches: throw usage_error{count(" micro-batches")};
      case step_fault::announced: throw usage_error{count(" announced micro-batches")};
      case step_fault::order:
        throw usage_error{
            text("step: expected units in one order on all ranks, actual another on rank ",
                 report.rank, " than here (rank ", here, ")")};
      case step_fault::optimizer:
        throw usage_error{
            text("step: expected one optimizer on all ranks, actual other hyperparameters on rank ",
                 report.rank, " than here (rank ", here, ")")};
    }
  }

  void update_bucket(std::size_t b) {
    for (std::size_t const s : bound_->of().buckets()[b].segments) {
      if (bound_->of().segments()[s].trainable) {
        update_segment(s);
      }
    }
  }

  void update_segment(std::size_t s) {
    layout::segment const& segment = bound_->of().segments()[s];
    visit(segment.value, [&]<class Parameter>(std::type_identity<Parameter>) {
      if constexpr (sizeof(Parameter) == 2) {
        if (segment.reduced == dtype::float32) {
          update_pieces<update_elements<Optimizer, Parameter, float>>(s);
          return;
        }
      }
      update_pieces<update_elements<Optimizer, Parameter, Parameter>>(s);
    });
  }

  template <class Kernel>
  void update_pieces(std::size_t s) {
    constexpr std::size_t master = Kernel::has_master ? 1 : 0;
    using real = typename Kernel::real;
    bound_->of().for_each_piece(
        bound_->of().segments()[s], bound_->update_begin(s), bound_->update_end(s),
        [&](std::size_t id, std::uint64_t first, std::uint64_t offset, std::uint64_t count) {
          auto const state_at = [&](std::size_t k) {
            return reinterpret_cast<real*>(bound_->state_piece(s, k, offset));
          };
          Kernel kernel{};
          kernel.state = state();
          kernel.had = at<std::uint8_t>(map_.had) + id;
          kernel.constants = reinterpret_cast<decltype(kernel.constants)>(
              at<std::byte>(map_.constants_of + id * map_.constants_bytes));
          kernel.parameter = static_cast<decltype(kernel.parameter)>(
              bound_->value_piece(id, first, offset, count).data());
          kernel.gradient = static_cast<decltype(kernel.gradient)>(
              bound_->reduced_piece(id, first, offset, count).data());
          kernel.master = master != 0 ? state_at(0) : nullptr;
          for (std::size_t k = kernel.states.size(); k-- > 0;) {
            kernel.states[k] = state_at(k + master);
          }
          device::launch(*stream_, count, kernel);
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
  stream* engine_;
  std::optional<double> clip_norm_;
  map map_;
  std::byte* control_;
  std::unique_ptr<step_report, give_back> report_;  // the host's copy, where it needs one
  std::vector<event> ready_;                        // per bucket
  event finished_;
  bool recorded_ = true;  // finished_ is that of the last step; not while, or if, one is cut short
  mutable bool done_ = true;
};

}  // namespace zero::inline v0::detail
