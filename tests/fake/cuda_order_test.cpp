// SPDX-License-Identifier: MIT
#include <fake/child.hpp>
#include <fake/cuda_support.hpp>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>

// What crashes, races or ends a program: cases that run in a process of their own.

using namespace std::chrono_literals;
using namespace cuda_test;

namespace {

[[maybe_unused]] unsigned int const deadline = alarm(200);  // no test may hang

bool is_child() { return std::getenv("FAKE_CHILD") != nullptr; }

}  // namespace

TEST_CASE("child: the host reads device memory" * doctest::skip()) {
  if (is_child()) {
    auto const* const device = make_device<int volatile>(1);
    ok(cudaMemsetAsync(const_cast<int*>(device), 0, 4, nullptr));
    ok(cudaStreamSynchronize(nullptr));
    std::puts("before");
    std::fflush(stdout);
    std::printf("%d\n", *device);
    std::puts("survived");
  }
}

TEST_CASE("child: a kernel uses freed memory" * doctest::skip()) {
  if (is_child()) {
    auto* const device = make_device<int>(1);
    ok(cudaFree(device));
    std::puts("before");
    std::fflush(stdout);
    ok(launch(nullptr, [device] { *device = 1; }));
    ok(cudaStreamSynchronize(nullptr));
    std::puts("survived");
  }
}

TEST_CASE("child: a kernel throws" * doctest::skip()) {
  if (is_child()) {
    std::puts("before");
    std::fflush(stdout);
    ok(launch(nullptr, [] { throw std::runtime_error{"from a kernel"}; }));
    ok(cudaStreamSynchronize(nullptr));
    std::puts("survived");
  }
}

TEST_CASE("device memory faults in the host, freed memory in a kernel, and throwing kernels end") {
  for (char const* name : {"child: the host reads device memory",
                           "child: a kernel uses freed memory", "child: a kernel throws"}) {
    fake::child const result{name};
    CAPTURE(result.output);
    CHECK(result.status != 0);
    CHECK(result.status != 124 << 8);  // out of time
    CHECK(result.output.find("before") != std::string::npos);
    CHECK(result.output.find("survived") == std::string::npos);
  }
}

TEST_CASE("child: exit with work that still runs" * doctest::skip()) {
  if (is_child()) {
    auto* const first = make_stream();
    auto* const second = make_stream();
    auto* const event = make_event();
    fake::delay_all(5ms);
    for (int i = 0; i < 10; ++i) {
      ok(launch(first, [] {}));
    }
    ok(cudaEventRecord(event, first));
    ok(cudaStreamWaitEvent(second, event, 0));
    ok(launch(second, [] {
      std::puts("the last work ran");
      std::fflush(stdout);
    }));
    ok(cudaStreamDestroy(second));
  }
}

TEST_CASE("the program ends after the work that was enqueued") {
  fake::child const result{"child: exit with work that still runs"};
  CHECK(result.status == 0);
  CHECK(result.output.find("the last work ran") != std::string::npos);
}

// What ThreadSanitizer must and must not report. Every case gives the first write time to end, so
// that only the promised order counts, and then touches what could order streams by accident.

namespace {

struct race_case {
  cudaStream_t first = make_stream();
  cudaStream_t second = make_stream();
  cudaEvent_t event = make_event();
  int* device = make_device<int>(1);
  int* pinned = make_pinned<int>(1);

  void write(cudaStream_t stream) const {
    ok(launch(stream, [at = device] { *at = *at + 1; }));
  }
  void let_time_pass() const {
    std::this_thread::sleep_for(50ms);
    ok(launch(first, [] {}));  // an enqueue after the write
    auto* const other = make_event();
    ok(cudaEventRecord(other, first));
    ok(cudaEventDestroy(other));
    std::this_thread::sleep_for(20ms);
  }
  void finish() const {
    ok(cudaDeviceSynchronize());
    ok(cudaEventDestroy(event));
    ok(cudaStreamDestroy(first));
    ok(cudaStreamDestroy(second));
    ok(cudaFree(device));
    ok(cudaFreeHost(pinned));
  }
};

}  // namespace

#define CHILD(name) TEST_CASE("child: " name* doctest::skip())

CHILD("races without an event") {
  if (is_child()) {
    race_case const race;
    race.write(race.first);
    race.let_time_pass();
    race.write(race.second);
    race.finish();
  }
}

CHILD("races after an event that was recorded too early") {
  if (is_child()) {
    race_case const race;
    ok(cudaEventRecord(race.event, race.first));
    race.write(race.first);
    race.let_time_pass();
    ok(cudaStreamWaitEvent(race.second, race.event, 0));
    ok(cudaEventSynchronize(race.event));
    race.write(race.second);
    race.finish();
  }
}

CHILD("races with another thread's stream") {
  if (is_child()) {
    race_case const race;
    std::thread other{[&] {
      std::this_thread::sleep_for(150ms);
      race.write(race.second);
    }};
    race.write(race.first);
    race.let_time_pass();
    ok(cudaStreamSynchronize(race.first));
    int device = 0;
    ok(cudaGetDevice(&device));
    ok(cudaFree(make_device<char>(1)));
    other.join();
    race.finish();
  }
}

CHILD("races with a host that doesn't wait") {
  if (is_child()) {
    race_case const race;
    ok(cudaMemcpyAsync(race.pinned, race.device, 4, cudaMemcpyDeviceToHost, race.first));
    race.let_time_pass();
    std::printf("%d\n", *race.pinned);
    race.finish();
  }
}

CHILD("ordered by an event") {
  if (is_child()) {
    race_case const race;
    race.write(race.first);
    ok(cudaEventRecord(race.event, race.first));
    ok(cudaStreamWaitEvent(race.second, race.event, 0));
    race.write(race.second);
    race.finish();
  }
}

CHILD("ordered by a host that waits") {
  if (is_child()) {
    race_case const race;
    race.write(race.first);
    ok(cudaStreamSynchronize(race.first));
    race.write(race.second);
    ok(cudaEventRecord(race.event, race.second));
    ok(cudaEventSynchronize(race.event));
    race.write(race.first);
    ok(cudaMemcpyAsync(race.pinned, race.device, 4, cudaMemcpyDeviceToHost, race.first));
    while (cudaStreamQuery(race.first) == cudaErrorNotReady) {
      std::this_thread::yield();
    }
    std::printf("%d\n", *race.pinned);
    race.write(race.second);
    ok(cudaEventRecord(race.event, race.second));
    while (cudaEventQuery(race.event) == cudaErrorNotReady) {
      std::this_thread::yield();
    }
    race.write(race.first);
    race.finish();
  }
}

TEST_CASE("ThreadSanitizer reports what CUDA doesn't order, and nothing else") {
  struct expected {
    char const* name;
    bool races;
  };
  for (auto const& each : {
           expected{"child: races without an event", true},
           expected{"child: races after an event that was recorded too early", true},
           expected{"child: races with another thread's stream", true},
           expected{"child: races with a host that doesn't wait", true},
           expected{"child: ordered by an event", false},
           expected{"child: ordered by a host that waits", false},
       }) {
    fake::child const result{each.name};
    CAPTURE(result.output);
    CHECK(result.output.find("1 passed") != std::string::npos);
#if FAKE_HAS_TSAN
    bool const reported = result.output.find("data race") != std::string::npos;
    CHECK(reported == each.races);
#else
    CHECK(result.status == 0);
#endif
  }
}
