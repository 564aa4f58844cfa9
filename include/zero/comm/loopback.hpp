// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/run_threads.hpp>
#include <zero/comm/threads.hpp>
#include <zero/device/cuda.hpp>

#include <utility>

/// @file
/// `loopback`: ranks are threads that share one GPU, and read each other's device memory on streams
/// of their own. Sums are ordered, as those of `thread_communicator`. It is how one GPU runs a
/// world of several ranks.

namespace zero::inline v0 {

/// See `basic_thread_communicator`. Ranks meet in the call, on the host; what they enqueue waits
/// for each other's streams on the device.
using loopback = basic_thread_communicator<cuda>;

/// `run_threads` for ranks that share the current GPU.
template <class Function>
  requires std::invocable<Function&, loopback&>
void run_loopback(int ranks, Function&& function, thread_options options = {}) {
  int const device = detail::current_device();
  run_threads<cuda>(
      ranks,
      [&function, device](loopback& comm) {
        detail::check_cuda(cudaSetDevice(device), "cudaSetDevice");
        detail::rank_of_thread = comm.rank();
        function(comm);
      },
      options);
}

static_assert(communicator<loopback>);

}  // namespace zero::inline v0
