// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/control_group.hpp>
#include <zero/comm/nccl_options.hpp>
#include <zero/comm/nccl_watch.hpp>
#include <zero/core/error.hpp>
#include <zero/device/cuda_stream.hpp>

#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <future>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

/// @file
/// NCCL's handle of a rank, with a thread that watches it: an asynchronous error, a call past its
/// deadline, and a failure that another rank reports all end in `ncclCommAbort` on every rank.
/// Nothing here is for users.

namespace zero::inline v0::detail {

/// Ordering: one thread at a time makes calls; `fail` may come from any.
class nccl_handle {
 public:
  /// @throws zero::communication_error  NCCL refuses, or the deadline has passed.
  nccl_handle(std::shared_ptr<control_group> control, ncclUniqueId const& id,
              std::chrono::milliseconds deadline)
      : deadline_ms_{deadline.count()}, control_{std::move(control)}, device_{current_device()} {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    try {
      check("ncclCommInitRankConfig",
            ncclCommInitRankConfig(&comm_, control_->size(), id, control_->rank(), &config));
      settle("ncclCommInitRankConfig");
      watchdog_ = std::thread{[this] { watch(); }};
    } catch (...) {
      abort();
      throw;
    }
  }
  nccl_handle(nccl_handle const&) = delete;
  nccl_handle& operator=(nccl_handle const&) = delete;
  /// NCCL's own end may wait for peers, and does for graphs that captured calls. What lasts longer
  /// than `end_time` is this rank's alone, and no failure: its handle is aborted.
  ~nccl_handle() {
    {
      std::lock_guard const lock{waking_};
      stop_ = true;
    }
    wake_.notify_all();
    watchdog_.join();
    control_->leave(calls.issued());
    device_scope const current{device_, std::nothrow};
    if (finalizes()) {
      static_cast<void>(ncclCommDestroy(take()));
    } else {
      abort();
    }
  }

  [[nodiscard]] int rank() const noexcept { return control_->rank(); }
  [[nodiscard]] int size() const noexcept { return control_->size(); }
  [[nodiscard]] int device() const noexcept { return device_; }
  [[nodiscard]] control_group& control() noexcept { return *control_; }
  [[nodiscard]] std::shared_ptr<control_group> const& shared_control() const noexcept {
    return control_;
  }

  [[nodiscard]] std::chrono::milliseconds deadline() const noexcept {
    return std::chrono::milliseconds{deadline_ms_.load()};
  }
  void set_deadline(std::chrono::milliseconds deadline) noexcept {
    deadline_ms_.store(deadline.count());
  }

  /// Fail on every rank.
  void fail(std::string const& why) noexcept {
    control_->fail(rank(), why);
    {
      std::lock_guard const lock{waking_};
      woken_ = true;
    }
    wake_.notify_all();
  }

  /// One call of NCCL's: `function(comm)`.
  /// @throws zero::communication_error  it failed, or the group has.
  template <class Function>
  void call(char const* name, Function const& function) {
    device_scope const current{device_};
    {
      std::lock_guard const lock{mutex_};
      control_->failure().raise_if_happened();
      check(name, function(comm_));
    }
    settle(name);
  }

  /// Calls that NCCL starts together: `function(comm, note)`, with `note(name, result)` after each.
  template <class Function>
  void group(Function const& function) {
    device_scope const current{device_};
    {
      std::lock_guard const lock{mutex_};
      control_->failure().raise_if_happened();
      char const* wrong = nullptr;
      ncclResult_t result = ncclSuccess;
      auto const note = [&](char const* name, ncclResult_t each) {
        if (wrong == nullptr && !is_good(each)) {
          wrong = name;
          result = each;
        }
      };
      check("ncclGroupStart", ncclGroupStart());
      function(comm_, note);
      note("ncclGroupEnd", ncclGroupEnd());
      check(wrong, result);
    }
    settle("ncclGroupEnd");
  }

  /// Calls that end something: not made after a failure, with which it ended.
  template <class Function>
  void quietly(Function const& function) noexcept {
    device_scope const current{device_, std::nothrow};
    std::lock_guard const lock{mutex_};
    if (comm_ != nullptr) {
      function(comm_);
    }
  }

  /// Wait until the stream has run this rank's calls, for at most `most` beside their own
  /// deadlines; then the group fails, and they end with NCCL's abort. Returns whether they have
  /// ended, at last `end_time` later.
  [[nodiscard]] bool drain(std::chrono::milliseconds most) noexcept {
    auto since = std::chrono::steady_clock::now();
    bool failed = control_->failure().happened();
    while (calls.busy()) {
      auto const waited = std::chrono::duration_cast<std::chrono::milliseconds>(
          std::chrono::steady_clock::now() - since);
      if (waited > (failed ? end_time : most) || (!failed && control_->failure().happened())) {
        if (failed) {
          return false;
        }
        fail_late(most);
        failed = true;
        since = std::chrono::steady_clock::now();
      }
      std::this_thread::sleep_for(drain_time);
    }
    return !calls.lost() || drain_device();
  }

  nccl_calls calls;

  /// How long the end may take.
  static constexpr std::chrono::seconds end_time{10};

 private:
  static constexpr std::chrono::milliseconds watch_time{10};
  static constexpr std::chrono::microseconds drain_time{100};
  static constexpr std::chrono::microseconds longest_poll{1000};

  /// The caller holds the mutex, or is the only thread.
  void check(char const* name, ncclResult_t result) {
    if (!is_good(result)) {
      fail(nccl_text(name, result, comm_, rank()));
      control_->failure().raise();
    }
  }

  /// Whether NCCL has taken the call `name`, the last one.
  [[nodiscard]] bool is_settled(char const* name) {
    std::lock_guard const lock{mutex_};
    control_->failure().raise_if_happened();
    ncclResult_t now = ncclSuccess;
    check("ncclCommGetAsyncError", ncclCommGetAsyncError(comm_, &now));
    check(name, now);
    return now == ncclSuccess;
  }

  /// Wait until NCCL has taken the last call.
  void settle(char const* name) {
    auto const start = std::chrono::steady_clock::now();
    std::chrono::microseconds pause{0};
    while (!is_settled(name)) {
      if (std::chrono::steady_clock::now() - start > deadline()) {
        fail(text(name, ": expected its end within ", deadline().count(), " ms, actual none (rank ",
                  rank(), ")"));
        control_->failure().raise();
      }
      if (pause.count() == 0) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(pause);
      }
      pause = std::min(longest_poll, pause * 2 + std::chrono::microseconds{5});
    }
  }

  /// After an error of CUDA, for which the group has failed.
  [[nodiscard]] bool drain_device() const noexcept {
    try {
      device_scope const current{device_};
      return cudaDeviceSynchronize() == cudaSuccess;
    } catch (std::exception const&) {
      return false;
    }
  }

  void fail_late(std::chrono::milliseconds most) noexcept {
    try {
      fail(text("nccl: expected the end of this rank's calls within ", most.count(),
                " ms, actual none (rank ", rank(), ")"));
    } catch (std::exception const&) {
      control_->fail(rank(), "out of memory");
    }
  }

  void watch() noexcept {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal;  // queries break no capture
    static_cast<void>(cudaSetDevice(device_));
    static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode));
    rank_of_thread = rank();
    for (bool last = false; !last;) {
      {
        std::unique_lock lock{waking_};
        wake_.wait_for(lock, watch_time, [this] { return stop_ || woken_; });
        woken_ = false;
        last = stop_;
      }
      calls.announce([this](wire_call const& call, std::uint64_t sequence) {
        control_->announce(call, sequence);
      });
      if (!control_->failure().happened() && !last) {
        look();
      }
      if (control_->failure().happened()) {
        abort();
      }
    }
  }

  /// What went wrong becomes the group's failure.
  void look() noexcept {
    try {
      static_cast<void>(is_settled("ncclCommGetAsyncError"));
      auto const oldest = calls.oldest();
      if (oldest && std::chrono::steady_clock::now() - oldest->since > deadline() && !late_) {
        late_ = true;
        control_->late(oldest->call, oldest->sequence, deadline());
        late_since_ = std::chrono::steady_clock::now();
      }
      if (late_ && std::chrono::steady_clock::now() - late_since_ > answer_time) {
        fail(text("expected the store's answer to a missed deadline, actual none (rank ", rank(),
                  ")"));
      }
    } catch (communication_error const&) {
    } catch (std::exception const& cause) {
      control_->fail(rank(), cause.what());
    }
  }

  [[nodiscard]] ncclComm_t take() noexcept {
    std::lock_guard const lock{mutex_};
    return std::exchange(comm_, nullptr);
  }

  /// Let the streams go on that wait in NCCL, which then waits until graphs with its calls end.
  void abort() noexcept {
    ncclComm_t const comm = take();
    if (comm == nullptr) {
      return;
    }
    if (!calls.captured()) {
      static_cast<void>(ncclCommAbort(comm));
      return;
    }
    try {
      std::packaged_task<void()> task{[comm, device = device_] {
        static_cast<void>(cudaSetDevice(device));
        static_cast<void>(ncclCommAbort(comm));
      }};
      std::future<void> const ended = task.get_future();
      std::thread{std::move(task)}.detach();
      ended.wait_for(std::min<std::chrono::milliseconds>(deadline(), end_time));
    } catch (std::exception const&) {  // no thread: here
      static_cast<void>(ncclCommAbort(comm));
    }
  }

  /// NCCL's end of the handle, where nothing has failed.
  [[nodiscard]] bool finalizes() noexcept {
    if (control_->failure().happened()) {
      return false;
    }
    auto const start = std::chrono::steady_clock::now();
    ncclResult_t result = ncclCommFinalize(comm_);
    while (result == ncclInProgress && !control_->failure().happened() &&
           std::chrono::steady_clock::now() - start <
               std::min<std::chrono::milliseconds>(deadline(), end_time)) {
      std::this_thread::sleep_for(drain_time);
      ncclResult_t now = ncclSuccess;
      ncclResult_t const asked = ncclCommGetAsyncError(comm_, &now);
      result = asked == ncclSuccess ? now : asked;
    }
    return result == ncclSuccess;
  }

  static constexpr std::chrono::seconds answer_time{5};

  std::atomic<std::int64_t> deadline_ms_;
  std::shared_ptr<control_group> control_;
  int device_;
  std::mutex mutex_;  // one thread at a time calls NCCL with the handle
  ncclComm_t comm_ = nullptr;
  std::mutex waking_;
  std::condition_variable wake_;
  bool stop_ = false;
  bool woken_ = false;
  bool late_ = false;  // of the watchdog, as the next
  std::chrono::steady_clock::time_point late_since_;
  std::thread watchdog_;
};

}  // namespace zero::inline v0::detail
