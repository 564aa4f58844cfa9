// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/collective.hpp>
#include <zero/comm/nccl_call.hpp>
#include <zero/comm/nccl_fast.hpp>
#include <zero/comm/nccl_options.hpp>
#include <zero/comm/nccl_ordered.hpp>
#include <zero/core/any_span.hpp>
#include <zero/device/cuda.hpp>

#include <nccl.h>

#include <cstddef>

/// @file
/// What a rank enqueues for a collective. Nothing here is for users.

namespace zero::inline v0::detail {

/// A call of one rank in its stream.
class nccl_transfer : nccl_call {
 public:
  using nccl_call::nccl_call;

  void run(nccl_mode mode) const {
    switch (call_.op) {
      case operation::reduce_scatter:
      case operation::all_reduce: reduce(mode); return;
      case operation::all_gather: all_gather(); return;
      case operation::broadcast: broadcast(); return;
      default: barrier(); return;
    }
  }

 private:
  void reduce(nccl_mode mode) const {
    if (call_.count == 0) {
      return;
    }
    if (mode == nccl_mode::ordered || size() == 1) {
      nccl_ordered{handle_, scratch_, call_, sources_, on_}.run();
    } else {
      nccl_fast{handle_, scratch_, call_, sources_, on_}.run();
    }
  }

  void all_gather() const {
    if (call_.input_bytes == 0) {
      return;
    }
    std::size_t const count = call_.input_bytes / in_size();
    if (size() == 1) {
      cuda::copy(on_, const_any_span{call_.input, count, call_.input_dtype}, result(0, count));
      return;
    }
    handle_.call("ncclAllGather", [&](ncclComm_t comm) {
      return ncclAllGather(call_.input, call_.output, count, nccl_type(call_.input_dtype), comm,
                           on_.native());
    });
  }

  void broadcast() const {
    if (call_.count == 0 || size() == 1) {
      return;
    }
    // The root's output is empty: NCCL gets what it reads there.
    void* const output = rank() == call_.root ? const_cast<std::byte*>(call_.input) : call_.output;
    handle_.call("ncclBroadcast", [&](ncclComm_t comm) {
      return ncclBroadcast(output, output, call_.count, nccl_type(call_.input_dtype), call_.root,
                           comm, on_.native());
    });
  }

  void barrier() const {
    if (size() > 1) {
      handle_.call("ncclAllReduce", [&](ncclComm_t comm) {
        return ncclAllReduce(scratch_.data(), scratch_.data(), 1, ncclInt32, ncclMax, comm,
                             on_.native());
      });
    }
  }
};

}  // namespace zero::inline v0::detail
