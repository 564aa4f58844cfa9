// SPDX-License-Identifier: MIT
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

/// @file
/// Control of the fake CUDA runtime, which a test links instead of cudart.
///
/// A stream is a thread that works in order, device memory is host memory that faults while no work
/// of a stream runs, and calls that CUDA refuses are refused. ThreadSanitizer sees only the order
/// that CUDA promises: the order of a stream, events, and what the host waited for. Locks inside
/// the fake are out of its sight.
///
/// What the fake doesn't do: blocking streams don't wait for the null stream (each is just in
/// order), a graph's nodes run one after the other, a failed device still runs what was enqueued.

namespace fake {

/// Devices, settings and faults as at the start of the program; counts and logs are empty again.
/// Streams, events, memory and graphs stay, and so do the current device and the last error of
/// other threads than the caller.
void reset();

/// How many devices there are (1 at first, 16 at most). With none, calls give cudaErrorNoDevice.
void set_device_count(int count);

/// The newest CUDA that the driver knows (the toolkit's at first). With an older major version, all
/// calls but those for versions give cudaErrorInsufficientDriver.
void set_driver_version(int version);

/// The memory of each device (1 GiB at first).
void set_memory(std::size_t bytes);

/// How many addresses all devices use together (4 GiB at first, which is the most). Freed memory
/// faults, and its addresses are used again only once all of them were used.
void limit_addresses(std::size_t bytes);

/// Whether device memory faults while no work of a stream runs. It does at first.
void protect_device_memory(bool protect);

/// Run `work` in the order of `stream` with device memory open, or make it a node of the graph that
/// the stream captures.
///
/// What `work` refers to must not count its references across threads: the counter would order
/// streams in the eyes of ThreadSanitizer. Captured work lives until the program ends.
cudaError_t enqueue(cudaStream_t stream, std::function<void()> work);

/// Count and log a call of `function`, whose name must live as long as the program.
void count(char const* function);

/// The error that `fail_call` wants from this call, or cudaSuccess. Every call asks once.
cudaError_t fail_if_told(char const* function);

/// The n-th call from now on (1 is the next) returns `error` and does nothing, except that what
/// frees or destroys does so nevertheless. cudaGetErrorString, cudaGetErrorName, cudaGetLastError
/// and cudaPeekAtLastError aren't counted and can't fail.
void fail_call(std::uint64_t n, cudaError_t error);
/// The n-th call of the thread `caller`.
void fail_call(std::uint64_t n, cudaError_t error, std::thread::id caller);
/// The n-th call for which `concerns(function)` is true; asked in the calling thread, and it
/// must not call the fake.
void fail_call(std::uint64_t n, cudaError_t error, std::function<bool(char const*)> concerns);

/// The next call that waits for `stream` or queries it returns `error`, and so does every later
/// call on its device.
void fail_async(cudaStream_t stream, cudaError_t error);

/// The n-th call of cudaStreamWaitEvent from now waits for nothing: a fault that a race detector
/// must find. 0 ends it.
void drop_wait(std::uint64_t n);

std::uint64_t calls();
std::map<std::string, std::uint64_t> call_counts();
void reset_counts();

/// Start (with an empty log) or stop writing down the names of the functions called.
void log(bool on);
/// What a thread called, in order.
std::vector<std::string> logged(std::thread::id caller = std::this_thread::get_id());

struct live_counts {
  std::size_t allocations = 0;
  std::size_t pinned = 0;
  std::size_t streams = 0;  // without null streams
  std::size_t events = 0;
  std::size_t graphs = 0;
  std::size_t graph_execs = 0;

  friend bool operator==(live_counts const&, live_counts const&) = default;
};

/// What was created and not destroyed.
live_counts live();

/// Each piece of work of `stream` sleeps first.
void delay(cudaStream_t stream, std::chrono::microseconds duration);
/// Each piece of work of every stream sleeps first, in addition.
void delay_all(std::chrono::microseconds duration);
/// Each piece of work sleeps up to 200 µs first, at random; 0 ends it.
void set_jitter(std::uint64_t seed);

}  // namespace fake

extern "C" {

/// Copy `bytes` bytes of a trivially copyable functor, aligned to at most 16, and run `run(copy)`
/// in the order of `stream`, like a kernel.
cudaError_t zeroFakeLaunch(cudaStream_t stream, void (*run)(void const* functor),
                           void const* functor, std::size_t bytes);
}
