// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/collective.hpp>
#include <zero/comm/control_message.hpp>
#include <zero/device/cuda_stream.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

/// @file
/// The calls of a rank that its stream has not ended, for the watchdog. Nothing here is for users.

namespace zero::inline v0::detail {

/// A call that is to be compared with the other ranks'.
struct announced_call {
  wire_call call;
  std::uint64_t sequence;
};

/// Ordering: any thread may call anything.
class nccl_calls {
 public:
  using clock = std::chrono::steady_clock;

  struct entry {
    collective call;
    std::uint64_t sequence = 0;
    clock::time_point since;
  };

  nccl_calls() {
    announced_.reserve(announcements);
    spare_.reserve(announcements);
  }

  /// Note a call that is enqueued now. Returns its sequence number.
  std::uint64_t start(collective const& call, bool announce) {
    std::lock_guard const lock{mutex_};
    if (announce) {
      announced_.push_back({to_wire(call), issued_ + 1});
    }
    return ++issued_;
  }

  /// The call is enqueued in `on`: it ends where the stream comes to here. With too many calls the
  /// last one stands for several.
  void watch(collective const& call, std::uint64_t sequence, clock::time_point since,
             cuda_stream& on) {
    std::lock_guard const lock{mutex_};
    lost_ = true;
    if (on.capturing()) {
      captured_ = true;
      lost_ = false;
      return;
    }
    std::size_t const at = count_ < slots_.size() ? count_++ : count_ - 1;
    slot& mine = slots_[(first_ + at) % slots_.size()];
    mine.what = {call, sequence, since};
    stream_ = on.native();
    on.record(mine.end);
    lost_ = false;
  }

  /// Whether calls in another stream than `stream` have not ended.
  [[nodiscard]] bool busy_elsewhere(cudaStream_t stream) {
    std::lock_guard const lock{mutex_};
    return count_ != 0 && stream_ != stream && !newest().end.ready();
  }

  /// Whether the stream has not run all calls that are watched. An error that stays is its end.
  [[nodiscard]] bool busy() {
    relaxed_capture const relaxed;
    std::lock_guard const lock{mutex_};
    if (count_ == 0) {
      return false;
    }
    cudaError_t const code = query(newest().end.native());
    return code != cudaSuccess && query(newest().end.native()) == cudaErrorNotReady;
  }

  /// Whether a graph has captured calls.
  [[nodiscard]] bool captured() {
    std::lock_guard const lock{mutex_};
    return captured_;
  }

  /// Whether the newest call could not be watched.
  [[nodiscard]] bool lost() {
    std::lock_guard const lock{mutex_};
    return lost_;
  }

  /// Forget the calls that have ended; the oldest that has not.
  /// @throws zero::cuda_error  the stream failed.
  [[nodiscard]] std::optional<entry> oldest() {
    std::lock_guard const lock{mutex_};
    while (count_ != 0) {
      cudaError_t const code = query(slots_[first_].end.native());
      if (code == cudaErrorNotReady) {
        return slots_[first_].what;
      }
      check_cuda(code, "cudaEventQuery");
      first_ = (first_ + 1) % slots_.size();
      --count_;
    }
    return {};
  }

  /// Call `send(call, sequence)` with what is to be announced.
  template <class Send>
  void announce(Send const& send) {
    {
      std::lock_guard const lock{mutex_};
      std::swap(announced_, spare_);
    }
    for (announced_call const& each : spare_) {
      send(each.call, each.sequence);
    }
    spare_.clear();
  }

  [[nodiscard]] std::uint64_t issued() {
    std::lock_guard const lock{mutex_};
    return issued_;
  }

 private:
  static constexpr std::size_t announcements = 1024;

  struct slot {
    cuda_event end;
    entry what;
  };

  [[nodiscard]] slot& newest() noexcept { return slots_[(first_ + count_ - 1) % slots_.size()]; }

  std::mutex mutex_;
  std::array<slot, 32> slots_;
  std::size_t first_ = 0;
  std::size_t count_ = 0;
  cudaStream_t stream_ = nullptr;
  bool captured_ = false;
  bool lost_ = false;
  std::uint64_t issued_ = 0;
  std::vector<announced_call> announced_;
  std::vector<announced_call> spare_;  // of the one thread that announces
};

}  // namespace zero::inline v0::detail
