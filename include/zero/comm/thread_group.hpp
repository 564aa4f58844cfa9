// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/collective.hpp>
#include <zero/comm/failure_scope.hpp>
#include <zero/comm/rendezvous.hpp>
#include <zero/comm/thread_transfer.hpp>
#include <zero/core/error.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <string>
#include <vector>

/// @file
/// What the threads behind `thread_communicator` share, and how each goes through a collective.
/// Nothing here is for users.

namespace zero::inline v0::detail {

/// How far a rank's stream is in a call, where streams are the device's: peers' streams wait for
/// that.
template <class Event>
struct thread_events {
  Event arrived;  // its input is ready, and its output free
  Event reduced;
  Event finished;  // it has read what it needs
};

/// What a group knows about one rank.
template <class Device>
struct alignas(128) thread_member {
  std::atomic<std::int64_t> deadline_ms{0};
  std::atomic<std::uint64_t> peer_bytes_read{0};
  std::atomic<void const*> stream{nullptr};  // of the last payload call
  std::vector<void const*> sources;          // space for a reduction, one for each rank
  thread_events<typename Device::event> events;
};

/// The ranks of one communicator. Its payload, in memory of `Device`, and its control channel meet
/// apart.
template <class Device>
class thread_group {
  using stream = typename Device::stream;

 public:
  thread_group(std::mutex& tree, int size)
      : failure{tree}, payload{size, failure}, control{size, failure},
        members_(static_cast<std::size_t>(size)) {
    reserve();
  }

  /// Rank r of the new group is rank `ranks[r]` of `parent`. The caller holds the tree's mutex.
  thread_group(thread_group& parent, std::vector<int> const& ranks)
      : failure{parent.failure, ranks}, payload{static_cast<int>(ranks.size()), failure},
        control{static_cast<int>(ranks.size()), failure}, members_(ranks.size()) {
    reserve();
  }

  [[nodiscard]] int size() const noexcept { return payload.size(); }
  [[nodiscard]] thread_member<Device>& member(int rank) noexcept {
    return members_[static_cast<std::size_t>(rank)];
  }

  void leave(int rank) noexcept {
    payload.leave(rank);
    control.leave(rank);
    failure.wake().notify();
  }

  /// Whether no rank has a handle, or work in a stream, that may use the group.
  [[nodiscard]] bool is_unused() const noexcept {
    for (int rank = 0; rank < size(); ++rank) {
      if (!payload.has_left(rank) || payload.issued(rank) != payload.ended(rank) ||
          control.issued(rank) != control.ended(rank)) {
        return false;
      }
    }
    return true;
  }

  /// Rank `rank`'s part in `call`, which it has issued to the payload; data moves in `on`.
  /// @throws zero::communication_error  the group has failed; no peer reads the call's memory any
  ///                                    more.
  void run_payload(int rank, collective const& call, stream& on) {
    if constexpr (!Device::has_host_memory) {
      checked(rank, call, [&] {
        if (size() > 1 && on.capturing()) {
          throw usage_error{text(name(call.op), ": expected no capture where threads share a GPU, ",
                                 "actual one (rank ", rank, ")")};
        }
        on.record(member(rank).events.arrived);
      });
    }
    run(payload, rank, call, [&](thread_place const& here) {
      try {
        checked(rank, call, [&] { move_data(here, on); });
      } catch (communication_error const&) {
        throw;
      } catch (...) {
        wait_for_readers(here);
        throw;
      }
    });
  }

  /// The same in the control channel, whose bytes are the host's. Returns the sequence number.
  std::uint64_t run_control(int rank, collective const& call) {
    return run(control, rank, call, [&](thread_place const& here) {
      read_peers(here, phase::copying, phase::finished, [&] { gather_bytes(here); });
      wait_for(here, phase::finished);
    });
  }

  /// `rank` has issued `call`, but won't come to it, since its stream failed: nor will its peers.
  void discard(int rank, collective const& call, std::exception_ptr const& cause) noexcept {
    failure.fail(rank, [&] {
      return text(name(call.op), ": not run, since the stream failed before it: ", what(cause),
                  " (rank ", rank, ")");
    });
    payload.end(rank);
  }

  failure_scope failure;
  rendezvous payload;
  rendezvous control;

 private:
  template <class Move>
  std::uint64_t run(rendezvous& channel, int rank, collective const& call, Move const& move) {
    struct ending {
      rendezvous& channel;
      int rank;
      ~ending() { channel.end(rank); }
    } const at_end{channel, rank};
    failure.raise_if_happened();
    thread_place const here{channel, rank, channel.arrive(rank, call), call};
    meet(here);
    compare(here);
    move(here);
    return here.sequence;
  }

  [[nodiscard]] static std::string what(std::exception_ptr const& cause) {
    try {
      std::rethrow_exception(cause);
    } catch (std::exception const& known) {
      return known.what();
    } catch (...) {
      return "an exception of unknown type";
    }
  }

  void reserve() {
    for (thread_member<Device>& member : members_) {
      member.sources.resize(members_.size());
    }
  }

  [[noreturn]] void give_up(thread_place const& here) {
    wait_for_readers(here);
    failure.raise();
  }

  /// After a failure, until no peer reads this rank's memory any more.
  void wait_for_readers(thread_place const& here) noexcept {
    here.channel.wait_until_unread(here.rank);
    if constexpr (!Device::has_host_memory) {
      // Streams, of which one that has failed reads no more.
      for (thread_member<Device> const& each : members_) {
        Device::clean_up([&] { each.events.reduced.wait(); });
        Device::clean_up([&] { each.events.finished.wait(); });
      }
    }
  }

  /// Work on a device can fail: then the group does.
  template <class Work>
  void checked(int rank, collective const& call, Work const& work) {
    try {
      work();
    } catch (communication_error const&) {
      throw;
    } catch (std::exception const& cause) {
      failure.fail(rank, [&] { return text(name(call.op), ": ", std::string_view{cause.what()}); });
      throw;
    }
  }

  /// Let `on` wait for an event of each peer, which has recorded it.
  void wait_for_peers(thread_place const& here, stream& on,
                      typename Device::event thread_events<typename Device::event>::*which) {
    if constexpr (!Device::has_host_memory) {
      here.for_peers([&](int peer) { on.wait(member(peer).events.*which); });
    }
  }

  void record(thread_place const& here, stream& on,
              typename Device::event thread_events<typename Device::event>::*which) {
    if constexpr (!Device::has_host_memory) {
      on.record(member(here.rank).events.*which);
    }
  }

  /// Wait for all ranks.
  void meet(thread_place const& here) {
    std::chrono::milliseconds const deadline{member(here.rank).deadline_ms.load()};
    meeting const result = here.channel.wait_for_arrivals(here.rank, here.sequence, deadline);
    if (result == meeting::complete) {
      return;
    }
    if (result == meeting::absent) {
      int const gone = here.channel.first_gone(here.sequence);
      failure.fail(gone, [&] {
        return text(here.title(), ": expected ", size(), " ranks, but rank ", gone,
                    " has left (rank ", here.rank, ")");
      });
    } else if (result == meeting::late) {
      fail_late(here, deadline);
    }
    give_up(here);
  }

  void fail_late(thread_place const& here, std::chrono::milliseconds deadline) noexcept {
    int missing = 0;
    int origin = -1;
    for (int rank = 0; rank < size(); ++rank) {
      bool const here_in_time = here.channel.has_arrived(rank, here.sequence);
      origin = here_in_time ? origin : rank;
      missing += here_in_time ? 0 : 1;
    }
    failure.fail(missing == 1 ? origin : -1, [&] {
      std::string absent;
      for (int rank = 0; rank < size(); ++rank) {
        if (!here.channel.has_arrived(rank, here.sequence)) {
          absent += text(", missing rank ", rank, elsewhere(here, rank));
        }
      }
      return text(here.title(), ": expected ", size(), " ranks within ", deadline.count(),
                  " ms of the first, actual ", size() - missing, absent, " (rank ", here.rank, ")");
    });
  }

  /// Where else `rank` waits, which explains most deadlines.
  [[nodiscard]] std::string elsewhere(thread_place const& here, int rank) const {
    bool const in_payload = &here.channel == &control;
    std::uint64_t const sequence = (in_payload ? payload : control).waits_in(rank);
    return sequence == 0 ? std::string{}
                         : text(" (which waits in ", in_payload ? "collective #" : "control call #",
                                sequence, ")");
  }

  /// Check that all ranks make the same call, each with memory of its own. Every rank does this for
  /// itself, so none reads or writes a span that isn't what it expects.
  void compare(thread_place const& here) {
    bool same = true;
    for (int rank = 1; rank < size(); ++rank) {
      same = same && agree(here.peer(0), here.peer(rank));
    }
    if (!same) {
      fail_different(here);
      give_up(here);
    }
    for (int rank = 0; rank < size(); ++rank) {
      if (rank != here.rank && here.call.writes_into(here.peer(rank))) {
        failure.fail(here.rank, [&] {
          return text(
              here.title(),
              ": expected memory of its own for every rank, actual a result that overlaps rank ",
              rank, "'s (rank ", here.rank, ")");
        });
        give_up(here);
      }
    }
  }

  /// Name a rank that differs from most. All ranks find the same one.
  void fail_different(thread_place const& here) noexcept {
    int reference = 0;  // by majority vote, if there is one
    int votes = 0;
    for (int rank = 0; rank < size(); ++rank) {
      reference = votes == 0 ? rank : reference;
      votes += agree(here.peer(reference), here.peer(rank)) ? 1 : -1;
    }
    int other = 0;
    while (agree(here.peer(reference), here.peer(other))) {
      ++other;
    }
    failure.fail(other, [&] {
      collective const& expected = here.peer(reference);
      return text(name(expected.op), " #", here.sequence, ": ",
                  difference(expected, reference, here.peer(other), other));
    });
  }

  void move_data(thread_place const& here, stream& on) {
    using events = thread_events<typename Device::event>;
    thread_transfer<Device> const transfer{here, on};
    wait_for_peers(here, on, &events::arrived);
    if (here.call.op == operation::all_reduce) {
      read_payload(here, on, phase::reducing, phase::reduced, [&] {
        std::uint64_t const bytes = transfer.reduce_slice(member(here.rank).sources);
        record(here, on, &events::reduced);
        return bytes;
      });
      wait_for(here, phase::reduced);
      wait_for_peers(here, on, &events::reduced);
    }
    if (here.call.op == operation::barrier && Device::has_host_memory) {
      return;
    }
    bool const reduces = here.call.op == operation::reduce_scatter;
    read_payload(here, on, reduces ? phase::reducing : phase::copying, phase::finished, [&] {
      std::uint64_t const bytes = last_part(here, transfer);
      record(here, on, &events::finished);
      return bytes;
    });
    wait_for(here, phase::finished);
    wait_for_peers(here, on, &events::finished);
  }

  std::uint64_t last_part(thread_place const& here, thread_transfer<Device> const& transfer) {
    switch (here.call.op) {
      case operation::reduce_scatter: return transfer.reduce_slice(member(here.rank).sources);
      case operation::all_reduce: return transfer.gather_results();
      case operation::broadcast: return transfer.copy_root();
      case operation::all_gather: return transfer.gather_inputs();
      default: return 0;  // a barrier
    }
  }

  /// `copy` returns the bytes that it reads from peers, in `on`.
  template <class Copy>
  void read_payload(thread_place const& here, stream& on, phase during, phase after,
                    Copy const& copy) {
    read_peers(here, during, after, [&] {
      try {
        member(here.rank).peer_bytes_read.fetch_add(copy(), std::memory_order_relaxed);
      } catch (...) {
        if constexpr (!Device::has_host_memory) {
          Device::clean_up([&] { on.synchronize(); });  // no event tells peers when it has read
        }
        throw;
      }
    });
  }

  template <class Copy>
  void read_peers(thread_place const& here, phase during, phase after, Copy const& copy) {
    if (!here.channel.read_peers(here.rank, here.sequence, during, after, copy)) {
      give_up(here);
    }
  }

  void wait_for(thread_place const& here, phase target) {
    if (here.channel.wait_for(here.sequence, target) != meeting::complete) {
      give_up(here);
    }
  }

  std::vector<thread_member<Device>> members_;
};

}  // namespace zero::inline v0::detail
