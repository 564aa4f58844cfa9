// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/error.hpp>
#include <zero/device/wait.hpp>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// @file
/// Whether a group of ranks has failed, and why. Nothing here is for users.

namespace zero::inline v0::detail {

/// The failure of a group. It reaches the groups that were split from it, and theirs, but not the
/// group that it was split from.
///
/// Ordering: any thread may call anything. A scope outlives those that were split from it.
class failure_scope {
 public:
  /// `tree` guards this scope and those that are split from it.
  explicit failure_scope(std::mutex& tree) : tree_{tree} {}

  /// The scope of a group split from `parent`'s: its rank r is rank `ranks[r]` there. It has failed
  /// from the start if `parent` has. The caller holds the tree's mutex.
  failure_scope(failure_scope& parent, std::vector<int> ranks)
      : tree_{parent.tree_}, parent_{&parent}, ranks_{std::move(ranks)} {
    parent.children_.push_back(this);
    if (parent.happened()) {
      inherit();
    }
  }

  failure_scope(failure_scope const&) = delete;
  failure_scope& operator=(failure_scope const&) = delete;

  /// The caller holds the tree's mutex, or is the last to use the tree.
  ~failure_scope() {
    if (parent_ != nullptr) {
      std::erase(parent_->children_, this);
    }
  }

  [[nodiscard]] bool happened() const noexcept { return happened_.load(); }

  /// Whether a scope was split from this one. The caller holds the tree's mutex.
  [[nodiscard]] bool has_children() const noexcept { return !children_.empty(); }

  /// What everybody waits with who waits for this group: a failure wakes them.
  [[nodiscard]] waiter& wake() noexcept { return wake_; }

  /// Fail with the text that `compose()` returns, on behalf of rank `origin` (-1: unknown). Only
  /// the first failure counts.
  template <class Compose>
  void fail(int origin, Compose const& compose) noexcept {
    std::lock_guard const lock{tree_};
    if (!happened()) {
      set(origin, compose);
    }
  }

  /// Throw the failure, which has happened.
  [[noreturn]] void raise() const { throw communication_error{message_, origin_}; }

  void raise_if_happened() const {
    if (happened()) {
      raise();
    }
  }

 private:
  template <class Compose>
  void set(int origin, Compose const& compose) noexcept {
    try {
      message_ = compose();
    } catch (std::exception const&) {
      message_ = "out of memory";  // short enough to need none
    }
    origin_ = origin;
    happened_.store(true);
    wake_.notify();
    for (failure_scope* const child : children_) {
      if (!child->happened()) {
        child->inherit();
      }
    }
  }

  void inherit() noexcept {
    constexpr std::string_view prefix = "the parent communicator failed: ";
    std::string_view cause = parent_->message_;
    cause.remove_prefix(cause.starts_with(prefix) ? prefix.size() : 0);
    auto const here = std::find(ranks_.begin(), ranks_.end(), parent_->origin_);
    set(here == ranks_.end() ? -1 : static_cast<int>(here - ranks_.begin()),
        [&] { return text(prefix, cause); });
  }

  std::mutex& tree_;
  failure_scope* parent_ = nullptr;
  std::vector<int> ranks_;
  std::vector<failure_scope*> children_;
  std::atomic<bool> happened_{false};
  std::string message_;  // written once, before `happened_`, as is the origin
  int origin_ = -1;
  waiter wake_;
};

}  // namespace zero::inline v0::detail
