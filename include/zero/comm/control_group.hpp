// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/collective.hpp>
#include <zero/comm/control_client.hpp>
#include <zero/comm/control_message.hpp>
#include <zero/comm/failure_scope.hpp>
#include <zero/core/error.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

/// @file
/// A rank's side of the control channel: blocking exchanges of a few bytes, and failures that reach
/// every rank of a group. Nothing here is for users.

namespace zero::inline v0::detail {

/// The ranks of one communicator in the control channel.
///
/// Ordering: one thread at a time exchanges; any thread may call the rest.
class control_group final : public control_listener {
 public:
  /// All ranks of a client's world.
  [[nodiscard]] static std::shared_ptr<control_group> world(std::shared_ptr<control_client> client,
                                                            std::string name = {}) {
    std::vector<int> ranks(static_cast<std::size_t>(client->size()));
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      ranks[rank] = static_cast<int>(rank);
    }
    int const rank = client->rank();
    return std::shared_ptr<control_group>{
        new control_group{std::move(client), nullptr, std::move(name), std::move(ranks), rank}};
  }

  /// `parent`'s ranks `ranks`, of which this is number `rank`. `name` is another for each group.
  [[nodiscard]] static std::shared_ptr<control_group> part(std::shared_ptr<control_group> parent,
                                                           std::string name, std::vector<int> ranks,
                                                           int rank) {
    auto client = parent->client_;
    return std::shared_ptr<control_group>{new control_group{
        std::move(client), std::move(parent), std::move(name), std::move(ranks), rank}};
  }

  control_group(control_group const&) = delete;
  control_group& operator=(control_group const&) = delete;
  ~control_group() {
    client_->ignore(name_);
    if (!left_) {
      leave(0);
    }
    std::lock_guard const lock{*tree_};
    failure_.reset();
  }

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return static_cast<int>(world_ranks_.size()); }
  [[nodiscard]] std::string const& name() const noexcept { return name_; }
  [[nodiscard]] failure_scope& failure() noexcept { return *failure_; }
  [[nodiscard]] failure_scope const& failure() const noexcept { return *failure_; }

  /// Collect `mine` of all ranks in `all`, which has room for it. Returns the sequence number. What
  /// a communicator `starts` with is counted apart.
  /// @throws zero::communication_error  a rank failed, left, differs, or missed the deadline.
  std::uint64_t exchange(operation op, std::span<std::byte const> mine, std::span<std::byte> all,
                         std::chrono::milliseconds deadline, bool starts = false) {
    answer mail;
    collective const call{.op = op, .count = mine.size()};
    std::uint64_t const sequence = await(mail, starts);
    control_message message = make(control_kind::exchange, sequence);
    put(message.body, to_wire(call));
    message.body.append(reinterpret_cast<char const*>(mine.data()), mine.size());
    client_->send(message);
    auto const arrived = [&] { return mail.ready.load() || failure_->happened(); };
    if (!failure_->wake().wait_until(arrived, after(deadline))) {
      late(call, sequence, deadline);
      if (!failure_->wake().wait_until(arrived, after(answer_time))) {
        fail(-1, text(title(op, sequence), ": expected an answer within ",
                      (deadline + answer_time).count(), " ms, actual none (rank ", rank_, ")"));
      }
    }
    {
      std::lock_guard const lock{client_->mutex()};
      mail_ = nullptr;
    }
    if (!mail.ready.load()) {
      failure_->raise();
    }
    if (mail.bytes.size() == all.size() && !all.empty()) {
      std::memcpy(all.data(), mail.bytes.data(), all.size());
    }
    return sequence;
  }

  /// Let the hub compare payload call `sequence` with the other ranks'.
  void announce(wire_call const& call, std::uint64_t sequence) noexcept {
    send_quietly(control_kind::announce, sequence, call);
  }

  /// Payload call or exchange `sequence` missed its deadline: all ranks will know why.
  void late(collective const& call, std::uint64_t sequence,
            std::chrono::milliseconds deadline) noexcept {
    send_quietly(control_kind::late, sequence,
                 late_call{to_wire(call), static_cast<std::uint64_t>(deadline.count())});
  }

  /// Fail here and on all ranks, on behalf of rank `origin` (-1: unknown).
  void fail(int origin, std::string const& why) noexcept {
    if (failure_->happened()) {
      return;
    }
    failure_->fail(origin, [&] { return why; });
    try {
      control_message message = make(control_kind::failed, 0);
      message.body = why;
      message.rank = origin < 0 ? rank_ : origin;
      client_->send(message);
    } catch (std::exception const&) {  // no memory: peers have their deadlines
    }
  }

  /// This rank makes no more calls than the `issued` that it has made.
  void leave(std::uint64_t issued) noexcept {
    left_ = true;
    try {
      client_->send(make(control_kind::leave, issued));
    } catch (std::exception const&) {  // no memory: peers have their deadlines
    }
  }

  // Of the client.
  void answered(control_message const& message) override {
    if (mail_ != nullptr && mail_->sequence == message.sequence) {
      mail_->bytes = message.body;
      mail_->ready.store(true);
      failure_->wake().notify();
    }
  }
  void failed(int origin, std::string const& why) noexcept override {
    failure_->fail(origin, [&] { return why; });
  }

 private:
  /// How long a hub may take to say who was late.
  static constexpr std::chrono::milliseconds answer_time{5000};

  struct answer {
    std::atomic<bool> ready{false};
    std::uint64_t sequence = 0;
    std::string bytes;
  };

  control_group(std::shared_ptr<control_client> client, std::shared_ptr<control_group> parent,
                std::string name, std::vector<int> ranks, int rank)
      : client_{std::move(client)}, parent_{std::move(parent)}, name_{std::move(name)}, rank_{rank},
        tree_{parent_ ? parent_->tree_ : std::make_shared<std::mutex>()} {
    control_message message = make(control_kind::open, 0);
    for (int const member : ranks) {
      world_ranks_.push_back(parent_ ? parent_->world_ranks_[static_cast<std::size_t>(member)]
                                     : member);
      put(message.body, static_cast<std::int32_t>(world_ranks_.back()));
    }
    if (parent_) {
      std::lock_guard const lock{*tree_};
      failure_.emplace(*parent_->failure_, std::move(ranks));
    } else {
      failure_.emplace(*tree_);
    }
    client_->listen(name_, *this);
    client_->send(message);
  }

  [[nodiscard]] control_message make(control_kind kind, std::uint64_t sequence) const {
    return {.kind = kind, .rank = rank_, .sequence = sequence, .group = name_, .body = {}};
  }

  template <class Body>
  void send_quietly(control_kind kind, std::uint64_t sequence, Body const& body) noexcept {
    try {
      control_message message = make(kind, sequence);
      put(message.body, body);
      client_->send(message);
    } catch (std::exception const&) {
      failure_->fail(rank_, [] { return std::string{"out of memory"}; });
    }
  }

  [[nodiscard]] static waiter::clock::time_point after(std::chrono::milliseconds time) noexcept {
    auto const now = waiter::clock::now();
    using std::chrono::milliseconds;
    auto const most = std::chrono::floor<milliseconds>(waiter::clock::time_point::max() - now);
    return time < most ? now + time : waiter::clock::time_point::max();
  }

  std::uint64_t await(answer& mail, bool starts) {
    failure_->raise_if_happened();
    std::lock_guard const lock{client_->mutex()};
    if (mail_ != nullptr) {
      throw usage_error{
          text("exchange: expected one control call at a time, actual another is "
               "under way in this rank (rank ",
               rank_, ")")};
    }
    mail_ = &mail;
    return mail.sequence = starts ? first_start + ++starts_ : ++exchanges_;
  }

  std::shared_ptr<control_client> client_;
  std::shared_ptr<control_group> parent_;
  std::string name_;
  std::vector<int> world_ranks_;
  int rank_;
  std::shared_ptr<std::mutex> tree_;
  std::optional<failure_scope> failure_;
  answer* mail_ = nullptr;
  std::uint64_t exchanges_ = 0;
  std::uint64_t starts_ = 0;
  bool left_ = false;
};

}  // namespace zero::inline v0::detail
