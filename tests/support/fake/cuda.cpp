// SPDX-License-Identifier: MIT
#include <fake/internal.hpp>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <string_view>

// Devices, errors, counting and faults.

#if defined(__SANITIZE_THREAD__)
#define FAKE_HAS_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define FAKE_HAS_TSAN 1
#endif
#endif

#ifdef FAKE_HAS_TSAN
extern "C" {
void AnnotateIgnoreSyncBegin(char const* file, int line);
void AnnotateIgnoreSyncEnd(char const* file, int line);
void AnnotateIgnoreReadsBegin(char const* file, int line);
void AnnotateIgnoreReadsEnd(char const* file, int line);
void AnnotateIgnoreWritesBegin(char const* file, int line);
void AnnotateIgnoreWritesEnd(char const* file, int line);
}
#endif

namespace fake {
namespace detail {
namespace {

struct fault {
  std::uint64_t calls_left;
  cudaError_t error;
  std::function<bool(char const*)> concerns;  // empty: every call
};

struct calls_state {
  std::mutex mutex;
  int device_count = 1;
  int driver_version = CUDART_VERSION;
  bool logging = false;
  std::uint64_t calls = 0;
  std::map<std::string, std::uint64_t> counts;
  std::map<std::thread::id, std::vector<std::string>> logs;
  std::vector<fault> faults;
  std::array<std::atomic<cudaError_t>, max_devices> sticky{};
  std::atomic<bool> unloading{false};
};

// Lives until the process is gone: destructors of statics may still call.
calls_state& state() {
  static calls_state& it = *new calls_state;
  return it;
}

thread_local int device_of_thread = 0;
thread_local cudaError_t last_error = cudaSuccess;

void begin_hiding() noexcept {
#ifdef FAKE_HAS_TSAN
  AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
#endif
}

void end_hiding() noexcept {
#ifdef FAKE_HAS_TSAN
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
#endif
}

void add_fault(std::uint64_t n, cudaError_t error, std::function<bool(char const*)> concerns) {
  hidden_lock const lock;
  state().faults.push_back({n, error, std::move(concerns)});
}

bool driver_is_old() {
  hidden_lock const lock;
  return state().driver_version / 1000 < CUDART_VERSION / 1000;
}

void futex(std::atomic<std::uint32_t>* word, int operation, std::uint32_t value) noexcept {
  syscall(SYS_futex, word, operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

}  // namespace

hidden_lock::hidden_lock() noexcept {
  begin_hiding();
  state().mutex.lock();
}

hidden_lock::~hidden_lock() {
  state().mutex.unlock();
  end_hiding();
}

void flag::set() noexcept {
  if (state_.exchange(raised, std::memory_order_release) == awaited) {
    futex(&state_, FUTEX_WAKE, INT_MAX);
  }
}

void flag::wait() noexcept {
  while (!is_set()) {
    std::uint32_t expected = 0;
    if (state_.compare_exchange_strong(expected, awaited, std::memory_order_relaxed) ||
        expected == awaited) {
      futex(&state_, FUTEX_WAIT, awaited);
    }
  }
}

cudaError_t enter(char const* function, bool needs_device) {
  if (state().unloading.load(std::memory_order_relaxed)) {
    return cudaErrorCudartUnloading;
  }
  count(function);
  if (cudaError_t const error = fail_if_told(function); error != cudaSuccess) {
    return error;
  }
  if (driver_is_old() && !std::string_view{function}.ends_with("GetVersion")) {
    return cudaErrorInsufficientDriver;
  }
  if (!needs_device) {
    return cudaSuccess;
  }
  if (!is_device(0)) {
    return cudaErrorNoDevice;
  }
  return sticky_error(current_device());
}

void set_last_error(cudaError_t error) noexcept { last_error = error; }
int current_device() noexcept { return device_of_thread; }

cudaError_t sticky_error(int device) noexcept {
  return state().sticky[static_cast<std::size_t>(device)].load(std::memory_order_relaxed);
}

void set_sticky_error(int device, cudaError_t error) noexcept {
  state().sticky[static_cast<std::size_t>(device)].store(error, std::memory_order_relaxed);
}

bool is_device(int device) {
  hidden_lock const lock;
  return device >= 0 && device < state().device_count;
}

void start_unloading() noexcept { state().unloading.store(true, std::memory_order_relaxed); }

}  // namespace detail

using detail::hidden_lock;
using detail::state;

void reset() {
  hidden_lock const lock;
  auto& calls = state();
  calls.device_count = 1;
  calls.driver_version = CUDART_VERSION;
  calls.logging = false;
  calls.calls = 0;
  calls.counts.clear();
  calls.logs.clear();
  calls.faults.clear();
  for (auto& error : calls.sticky) {
    error.store(cudaSuccess, std::memory_order_relaxed);
  }
  detail::device_of_thread = 0;
  detail::last_error = cudaSuccess;
  detail::reset_streams_locked();
  detail::reset_memory_locked();
}

void set_driver_version(int version) {
  hidden_lock const lock;
  state().driver_version = version;
}

void set_device_count(int count) {
  hidden_lock const lock;
  state().device_count = std::clamp(count, 0, detail::max_devices);
}

void count(char const* function) {
  hidden_lock const lock;
  auto& calls = state();
  ++calls.calls;
  ++calls.counts[function];
  if (calls.logging) {
    calls.logs[std::this_thread::get_id()].emplace_back(function);
  }
}

cudaError_t fail_if_told(char const* function) {
  hidden_lock const lock;
  auto& faults = state().faults;
  cudaError_t error = cudaSuccess;
  for (auto& fault : faults) {
    if (!fault.concerns || fault.concerns(function)) {
      if (--fault.calls_left == 0 && error == cudaSuccess) {
        error = fault.error;
      }
    }
  }
  std::erase_if(faults, [](auto const& fault) { return fault.calls_left == 0; });
  return error;
}

void fail_call(std::uint64_t n, cudaError_t error) { detail::add_fault(n, error, {}); }

void fail_call(std::uint64_t n, cudaError_t error, std::thread::id caller) {
  detail::add_fault(n, error,
                    [caller](char const*) { return std::this_thread::get_id() == caller; });
}

void fail_call(std::uint64_t n, cudaError_t error, std::function<bool(char const*)> concerns) {
  detail::add_fault(n, error, std::move(concerns));
}

std::uint64_t calls() {
  hidden_lock const lock;
  return state().calls;
}

std::map<std::string, std::uint64_t> call_counts() {
  hidden_lock const lock;
  return state().counts;
}

void reset_counts() {
  hidden_lock const lock;
  state().calls = 0;
  state().counts.clear();
}

void log(bool on) {
  hidden_lock const lock;
  if (on) {
    state().logs.clear();
  }
  state().logging = on;
}

std::vector<std::string> logged(std::thread::id caller) {
  hidden_lock const lock;
  auto const found = state().logs.find(caller);
  return found == state().logs.end() ? std::vector<std::string>{} : found->second;
}

live_counts live() {
  hidden_lock const lock;
  live_counts counts;
  detail::count_memory_locked(counts);
  detail::count_streams_locked(counts);
  detail::count_graphs_locked(counts);
  return counts;
}

namespace {

struct error_text {
  cudaError_t error;
  char const* name;
  char const* text;
};

#define FAKE_ERROR(name, text) \
  error_text { name, #name, text }
constexpr std::array error_texts{
    FAKE_ERROR(cudaSuccess, "no error"),
    FAKE_ERROR(cudaErrorInvalidValue, "invalid argument"),
    FAKE_ERROR(cudaErrorMemoryAllocation, "out of memory"),
    FAKE_ERROR(cudaErrorInitializationError, "initialization error"),
    FAKE_ERROR(cudaErrorCudartUnloading, "driver shutting down"),
    FAKE_ERROR(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    FAKE_ERROR(cudaErrorInvalidDevicePointer, "invalid device pointer"),
    FAKE_ERROR(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"),
    FAKE_ERROR(cudaErrorInsufficientDriver,
               "CUDA driver version is insufficient for CUDA runtime version"),
    FAKE_ERROR(cudaErrorDevicesUnavailable, "CUDA-capable device(s) is/are busy or unavailable"),
    FAKE_ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    FAKE_ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    FAKE_ERROR(cudaErrorNoKernelImageForDevice,
               "no kernel image is available for execution on the device"),
    FAKE_ERROR(cudaErrorECCUncorrectable, "uncorrectable ECC error encountered"),
    FAKE_ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    FAKE_ERROR(cudaErrorIllegalState, "the operation cannot be performed in the present state"),
    FAKE_ERROR(cudaErrorNotReady, "device not ready"),
    FAKE_ERROR(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    FAKE_ERROR(cudaErrorLaunchOutOfResources, "too many resources requested for launch"),
    FAKE_ERROR(cudaErrorLaunchTimeout, "the launch timed out and was terminated"),
    FAKE_ERROR(cudaErrorHardwareStackError, "hardware stack error"),
    FAKE_ERROR(cudaErrorMisalignedAddress, "misaligned address"),
    FAKE_ERROR(cudaErrorLaunchFailure, "unspecified launch failure"),
    FAKE_ERROR(cudaErrorNotPermitted, "operation not permitted"),
    FAKE_ERROR(cudaErrorNotSupported, "operation not supported"),
    FAKE_ERROR(cudaErrorSystemNotReady, "system not yet initialized"),
    FAKE_ERROR(cudaErrorStreamCaptureUnsupported,
               "operation not permitted when stream is capturing"),
    FAKE_ERROR(cudaErrorStreamCaptureInvalidated,
               "operation failed due to a previous error during capture"),
    FAKE_ERROR(cudaErrorStreamCaptureMerge,
               "operation would result in a merge of separate capture sequences"),
    FAKE_ERROR(cudaErrorStreamCaptureUnmatched,
               "capture was not ended in the same stream as it began"),
    FAKE_ERROR(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    FAKE_ERROR(cudaErrorStreamCaptureIsolation,
               "dependency created on uncaptured work in another stream"),
    FAKE_ERROR(cudaErrorStreamCaptureImplicit,
               "operation would make the legacy stream depend on a capturing blocking stream"),
    FAKE_ERROR(cudaErrorCapturedEvent,
               "operation not permitted on an event last recorded in a capturing stream"),
    FAKE_ERROR(cudaErrorStreamCaptureWrongThread,
               "attempt to terminate a thread-local capture sequence from another thread"),
    FAKE_ERROR(cudaErrorTimeout, "wait operation timed out"),
    FAKE_ERROR(cudaErrorUnknown, "unknown error"),
};
#undef FAKE_ERROR

error_text text_of(cudaError_t error) {
  auto const* const found =
      std::find_if(error_texts.begin(), error_texts.end(),
                   [&](error_text const& each) { return each.error == error; });
  return found != error_texts.end()
             ? *found
             : error_text{error, "unrecognized error code", "unrecognized error code"};
}

int attribute(cudaDeviceAttr which) {
  switch (which) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX: return 1024;
    case cudaDevAttrMaxGridDimX: return INT_MAX;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case cudaDevAttrAsyncEngineCount: return 2;
    case cudaDevAttrMultiProcessorCount:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrUnifiedAddressing: return 1;
    default: return 0;
  }
}

}  // namespace
}  // namespace fake

using fake::detail::call;

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  return call(
      "cudaGetDeviceCount",
      [&] {
        if (count == nullptr) {
          return cudaErrorInvalidValue;
        }
        fake::detail::hidden_lock const lock;
        *count = fake::detail::state().device_count;
        return *count == 0 ? cudaErrorNoDevice : cudaSuccess;
      },
      false);
}

cudaError_t cudaGetDevice(int* device) {
  return call("cudaGetDevice", [&] {
    if (device == nullptr) {
      return cudaErrorInvalidValue;
    }
    *device = fake::detail::current_device();
    return cudaSuccess;
  });
}

cudaError_t cudaSetDevice(int device) {
  return call(
      "cudaSetDevice",
      [&] {
        if (!fake::detail::is_device(0)) {
          return cudaErrorNoDevice;
        }
        if (!fake::detail::is_device(device)) {
          return cudaErrorInvalidDevice;
        }
        fake::detail::device_of_thread = device;
        return fake::detail::sticky_error(device);
      },
      false);
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device) {
  return call("cudaDeviceGetAttribute", [&] {
    if (value == nullptr || which < cudaDevAttrMaxThreadsPerBlock || which >= cudaDevAttrMax) {
      return cudaErrorInvalidValue;
    }
    if (!fake::detail::is_device(device)) {
      return cudaErrorInvalidDevice;
    }
    *value = fake::attribute(which);
    return cudaSuccess;
  });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  return call("cudaGetDeviceProperties", [&] {
    if (properties == nullptr) {
      return cudaErrorInvalidValue;
    }
    if (!fake::detail::is_device(device)) {
      return cudaErrorInvalidDevice;
    }
    *properties = cudaDeviceProp{};
    std::strcpy(properties->name, "fake device");
    {
      fake::detail::hidden_lock const lock;
      properties->totalGlobalMem = fake::detail::device_memory_locked();
    }
    properties->major = fake::attribute(cudaDevAttrComputeCapabilityMajor);
    properties->minor = fake::attribute(cudaDevAttrComputeCapabilityMinor);
    properties->warpSize = fake::attribute(cudaDevAttrWarpSize);
    properties->maxThreadsPerBlock = fake::attribute(cudaDevAttrMaxThreadsPerBlock);
    properties->multiProcessorCount = fake::attribute(cudaDevAttrMultiProcessorCount);
    properties->canMapHostMemory = 1;
    properties->unifiedAddressing = 1;
    properties->concurrentKernels = 1;
    properties->asyncEngineCount = 2;
    return cudaSuccess;
  });
}

cudaError_t cudaDriverGetVersion(int* version) {
  return call(
      "cudaDriverGetVersion",
      [&] {
        if (version == nullptr) {
          return cudaErrorInvalidValue;
        }
        fake::detail::hidden_lock const lock;
        *version = fake::detail::state().driver_version;
        return cudaSuccess;
      },
      false);
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  return call(
      "cudaRuntimeGetVersion",
      [&] {
        if (version == nullptr) {
          return cudaErrorInvalidValue;
        }
        *version = CUDART_VERSION;
        return cudaSuccess;
      },
      false);
}

char const* cudaGetErrorString(cudaError_t error) { return fake::text_of(error).text; }
char const* cudaGetErrorName(cudaError_t error) { return fake::text_of(error).name; }

cudaError_t cudaGetLastError() {
  cudaError_t const sticky = fake::detail::sticky_error(fake::detail::current_device());
  cudaError_t const error = std::exchange(fake::detail::last_error, cudaSuccess);
  return sticky != cudaSuccess ? sticky : error;
}

cudaError_t cudaPeekAtLastError() {
  cudaError_t const sticky = fake::detail::sticky_error(fake::detail::current_device());
  return sticky != cudaSuccess ? sticky : fake::detail::last_error;
}

}  // extern "C"
