// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/control_message.hpp>
#include <zero/core/error.hpp>

#include <atomic>
#include <cstdint>
#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

/// @file
/// One rank's connection to the control channel's hub. Nothing here is for users.

namespace zero::inline v0::detail {

/// What hears of a group's messages; the client's lock is held.
class control_listener {
 public:
  virtual void answered(control_message const& message) = 0;
  virtual void failed(int origin, std::string const& why) noexcept = 0;

 protected:
  ~control_listener() = default;
};

/// The transport derives from it.
///
/// Ordering: any thread may call anything.
class control_client {
 public:
  control_client(int rank, int size) noexcept : rank_{rank}, size_{size} {}
  control_client(control_client const&) = delete;
  control_client& operator=(control_client const&) = delete;
  virtual ~control_client() = default;

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return size_; }

  /// A name for a group of all ranks: they ask as often as each other.
  [[nodiscard]] std::string next_name() { return text("world ", names_.fetch_add(1)); }

  /// Send to the hub. What goes wrong reaches `lose`.
  virtual void send(control_message const& message) noexcept = 0;

  /// Let `group` hear what concerns `name`, also what came before.
  void listen(std::string const& name, control_listener& group) {
    std::lock_guard const lock{mutex_};
    groups_[name] = &group;
    if (auto const early = failed_early_.extract(name)) {
      group.failed(early.mapped().first, early.mapped().second);
    }
    if (!lost_.empty()) {
      group.failed(0, lost_);
    }
  }
  /// Nobody hears of `name` any more.
  void ignore(std::string const& name) noexcept {
    std::lock_guard const lock{mutex_};
    groups_.erase(name);
  }

  /// Held where a listener is called.
  [[nodiscard]] std::mutex& mutex() noexcept { return mutex_; }

 protected:
  void receive(control_message const& message) noexcept {
    try {
      std::lock_guard const lock{mutex_};
      auto const found = groups_.find(message.group);
      if (message.kind == control_kind::failed && found == groups_.end()) {
        failed_early_.emplace(message.group, std::pair{int{message.rank}, message.body});
      } else if (message.kind == control_kind::failed) {
        found->second->failed(message.rank, message.body);
      } else if (message.kind == control_kind::exchange && found != groups_.end()) {
        found->second->answered(message);
      }
    } catch (std::exception const& cause) {
      lose(cause.what());
    }
  }

  /// The hub can't be reached any more.
  void lose(std::string_view why) noexcept {
    try {
      std::lock_guard const lock{mutex_};
      if (lost_.empty()) {
        lost_ = text("lost the store of rank 0: ", why, " (rank ", rank_, ")");
      }
      for (auto const& [name, group] : groups_) {
        group->failed(0, lost_);
      }
    } catch (std::exception const&) {  // no memory: calls have their deadlines
    }
  }

 private:
  int rank_;
  int size_;
  std::atomic<std::uint64_t> names_{0};
  std::mutex mutex_;
  std::map<std::string, control_listener*> groups_;
  std::map<std::string, std::pair<int, std::string>> failed_early_;  // before anybody listened
  std::string lost_;
};

}  // namespace zero::inline v0::detail
