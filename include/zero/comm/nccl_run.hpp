// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/control_client.hpp>
#include <zero/comm/control_memory.hpp>
#include <zero/comm/nccl_communicator.hpp>
#include <zero/comm/run_threads.hpp>
#include <zero/core/error.hpp>
#include <zero/device/cuda_error.hpp>

#include <cuda_runtime_api.h>

#include <concepts>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

/// @file
/// `run_nccl`: a function on P ranks of one process, each a thread with a GPU.

namespace zero::inline v0 {
namespace detail {

template <class Function>
void run_nccl_rank(Function& function, std::shared_ptr<control_client> client, int device,
                   nccl_options const& options, rank_errors& errors) noexcept {
  try {
    rank_of_thread = client->rank();
    check_cuda(cudaSetDevice(device), "cudaSetDevice");
    nccl comm{std::move(client), options};
    try {
      std::invoke(function, comm);
    } catch (std::exception const& failure) {
      comm.abort(failure.what());
      throw;
    } catch (...) {
      comm.abort("an exception of unknown type");
      throw;
    }
  } catch (communication_error const&) {
    errors.add(false);
  } catch (...) {
    errors.add(true);
  }
}

}  // namespace detail

/// Call `function(comm)` on `ranks` threads, with `comm` a `nccl&` of ranks 0 to `ranks` - 1, and
/// wait for all of them. Rank r has device r, or `devices[r]` where they are given.
///
/// When one throws, its peers' pending and later calls end or throw, too. Then the first exception
/// is thrown here; a `communication_error`, which is mostly another's consequence, only if there is
/// no other.
/// @throws zero::usage_error  fewer than one rank, or another number of devices.
template <class Function>
  requires std::invocable<Function&, nccl&>
void run_nccl(int ranks, Function&& function, nccl_options const& options = {},
              std::vector<int> const& devices = {}) {
  if (ranks < 1) {
    throw usage_error{detail::text("run_nccl: expected at least 1 rank, actual ", ranks)};
  }
  if (!devices.empty() && devices.size() != static_cast<std::size_t>(ranks)) {
    throw usage_error{
        detail::text("run_nccl: expected ", ranks, " devices, actual ", devices.size())};
  }
  auto clients = detail::memory_store::create(ranks);
  detail::rank_errors errors;
  std::vector<std::thread> threads;
  threads.reserve(clients.size());
  auto const join = [&] {
    clients.clear();  // a rank without a thread leaves, so that no peer waits for it
    for (std::thread& thread : threads) {
      thread.join();
    }
  };
  try {
    for (auto& client : clients) {
      int const device =
          devices.empty() ? client->rank() : devices[static_cast<std::size_t>(client->rank())];
      threads.emplace_back([&, device, mine = std::move(client)]() mutable {
        detail::run_nccl_rank(function, std::move(mine), device, options, errors);
      });
    }
  } catch (std::system_error const& cause) {
    std::size_t const started = threads.size();
    join();
    throw error{detail::text("run_nccl: expected ", ranks, " threads, actual ", started, ": ",
                             std::string_view{cause.what()})};
  }
  join();
  errors.rethrow();
}

}  // namespace zero::inline v0
