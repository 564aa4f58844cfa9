// SPDX-License-Identifier: MIT
#include <fake/cuda_support.hpp>

#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <vector>

using namespace std::chrono_literals;
using namespace cuda_test;

namespace {

[[maybe_unused]] unsigned int const deadline = alarm(200);  // no test may hang

// A gate that work of a stream waits for, so that a test knows what hasn't run yet.
struct gate {
  std::atomic<bool> open{false};

  static void wait(void* data) { static_cast<gate*>(data)->open.wait(false); }
  void let_pass() {
    open.store(true);
    open.notify_all();
  }
};

// Settings as at the start, and a check that nothing leaks.
struct fixture {
  fixture() { fake::reset(); }
  ~fixture() {
    CHECK(fake::live() == fake::live_counts{});
    fake::reset();
  }
};

}  // namespace

// ---- devices and errors ----

TEST_CASE_FIXTURE(fixture, "devices are counted, and each thread has its own current one") {
  fake::set_device_count(2);
  int count = 0;
  ok(cudaGetDeviceCount(&count));
  CHECK(count == 2);
  ok(cudaSetDevice(1));
  int other = -1;
  std::thread{[&] { cudaGetDevice(&other); }}.join();
  CHECK(other == 0);
  int mine = -1;
  ok(cudaGetDevice(&mine));
  CHECK(mine == 1);
  CHECK(cudaSetDevice(2) == cudaErrorInvalidDevice);
  CHECK(cudaGetLastError() == cudaErrorInvalidDevice);
  CHECK(cudaGetLastError() == cudaSuccess);
}

TEST_CASE_FIXTURE(fixture, "without a device every call says so") {
  fake::set_device_count(0);
  int count = -1;
  CHECK(cudaGetDeviceCount(&count) == cudaErrorNoDevice);
  CHECK(count == 0);
  void* memory = nullptr;
  CHECK(cudaMalloc(&memory, 1) == cudaErrorNoDevice);
  CHECK(cudaSetDevice(0) == cudaErrorNoDevice);
  CHECK(cudaDeviceSynchronize() == cudaErrorNoDevice);
}

TEST_CASE_FIXTURE(fixture, "properties and attributes agree") {
  fake::set_memory(12345);
  cudaDeviceProp properties{};
  ok(cudaGetDeviceProperties(&properties, 0));
  int major = 0;
  ok(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  CHECK(properties.major == major);
  CHECK(properties.totalGlobalMem == 12345);
  CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrWarpSize, 1) == cudaErrorInvalidDevice);
  int version = 0;
  ok(cudaRuntimeGetVersion(&version));
  CHECK(version == CUDART_VERSION);
  CHECK(std::string{cudaGetErrorName(cudaErrorMemoryAllocation)} == "cudaErrorMemoryAllocation");
  CHECK(std::string{cudaGetErrorString(cudaErrorMemoryAllocation)} == "out of memory");
}

// ---- streams and events ----

TEST_CASE_FIXTURE(fixture, "a stream runs its work in order") {
  auto* const stream = make_stream();
  std::vector<int> seen;
  fake::set_jitter(7);
  for (int i = 0; i < 20; ++i) {
    ok(launch(stream, [i, &seen] { seen.push_back(i); }));
  }
  ok(cudaStreamSynchronize(stream));
  REQUIRE(seen.size() == 20);
  for (int i = 0; i < 20; ++i) {
    CHECK(seen[static_cast<std::size_t>(i)] == i);
  }
  ok(cudaStreamDestroy(stream));
  CHECK(cudaStreamSynchronize(stream) == cudaErrorInvalidResourceHandle);
  CHECK(fake::enqueue(stream, [] {}) == cudaErrorInvalidResourceHandle);
  CHECK(cudaStreamDestroy(stream) == cudaErrorInvalidResourceHandle);
}

TEST_CASE_FIXTURE(fixture, "several threads enqueue on one stream") {
  auto* const stream = make_stream();
  int sum = 0;  // no atomic: the stream orders the work
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&sum, stream] {
      for (int j = 0; j < 200; ++j) {
        launch(stream, [at = &sum] { ++*at; });
      }
    });
  }
  for (auto& each : threads) {
    each.join();
  }
  ok(cudaStreamSynchronize(stream));
  CHECK(sum == 800);
  ok(cudaStreamDestroy(stream));
}

TEST_CASE_FIXTURE(fixture, "two streams take turns by events") {
  std::array<cudaStream_t, 2> const streams{make_stream(), make_stream()};
  std::array<cudaEvent_t, 2> const events{make_event(), make_event()};
  auto* const device = make_device<int>(1);
  ok(cudaMemsetAsync(device, 0, 4, streams[0]));
  fake::set_jitter(3);
  for (std::size_t i = 0; i < 100; ++i) {
    ok(launch(streams[i % 2], [device, i] { *device = 3 * *device % 1001 + static_cast<int>(i); }));
    ok(cudaEventRecord(events[i % 2], streams[i % 2]));
    ok(cudaStreamWaitEvent(streams[(i + 1) % 2], events[i % 2], 0));
  }
  int expected = 0;
  for (int i = 0; i < 100; ++i) {
    expected = 3 * expected % 1001 + i;
  }
  int result = 0;
  ok(cudaMemcpyAsync(&result, device, 4, cudaMemcpyDeviceToHost, streams[0]));
  CHECK(result == expected);
  ok(cudaFree(device));
  for (std::size_t i = 0; i < 2; ++i) {
    ok(cudaEventDestroy(events[i]));
    ok(cudaStreamDestroy(streams[i]));
  }
}

TEST_CASE_FIXTURE(fixture, "hundreds of streams come and go") {
  std::atomic<int> ran{0};
  for (int i = 0; i < 300; ++i) {
    auto* const stream = make_stream();
    ok(launch(stream, [at = &ran] { ++*at; }));
    ok(cudaStreamDestroy(stream));
  }
  ok(cudaDeviceSynchronize());
  CHECK(ran == 300);
}

TEST_CASE_FIXTURE(fixture, "a launch copies its functor, aligned") {
  struct alignas(16) functor {
    std::uint64_t* address;
    std::array<int, 30> values;
    int* sum;
    void operator()() const {
      *address = reinterpret_cast<std::uint64_t>(this);
      for (int const value : values) {
        *sum += value;
      }
    }
  };
  std::uint64_t address = 1;
  int sum = 0;
  {
    functor original{&address, {}, &sum};
    original.values.fill(3);
    ok(launch(nullptr, original));
    original.values.fill(100);
  }
  ok(cudaStreamSynchronize(nullptr));
  CHECK(sum == 90);
  CHECK(address % 16 == 0);
}

TEST_CASE_FIXTURE(fixture, "a destroyed stream finishes its work and doesn't block") {
  gate blocked;
  std::atomic<bool> ran{false};
  auto* const stream = make_stream();
  ok(cudaLaunchHostFunc(stream, gate::wait, &blocked));
  ok(launch(stream, [&ran] { ran = true; }));
  ok(cudaStreamDestroy(stream));
  CHECK(!ran);
  blocked.let_pass();
  ok(cudaDeviceSynchronize());
  CHECK(ran);
}

TEST_CASE_FIXTURE(fixture, "queries tell when a stream and an event are ready") {
  gate blocked;
  auto* const stream = make_stream();
  auto* const event = make_event();
  CHECK(cudaEventQuery(event) == cudaSuccess);
  CHECK(cudaStreamQuery(stream) == cudaSuccess);
  ok(cudaLaunchHostFunc(stream, gate::wait, &blocked));
  ok(cudaEventRecord(event, stream));
  CHECK(cudaEventQuery(event) == cudaErrorNotReady);
  CHECK(cudaStreamQuery(stream) == cudaErrorNotReady);
  blocked.let_pass();
  ok(cudaEventSynchronize(event));
  CHECK(cudaEventQuery(event) == cudaSuccess);
  CHECK(cudaStreamQuery(stream) == cudaSuccess);
  ok(cudaEventDestroy(event));
  ok(cudaStreamDestroy(stream));
  CHECK(cudaEventQuery(event) == cudaErrorInvalidResourceHandle);
  cudaGetLastError();
}

TEST_CASE_FIXTURE(fixture, "a stream waits for what an event had recorded, not for later records") {
  gate never_yet;
  int value = 0;
  auto* const first = make_stream();
  auto* const second = make_stream();
  auto* const event = make_event();
  fake::delay(first, 5ms);
  ok(launch(first, [&value] { value = 1; }));
  ok(cudaEventRecord(event, first));
  ok(cudaStreamWaitEvent(second, event, 0));
  ok(cudaLaunchHostFunc(first, gate::wait, &never_yet));
  ok(cudaEventRecord(event, first));
  int seen = 0;
  ok(launch(second, [&value, &seen] { seen = value; }));
  ok(cudaStreamSynchronize(second));
  CHECK(seen == 1);
  CHECK(cudaEventQuery(event) == cudaErrorNotReady);
  never_yet.let_pass();
  ok(cudaStreamSynchronize(first));
  ok(cudaEventDestroy(event));
  ok(cudaStreamDestroy(first));
  ok(cudaStreamDestroy(second));
}

TEST_CASE_FIXTURE(fixture, "timed events measure, others refuse to") {
  auto* const stream = make_stream();
  auto* const start = make_event(cudaEventDefault);
  auto* const end = make_event(cudaEventDefault);
  auto* const untimed = make_event();
  float ms = 0;
  CHECK(cudaEventElapsedTime(&ms, start, end) == cudaErrorInvalidResourceHandle);
  ok(cudaEventRecord(start, stream));
  fake::delay(stream, 20ms);
  ok(launch(stream, [] {}));
  ok(cudaEventRecord(end, stream));
  CHECK(cudaEventElapsedTime(&ms, start, end) == cudaErrorNotReady);
  ok(cudaEventSynchronize(end));
  ok(cudaEventElapsedTime(&ms, start, end));
  CHECK(ms >= 20);
  CHECK(cudaEventElapsedTime(&ms, start, untimed) == cudaErrorInvalidResourceHandle);
  for (auto* event : {start, end, untimed}) {
    ok(cudaEventDestroy(event));
  }
  ok(cudaStreamDestroy(stream));
}

TEST_CASE_FIXTURE(fixture, "streams and events belong to the device of their creation") {
  fake::set_device_count(2);
  auto* const stream0 = make_stream();
  auto* const event0 = make_event();
  ok(cudaSetDevice(1));
  auto* const stream1 = make_stream();
  CHECK(cudaEventRecord(event0, stream1) == cudaErrorInvalidResourceHandle);
  CHECK(launch(stream0, [] {}) == cudaErrorInvalidResourceHandle);
  ok(cudaEventRecord(event0, stream0));
  ok(cudaStreamWaitEvent(stream1, event0, 0));
  ok(cudaStreamSynchronize(stream1));
  ok(cudaEventDestroy(event0));
  ok(cudaStreamDestroy(stream0));
  ok(cudaStreamDestroy(stream1));
}

// ---- memory ----

TEST_CASE_FIXTURE(fixture, "memory is limited, aligned and accounted for") {
  fake::set_memory(10000);
  std::size_t free = 0;
  std::size_t total = 0;
  void* const first = make_device<char>(6000);
  CHECK(reinterpret_cast<std::uintptr_t>(first) % 256 == 0);
  ok(cudaMemGetInfo(&free, &total));
  CHECK(total == 10000);
  CHECK(free == 4000);
  void* second = nullptr;
  CHECK(cudaMalloc(&second, 4001) == cudaErrorMemoryAllocation);
  CHECK(second == nullptr);
  second = make_device<char>(4000);
  CHECK(second != first);
  CHECK(fake::live().allocations == 2);
  ok(cudaFree(first));
  void* const third = make_device<char>(6000);
  CHECK(third != first);
  CHECK(cudaFree(first) == cudaErrorInvalidValue);
  ok(cudaFree(second));
  ok(cudaFree(third));
  ok(cudaFree(nullptr));
}

TEST_CASE_FIXTURE(fixture, "addresses are used again only once all were used") {
  fake::limit_addresses(std::size_t{64} << 20U);
  constexpr std::size_t bytes = std::size_t{1} << 20U;
  void* const kept = make_device<char>(bytes);
  std::set<void*> seen;
  bool again = false;
  for (int i = 0; i < 100 && !again; ++i) {
    void* const memory = make_device<char>(bytes);
    CHECK(memory != kept);
    again = !seen.insert(memory).second;
    ok(cudaFree(memory));
  }
  CHECK(again);
  CHECK(seen.size() >= 32);
  fake::limit_addresses(bytes);
  void* memory = nullptr;
  CHECK(cudaMalloc(&memory, 2 * bytes) == cudaErrorMemoryAllocation);
  ok(cudaFree(kept));
}

TEST_CASE_FIXTURE(fixture, "new memory is NaN, and copies go both ways") {
  auto* const stream = make_stream();
  auto* const device = make_device<float>(100);
  auto* const pinned = make_pinned<float>(100);
  std::vector<float> host(100, 2.0F);
  ok(cudaMemcpyAsync(pinned, device, 400, cudaMemcpyDeviceToHost, stream));
  ok(cudaStreamSynchronize(stream));
  CHECK(std::isnan(pinned[0]));
  CHECK(std::isnan(pinned[99]));
  ok(cudaMemcpyAsync(device, host.data(), 400, cudaMemcpyHostToDevice, stream));
  ok(launch(stream, [device] { device[5] = device[4] + 1.0F; }));
  ok(cudaMemsetAsync(device, 0, 4, stream));
  ok(cudaMemcpyAsync(host.data(), device, 400, cudaMemcpyDefault, stream));
  CHECK(host[0] == 0.0F);
  CHECK(host[4] == 2.0F);
  CHECK(host[5] == 3.0F);
  ok(cudaMemcpy(host.data() + 1, device + 5, 4, cudaMemcpyDeviceToHost));
  CHECK(host[1] == 3.0F);
  ok(cudaFree(device));
  ok(cudaFreeHost(pinned));
  ok(cudaStreamDestroy(stream));
}

TEST_CASE_FIXTURE(fixture, "pageable memory is read before the copy returns, pinned memory later") {
  gate blocked;
  auto* const stream = make_stream();
  auto* const device = make_device<int>(2);
  auto* const pinned = make_pinned<int>(2);
  int pageable = 1;
  pinned[0] = 1;
  ok(cudaLaunchHostFunc(stream, gate::wait, &blocked));
  ok(cudaMemcpyAsync(device, &pageable, 4, cudaMemcpyHostToDevice, stream));
  ok(cudaMemcpyAsync(device + 1, pinned, 4, cudaMemcpyHostToDevice, stream));
  pageable = 2;
  pinned[0] = 2;
  blocked.let_pass();
  std::array<int, 2> result{};
  ok(cudaMemcpyAsync(result.data(), device, 8, cudaMemcpyDeviceToHost, stream));
  CHECK(result[0] == 1);
  CHECK(result[1] == 2);
  ok(cudaFree(device));
  ok(cudaFreeHost(pinned));
  ok(cudaStreamDestroy(stream));
}

TEST_CASE_FIXTURE(fixture, "copies outside of an allocation or of the wrong kind are refused") {
  auto* const device = make_device<char>(100);
  auto* const pinned = make_pinned<char>(100);
  std::array<char, 200> host{};
  auto const copy = [](void* to, void const* from, std::size_t bytes, cudaMemcpyKind kind) {
    return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  };
  CHECK(copy(device, host.data(), 101, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  CHECK(copy(device + 50, host.data(), 51, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  CHECK(copy(device + 100, host.data(), 1, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  CHECK(copy(device, host.data(), 1, cudaMemcpyDeviceToDevice) == cudaErrorInvalidValue);
  CHECK(copy(device, host.data(), 1, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
  CHECK(copy(device, pinned, 101, cudaMemcpyDefault) == cudaErrorInvalidValue);
  CHECK(copy(device, nullptr, 1, cudaMemcpyDefault) == cudaErrorInvalidValue);
  CHECK(copy(device, pinned, 100, cudaMemcpyDefault) == cudaSuccess);
  CHECK(cudaMemsetAsync(host.data(), 0, 1, nullptr) == cudaErrorInvalidValue);
  CHECK(cudaMemsetAsync(device, 0, 101, nullptr) == cudaErrorInvalidValue);
  ok(cudaStreamSynchronize(nullptr));
  ok(cudaFree(device));
  CHECK(copy(device, host.data(), 1, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  ok(cudaFreeHost(pinned));
  CHECK(cudaFreeHost(pinned) == cudaErrorInvalidValue);
}

TEST_CASE_FIXTURE(fixture, "attributes tell device, pinned and pageable memory apart") {
  auto* const device = make_device<char>(10);
  auto* const pinned = make_pinned<char>(10);
  char pageable = 0;
  cudaPointerAttributes attributes{};
  ok(cudaPointerGetAttributes(&attributes, device + 9));
  CHECK(attributes.type == cudaMemoryTypeDevice);
  CHECK(attributes.device == 0);
  CHECK(attributes.devicePointer == device + 9);
  ok(cudaPointerGetAttributes(&attributes, pinned));
  CHECK(attributes.type == cudaMemoryTypeHost);
  ok(cudaPointerGetAttributes(&attributes, &pageable));
  CHECK(attributes.type == cudaMemoryTypeUnregistered);
  void* mapped = nullptr;
  ok(cudaHostGetDevicePointer(&mapped, pinned, 0));
  CHECK(mapped == pinned);
  CHECK(cudaHostGetDevicePointer(&mapped, &pageable, 0) == cudaErrorInvalidValue);
  ok(cudaFree(device));
  ok(cudaFreeHost(pinned));
}

TEST_CASE_FIXTURE(fixture, "unprotected device memory can be read by the host") {
  auto* const device = make_device<unsigned char>(10);
  fake::protect_device_memory(false);
  CHECK(device[0] == 0xFF);
  ok(cudaMemsetAsync(device, 3, 10, nullptr));
  ok(cudaStreamSynchronize(nullptr));
  CHECK(device[9] == 3);
  ok(cudaFree(device));
}

TEST_CASE_FIXTURE(fixture, "freeing waits for the device") {
  auto* const stream = make_stream();
  auto* const device = make_device<int>(1);
  fake::delay(stream, 30ms);
  std::atomic<bool> ran{false};
  ok(launch(stream, [device, &ran] {
    *device = 1;
    ran = true;
  }));
  ok(cudaFree(device));
  CHECK(ran);
  ok(cudaStreamDestroy(stream));
}

// ---- faults, counts, logs ----

TEST_CASE_FIXTURE(fixture, "a call that is told to fail does nothing") {
  void* memory = nullptr;
  fake::fail_call(2, cudaErrorMemoryAllocation);
  int device = 0;
  CHECK(cudaGetDevice(&device) == cudaSuccess);
  CHECK(cudaMalloc(&memory, 8) == cudaErrorMemoryAllocation);
  CHECK(fake::live().allocations == 0);
  CHECK(cudaPeekAtLastError() == cudaErrorMemoryAllocation);
  CHECK(cudaGetLastError() == cudaErrorMemoryAllocation);
  ok(cudaMalloc(&memory, 8));
  fake::fail_call(1, cudaErrorLaunchFailure);
  CHECK(cudaFree(memory) == cudaErrorLaunchFailure);
  CHECK(fake::live().allocations == 0);
  auto* const stream = make_stream();
  fake::fail_call(1, cudaErrorLaunchFailure);
  CHECK(cudaStreamDestroy(stream) == cudaErrorLaunchFailure);
}

TEST_CASE_FIXTURE(fixture, "only calls of one thread or one name are told to fail") {
  int device = 0;
  cudaError_t in_thread = cudaSuccess;
  std::thread{[&] {
    fake::fail_call(1, cudaErrorUnknown, std::this_thread::get_id());
    std::thread{[&] { in_thread = cudaGetDevice(&device); }}.join();
    CHECK(in_thread == cudaSuccess);
    in_thread = cudaGetDevice(&device);
  }}.join();
  CHECK(in_thread == cudaErrorUnknown);
  fake::fail_call(2, cudaErrorNotSupported,
                  [](char const* function) { return std::string{function} == "cudaGetDevice"; });
  CHECK(cudaGetDevice(&device) == cudaSuccess);
  CHECK(cudaSetDevice(0) == cudaSuccess);
  CHECK(cudaGetDevice(&device) == cudaErrorNotSupported);
  CHECK(cudaGetDevice(&device) == cudaSuccess);
}

TEST_CASE_FIXTURE(fixture, "calls are counted and logged per thread") {
  int device = 0;
  fake::log(true);
  cudaGetDevice(&device);
  std::thread::id other;
  std::thread{[&] {
    other = std::this_thread::get_id();
    cudaSetDevice(0);
  }}.join();
  cudaGetDevice(&device);
  fake::log(false);
  cudaSetDevice(0);
  CHECK(fake::logged() == std::vector<std::string>{"cudaGetDevice", "cudaGetDevice"});
  CHECK(fake::logged(other) == std::vector<std::string>{"cudaSetDevice"});
  CHECK(fake::calls() == 4);
  CHECK(fake::call_counts()["cudaGetDevice"] == 2);
  fake::reset_counts();
  CHECK(fake::calls() == 0);
}

TEST_CASE_FIXTURE(fixture, "an asynchronous error stays with its device") {
  fake::set_device_count(2);
  auto* const stream = make_stream();
  fake::fail_async(stream, cudaErrorIllegalAddress);
  ok(launch(stream, [] {}));
  CHECK(cudaStreamSynchronize(stream) == cudaErrorIllegalAddress);
  void* memory = nullptr;
  CHECK(cudaMalloc(&memory, 1) == cudaErrorIllegalAddress);
  CHECK(launch(stream, [] {}) == cudaErrorIllegalAddress);
  CHECK(cudaGetLastError() == cudaErrorIllegalAddress);
  CHECK(cudaGetLastError() == cudaErrorIllegalAddress);
  CHECK(cudaStreamDestroy(stream) == cudaErrorIllegalAddress);
  ok(cudaSetDevice(1));
  ok(cudaMalloc(&memory, 1));
  ok(cudaFree(memory));
}

// ---- captures ----

namespace {

struct capture_fixture : fixture {
  cudaStream_t main = make_stream();
  cudaStream_t side = make_stream();
  cudaEvent_t fork = make_event();
  cudaEvent_t join = make_event();
  cudaGraph_t graph = nullptr;

  void begin(cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal) const {
    ok(cudaStreamBeginCapture(main, mode));
  }
  ~capture_fixture() {
    cudaEventDestroy(fork);
    cudaEventDestroy(join);
    cudaStreamDestroy(main);
    cudaStreamDestroy(side);
  }
};

}  // namespace

TEST_CASE_FIXTURE(capture_fixture, "a graph with a fork runs when it is launched, and again") {
  std::vector<int> seen;
  begin();
  cudaStreamCaptureStatus status{};
  ok(launch(main, [this_seen = &seen] { this_seen->push_back(1); }));
  ok(cudaEventRecord(fork, main));
  ok(cudaStreamWaitEvent(side, fork, 0));
  ok(cudaStreamIsCapturing(side, &status));
  CHECK(status == cudaStreamCaptureStatusActive);
  ok(launch(side, [this_seen = &seen] { this_seen->push_back(2); }));
  ok(fake::enqueue(side, [&seen] { seen.push_back(3); }));
  ok(cudaEventRecord(join, side));
  ok(cudaStreamWaitEvent(main, join, 0));
  ok(launch(main, [this_seen = &seen] { this_seen->push_back(4); }));
  unsigned long long id = 0;
  ok(cudaStreamGetCaptureInfo(side, &status, &id, nullptr, nullptr, nullptr, nullptr));
  CHECK(id != 0);
  ok(cudaStreamEndCapture(main, &graph));
  ok(cudaStreamIsCapturing(side, &status));
  CHECK(status == cudaStreamCaptureStatusNone);
  CHECK(seen.empty());
  cudaGraphExec_t exec = nullptr;
  ok(cudaGraphInstantiate(&exec, graph, 0));
  ok(cudaGraphDestroy(graph));
  ok(cudaGraphLaunch(exec, main));
  ok(cudaGraphLaunch(exec, main));
  ok(cudaGraphExecDestroy(exec));
  ok(cudaStreamSynchronize(main));
  CHECK(seen == std::vector<int>{1, 2, 3, 4, 1, 2, 3, 4});
}

TEST_CASE_FIXTURE(capture_fixture, "a fork that isn't joined back is refused") {
  begin();
  ok(cudaEventRecord(fork, main));
  ok(cudaStreamWaitEvent(side, fork, 0));
  ok(cudaEventRecord(join, side));
  ok(launch(side, [] {}));
  ok(cudaStreamWaitEvent(main, join, 0));
  CHECK(cudaStreamEndCapture(main, &graph) == cudaErrorStreamCaptureUnjoined);
  CHECK(graph == nullptr);
  ok(launch(side, [] {}));
  ok(cudaStreamSynchronize(side));
}

TEST_CASE_FIXTURE(capture_fixture, "waits don't cross the boundary of a capture") {
  ok(cudaEventRecord(fork, side));
  begin();
  CHECK(cudaStreamWaitEvent(main, fork, 0) == cudaErrorStreamCaptureIsolation);
  CHECK(launch(main, [] {}) == cudaErrorStreamCaptureInvalidated);
  CHECK(cudaStreamEndCapture(main, &graph) == cudaErrorStreamCaptureInvalidated);
  begin();
  ok(cudaEventRecord(fork, main));
  ok(cudaStreamEndCapture(main, &graph));
  ok(cudaGraphDestroy(graph));
  CHECK(cudaStreamWaitEvent(side, fork, 0) == cudaErrorStreamCaptureIsolation);
  CHECK(cudaEventQuery(fork) == cudaErrorCapturedEvent);
  ok(cudaEventRecord(fork, main));
  ok(cudaStreamWaitEvent(side, fork, 0));
}

TEST_CASE_FIXTURE(capture_fixture, "two captures don't merge, and end in their own stream") {
  begin();
  ok(cudaStreamBeginCapture(side, cudaStreamCaptureModeGlobal));
  ok(cudaEventRecord(fork, main));
  CHECK(cudaStreamWaitEvent(side, fork, 0) == cudaErrorStreamCaptureMerge);
  CHECK(cudaStreamEndCapture(main, &graph) == cudaErrorStreamCaptureInvalidated);
  CHECK(cudaStreamEndCapture(side, &graph) == cudaErrorStreamCaptureInvalidated);
  CHECK(cudaStreamEndCapture(side, &graph) == cudaErrorIllegalState);
  begin();
  cudaError_t elsewhere = cudaSuccess;
  std::thread{[&] { elsewhere = cudaStreamEndCapture(main, &graph); }}.join();
  CHECK(elsewhere == cudaErrorStreamCaptureWrongThread);
  ok(cudaStreamEndCapture(main, &graph));
  ok(cudaGraphDestroy(graph));
}

TEST_CASE_FIXTURE(capture_fixture, "calls that can't be captured invalidate the capture") {
  int pageable = 0;
  auto* const device = make_device<int>(1);
  void* memory = nullptr;
  std::vector<std::function<cudaError_t()>> const calls{
      [&] { return cudaMalloc(&memory, 1); },
      [&] { return cudaMallocHost(&memory, 1); },
      [&] { return cudaFree(device); },
      [&] { return cudaFreeHost(nullptr); },
      [&] { return cudaDeviceSynchronize(); },
      [&] { return cudaStreamSynchronize(main); },
      [&] { return cudaStreamQuery(main); },
      [&] { return cudaEventQuery(join); },
      [&] { return cudaMemcpy(&pageable, device, 4, cudaMemcpyDeviceToHost); },
      [&] { return cudaMemcpyAsync(device, &pageable, 4, cudaMemcpyHostToDevice, main); },
  };
  for (auto const& each : calls) {
    begin();
    CHECK(each() == cudaErrorStreamCaptureUnsupported);
    CHECK(cudaStreamEndCapture(main, &graph) == cudaErrorStreamCaptureInvalidated);
  }
  begin();
  ok(cudaEventRecord(fork, main));
  CHECK(cudaEventSynchronize(fork) == cudaErrorCapturedEvent);
  CHECK(cudaStreamEndCapture(main, &graph) == cudaErrorStreamCaptureInvalidated);
  ok(cudaFree(device));
}

TEST_CASE_FIXTURE(capture_fixture, "the modes decide what other threads may do") {
  auto const query_in = [&](cudaStreamCaptureMode mode) {
    cudaError_t result = cudaSuccess;
    std::thread{[&] {
      cudaThreadExchangeStreamCaptureMode(&mode);
      CHECK(mode == cudaStreamCaptureModeGlobal);
      result = cudaEventQuery(join);
    }}.join();
    return result;
  };
  begin(cudaStreamCaptureModeGlobal);
  CHECK(query_in(cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  CHECK(query_in(cudaStreamCaptureModeRelaxed) == cudaSuccess);
  CHECK(query_in(cudaStreamCaptureModeGlobal) == cudaErrorStreamCaptureUnsupported);
  CHECK(cudaStreamEndCapture(main, &graph) == cudaErrorStreamCaptureInvalidated);
  begin(cudaStreamCaptureModeThreadLocal);
  CHECK(query_in(cudaStreamCaptureModeGlobal) == cudaSuccess);
  CHECK(cudaEventQuery(join) == cudaErrorStreamCaptureUnsupported);
  CHECK(cudaStreamEndCapture(main, &graph) == cudaErrorStreamCaptureInvalidated);
  begin(cudaStreamCaptureModeRelaxed);
  CHECK(cudaEventQuery(join) == cudaSuccess);
  ok(cudaStreamEndCapture(main, &graph));
  ok(cudaGraphDestroy(graph));
}

TEST_CASE_FIXTURE(capture_fixture,
                  "the null stream isn't captured, nor used beside a blocking one") {
  CHECK(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal) ==
        cudaErrorStreamCaptureUnsupported);
  auto* const blocking = make_stream(cudaStreamDefault);
  ok(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeRelaxed));
  CHECK(launch(nullptr, [] {}) == cudaErrorStreamCaptureImplicit);
  CHECK(cudaStreamEndCapture(blocking, &graph) == cudaErrorStreamCaptureInvalidated);
  ok(cudaStreamDestroy(blocking));
  begin();
  ok(launch(nullptr, [] {}));
  ok(cudaStreamEndCapture(main, &graph));
  ok(cudaGraphDestroy(graph));
}
