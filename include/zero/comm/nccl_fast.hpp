// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/collective.hpp>
#include <zero/comm/nccl_call.hpp>
#include <zero/core/any_span.hpp>
#include <zero/device/cuda.hpp>

#include <nccl.h>

#include <algorithm>
#include <cstddef>

/// @file
/// Reductions by NCCL. Nothing here is for users.

namespace zero::inline v0::detail {

/// NCCL sums, in the wire's type; what that isn't the result's goes through the scratch.
class nccl_fast : nccl_call {
 public:
  using nccl_call::nccl_call;

  void run() const {
    if (nccl_writes_result(call_.input_dtype, call_.output_dtype, call_.how)) {
      reduce_plainly();
    } else if (call_.op == operation::reduce_scatter) {
      scatter_in_parts();
    } else {
      reduce_in_parts();
    }
  }

 private:
  [[nodiscard]] dtype wire() const noexcept { return nccl_wire(call_.input_dtype); }

  /// NCCL writes the result itself.
  void reduce_plainly() const {
    ncclDataType_t const type = nccl_type(wire());
    bool const scatters = call_.op == operation::reduce_scatter;
    std::size_t const count = scatters ? call_.count / ranks() : call_.count;
    if (scatters) {
      handle_.call("ncclReduceScatter", [&](ncclComm_t comm) {
        return ncclReduceScatter(call_.input, call_.output, count, type, ncclSum, comm,
                                 on_.native());
      });
    } else {
      handle_.call("ncclAllReduce", [&](ncclComm_t comm) {
        return ncclAllReduce(call_.input, call_.output, count, type, ncclSum, comm, on_.native());
      });
    }
    if (call_.what == reduction::average) {
      void const* const source = call_.output;
      cuda::sum(on_, {&source, 1}, wire(), result(0, count), false, scale());
    }
  }

  /// Input elements, as they travel, to a place in the scratch.
  void pack(std::size_t first, std::size_t count, std::byte* to) const {
    const_any_span const from{call_.input + first * in_size(), count, call_.input_dtype};
    if (wire() == call_.input_dtype) {
      cuda::copy(on_, from, any_span{to, count, wire()});
    } else {
      void const* const source = from.data();  // a sum of one, whose kernel is here anyway
      cuda::sum(on_, {&source, 1}, from.dtype(), any_span{to, count, wire()}, false, 1);
    }
  }

  /// A sum in the scratch becomes, or is added to, part of the result.
  void unpack(void const* sum, std::size_t first, std::size_t count) const {
    cuda::sum(on_, {&sum, 1}, wire(), result(first, count), adds(), scale());
  }

  void scatter_in_parts() const {
    std::size_t const whole = call_.count / ranks();
    std::size_t const bytes = size_bytes(wire());
    std::size_t const part = slot_bytes(ranks()) / bytes;
    for (std::size_t offset = 0; offset < whole; offset += part) {
      std::size_t const count = std::min(part, whole - offset);
      for (std::size_t other = 0; other < ranks(); ++other) {
        pack(other * whole + offset, count, scratch_.data() + other * count * bytes);
      }
      std::byte* const mine = scratch_.data() + static_cast<std::size_t>(rank()) * count * bytes;
      handle_.call("ncclReduceScatter", [&](ncclComm_t comm) {
        return ncclReduceScatter(scratch_.data(), mine, count, nccl_type(wire()), ncclSum, comm,
                                 on_.native());
      });
      unpack(mine, offset, count);
    }
  }

  /// With `add`, a rank adds to its slice only, and the others copy that.
  void reduce_in_parts() const {
    std::size_t const bytes = size_bytes(wire());
    std::size_t const part = slot_bytes(1) / bytes;
    slice const mine = slice_of(rank());
    for (std::size_t offset = 0; offset < call_.count; offset += part) {
      std::size_t const count = std::min(part, call_.count - offset);
      pack(offset, count, scratch_.data());
      handle_.call("ncclAllReduce", [&](ncclComm_t comm) {
        return ncclAllReduce(scratch_.data(), scratch_.data(), count, nccl_type(wire()), ncclSum,
                             comm, on_.native());
      });
      std::size_t const first = adds() ? std::max(offset, mine.first) : offset;
      std::size_t const last =
          adds() ? std::min(offset + count, mine.first + mine.count) : offset + count;
      if (first < last) {
        unpack(scratch_.data() + (first - offset) * bytes, first, last - first);
      }
    }
    if (adds()) {
      gather_slices();
    }
  }
};

}  // namespace zero::inline v0::detail
