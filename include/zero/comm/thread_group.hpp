// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/collective.hpp>
#include <zero/comm/failure_scope.hpp>
#include <zero/comm/reduce_ordered.hpp>
#include <zero/comm/rendezvous.hpp>
#include <zero/core/error.hpp>
#include <zero/core/partition.hpp>
#include <zero/device/host_copy.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <string>
#include <vector>

/// @file
/// What the threads behind `thread_communicator` share, and what each does in a collective.
/// Nothing here is for users.

namespace zero::inline v0::detail {

/// What a group knows about one rank.
struct alignas(128) thread_member {
  std::atomic<std::int64_t> deadline_ms{0};
  std::atomic<std::uint64_t> peer_bytes_read{0};
  std::atomic<void const*> stream{nullptr};  // of the last payload call
  std::vector<void const*> sources;          // of a reduction, one for each rank
};

/// The ranks of one communicator. Its payload and its control channel meet apart.
class thread_group {
 public:
  thread_group(std::mutex& tree, int size)
      : failure{tree}, payload{size, failure}, control{size, failure}, members_(to_size(size)) {
    reserve();
  }

  /// Rank r of the new group is rank `ranks[r]` of `parent`. The caller holds the tree's mutex.
  thread_group(thread_group& parent, std::vector<int> const& ranks)
      : failure{parent.failure, ranks}, payload{static_cast<int>(ranks.size()), failure},
        control{static_cast<int>(ranks.size()), failure}, members_(ranks.size()) {
    reserve();
  }

  [[nodiscard]] int size() const noexcept { return payload.size(); }
  [[nodiscard]] thread_member& member(int rank) noexcept { return members_[to_size(rank)]; }

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

  /// Rank `rank`'s part in `call`, which it has issued to `channel`. Returns the sequence number.
  /// @throws zero::communication_error  the group has failed; no peer reads the call's memory any
  ///                                    more.
  std::uint64_t run(rendezvous& channel, int rank, collective const& call) {
    struct ending {
      rendezvous& channel;
      int rank;
      ~ending() { channel.end(rank); }
    } const at_end{channel, rank};
    failure.raise_if_happened();
    place const here{channel, rank, channel.arrive(rank, call), call};
    meet(here);
    compare(here);
    move_data(here);
    return here.sequence;
  }

  /// `rank` has issued `call`, but won't come to it, since its stream failed: nor will its peers.
  void discard(rendezvous& channel, int rank, collective const& call,
               std::exception_ptr const& cause) noexcept {
    failure.fail(rank, [&] {
      return text(name(call.op), ": not run, since the stream failed before it: ", what(cause),
                  " (rank ", rank, ")");
    });
    channel.end(rank);
  }

  failure_scope failure;
  rendezvous payload;
  rendezvous control;

 private:
  struct place {
    rendezvous& channel;
    int rank;
    std::uint64_t sequence;
    collective const& call;

    [[nodiscard]] collective const& peer(int other) const noexcept {
      return channel.call(other, sequence);
    }
    [[nodiscard]] std::string title() const { return text(name(call.op), " #", sequence); }
  };

  [[nodiscard]] static std::size_t to_size(int count) noexcept {
    return static_cast<std::size_t>(count);
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
    for (thread_member& member : members_) {
      member.sources.resize(members_.size());
    }
  }

  [[noreturn]] void give_up(place const& here) {
    here.channel.wait_until_unread(here.rank);
    failure.raise();
  }

  /// Wait for all ranks.
  void meet(place const& here) {
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

  void fail_late(place const& here, std::chrono::milliseconds deadline) noexcept {
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
  [[nodiscard]] std::string elsewhere(place const& here, int rank) const {
    bool const in_payload = &here.channel == &control;
    std::uint64_t const sequence = (in_payload ? payload : control).waits_in(rank);
    return sequence == 0 ? std::string{}
                         : text(" (which waits in ", in_payload ? "collective #" : "control call #",
                                sequence, ")");
  }

  /// Check that all ranks make the same call, each with memory of its own. Every rank does this for
  /// itself, so none reads or writes a span that isn't what it expects.
  void compare(place const& here) {
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
  void fail_different(place const& here) noexcept {
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

  void move_data(place const& here) {
    switch (here.call.op) {
      case operation::barrier: return;
      case operation::reduce_scatter:
        read_peers(here, phase::reducing, phase::finished, [&] { reduce_slice(here); });
        break;
      case operation::all_reduce:
        read_peers(here, phase::reducing, phase::reduced, [&] { reduce_slice(here); });
        wait_for(here, phase::reduced);
        read_peers(here, phase::copying, phase::finished, [&] { gather_reduced(here); });
        break;
      case operation::broadcast:
        read_peers(here, phase::copying, phase::finished, [&] { copy_root(here); });
        break;
      case operation::all_gather:
      case operation::exchange:
      case operation::split:
        read_peers(here, phase::copying, phase::finished, [&] { gather(here); });
        break;
    }
    wait_for(here, phase::finished);
  }

  template <class Copy>
  void read_peers(place const& here, phase during, phase after, Copy const& copy) {
    if (!here.channel.read_peers(here.rank, here.sequence, during, after, copy)) {
      give_up(here);
    }
  }

  void wait_for(place const& here, phase target) {
    if (here.channel.wait_for(here.sequence, target) != meeting::complete) {
      give_up(here);
    }
  }

  /// Sum this rank's slice of all inputs into its place in the result.
  void reduce_slice(place const& here) noexcept {
    collective const& call = here.call;
    partition const cut{call.count, to_size(size())};
    std::size_t const first = std::min(cut.offset(to_size(here.rank)), call.count);
    std::size_t const count = cut.size(to_size(here.rank));
    thread_member& self = member(here.rank);
    for (int rank = 0; rank < size(); ++rank) {
      self.sources[to_size(rank)] = here.peer(rank).input + first * size_bytes(call.input_dtype);
    }
    bool const whole = call.op == operation::all_reduce;
    any_span const result{call.output + (whole ? first * size_bytes(call.output_dtype) : 0), count,
                          call.output_dtype};
    reduce_ordered(self.sources, call, result);
    count_read(self, (self.sources.size() - 1) * count * size_bytes(call.input_dtype));
  }

  /// Copy the other ranks' slices of the result.
  void gather_reduced(place const& here) noexcept {
    collective const& call = here.call;
    std::size_t const element_bytes = size_bytes(call.output_dtype);
    partition const cut{call.count, to_size(size())};
    for_peers(here, [&](int rank) {
      std::size_t const at = std::min(cut.offset(to_size(rank)), call.count) * element_bytes;
      std::size_t const bytes = cut.size(to_size(rank)) * element_bytes;
      host_copy(call.output + at, here.peer(rank).output + at, bytes);
      count_read(member(here.rank), bytes);
    });
  }

  void gather(place const& here) noexcept {
    collective const& call = here.call;
    auto const place_of = [&](int rank) { return call.output + to_size(rank) * call.input_bytes; };
    host_copy(place_of(here.rank), call.input, call.input_bytes);
    for_peers(here, [&](int rank) {
      host_copy(place_of(rank), here.peer(rank).input, call.input_bytes);
      count_read(member(here.rank), &here.channel == &payload ? call.input_bytes : 0);
    });
  }

  void copy_root(place const& here) noexcept {
    if (here.rank != here.call.root) {
      host_copy(here.call.output, here.peer(here.call.root).input, here.call.output_bytes);
      count_read(member(here.rank), here.call.output_bytes);
    }
  }

  /// All ranks but this one, from the next one on, so that not all read the same one at a time.
  template <class Function>
  void for_peers(place const& here, Function const& function) const noexcept {
    for (int step = 1; step < size(); ++step) {
      function((here.rank + step) % size());
    }
  }

  static void count_read(thread_member& reader, std::size_t bytes) noexcept {
    reader.peer_bytes_read.fetch_add(bytes, std::memory_order_relaxed);
  }

  std::vector<thread_member> members_;
};

}  // namespace zero::inline v0::detail
