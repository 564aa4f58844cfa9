// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/collective.hpp>
#include <zero/comm/scratch.hpp>
#include <zero/core/dtype.hpp>
#include <zero/core/error.hpp>
#include <zero/core/partition.hpp>

#include <nccl.h>

#include <algorithm>
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
  ordered,  ///< each rank, in rank order, of what others send: the bits of `thread_communicator`;
            ///< at most 256 ranks
  fast      ///< NCCL, in an order and with roundings of its own
};

struct nccl_options {
  nccl_mode mode = nccl_mode::ordered;

  /// The most memory that reductions go through; larger ones go in parts that fit. The first
  /// reduction that needs it takes all of it, once, unless memory was lent (`nccl::use_scratch`).
  /// At least 1 MiB, and 256 bytes for each rank. The same on every rank.
  std::size_t scratch_bytes = std::size_t{16} << 20U;

  /// Take what wasn't lent by `ncclMemAlloc`, and register it, with NCCL 2.27 as a symmetric
  /// window, too. The same on every rank.
  bool nccl_memory = false;

  /// Compare what the ranks call, beside the streams: a call that differs fails at once, with what
  /// differed, and not at its deadline. It costs each rank a message of about 100 bytes a call.
  bool compare_calls = true;

  /// How long a call may take, counted from where it is enqueued; and how long the constructor may.
  /// Work that is captured into a graph has no deadline; the graph is destroyed before the
  /// communicator.
  std::chrono::milliseconds deadline = std::chrono::minutes{10};

  /// NCCL's id of these ranks, where they have one; the same on every rank. Without it rank 0 makes
  /// one.
  std::optional<ncclUniqueId> id = {};

  /// The scratch with which a reduction goes in one part, or `scratch_bytes` where that is less.
  ///
  /// Units: bytes: slots * the slice's, rounded up to a multiple of 256. In ordered mode a slot for
  ///        each other rank, in the input's type. In fast mode a slot for each rank, in the type on
  ///        the wire (the input's, or float32 for float16), but none where NCCL writes the result
  ///        itself: it is in that type, too, and isn't added to. With one rank none.
  [[nodiscard]] constexpr std::uint64_t scratch_for(reduction_shape const& of,
                                                    std::uint64_t ranks) const;
};

namespace detail {

inline constexpr std::size_t least_scratch_bytes = std::size_t{1} << 20U;
inline constexpr std::size_t scratch_alignment = 256;
inline constexpr std::size_t window_alignment = 4096;

/// How many ranks' slices are in the scratch at a time.
[[nodiscard]] constexpr std::uint64_t scratch_slots(nccl_mode mode, std::uint64_t ranks) noexcept {
  return ranks == 1 ? 0 : mode == nccl_mode::ordered ? ranks - 1 : ranks;
}

/// In what type NCCL sums: float16 overflows on the way.
[[nodiscard]] constexpr dtype nccl_wire(dtype input) noexcept {
  return input == dtype::float16 ? dtype::float32 : input;
}

/// Whether NCCL's sum is the result, but for a scale.
[[nodiscard]] constexpr bool nccl_writes_result(dtype input, dtype output, combine how) noexcept {
  return nccl_wire(input) == input && input == output && how == combine::overwrite;
}

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

[[nodiscard]] inline std::string nccl_reason(ncclResult_t result, ncclComm_t comm) {
  char const* const last = ncclGetLastError(comm);
  std::string_view const details = last == nullptr ? "" : last;
  return text(std::string_view{ncclGetErrorString(result)}, details.empty() ? "" : ": ", details);
}

[[nodiscard]] inline std::string nccl_text(std::string_view call, ncclResult_t result,
                                           ncclComm_t comm, int rank) {
  return text(call, ": expected success, actual ", nccl_reason(result, comm), " (rank ", rank, ")");
}

}  // namespace detail

constexpr std::uint64_t nccl_options::scratch_for(reduction_shape const& of,
                                                  std::uint64_t ranks) const {
  bool const fast = mode == nccl_mode::fast;
  if (fast && detail::nccl_writes_result(of.input, of.output, of.how)) {
    return 0;
  }
  std::uint64_t const width = size_bytes(fast ? detail::nccl_wire(of.input) : of.input);
  std::uint64_t const slot = round_up(of.slice * width, detail::scratch_alignment);
  return std::min<std::uint64_t>(scratch_bytes, detail::scratch_slots(mode, ranks) * slot);
}

static_assert(scratch_rule<nccl_options>);

}  // namespace zero::inline v0
