// SPDX-License-Identifier: MIT
#include <fake/internal.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <random>
#include <unordered_set>

// Streams, events, and the work between them.

namespace fake {
namespace detail {
namespace {

constexpr std::size_t threads_kept = 64;  // ended threads that wait to be joined
constexpr std::int64_t longest_jitter_us = 200;

struct streams_state {
  // All streams and events ever made, since handles and work may refer to them still.
  std::vector<std::unique_ptr<CUstream_st>> streams;
  std::vector<std::unique_ptr<CUevent_st>> events;
  std::unordered_set<CUstream_st const*> live_streams;
  std::unordered_set<CUevent_st const*> live_events;
  std::array<CUstream_st*, max_devices> null_streams{};
  std::atomic<std::int64_t> delay_us{0};
  std::atomic<std::uint64_t> jitter_seed{0};
  std::atomic<std::uint64_t> waits_to_drop{0};
};

streams_state& state() {
  static streams_state& it = *new streams_state;
  return it;
}

/// Whether this call of cudaStreamWaitEvent is the one that was told to wait for nothing.
bool drops_wait() {
  std::uint64_t left = state().waits_to_drop.load(std::memory_order_relaxed);
  while (left != 0 &&
         !state().waits_to_drop.compare_exchange_weak(left, left - 1, std::memory_order_relaxed)) {
  }
  return left == 1;
}

void run_body(item& work) noexcept {
  try {
    work.body();
    work.body = nullptr;
  } catch (std::exception const& thrown) {
    std::fprintf(stderr, "fake CUDA: work of a stream threw: %s\n", thrown.what());
    std::terminate();
  } catch (...) {
    std::fputs("fake CUDA: work of a stream threw\n", stderr);
    std::terminate();
  }
}

void sleep_first(CUstream_st const& stream, std::uint64_t place) {
  std::int64_t us = stream.delay_us.load(std::memory_order_relaxed) +
                    state().delay_us.load(std::memory_order_relaxed);
  if (auto const seed = state().jitter_seed.load(std::memory_order_relaxed); seed != 0) {
    std::seed_seq mixed{seed, place, static_cast<std::uint64_t>(stream.number)};
    us += static_cast<std::int64_t>(std::minstd_rand{mixed}() % (longest_jitter_us + 1));
  }
  if (us > 0) {
    std::this_thread::sleep_for(std::chrono::microseconds{us});
  }
}

// Device memory as one stream needs it: open over consecutive work, for opening it takes long.
class memory_door {
 public:
  void set(bool open) {
    if (open != open_) {
      open ? open_device_memory() : close_device_memory();
      open_ = open;
    }
  }

 private:
  bool open_ = false;
};

// After a body, the only thing that others can learn from this thread is `done`.
void run_stream(CUstream_st* stream, item* at) noexcept {
  memory_door door;
  for (std::uint64_t place = 0;; ++place) {
    at->has_next.wait();
    delete std::exchange(at, at->next);
    bool const last = at->last;
    if (!last) {
      sleep_first(*stream, place);
    }
    if (at->body) {
      door.set(at->memory == access::device);
      run_body(*at);
    }
    if (!at->has_next.seems_set()) {
      door.set(false);
    }
    at->finished->time = std::chrono::steady_clock::now();
    at->finished->done.set();
    if (last) {  // `at` stays: it is the tail still
      stream->exited.store(true, std::memory_order_relaxed);
      return;
    }
  }
}

// Made out of sight, because whoever enqueues next, in any thread, links to it.
std::unique_ptr<item> make_item() {
  hidden_lock const lock;
  return std::make_unique<item>();
}

completion* push(CUstream_st& stream, std::unique_ptr<item> work) {
  item* const next = work.release();
  item* previous = nullptr;
  completion* finished = nullptr;
  {
    hidden_lock const lock;
    finished = &stream.completions.emplace_back();
    next->finished = finished;
    stream.newest = finished;
    previous = std::exchange(stream.tail, next);
  }
  // Out of the lock: what this thread did so far happens before the work.
  previous->next = next;
  previous->has_next.set();
  return finished;
}

void push_last(CUstream_st& stream) {
  auto work = make_item();
  work->last = true;
  push(stream, std::move(work));
}

// Work that is still queued runs before. Calls from now on are refused.
void join_all() {
  start_unloading();
  std::vector<CUstream_st*> streams;
  {
    hidden_lock const lock;
    for (auto const& each : state().streams) {
      if (each->worker.joinable()) {
        streams.push_back(each.get());
      }
    }
  }
  for (auto* each : streams) {
    if (!each->ending.exchange(true, std::memory_order_relaxed)) {
      push_last(*each);
    }
  }
  for (auto* each : streams) {
    each->worker.join();
  }
}

// Ended threads keep their stacks until they are joined.
void join_ended_locked() {
  auto const ended = [](auto const& each) {
    return each->worker.joinable() && each->exited.load(std::memory_order_relaxed);
  };
  auto& streams = state().streams;
  if (static_cast<std::size_t>(std::count_if(streams.begin(), streams.end(), ended)) >
      threads_kept) {
    for (auto const& each : streams) {
      if (ended(each)) {
        each->worker.join();
      }
    }
  }
}

CUstream_st* make_stream_locked(int device, unsigned int flags) {
  static struct joiner {
    ~joiner() { join_all(); }
  } const at_exit;
  auto& streams = state().streams;
  join_ended_locked();
  auto first = std::make_unique<item>();
  auto& stream =
      *streams.emplace_back(std::make_unique<CUstream_st>(device, flags, streams.size()));
  stream.tail = first.get();
  stream.worker = std::thread{run_stream, &stream, first.get()};
  static_cast<void>(first.release());  // the worker has it
  return &stream;
}

CUevent_st* find_event(cudaEvent_t handle) {
  hidden_lock const lock;
  return state().live_events.contains(handle) ? handle : nullptr;
}

// The body gets the event, which is live.
template <class F>
cudaError_t call_on_event(char const* function, cudaEvent_t handle, F body) noexcept {
  return call(function, [&]() -> cudaError_t {
    CUevent_st* const event = find_event(handle);
    return event == nullptr ? cudaErrorInvalidResourceHandle : body(*event);
  });
}

// What the event recorded (null: nothing), or the error for asking.
cudaError_t ask_event(CUevent_st& event, completion*& recorded, CUstream_st*& stream) {
  hidden_lock const lock;
  recorded = event.recorded;
  stream = event.stream;
  return refuse_wait_locked(event);
}

// The newest work of the stream (null: none), or the error for asking.
cudaError_t ask_stream(CUstream_st& stream, completion*& newest) {
  hidden_lock const lock;
  newest = stream.newest;
  return refuse_wait_locked(stream);
}

}  // namespace

CUstream_st* find_stream(cudaStream_t handle) {
  hidden_lock const lock;
  if (handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread) {
    CUstream_st*& found = state().null_streams[static_cast<std::size_t>(current_device())];
    if (found == nullptr) {
      found = make_stream_locked(current_device(), cudaStreamDefault);
    }
    return found;
  }
  return state().live_streams.contains(handle) ? handle : nullptr;
}

bool is_null_stream_locked(CUstream_st const& stream) {
  return state().null_streams[static_cast<std::size_t>(stream.device)] == &stream;
}

completion* submit(CUstream_st& stream, std::function<void()> body, access memory) {
  auto work = make_item();
  work->body = std::move(body);
  work->memory = memory;
  return push(stream, std::move(work));
}

cudaError_t add_work(CUstream_st& stream, std::function<void()> body, access memory,
                     completion** finished) {
  {
    hidden_lock const lock;
    if (stream.capturing != nullptr) {
      return capture_work_locked(stream, std::move(body), memory);
    }
    if (cudaError_t const error = refuse_null_stream_locked(stream); error != cudaSuccess) {
      return error;
    }
  }
  completion* const submitted = submit(stream, std::move(body), memory);
  if (finished != nullptr) {
    *finished = submitted;
  }
  return cudaSuccess;
}

void wait_for_device(int device) {
  std::vector<completion*> newest;
  {
    hidden_lock const lock;
    for (auto const& each : state().streams) {
      if (each->device == device && each->newest != nullptr) {
        newest.push_back(each->newest);
      }
    }
  }
  for (auto* each : newest) {
    each->done.wait();
  }
}

cudaError_t take_failure(CUstream_st& stream) noexcept {
  cudaError_t const error = stream.failure.exchange(cudaSuccess, std::memory_order_relaxed);
  if (error != cudaSuccess) {
    set_sticky_error(stream.device, error);
  }
  return error != cudaSuccess ? error : sticky_error(stream.device);
}

void reset_streams_locked() {
  state().delay_us.store(0, std::memory_order_relaxed);
  state().jitter_seed.store(0, std::memory_order_relaxed);
  for (auto const& each : state().streams) {
    each->delay_us.store(0, std::memory_order_relaxed);
    each->failure.store(cudaSuccess, std::memory_order_relaxed);
  }
}

void count_streams_locked(live_counts& counts) {
  counts.streams = state().live_streams.size();
  counts.events = state().live_events.size();
}

std::vector<CUstream_st*> streams_locked(int device) {
  std::vector<CUstream_st*> found;
  for (auto const& each : state().streams) {
    if (each->device == device) {
      found.push_back(each.get());
    }
  }
  return found;
}

}  // namespace detail

cudaError_t enqueue(cudaStream_t stream, std::function<void()> work) {
  CUstream_st* const found = detail::find_stream(stream);
  return found == nullptr ? cudaErrorInvalidResourceHandle
                          : detail::add_work(*found, std::move(work), detail::access::device);
}

void fail_async(cudaStream_t stream, cudaError_t error) {
  if (auto* const found = detail::find_stream(stream)) {
    found->failure.store(error, std::memory_order_relaxed);
  }
}

void delay(cudaStream_t stream, std::chrono::microseconds duration) {
  if (auto* const found = detail::find_stream(stream)) {
    found->delay_us.store(duration.count(), std::memory_order_relaxed);
  }
}

void delay_all(std::chrono::microseconds duration) {
  detail::state().delay_us.store(duration.count(), std::memory_order_relaxed);
}

void set_jitter(std::uint64_t seed) {
  detail::state().jitter_seed.store(seed, std::memory_order_relaxed);
}

void drop_wait(std::uint64_t n) {
  detail::state().waits_to_drop.store(n, std::memory_order_relaxed);
}

}  // namespace fake

using namespace fake::detail;

extern "C" {

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags) {
  return call("cudaStreamCreateWithFlags", [&] {
    if (stream == nullptr || (flags & ~static_cast<unsigned int>(cudaStreamNonBlocking)) != 0) {
      return cudaErrorInvalidValue;
    }
    hidden_lock const lock;
    *stream = make_stream_locked(current_device(), flags);
    state().live_streams.insert(*stream);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return release_call("cudaStreamDestroy", [&] {
    {
      hidden_lock const lock;
      if (state().live_streams.erase(stream) == 0) {
        return cudaErrorInvalidResourceHandle;
      }
      leave_capture_locked(*stream);
    }
    if (!stream->ending.exchange(true, std::memory_order_relaxed)) {
      push_last(*stream);
    }
    return cudaSuccess;
  });
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return call_on("cudaStreamSynchronize", stream, [&](CUstream_st& found) {
    completion* newest = nullptr;
    if (cudaError_t const error = ask_stream(found, newest); error != cudaSuccess) {
      return error;
    }
    if (newest != nullptr) {
      newest->done.wait();
    }
    return take_failure(found);
  });
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return call_on("cudaStreamQuery", stream, [&](CUstream_st& found) {
    completion* newest = nullptr;
    if (cudaError_t const error = ask_stream(found, newest); error != cudaSuccess) {
      return error;
    }
    if (cudaError_t const error = take_failure(found); error != cudaSuccess) {
      return error;
    }
    return newest == nullptr || newest->done.is_set() ? cudaSuccess : cudaErrorNotReady;
  });
}

cudaError_t cudaDeviceSynchronize() {
  return call("cudaDeviceSynchronize", [&] {
    int const device = current_device();
    std::vector<CUstream_st*> streams;
    {
      hidden_lock const lock;
      if (cudaError_t const error = refuse_unsafe_locked(); error != cudaSuccess) {
        return error;
      }
      streams = streams_locked(device);
      for (auto* each : streams) {
        if (each->capturing != nullptr) {
          return invalidate_locked(*each, cudaErrorStreamCaptureUnsupported);
        }
      }
    }
    wait_for_device(device);
    for (auto* each : streams) {
      if (cudaError_t const error = take_failure(*each); error != cudaSuccess) {
        return error;
      }
    }
    return cudaSuccess;
  });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags) {
  return call("cudaEventCreateWithFlags", [&] {
    constexpr unsigned int known =
        cudaEventBlockingSync | cudaEventDisableTiming | cudaEventInterprocess;
    if (event == nullptr || (flags & ~known) != 0) {
      return cudaErrorInvalidValue;
    }
    hidden_lock const lock;
    bool const timed = (flags & cudaEventDisableTiming) == 0;
    auto& events = state().events;
    *event = events.emplace_back(std::make_unique<CUevent_st>(CUevent_st{current_device(), timed}))
                 .get();
    state().live_events.insert(*event);
    return cudaSuccess;
  });
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return release_call("cudaEventDestroy", [&] {
    hidden_lock const lock;
    return state().live_events.erase(event) == 0 ? cudaErrorInvalidResourceHandle : cudaSuccess;
  });
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return call_on("cudaEventRecord", stream, [&](CUstream_st& found) {
    if (find_event(event) == nullptr || event->device != found.device) {
      return cudaErrorInvalidResourceHandle;
    }
    {
      hidden_lock const lock;
      if (found.capturing != nullptr) {
        cudaError_t const error = check_capture_locked(found);
        if (error == cudaSuccess) {
          capture_record_locked(found, *event);
        }
        return error;
      }
      if (cudaError_t const error = refuse_null_stream_locked(found); error != cudaSuccess) {
        return error;
      }
    }
    completion* const recorded = submit(
        found, [] {}, access::host);
    hidden_lock const lock;
    event->recorded = recorded;
    event->stream = &found;
    event->capture = 0;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
  return call_on("cudaStreamWaitEvent", stream, [&](CUstream_st& found) {
    if (flags != cudaEventWaitDefault) {
      return cudaErrorInvalidValue;
    }
    if (find_event(event) == nullptr) {
      return cudaErrorInvalidResourceHandle;
    }
    completion* recorded = nullptr;
    {
      hidden_lock const lock;
      if (auto const captured = capture_wait_locked(found, *event)) {
        return *captured;
      }
      if (cudaError_t const error = refuse_null_stream_locked(found); error != cudaSuccess) {
        return error;
      }
      recorded = event->recorded;
    }
    if (recorded != nullptr && !fake::detail::drops_wait()) {
      submit(
          found, [recorded] { recorded->done.wait(); }, access::host);
    }
    return cudaSuccess;
  });
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return call_on_event("cudaEventQuery", event, [&](CUevent_st& found) {
    completion* recorded = nullptr;
    CUstream_st* stream = nullptr;
    if (cudaError_t const error = ask_event(found, recorded, stream); error != cudaSuccess) {
      return error;
    }
    if (recorded == nullptr) {
      return cudaSuccess;
    }
    if (cudaError_t const error = take_failure(*stream); error != cudaSuccess) {
      return error;
    }
    return recorded->done.is_set() ? cudaSuccess : cudaErrorNotReady;
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return call_on_event("cudaEventSynchronize", event, [&](CUevent_st& found) {
    completion* recorded = nullptr;
    CUstream_st* stream = nullptr;
    if (cudaError_t const error = ask_event(found, recorded, stream); error != cudaSuccess) {
      return error;
    }
    if (recorded == nullptr) {
      return cudaSuccess;
    }
    recorded->done.wait();
    return take_failure(*stream);
  });
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  return call("cudaEventElapsedTime", [&] {
    if (ms == nullptr) {
      return cudaErrorInvalidValue;
    }
    if (find_event(start) == nullptr || find_event(end) == nullptr || !start->timed ||
        !end->timed || start->device != end->device) {
      return cudaErrorInvalidResourceHandle;
    }
    completion* from = nullptr;
    completion* to = nullptr;
    {
      hidden_lock const lock;
      if (start->capture != 0 || end->capture != 0) {
        return cudaErrorCapturedEvent;
      }
      from = start->recorded;
      to = end->recorded;
    }
    if (from == nullptr || to == nullptr) {
      return cudaErrorInvalidResourceHandle;
    }
    if (!from->done.is_set() || !to->done.is_set()) {
      return cudaErrorNotReady;
    }
    *ms = std::chrono::duration<float, std::milli>{to->time - from->time}.count();
    return cudaSuccess;
  });
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return call_on("cudaLaunchHostFunc", stream, [&](CUstream_st& found) {
    if (function == nullptr) {
      return cudaErrorInvalidValue;
    }
    return add_work(
        found, [=] { function(data); }, access::host);
  });
}

cudaError_t zeroFakeLaunch(cudaStream_t stream, void (*run)(void const* functor),
                           void const* functor, std::size_t bytes) {
  return call_on("zeroFakeLaunch", stream, [&](CUstream_st& found) {
    if (run == nullptr || (functor == nullptr && bytes != 0)) {
      return cudaErrorInvalidValue;
    }
    if (found.device != current_device()) {
      return cudaErrorInvalidResourceHandle;
    }
    struct alignas(16) chunk {
      std::array<std::byte, 16> bytes;
    };
    std::vector<chunk> copy(bytes / sizeof(chunk) + 1);
    if (bytes != 0) {
      std::memcpy(copy.data(), functor, bytes);
    }
    return add_work(
        found, [run, copy = std::move(copy)] { run(copy.data()); }, access::device);
  });
}

}  // extern "C"
