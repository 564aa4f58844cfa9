// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/thread_group.hpp>

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

/// @file
/// The ownership of thread groups. Nothing here is for users.

namespace zero::inline v0::detail {

/// A group of threads and all groups that were split from it, which live until the last handle of
/// any of them is gone: work in a stream and a parent's failure can rely on them.
template <class Device>
class thread_family {
 public:
  explicit thread_family(int ranks) {
    groups_.push_back({std::make_unique<thread_group<Device>>(mutex_, ranks)});
  }

  thread_family(thread_family const&) = delete;
  thread_family& operator=(thread_family const&) = delete;
  ~thread_family() {
    while (!groups_.empty()) {
      groups_.pop_back();  // children before their parents
    }
  }

  [[nodiscard]] thread_group<Device>& root() noexcept { return *groups_.front().group; }

  /// The group of `parent`'s ranks `ranks`, which gave `color` in control call `sequence`. The
  /// first of them to ask creates it.
  [[nodiscard]] thread_group<Device>& child(thread_group<Device>& parent, std::uint64_t sequence,
                                            int color, std::vector<int> const& ranks) {
    std::lock_guard const lock{mutex_};
    for (member const& known : groups_) {
      if (known.parent == &parent && known.sequence == sequence && known.color == color) {
        return *known.group;
      }
    }
    std::erase_if(groups_, [&](member const& known) {
      return known.parent != nullptr && !known.group->failure.has_children() &&
             known.group->is_unused();
    });
    groups_.push_back(
        {std::make_unique<thread_group<Device>>(parent, ranks), &parent, sequence, color});
    return *groups_.back().group;
  }

  /// `rank`'s handle to `group` is gone.
  void leave(thread_group<Device>& group, int rank) noexcept {
    std::lock_guard const lock{
        mutex_};  // `child` frees no group under the hands of the last to leave
    group.leave(rank);
  }

 private:
  struct member {
    std::unique_ptr<thread_group<Device>> group;
    thread_group<Device>* parent = nullptr;
    std::uint64_t sequence = 0;
    int color = 0;
  };

  std::mutex mutex_;
  std::vector<member> groups_;
};

}  // namespace zero::inline v0::detail
