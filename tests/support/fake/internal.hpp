// SPDX-License-Identifier: MIT
#pragma once

#include <fake/cuda.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

/// @file
/// What the fake's own files share. One mutex guards all of it; `_locked` means that the caller
/// holds a `hidden_lock`.

namespace fake::detail {

/// Locks the fake. ThreadSanitizer sees neither the lock nor what is read or written under it, so
/// that the lock orders nothing in its eyes.
class hidden_lock {
 public:
  hidden_lock() noexcept;
  hidden_lock(hidden_lock const&) = delete;
  hidden_lock& operator=(hidden_lock const&) = delete;
  ~hidden_lock();
};

/// A flag that is set once: what came before set() happened before what follows wait().
///
/// It calls futex itself: std::atomic::wait would order threads through the counters it shares.
class flag {
 public:
  /// Doesn't touch the flag after waiters saw it set.
  void set() noexcept;
  void wait() noexcept;
  [[nodiscard]] bool is_set() const noexcept {
    return state_.load(std::memory_order_acquire) == raised;
  }
  /// A guess that orders nothing.
  [[nodiscard]] bool seems_set() const noexcept {
    return state_.load(std::memory_order_relaxed) == raised;
  }

 private:
  static constexpr std::uint32_t awaited = 1;
  static constexpr std::uint32_t raised = 2;
  std::atomic<std::uint32_t> state_{0};
};

/// The end of one piece of work. It lives until the program ends, for a counter of references
/// would order streams.
struct completion {
  flag done;
  std::chrono::steady_clock::time_point time;  // once done
};

enum class access : std::uint8_t { host, device };  // whether work opens device memory

/// Work in the queue of a stream. The consumer keeps the item that it ran last, waits for its
/// successor and then deletes it; so the consumer never tells producers anything.
struct item {
  flag has_next;
  item* next = nullptr;
  std::function<void()> body;  // empty: a record of an event, or the end of the stream
  access memory = access::host;
  bool last = false;
  completion* finished = nullptr;
};

struct capture;

}  // namespace fake::detail

// CUDA's own names of what its handles point to.

struct CUstream_st {
  CUstream_st(int on_device, unsigned int with_flags, std::size_t as_number)
      : device{on_device}, flags{with_flags}, number{as_number} {}

  int const device;
  unsigned int const flags;
  std::size_t const number;
  std::atomic<bool> ending{false};
  std::atomic<bool> exited{false};
  std::atomic<cudaError_t> failure{cudaSuccess};
  std::atomic<std::int64_t> delay_us{0};

  // Under the lock:
  fake::detail::item* tail = nullptr;
  fake::detail::completion* newest = nullptr;
  std::deque<fake::detail::completion> completions;
  fake::detail::capture* capturing = nullptr;
  std::size_t frontier = 0;  // the node that the next captured node needs
  std::thread worker;
};

struct CUevent_st {
  int const device;
  bool const timed;

  // Under the lock:
  fake::detail::completion* recorded = nullptr;
  CUstream_st* stream = nullptr;
  std::uint64_t capture = 0;  // the capture in which it was recorded last
  std::size_t node = 0;
};

namespace fake::detail {

// calls: calls.cpp

constexpr int max_devices = 16;

/// Count the call; the error that it must return without doing anything, or cudaSuccess.
cudaError_t enter(char const* function, bool needs_device);
void set_last_error(cudaError_t error) noexcept;
int current_device() noexcept;
/// The error that stays with the device.
cudaError_t sticky_error(int device) noexcept;
void set_sticky_error(int device, cudaError_t error) noexcept;
bool is_device(int device);
void start_unloading() noexcept;

/// The body of a faked function, which runs unless the call was told to fail.
template <class F>
cudaError_t call(char const* function, F body, bool needs_device = true) noexcept {
  cudaError_t result = cudaErrorUnknown;
  try {
    result = enter(function, needs_device);
    if (result == cudaSuccess) {
      result = body();
    }
  } catch (std::bad_alloc const&) {
    result = cudaErrorMemoryAllocation;
  } catch (...) {
    result = cudaErrorUnknown;
  }
  if (result != cudaSuccess) {
    set_last_error(result);
  }
  return result;
}

/// The body of a function that frees or destroys: it runs even if the call was told to fail.
template <class F>
cudaError_t release_call(char const* function, F body) noexcept {
  cudaError_t result = cudaErrorUnknown;
  try {
    result = enter(function, true);
    if (result != cudaErrorCudartUnloading && result != cudaErrorNoDevice) {
      cudaError_t const own = body();
      result = result == cudaSuccess ? own : result;
    }
  } catch (...) {
    result = cudaErrorUnknown;
  }
  if (result != cudaSuccess) {
    set_last_error(result);
  }
  return result;
}

// streams: stream.cpp

/// The stream, or null if there is none of this handle.
CUstream_st* find_stream(cudaStream_t handle);
bool is_null_stream_locked(CUstream_st const& stream);
/// Enqueue, whether the stream captures or not.
completion* submit(CUstream_st& stream, std::function<void()> body, access memory);
/// Enqueue or capture; `finished` gets what to wait for, or null while capturing.
cudaError_t add_work(CUstream_st& stream, std::function<void()> body, access memory,
                     completion** finished = nullptr);
/// Wait for all work of the device, that of destroyed streams too.
void wait_for_device(int device);
/// The asynchronous error of the stream, which then stays with its device.
cudaError_t take_failure(CUstream_st& stream) noexcept;
void reset_streams_locked();
void count_streams_locked(live_counts& counts);
/// Streams of the device, destroyed ones too.
std::vector<CUstream_st*> streams_locked(int device);

template <class F>
cudaError_t call_on(char const* function, cudaStream_t handle, F body) noexcept {
  return call(function, [&]() -> cudaError_t {
    CUstream_st* const stream = find_stream(handle);
    if (stream == nullptr) {
      return cudaErrorInvalidResourceHandle;
    }
    if (cudaError_t const error = sticky_error(stream->device); error != cudaSuccess) {
      return error;
    }
    return body(*stream);
  });
}

// captures: graph.cpp

/// The error for a call that is unsafe during a capture, which invalidates the capture.
cudaError_t refuse_unsafe_locked();
/// The error for a use of the null stream while a stream that waits for it captures.
cudaError_t refuse_null_stream_locked(CUstream_st const& stream);
/// Keep `user` until the graph that the stream captures, and what is made of it, is destroyed.
void retain_in_graph_locked(CUstream_st& stream, std::shared_ptr<void> user);
cudaError_t capture_work_locked(CUstream_st& stream, std::function<void()> body, access memory);
void capture_record_locked(CUstream_st& stream, CUevent_st& event);
/// Whether this wait is the business of a capture; its result then.
std::optional<cudaError_t> capture_wait_locked(CUstream_st& stream, CUevent_st& event);
/// The error for waiting for the stream or the event; both invalidate a capture.
cudaError_t refuse_wait_locked(CUstream_st& stream);
cudaError_t refuse_wait_locked(CUevent_st& event);
/// Invalidate the capture of the stream, and give `error`.
cudaError_t invalidate_locked(CUstream_st& stream, cudaError_t error);
/// What an invalidated capture answers to work; cudaSuccess otherwise.
cudaError_t check_capture_locked(CUstream_st const& stream);
void leave_capture_locked(CUstream_st& stream);
bool device_captures_locked(int device);
void count_graphs_locked(live_counts& counts);

// memory: memory.cpp

/// Device memory can be read and written from the first opening to the last closing.
void open_device_memory();
void close_device_memory();

/// Free device memory without a wait for the device; whether it was allocated.
bool unmap_device_memory(void* memory);

void reset_memory_locked();
void count_memory_locked(live_counts& counts);
std::size_t device_memory_locked();

}  // namespace fake::detail
