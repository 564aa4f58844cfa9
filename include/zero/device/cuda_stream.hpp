// SPDX-License-Identifier: MIT
#pragma once

#include <zero/device/cuda_error.hpp>

#include <cuda_runtime_api.h>

#include <new>
#include <utility>

/// @file
/// `cuda_stream` and `cuda_event`: CUDA's, with errors as exceptions, on the device that was
/// current when they were made. Work that is captured into a graph is ordered by the graph.

namespace zero::inline v0 {
namespace detail {

/// Makes a device current, and the one before again.
class device_scope {
 public:
  explicit device_scope(int device) {
    check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
    if (device == previous_) {
      previous_ = -1;
    } else {
      check_cuda(cudaSetDevice(device), "cudaSetDevice");
    }
  }
  /// Where CUDA doesn't tell what is current, `device` stays so.
  device_scope(int device, std::nothrow_t) noexcept {
    bool const told = cudaGetDevice(&previous_) == cudaSuccess;
    if (!told || device == previous_) {
      previous_ = -1;
    }
    if (!told || previous_ >= 0) {
      static_cast<void>(cudaSetDevice(device));
    }
  }
  device_scope(device_scope const&) = delete;
  device_scope& operator=(device_scope const&) = delete;
  ~device_scope() {
    if (previous_ >= 0) {
      static_cast<void>(cudaSetDevice(previous_));
    }
  }

 private:
  int previous_ = -1;
};

[[nodiscard]] inline int current_device() {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

/// The capture that a stream is part of, or 0.
[[nodiscard]] inline unsigned long long capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status{};
  unsigned long long id = 0;
  check_cuda(cudaStreamGetCaptureInfo(stream, &status, &id), "cudaStreamGetCaptureInfo");
  return status == cudaStreamCaptureStatusNone ? 0 : id;
}

/// Whether an event's work is done. What isn't leaves no error behind for the next check of one.
[[nodiscard]] inline cudaError_t query(cudaEvent_t event) noexcept {
  cudaError_t const code = cudaEventQuery(event);
  if (code == cudaErrorNotReady) {
    static_cast<void>(cudaGetLastError());
  }
  return code;
}

/// Lets this thread query events, wait and free memory while another one captures.
class relaxed_capture {
 public:
  relaxed_capture() noexcept { exchange(); }
  relaxed_capture(relaxed_capture const&) = delete;
  relaxed_capture& operator=(relaxed_capture const&) = delete;
  ~relaxed_capture() { exchange(); }

 private:
  void exchange() noexcept { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }

  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace detail

/// A place in a stream's work; complete before it is first recorded. One that was recorded in a
/// capture is never ready.
class cuda_event {
 public:
  /// On the current device.
  /// @throws zero::cuda_error  CUDA can't make one.
  cuda_event() {
    detail::check_cuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming),
                       "cudaEventCreateWithFlags");
  }
  cuda_event(cuda_event&& other) noexcept
      : event_{std::exchange(other.event_, nullptr)}, capture_{other.capture_} {}
  cuda_event& operator=(cuda_event&& other) noexcept {
    std::swap(event_, other.event_);
    std::swap(capture_, other.capture_);
    return *this;
  }
  ~cuda_event() {
    if (event_ != nullptr) {
      detail::relaxed_capture const relaxed;
      static_cast<void>(cudaEventDestroy(event_));
    }
  }

  /// Whether the work before it is done. False after an error, which a wait throws.
  [[nodiscard]] bool ready() const noexcept {
    if (capture_ != 0) {
      return false;
    }
    detail::relaxed_capture const relaxed;
    return detail::query(event_) == cudaSuccess;
  }

  /// Let the host wait for the work before it.
  /// @throws zero::cuda_error   that failed.
  /// @throws zero::usage_error  it was captured.
  void wait() const {
    if (capture_ != 0) {
      throw usage_error{
          detail::text("cuda_event::wait: expected no wait of the host in a capture, actual one",
                       detail::rank_suffix())};
    }
    detail::check_cuda(cudaEventSynchronize(event_), "cudaEventSynchronize");
  }

  [[nodiscard]] cudaEvent_t native() const noexcept { return event_; }

 private:
  friend class cuda_stream;

  cudaEvent_t event_ = nullptr;
  unsigned long long capture_ = 0;
};

/// A stream of this library's own, which doesn't wait for the null stream, or the user's.
class cuda_stream {
 public:
  /// A new one on the current device.
  /// @throws zero::cuda_error  CUDA can't make one.
  cuda_stream() : device_{detail::current_device()}, owned_{true} {
    detail::check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
                       "cudaStreamCreateWithFlags");
  }
  /// The user's, on the current device, which outlives this.
  explicit cuda_stream(cudaStream_t borrowed)
      : stream_{borrowed}, device_{detail::current_device()} {}

  cuda_stream(cuda_stream const&) = delete;
  cuda_stream& operator=(cuda_stream const&) = delete;
  /// Waits for the work.
  ~cuda_stream() {
    detail::device_scope const current{device_, std::nothrow};
    detail::relaxed_capture const relaxed;
    static_cast<void>(cudaStreamSynchronize(stream_));
    if (owned_) {
      static_cast<void>(cudaStreamDestroy(stream_));
    }
  }

  [[nodiscard]] bool threaded() const noexcept { return true; }
  [[nodiscard]] cudaStream_t native() const noexcept { return stream_; }
  [[nodiscard]] int device() const noexcept { return device_; }
  [[nodiscard]] bool capturing() const {
    detail::device_scope const current{device_};
    return detail::capture_of(stream_) != 0;
  }

  /// Move `event` behind all work enqueued so far.
  void record(cuda_event& event) {
    detail::device_scope const current{device_};
    event.capture_ = detail::capture_of(stream_);
    detail::check_cuda(cudaEventRecord(event.event_, stream_), "cudaEventRecord");
  }

  /// Let all later work wait for `event`. What is in a graph is ordered by where that is launched.
  /// @throws zero::usage_error  this stream captures, and the event's work from before is not done.
  void wait(cuda_event const& event) {
    detail::device_scope const current{device_};
    unsigned long long const capture = detail::capture_of(stream_);
    if (capture != 0 && event.capture_ == 0) {
      check_idle(event);
      return;
    }
    if (capture != 0 && event.capture_ != capture) {
      return;  // of another graph
    }
    cudaError_t const code = cudaStreamWaitEvent(stream_, event.event_, 0);
    if (event.capture_ != 0 &&
        (code == cudaErrorStreamCaptureIsolation || code == cudaErrorCapturedEvent)) {
      static_cast<void>(cudaGetLastError());  // of a graph whose capture has ended
      return;
    }
    detail::check_cuda(code, "cudaStreamWaitEvent");
  }

  /// Let the host wait for all work.
  /// @throws zero::cuda_error   it failed.
  /// @throws zero::usage_error  it is being captured.
  void synchronize() {
    detail::device_scope const current{device_};
    if (detail::capture_of(stream_) != 0) {
      throw usage_error{
          detail::text("synchronize: expected no wait of the host in a capture, actual one",
                       detail::rank_suffix())};
    }
    detail::check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

 private:
  static void check_idle(cuda_event const& event) {
    if (!event.ready()) {
      throw usage_error{detail::text(
          "cuda_stream: expected nothing in flight where a capture begins, actual work from before",
          detail::rank_suffix(), "; synchronize first")};
    }
  }

  cudaStream_t stream_ = nullptr;
  int device_;
  bool owned_ = false;
};

}  // namespace zero::inline v0
