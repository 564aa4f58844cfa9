// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/dtype.hpp>
#include <zero/core/error.hpp>

#include <nccl.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

/// @file
/// How `nccl` communicates.

namespace zero::inline v0 {

/// Who computes the sums of a reduction.
enum class nccl_mode : std::uint8_t {
  ordered,  ///< each rank, in rank order, of what others send: the bits of `thread_communicator`
  fast      ///< NCCL, in an order and with roundings of its own
};

struct nccl_options {
  nccl_mode mode = nccl_mode::ordered;

  /// The memory that reductions go through, taken once. Larger calls go in parts that fit. The same
  /// on every rank.
  std::size_t scratch_bytes = std::size_t{16} << 20U;

  /// Take the scratch by `ncclMemAlloc`, and register it.
  bool nccl_memory = false;

  /// Compare what the ranks call, beside the streams: a call that differs fails at once, with what
  /// differed, and not at its deadline. It costs each rank a message of about 100 bytes a call.
  bool compare_calls = true;

  /// How long a call may take, counted from where it is enqueued; and how long the constructor may.
  /// Work that is captured into a graph has no deadline.
  std::chrono::milliseconds deadline = std::chrono::minutes{10};

  /// NCCL's id of these ranks, where they have one; the same on every rank. Without it rank 0 makes
  /// one.
  std::optional<ncclUniqueId> id = {};
};

namespace detail {

inline constexpr std::size_t least_scratch_bytes = std::size_t{1} << 20U;

[[nodiscard]] constexpr std::string_view name(nccl_mode mode) noexcept {
  return mode == nccl_mode::fast ? "fast" : "ordered";
}

[[nodiscard]] constexpr ncclDataType_t nccl_type(dtype type) noexcept {
  switch (type) {
    case dtype::float64: return ncclFloat64;
    case dtype::float16: return ncclFloat16;
    case dtype::bfloat16: return ncclBfloat16;
    case dtype::float32: break;
  }
  return ncclFloat32;
}

/// Whether `result` is that of a call that goes on, or has ended well.
[[nodiscard]] constexpr bool is_good(ncclResult_t result) noexcept {
  return result == ncclSuccess || result == ncclInProgress;
}

[[nodiscard]] inline std::string nccl_text(std::string_view call, ncclResult_t result,
                                           ncclComm_t comm, int rank) {
  char const* const last = ncclGetLastError(comm);
  std::string_view const details = last == nullptr ? "" : last;
  return text(call, ": expected success, actual ", std::string_view{ncclGetErrorString(result)},
              details.empty() ? "" : ": ", details, " (rank ", rank, ")");
}

}  // namespace detail
}  // namespace zero::inline v0
