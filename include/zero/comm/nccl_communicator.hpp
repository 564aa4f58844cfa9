// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/collective_checks.hpp>
#include <zero/comm/concept.hpp>
#include <zero/comm/nccl_options.hpp>
#include <zero/comm/nccl_setup.hpp>
#include <zero/comm/nccl_transfer.hpp>
#include <zero/comm/scratch.hpp>
#include <zero/comm/split_vote.hpp>
#include <zero/comm/store.hpp>
#include <zero/core/any_span.hpp>
#include <zero/core/error.hpp>
#include <zero/device/cuda.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

/// @file
/// `nccl`: ranks are GPUs, of one process or of many. Collectives run on the device; fingerprints
/// and failures go through the store that the ranks were started with, which stays open.
///
/// Failures: an error of CUDA or NCCL, a call past its deadline, one that differs from the peers',
///           a rank that leaves or dies, or an abort fails the group: NCCL is aborted on every
///           rank, so that streams go on, with indeterminate results; and every later call throws
///           the first error. Ranks abort one after the other, and until then a GPU may still use a
///           peer's memory: a process that goes on after a failure keeps the memory of its
///           collectives until all ranks have ended.

namespace zero::inline v0 {

/// One rank's handle. A moved-from one can only be destroyed or assigned to.
///
/// Graphs:     a graph that has captured calls, and what was instantiated from it, is destroyed
///             before the communicator: NCCL ends after it. The destructor waits 10 seconds,
///             aborts, waits as long again, and leaves the rest to NCCL until the graph is
///             destroyed.
///
/// Ordering:   one thread at a time makes a rank's calls. `abort` may come from any thread. The
///             device that is current in the constructor is the rank's.
/// @throws zero::usage_error          an argument is wrong. The peers get an error, too.
/// @throws zero::communication_error  the group has failed.
class nccl {
 public:
  using device = cuda;
  using stream = cuda_stream;

  /// A rank of `job`'s world, on the current device.
  ///
  /// Collective: every rank of the store, with the same options.
  /// @throws zero::usage_error  options that are wrong, or differ between ranks.
  explicit nccl(store const& job, nccl_options const& options = {}) : nccl{job.client(), options} {}

  /// The same over a control channel.
  nccl(std::shared_ptr<detail::control_client> client, nccl_options const& options) {
    std::string const name = client->next_name();
    auto const control = detail::control_group::world(std::move(client), name);
    detail::rank_of_thread = control->rank();
    try {
      check_options(options, control->rank(), control->size());
    } catch (usage_error const& cause) {
      control->fail(control->rank(), cause.what());
      throw;
    }
    me_ = detail::make_nccl_rank(control, options);
  }

  [[nodiscard]] int rank() const noexcept { return me_->handle.rank(); }
  [[nodiscard]] int size() const noexcept { return me_->handle.size(); }
  [[nodiscard]] nccl_options const& options() const noexcept { return me_->options; }

  /// How long a call may take from where it is enqueued, and an exchange from where it begins.
  void set_deadline(std::chrono::milliseconds deadline) {
    check([&] { checks().deadline(deadline); });
    me_->handle.set_deadline(deadline);
  }

  /// Sum `full` over all ranks and keep this rank's slice.
  ///
  /// Shapes:     full [shard_size * P]; shard [shard_size], apart from full or its slice `rank`.
  /// Units:      elements: the shard has full's dtype, or one is float32 and the other has 16 bits.
  /// Ordering:   enqueued on `on`.
  /// Collective: every rank, with the same size, dtypes, `how` and `what`.
  void reduce_scatter(const_any_span full, any_span shard, combine how, reduction what,
                      stream& on) {
    enqueue(on, [&] { return checks().reduce_scatter(full, shard, how, what); });
  }

  /// Collect the shards of all ranks.
  ///
  /// Shapes:     shard [shard_size], apart from full or its slice `rank`; full [shard_size * P].
  /// Ordering:   enqueued on `on`.
  /// Collective: every rank, with the same size and dtype.
  void all_gather(const_any_span shard, any_span full, stream& on) {
    enqueue(on, [&] { return checks().all_gather(shard, full); });
  }

  /// Sum `full` over all ranks. In ordered mode: the bits of a reduce-scatter (over slices of
  /// ceil(n / P) elements) followed by an all-gather.
  ///
  /// Shapes:     full [n], result [n], apart or (with `overwrite`) the same.
  /// Ordering:   enqueued on `on`.
  /// Collective: every rank, with the same size, dtypes, `how` and `what`. With `add`, the result
  ///             holds the same values on every rank: each slice is added to those of one rank.
  void all_reduce(const_any_span full, any_span result, combine how, reduction what, stream& on) {
    enqueue(on, [&] { return checks().all_reduce(full, result, how, what); });
  }

  /// Copy rank `root`'s elements to all ranks.
  ///
  /// Ordering:   enqueued on `on`.
  /// Collective: every rank, with the same size, dtype and root.
  void broadcast(any_span data, int root, stream& on) {
    enqueue(on, [&] { return checks().broadcast(data, root); });
  }

  /// Wait, in the stream, until all ranks' streams are here.
  void barrier(stream& on) {
    enqueue(on, [&] { return checks().barrier(); });
  }

  /// Collect `mine` of all ranks in `all`, through the store.
  ///
  /// Shapes:     mine [n], all [n * P].
  /// Units:      bytes of the host.
  /// Ordering:   blocks; apart from the other collectives.
  /// Collective: every rank, with the same size.
  void exchange(std::span<std::byte const> mine, std::span<std::byte> all) {
    check([&] { return checks().exchange(mine, all); });
    check([&] {
      me_->handle.control().exchange(detail::operation::exchange, mine, all,
                                     me_->handle.deadline());
    });
  }

  /// A communicator of the ranks that give the same color, in the order of (key, rank), with this
  /// one's options. An abort of this one reaches it; the reverse isn't so.
  ///
  /// Ordering:   blocks.
  /// Collective: every rank.
  [[nodiscard]] nccl split(int color, int key) {
    check([&] { checks().split(color); });
    auto const& control = me_->handle.shared_control();
    detail::split_vote const mine{color, key};
    std::vector<detail::split_vote> votes(static_cast<std::size_t>(size()));
    std::uint64_t const sequence = check([&] {
      return control->exchange(detail::operation::split, std::as_bytes(std::span{&mine, 1}),
                               std::as_writable_bytes(std::span{votes}), me_->handle.deadline());
    });
    std::vector<int> ranks = detail::ranks_of_color(votes, color);
    auto const here = std::find(ranks.begin(), ranks.end(), rank()) - ranks.begin();
    auto const part = detail::control_group::part(
        control, detail::text(control->name(), "/", sequence, ".", color), std::move(ranks),
        static_cast<int>(here));
    nccl_options const options{.mode = me_->options.mode,
                               .scratch_bytes = me_->options.scratch_bytes,
                               .nccl_memory = me_->options.nccl_memory,
                               .compare_calls = me_->options.compare_calls,
                               .deadline = me_->handle.deadline()};
    detail::device_scope const current{me_->handle.device()};
    return nccl{detail::make_nccl_rank(part, options)};
  }

  /// Fail the group: every rank's pending and later calls end or throw `reason`, here and in the
  /// groups split from this one. Only the first reason counts.
  void abort(std::string_view reason) noexcept {
    try {
      me_->handle.fail(detail::text("aborted by rank ", rank(), ": ", reason));
    } catch (std::exception const&) {
      me_->handle.fail("aborted");
    }
  }

  /// Throw the group's failure, if it has one: what a stream has run since is indeterminate.
  void raise_if_failed() const { me_->handle.control().failure().raise_if_happened(); }

  /// Let NCCL know memory that collectives will use, until `end_registrations`, which is before
  /// the memory ends; its first `symmetric_bytes` as a symmetric window, too, where NCCL has them
  /// (2.28, or 2.27 if that is all of it). A window is memory of `ncclMemAlloc`. Of a gather,
  /// broadcast, or reduction in fast mode, what peers read or write is at the same offset in it on
  /// every rank, and the rest in it on every rank or on none; `nccl_options::compare_calls`
  /// checks that, and without it other offsets give wrong values.
  ///
  /// Shapes:     a window begins at a multiple of 4096 bytes.
  /// Collective: every rank, with as many bytes.
  void register_memory(void* memory, std::size_t bytes, std::size_t symmetric_bytes = 0) {
    check([&] {
      if (memory == nullptr || bytes == 0) {
        throw usage_error{detail::text("register_memory: expected memory, actual ",
                                       bytes == 0 ? "no bytes" : "a null pointer", " (rank ",
                                       rank(), ")")};
      }
      if (symmetric_bytes > bytes) {
        throw usage_error{detail::text("register_memory: expected at most ", bytes,
                                       " symmetric bytes, actual ", symmetric_bytes, " (rank ",
                                       rank(), ")")};
      }
      if (symmetric_bytes != 0 &&
          reinterpret_cast<std::uintptr_t>(memory) % detail::window_alignment != 0) {
        throw usage_error{detail::text(
            "register_memory: expected a window at a multiple of ", detail::window_alignment,
            " bytes, actual ", reinterpret_cast<std::uintptr_t>(memory) % detail::window_alignment,
            " bytes behind one (rank ", rank(), ")")};
      }
    });
    me_->add_registration(memory, bytes, symmetric_bytes);
  }

  /// End what `register_memory` began, before that memory ends, once the stream has run this
  /// rank's calls (those of graphs: the caller waits for them).
  void end_registrations() noexcept { me_->end_registrations(); }

  /// The scratch with which a reduction over slices of `of.slice` elements goes in one part, or
  /// `nccl_options::scratch_bytes` where that is less (`nccl_options::scratch_for`).
  [[nodiscard]] std::uint64_t scratch_for(reduction_shape const& of) const {
    return me_->options.scratch_for(of, static_cast<std::uint64_t>(size()));
  }

  /// Lend memory of the rank's device that later reductions go through, instead of scratch of the
  /// communicator's own, until `end_scratch`; and until the streams have run those reductions.
  ///
  /// Shapes:     at a multiple of 256 bytes; at least 256 bytes for each other rank in ordered
  ///             mode, for each rank in fast mode.
  /// Collective: every rank, with as many bytes, between the same calls: what doesn't fit goes in
  ///             parts.
  void use_scratch(std::span<std::byte> memory) {
    std::uint64_t const slots =
        detail::scratch_slots(me_->options.mode, static_cast<std::uint64_t>(size()));
    std::size_t const least = detail::scratch_alignment * std::max<std::uint64_t>(slots, 1);
    bool const aligned =
        reinterpret_cast<std::uintptr_t>(memory.data()) % detail::scratch_alignment == 0;
    check([&] {
      if (!aligned || memory.size() < least) {
        throw usage_error{
            detail::text("use_scratch: expected at least ", least, " bytes at a multiple of ",
                         detail::scratch_alignment, ", actual ", memory.size(), " bytes",
                         aligned ? "" : " at another address", " (rank ", rank(), ")")};
      }
    });
    me_->lent = memory;
  }

  /// End what `use_scratch` began, before that memory ends.
  ///
  /// Collective: every rank, between the same calls.
  void end_scratch() noexcept { me_->lent = {}; }

 private:
  explicit nccl(std::unique_ptr<detail::nccl_rank> me) noexcept : me_{std::move(me)} {}

  static void check_options(nccl_options const& options, int rank, int size) {
    auto const refuse = [&](auto const&... parts) {
      throw usage_error{detail::text("nccl: expected ", parts..., " (rank ", rank, ")")};
    };
    if (options.scratch_bytes < detail::least_scratch_bytes || options.scratch_bytes % 256 != 0) {
      refuse("scratch_bytes of at least ", detail::least_scratch_bytes,
             ", a multiple of 256, actual ", options.scratch_bytes);
    }
    std::size_t const least = detail::scratch_alignment * static_cast<std::size_t>(size);
    if (options.scratch_bytes < least) {
      refuse("scratch_bytes of at least ", least, " for ", size, " ranks, actual ",
             options.scratch_bytes);
    }
    if (options.deadline.count() <= 0) {
      refuse("a deadline of at least 1 ms, actual ", options.deadline.count(), " ms");
    }
    if (options.mode == nccl_mode::ordered &&
        static_cast<std::size_t>(size) > detail::most_sources) {
      refuse("at most ", detail::most_sources, " ranks in ordered mode, actual ", size);
    }
  }

  [[nodiscard]] detail::collective_checks checks() const noexcept { return {rank(), size()}; }

  /// What `function` returns. A broken precondition fails the group, so that no peer waits in vain.
  template <class Function>
  std::invoke_result_t<Function const&> check(Function const& function) {
    raise_if_failed();
    try {
      return function();
    } catch (usage_error const& cause) {
      abort(cause.what());
      throw;
    }
  }

  template <class Function>
  void enqueue(stream& on, Function const& function) {
    auto const since = std::chrono::steady_clock::now();
    detail::collective const call = check([&] {
      detail::collective made = function();
      check_stream(made.op, on);
      made.place = me_->place_of(made);
      return made;
    });
    detail::nccl_handle& handle = me_->handle;
    std::uint64_t const sequence =
        handle.calls.start(call, me_->options.compare_calls && size() > 1);
    try {
      std::span<std::byte> const memory = me_->memory_of(call, on);
      auto const watch = [&] { handle.calls.watch(call, sequence, since, on); };
      try {
        detail::nccl_transfer{handle, memory, call, me_->sources, on}.run(me_->options.mode);
      } catch (std::exception const&) {
        watch();  // the stream may have got a part of it
        throw;
      }
      watch();
    } catch (communication_error const&) {
      throw;
    } catch (usage_error const& cause) {
      abort(cause.what());
      throw;
    } catch (std::exception const& cause) {
      handle.fail(
          detail::text(name(call.op), " #", sequence, ": ", std::string_view{cause.what()}));
      throw;
    }
  }

  /// Work of two streams could overtake each other, differently on every rank.
  void check_stream(detail::operation op, stream const& on) {
    if (on.device() != me_->handle.device()) {
      throw usage_error{detail::text(name(op), ": expected a stream of device ",
                                     me_->handle.device(), ", actual ", on.device(), " (rank ",
                                     rank(), ")")};
    }
    if (me_->handle.calls.busy_elsewhere(on.native())) {
      throw usage_error{detail::text(name(op),
                                     ": expected the stream of this rank's unfinished calls, "
                                     "actual another, which needs a communicator of its own "
                                     "(split) (rank ",
                                     rank(), ")")};
    }
  }

  std::unique_ptr<detail::nccl_rank> me_;
};

static_assert(communicator<nccl> && borrows_scratch<nccl>);

}  // namespace zero::inline v0
