// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/collective.hpp>
#include <zero/comm/failure_scope.hpp>
#include <zero/device/wait.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

/// @file
/// Where the threads of a group meet: each has a slot that says which call it has reached,
/// how far it is in that call, and where its memory is. Nothing here is for users.
///
/// A rank reads its peers' memory only between two marks in its slot, and makes the first one
/// before it looks whether the group has failed. So once the group has failed, a rank that sees no
/// peer between the marks knows that none will be again, and may give its memory back. The marks
/// and the failure are sequentially consistent for that.

namespace zero::inline v0::detail {

/// How far a rank is in a call. It reads its peers' memory while it is `reducing` or `copying`.
enum class phase : std::uint8_t { withdrawn, arrived, reducing, reduced, copying, finished };

/// What ended a wait. Of `absent` ranks, one left and will never arrive.
enum class meeting : std::uint8_t { complete, failed, absent, late };

class rendezvous {
 public:
  using clock = waiter::clock;

  rendezvous(int size, failure_scope& failure)
      : slots_(static_cast<std::size_t>(size)), failure_{failure}, wake_{failure.wake()} {}

  [[nodiscard]] int size() const noexcept { return static_cast<int>(slots_.size()); }

  /// Calls that `rank` has made, whether or not its stream has come to them.
  [[nodiscard]] std::uint64_t issued(int rank) const noexcept { return at(rank).issued.load(); }
  /// Calls of `rank` that have returned or thrown.
  [[nodiscard]] std::uint64_t ended(int rank) const noexcept { return at(rank).ended.load(); }

  void issue(int rank) noexcept { at(rank).issued.fetch_add(1); }
  /// As `issue`, or false while a call of this rank is under way in another thread.
  [[nodiscard]] bool issue_alone(int rank) noexcept {
    std::uint64_t expected = ended(rank);
    return at(rank).issued.compare_exchange_strong(expected, expected + 1);
  }
  /// The last thing that a call does here.
  void end(int rank) noexcept { at(rank).ended.fetch_add(1); }

  /// `rank` makes no calls after those that it has issued.
  void leave(int rank) noexcept { at(rank).left.store(true); }
  [[nodiscard]] bool has_left(int rank) const noexcept { return at(rank).left.load(); }

  /// Show `call` to the peers. Returns its sequence number; the first is 1.
  std::uint64_t arrive(int rank, collective const& call) noexcept {
    slot& mine = at(rank);
    std::uint64_t const sequence = ended(rank) + 1;
    // A slow peer may still read the previous call, but not the one before: all had arrived at the
    // previous one when this rank came through it.
    mine.calls[sequence % 2] = call;
    mine.arrivals[sequence % 2] = clock::now();
    mark(rank, sequence, phase::arrived);
    wake_.notify();
    return sequence;
  }

  /// What `rank`, which has arrived at `sequence`, calls there.
  [[nodiscard]] collective const& call(int rank, std::uint64_t sequence) const noexcept {
    return at(rank).calls[sequence % 2];
  }

  /// Wait until all ranks have arrived. The deadline runs from the first arrival.
  [[nodiscard]] meeting wait_for_arrivals(int rank, std::uint64_t sequence,
                                          std::chrono::milliseconds deadline) {
    meeting result = meeting::late;
    auto const ready = [&] {
      result = all_are(sequence, phase::arrived) ? meeting::complete
               : failure_.happened()             ? meeting::failed
               : first_gone(sequence) != size()  ? meeting::absent
                                                 : meeting::late;
      return result != meeting::late;
    };
    if (!ready()) {
      wake_.wait_until(ready, last_moment(rank, sequence, deadline));
    }
    return result;
  }

  /// Wait until all ranks, which have arrived, are in `target` or past it. On their way there they
  /// wait for nothing but each other's copies, so this needs no deadline.
  [[nodiscard]] meeting wait_for(std::uint64_t sequence, phase target) {
    meeting result = meeting::failed;
    wake_.wait_until([&] {
      result = all_are(sequence, target) ? meeting::complete : meeting::failed;
      return result == meeting::complete || failure_.happened();
    });
    return result;
  }

  /// Read the peers' memory in `copy`, marked as `during`. False, and nothing read, after a
  /// failure.
  template <class Copy>
  [[nodiscard]] bool read_peers(int rank, std::uint64_t sequence, phase during, phase after,
                                Copy const& copy) {
    struct marker {
      rendezvous& here;
      int rank;
      std::uint64_t sequence;
      phase after = phase::withdrawn;  // also where copy throws
      ~marker() {
        here.mark(rank, sequence, after);
        here.wake_.notify();
      }
    } at_end{*this, rank, sequence};
    mark(rank, sequence, during);
    if (failure_.happened()) {
      return false;
    }
    copy();
    at_end.after = after;
    return true;
  }

  /// After a failure: wait until no peer reads this rank's memory, or ever will.
  void wait_until_unread(int rank) {
    wake_.wait_until([&] {
      for (slot const& peer : slots_) {
        auto const where = static_cast<phase>(peer.state.load() % phases);
        if (&peer != &at(rank) && (where == phase::reducing || where == phase::copying)) {
          return false;
        }
      }
      return true;
    });
  }

  /// Whether `rank` has come to the call `sequence`.
  [[nodiscard]] bool has_arrived(int rank, std::uint64_t sequence) const noexcept {
    return at(rank).state.load() >= state(sequence, phase::arrived);
  }

  /// The first rank that left before the call `sequence`, or size().
  [[nodiscard]] int first_gone(std::uint64_t sequence) const noexcept {
    int rank = 0;
    while (rank < size() &&
           (has_arrived(rank, sequence) || !has_left(rank) || issued(rank) >= sequence)) {
      ++rank;
    }
    return rank;
  }

  /// The call that `rank` waits in for its peers to arrive, or 0.
  [[nodiscard]] std::uint64_t waits_in(int rank) const noexcept {
    std::uint64_t const now = at(rank).state.load();
    return now % phases == static_cast<std::uint64_t>(phase::arrived) ? now / phases : 0;
  }

 private:
  struct alignas(128) slot {  // apart from its neighbours: processors fetch cache lines in pairs
    std::atomic<std::uint64_t> state{0};
    std::atomic<bool> left{false};
    std::array<collective, 2> calls;
    std::array<clock::time_point, 2> arrivals;
    alignas(128) std::atomic<std::uint64_t> issued{0};
    std::atomic<std::uint64_t> ended{0};
  };

  static constexpr std::uint64_t phases = 8;

  [[nodiscard]] static constexpr std::uint64_t state(std::uint64_t sequence, phase where) noexcept {
    return sequence * phases + static_cast<std::uint64_t>(where);
  }

  [[nodiscard]] slot& at(int rank) noexcept { return slots_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] slot const& at(int rank) const noexcept {
    return slots_[static_cast<std::size_t>(rank)];
  }

  void mark(int rank, std::uint64_t sequence, phase where) noexcept {
    at(rank).state.store(state(sequence, where));
  }

  [[nodiscard]] bool all_are(std::uint64_t sequence, phase target) const noexcept {
    for (slot const& peer : slots_) {
      if (peer.state.load() < state(sequence, target)) {
        return false;
      }
    }
    return true;
  }

  [[nodiscard]] clock::time_point last_moment(int rank, std::uint64_t sequence,
                                              std::chrono::milliseconds deadline) const noexcept {
    clock::time_point first = at(rank).arrivals[sequence % 2];
    for (int peer = 0; peer < size(); ++peer) {
      if (has_arrived(peer, sequence)) {
        first = std::min(first, at(peer).arrivals[sequence % 2]);
      }
    }
    using std::chrono::milliseconds;
    auto const most = std::chrono::floor<milliseconds>(clock::time_point::max() - first);
    return deadline < most ? first + deadline : clock::time_point::max();
  }

  std::vector<slot> slots_;
  failure_scope const& failure_;
  waiter& wake_;
};

}  // namespace zero::inline v0::detail
