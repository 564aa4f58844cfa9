// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/collective.hpp>
#include <zero/comm/control_message.hpp>
#include <zero/core/error.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// @file
/// Where the control channel's messages meet: exchanges are answered when all ranks of a group have
/// sent theirs, announced calls are compared, and a failure is told to all. Nothing here is for
/// users.

namespace zero::inline v0::detail {

/// Ordering: any thread may call anything. `deliver(world rank, message)` is called under a lock,
///           and must not call the hub.
class control_hub {
 public:
  using delivery = std::function<void(int, control_message const&)>;

  explicit control_hub(delivery deliver) : deliver_{std::move(deliver)} {}

  /// A message of world rank `from`.
  void receive(int from, control_message const& message) {
    std::lock_guard const lock{mutex_};
    if (message.kind == control_kind::open) {
      open(message);
      return;
    }
    if (message.kind == control_kind::goodbye) {
      lose(from, {});
      return;
    }
    auto const found = groups_.find(message.group);
    if (found == groups_.end() || message.rank < 0 || message.rank >= found->second.size()) {
      return;
    }
    group& in = found->second;
    switch (message.kind) {
      case control_kind::exchange: exchange(in, message); break;
      case control_kind::announce: announce(in, message); break;
      case control_kind::late: be_late(in, message); break;
      case control_kind::failed: fail(in, message.rank, message.body); break;
      case control_kind::leave: leave(message); break;
      default: break;
    }
  }

  /// World rank `rank` is gone without a goodbye.
  void lost(int rank, std::string_view why) {
    std::lock_guard const lock{mutex_};
    lose(rank, why);
  }

 private:
  /// A call of each rank that has come to it.
  struct meeting {
    std::vector<std::optional<collective>> calls;
    std::vector<std::string> bytes;
    int arrived = 0;
  };

  struct member {
    int world_rank = 0;
    bool left = false;
    std::uint64_t issued = 0;  // payload calls, once it left
  };

  struct group {
    std::string name;
    std::vector<member> members;
    std::map<std::uint64_t, meeting> exchanges;
    std::map<std::uint64_t, meeting> calls;
    bool failed = false;

    [[nodiscard]] int size() const noexcept { return static_cast<int>(members.size()); }
  };

  void open(control_message const& message) {
    group& in = groups_[message.group];
    in.name = message.group;
    if (!in.members.empty()) {
      return;
    }
    std::string_view body = message.body;
    for (std::int32_t rank = 0; take(body, rank);) {
      in.members.push_back({.world_rank = rank, .left = gone_.contains(rank)});
    }
    for (int rank = 0; rank < in.size(); ++rank) {
      auto const gone = gone_.find(in.members[static_cast<std::size_t>(rank)].world_rank);
      if (gone != gone_.end() && !gone->second.empty()) {
        fail(in, rank, text("lost rank ", rank, ": ", gone->second));
      }
    }
  }

  /// Note a call of `message`'s rank. Null where it has come too late, or was wrong.
  meeting* arrive(group& in, std::map<std::uint64_t, meeting>& where,
                  control_message const& message, wire_call const& call) {
    meeting& here = where[message.sequence];
    here.calls.resize(in.members.size());
    here.bytes.resize(in.members.size());
    auto& mine = here.calls[static_cast<std::size_t>(message.rank)];
    if (in.failed || mine.has_value()) {
      return nullptr;
    }
    mine = from_wire(call);
    ++here.arrived;
    return &here;
  }

  void exchange(group& in, control_message const& message) {
    std::string_view body = message.body;
    wire_call call;
    meeting* const here = take(body, call) ? arrive(in, in.exchanges, message, call) : nullptr;
    if (here == nullptr) {
      return;
    }
    here->bytes[static_cast<std::size_t>(message.rank)] = body;
    if (here->arrived == in.size() && check_same(in, *here, message.sequence)) {
      control_message answer{.kind = control_kind::exchange,
                             .sequence = message.sequence,
                             .group = in.name,
                             .body = {}};
      for (std::string const& bytes : here->bytes) {
        answer.body += bytes;
      }
      tell(in, answer);
      in.exchanges.erase(message.sequence);
    }
    check_left(in);
  }

  void announce(group& in, control_message const& message) {
    std::string_view body = message.body;
    wire_call call;
    meeting* const here = take(body, call) ? arrive(in, in.calls, message, call) : nullptr;
    if (here != nullptr && here->arrived == in.size() && check_same(in, *here, message.sequence)) {
      in.calls.erase(message.sequence);
    }
    check_left(in);
  }

  /// Name a rank that differs from most.
  bool check_same(group& in, meeting const& here, std::uint64_t sequence) {
    auto const call = [&](int rank) -> collective const& {
      return *here.calls[static_cast<std::size_t>(rank)];
    };
    int reference = 0;  // by majority vote, if there is one
    int votes = 0;
    for (int rank = 0; rank < in.size(); ++rank) {
      reference = votes == 0 ? rank : reference;
      votes += agree(call(reference), call(rank)) ? 1 : -1;
    }
    for (int rank = 0; rank < in.size(); ++rank) {
      if (!agree(call(reference), call(rank))) {
        fail(in, rank,
             text(title(call(reference).op, sequence), ": ",
                  difference(call(reference), reference, call(rank), rank)));
        return false;
      }
    }
    return true;
  }

  /// Fail where a rank waits for one that left.
  void check_left(group& in) {
    if (!in.failed && !check_left(in, in.exchanges, false)) {
      return;
    }
    if (!in.failed) {
      check_left(in, in.calls, true);
    }
  }

  bool check_left(group& in, std::map<std::uint64_t, meeting> const& where, bool payload) {
    for (auto const& [sequence, here] : where) {
      for (int rank = 0; rank < in.size(); ++rank) {
        member const& peer = in.members[static_cast<std::size_t>(rank)];
        if (peer.left && !here.calls[static_cast<std::size_t>(rank)].has_value() &&
            (!payload || peer.issued < sequence)) {
          int const waits = first_arrived(here);
          fail(in, rank,
               text(title(here.calls[static_cast<std::size_t>(waits)]->op, sequence), ": expected ",
                    in.size(), " ranks, but rank ", rank, " has left (rank ", waits, ")"));
          return false;  // `where` is empty now
        }
      }
    }
    return true;
  }

  [[nodiscard]] static int first_arrived(meeting const& here) {
    auto const found = std::find_if(here.calls.begin(), here.calls.end(),
                                    [](auto const& call) { return call.has_value(); });
    return static_cast<int>(found - here.calls.begin());
  }

  void be_late(group& in, control_message const& message) {
    std::string_view body = message.body;
    late_call late;
    if (in.failed || !take(body, late)) {
      return;
    }
    collective const call = from_wire(late.call);
    bool const control = call.op == operation::exchange || call.op == operation::split;
    auto& where = control ? in.exchanges : in.calls;
    auto const found = where.find(message.sequence);
    if (found == where.end()) {
      fail(in, -1,
           text(title(call.op, message.sequence), ": expected its end within ", late.deadline_ms,
                " ms, actual none (rank ", message.rank, ")"));
      return;
    }
    std::string absent;
    int origin = -1;
    for (int rank = 0; rank < in.size(); ++rank) {
      if (!found->second.calls[static_cast<std::size_t>(rank)].has_value()) {
        absent += text(", missing rank ", rank, elsewhere(in, rank, control));
        origin = rank;
      }
    }
    int const arrived = found->second.arrived;
    fail(in, in.size() - arrived == 1 ? origin : -1,
         text(title(call.op, message.sequence), ": expected ", in.size(), " ranks within ",
              late.deadline_ms, " ms of the first, actual ", arrived, absent, " (rank ",
              message.rank, ")"));
  }

  /// Where else `rank` waits, which explains most deadlines.
  [[nodiscard]] static std::string elsewhere(group const& in, int rank, bool control) {
    for (auto const& [sequence, here] : control ? in.calls : in.exchanges) {
      if (here.calls[static_cast<std::size_t>(rank)].has_value()) {
        return text(" (which waits in ", control ? "collective #" : "control call #", sequence,
                    ")");
      }
    }
    return {};
  }

  void fail(group& in, int origin, std::string const& why) {
    if (!in.failed) {
      in.failed = true;
      in.exchanges.clear();
      in.calls.clear();
      tell(in, {.kind = control_kind::failed, .rank = origin, .group = in.name, .body = why});
    }
  }

  void leave(control_message const& message) {
    auto const found = groups_.find(message.group);
    member& gone = found->second.members[static_cast<std::size_t>(message.rank)];
    gone.left = true;
    gone.issued = message.sequence;
    check_left(found->second);
    drop_if_unused(found);
  }

  void lose(int world_rank, std::string_view why) {
    gone_.emplace(world_rank, why);
    for (auto at = groups_.begin(); at != groups_.end();) {
      auto const here = at++;
      std::vector<member>& members = here->second.members;
      for (std::size_t rank = 0; rank < members.size(); ++rank) {
        if (members[rank].world_rank == world_rank && !members[rank].left) {
          members[rank].left = true;
          if (!why.empty()) {
            fail(here->second, static_cast<int>(rank), text("lost rank ", rank, ": ", why));
          }
        }
      }
      check_left(here->second);
      drop_if_unused(here);
    }
  }

  void drop_if_unused(std::map<std::string, group>::iterator at) {
    std::vector<member> const& members = at->second.members;
    if (std::all_of(members.begin(), members.end(), [](member const& m) { return m.left; })) {
      groups_.erase(at);
    }
  }

  void tell(group const& in, control_message message) {
    for (member const& to : in.members) {
      deliver_(to.world_rank, message);
    }
  }

  std::mutex mutex_;
  delivery deliver_;
  std::map<std::string, group> groups_;
  std::map<int, std::string> gone_;  // world ranks, with what is known of it
};

}  // namespace zero::inline v0::detail
