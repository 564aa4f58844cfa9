// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/collective_checks.hpp>
#include <zero/comm/concept.hpp>
#include <zero/comm/split_vote.hpp>
#include <zero/comm/thread_family.hpp>
#include <zero/core/any_span.hpp>
#include <zero/core/error.hpp>
#include <zero/device/host.hpp>

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
/// `thread_communicator`: ranks are threads of one process, which read each other's memory.
/// It is the default, and the reference for every other communicator: sums are in rank order, in
/// the accumulate type, times 1/P for an average, and rounded once.
///
/// A call that can't end as it should ends with an error on every rank that takes part in it: when
/// a rank makes another call than its peers, isn't there by the deadline, destroys its
/// communicator, or aborts. The first error is the group's, and all later calls throw it at once.

namespace zero::inline v0 {

struct thread_options {
  /// How long a call waits for its last rank, counted from the arrival of its first.
  std::chrono::milliseconds deadline = std::chrono::minutes{10};
};

/// One rank's handle to a group of threads, in memory of `Device`. A moved-from one can
/// only be destroyed or assigned to.
///
/// Ordering:   one thread at a time makes a rank's calls. `abort` may come from any thread,
///             `exchange` and `split` from work in the rank's stream.
/// Collective: a rank that destroys its handle leaves the group: peers that wait for it get an
///             error.
/// @throws zero::usage_error          an argument is wrong. The peers get an error, too.
/// @throws zero::communication_error  the group has failed. An enqueued call throws in its stream.
template <class Device>
class basic_thread_communicator {
 public:
  using device = Device;
  using stream = typename Device::stream;

  /// Handles for ranks 0 to `ranks` - 1, each to be given to a thread of its own.
  /// @throws zero::usage_error  fewer than one rank, or a deadline that isn't in the future.
  [[nodiscard]] static std::vector<basic_thread_communicator> create(int ranks,
                                                                     thread_options options = {}) {
    if (ranks < 1) {
      throw usage_error{
          detail::text("thread_communicator: expected at least 1 rank, actual ", ranks)};
    }
    auto const family = std::make_shared<detail::thread_family<Device>>(ranks);
    std::vector<basic_thread_communicator> all;
    all.reserve(static_cast<std::size_t>(ranks));
    for (int rank = 0; rank < ranks; ++rank) {
      all.push_back(basic_thread_communicator{family, family->root(), rank});
      all.back().set_deadline(options.deadline);
    }
    return all;
  }

  basic_thread_communicator(basic_thread_communicator&&) noexcept = default;
  basic_thread_communicator& operator=(basic_thread_communicator&& other) noexcept {
    basic_thread_communicator taken{std::move(other)};
    std::swap(family_, taken.family_);
    std::swap(group_, taken.group_);
    std::swap(rank_, taken.rank_);
    return *this;
  }
  /// Returns at once: it waits for no peer.
  ~basic_thread_communicator() {
    if (family_ != nullptr) {
      family_->leave(*group_, rank_);
    }
  }

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return group_->size(); }

  /// How long this rank waits in a call for the last rank, counted from the arrival of the first.
  void set_deadline(std::chrono::milliseconds deadline) {
    check([&] { checks().deadline(deadline); });
    group_->member(rank_).deadline_ms.store(deadline.count());
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

  /// Sum `full` over all ranks: the bits of a reduce-scatter (over slices of ceil(n / P) elements)
  /// followed by an all-gather.
  ///
  /// Shapes:     full [n], result [n], apart or (with `overwrite`) the same.
  /// Units:      elements: dtypes as in `reduce_scatter`.
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

  /// Collect `mine` of all ranks in `all`.
  ///
  /// Shapes:     mine [n], apart from all or its slice `rank`; all [n * P].
  /// Units:      bytes.
  /// Ordering:   blocks. Apart from the other collectives, with sequence numbers of its own, so it
  ///             may come from work in a stream that has more collectives ahead.
  /// Collective: every rank, with the same size.
  void exchange(std::span<std::byte const> mine, std::span<std::byte> all) {
    run_control(check([&] { return checks().exchange(mine, all); }));
  }

  /// A communicator of the ranks that give the same color, in the order of (key, rank), with this
  /// one's deadline. An abort of this one reaches it; the reverse isn't so.
  ///
  /// Ordering:   blocks, as `exchange`.
  /// Collective: every rank.
  /// @throws zero::usage_error  a negative color.
  [[nodiscard]] basic_thread_communicator split(int color, int key) {
    check([&] { checks().split(color); });
    try {
      return split_off(color, key);
    } catch (communication_error const&) {
      throw;
    } catch (std::exception const& cause) {
      abort(cause.what());
      throw;
    }
  }

  /// Fail the group: every rank's pending and later calls throw `reason`, here and in the groups
  /// split from this one. Only the first reason counts.
  void abort(std::string_view reason) noexcept {
    group_->failure.fail(rank_,
                         [&] { return detail::text("aborted by rank ", rank_, ": ", reason); });
  }

  /// The bytes that this rank's collectives have read from its peers' spans (not the control
  /// channel's).
  [[nodiscard]] std::uint64_t peer_bytes_read() const noexcept {
    return group_->member(rank_).peer_bytes_read.load();
  }

 private:
  /// A call as a stream's work.
  struct enqueued_call {
    detail::thread_group<Device>* group;
    int rank;
    detail::collective call;

    void operator()() const {
      stream now;  // whose work is the stream's
      group->run_payload(rank, call, now);
    }
    void discarded(std::exception_ptr const& cause) const noexcept {
      group->discard(rank, call, cause);
    }
  };

  basic_thread_communicator(std::shared_ptr<detail::thread_family<Device>> family,
                            detail::thread_group<Device>& group, int rank) noexcept
      : family_{std::move(family)}, group_{&group}, rank_{rank} {}

  [[nodiscard]] detail::collective_checks checks() const noexcept { return {rank_, size()}; }

  /// What `function` returns. A broken precondition fails the group, so that no peer waits in vain.
  template <class Function>
  std::invoke_result_t<Function const&> check(Function const& function) {
    group_->failure.raise_if_happened();
    try {
      return function();
    } catch (usage_error const& cause) {
      abort(cause.what());
      throw;
    }
  }

  template <class Function>
  void enqueue(stream& on, Function const& function) {
    detail::collective const call = check([&] {
      detail::collective const made = function();
      check_stream(made.op, on);
      return made;
    });
    group_->payload.issue(rank_);
    if constexpr (Device::has_host_memory) {
      on.enqueue(enqueued_call{group_, rank_, call});
    } else {
      group_->run_payload(rank_, call, on);  // its work is enqueued; ranks meet here
    }
  }

  /// Work of two streams could overtake each other, differently on every rank.
  void check_stream(detail::operation op, stream const& on) {
    void const* const last = group_->member(rank_).stream.exchange(&on);
    std::uint64_t const open = group_->payload.issued(rank_) - group_->payload.ended(rank_);
    if (last != &on && open != 0) {
      throw usage_error{
          detail::text(name(op), ": expected the stream of this rank's ", open,
                       " unfinished calls, actual another, which needs a communicator of "
                       "its own (split) (rank ",
                       rank_, ")")};
    }
  }

  std::uint64_t run_control(detail::collective const& call) {
    check([&] {
      if (!group_->control.issue_alone(rank_)) {
        throw usage_error{detail::text(name(call.op),
                                       ": expected one control call at a time, actual "
                                       "another is under way in this rank (rank ",
                                       rank_, ")")};
      }
    });
    return group_->run_control(rank_, call);
  }

  [[nodiscard]] basic_thread_communicator split_off(int color, int key) {
    detail::split_vote const mine{color, key};
    std::vector<detail::split_vote> votes(static_cast<std::size_t>(size()));
    detail::collective call = checks().exchange(std::as_bytes(std::span{&mine, 1}),
                                                std::as_writable_bytes(std::span{votes}));
    call.op = detail::operation::split;
    std::uint64_t const sequence = run_control(call);
    std::vector<int> const ranks = detail::ranks_of_color(votes, color);
    auto const here = std::find(ranks.begin(), ranks.end(), rank_) - ranks.begin();
    detail::thread_group<Device>& part = family_->child(*group_, sequence, color, ranks);
    part.member(static_cast<int>(here)).deadline_ms = group_->member(rank_).deadline_ms.load();
    return {family_, part, static_cast<int>(here)};
  }

  std::shared_ptr<detail::thread_family<Device>> family_;
  detail::thread_group<Device>* group_;
  int rank_;
};

using thread_communicator = basic_thread_communicator<host>;

static_assert(communicator<thread_communicator>);

}  // namespace zero::inline v0
