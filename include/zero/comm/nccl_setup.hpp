// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/collective.hpp>
#include <zero/comm/control_group.hpp>
#include <zero/comm/nccl_handle.hpp>
#include <zero/comm/nccl_memory.hpp>
#include <zero/comm/nccl_options.hpp>
#include <zero/comm/scratch.hpp>
#include <zero/core/any_span.hpp>
#include <zero/core/error.hpp>
#include <zero/core/hash.hpp>
#include <zero/core/partition.hpp>
#include <zero/device/cuda.hpp>

#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

/// @file
/// How ranks agree on an id and on their options, and what one rank of a communicator owns. Nothing
/// here is for users.

namespace zero::inline v0::detail {

/// What ranks tell each other before NCCL starts.
struct nccl_vote {
  ncclUniqueId id{};
  std::uint64_t scratch_bytes = 0;
  std::int32_t version = 0;
  std::uint8_t mode = 0;
  std::uint8_t has_id = 0;
  std::uint8_t compare = 0;
  std::uint8_t nccl_memory = 0;
};

[[nodiscard]] inline int nccl_version(int rank) {
  int version = 0;
  if (ncclResult_t const code = ncclGetVersion(&version); code != ncclSuccess) {
    throw error{nccl_text("ncclGetVersion", code, nullptr, rank)};
  }
  return version;
}

/// Compare the options of all ranks. Returns their id, which rank 0 has made.
/// @throws zero::usage_error  they differ: the same one on every rank.
[[nodiscard]] inline ncclUniqueId agree_on_nccl(control_group& control,
                                                nccl_options const& options) {
  int const rank = control.rank();
  nccl_vote mine;
  mine.scratch_bytes = options.scratch_bytes;
  mine.version = nccl_version(rank);
  mine.mode = static_cast<std::uint8_t>(options.mode);
  mine.has_id = options.id.has_value() ? 1 : 0;
  mine.compare = options.compare_calls ? 1 : 0;
  mine.nccl_memory = options.nccl_memory ? 1 : 0;
  if (options.id) {
    mine.id = *options.id;
  } else if (rank == 0) {
    if (ncclResult_t const code = ncclGetUniqueId(&mine.id); code != ncclSuccess) {
      throw error{nccl_text("ncclGetUniqueId", code, nullptr, rank)};
    }
  }
  std::vector<nccl_vote> votes(static_cast<std::size_t>(control.size()));
  control.exchange(operation::exchange, std::as_bytes(std::span{&mine, 1}),
                   std::as_writable_bytes(std::span{votes}), options.deadline, true);
  nccl_vote const& first = votes.front();
  for (std::size_t peer = 1; peer < votes.size(); ++peer) {
    nccl_vote const& other = votes[peer];
    auto const compare = [&](std::string_view what, auto wanted, auto found) {
      if (wanted != found) {
        throw usage_error{text("nccl: expected ", what, wanted, " as on rank 0, actual ", found,
                               " (rank ", peer, ")")};
      }
    };
    compare("mode ", name(static_cast<nccl_mode>(first.mode)),
            name(static_cast<nccl_mode>(other.mode)));
    compare("scratch_bytes ", first.scratch_bytes, other.scratch_bytes);
    compare("version ", first.version, other.version);
    compare("compare_calls ", int{first.compare}, int{other.compare});
    compare("nccl_memory ", int{first.nccl_memory}, int{other.nccl_memory});
    bool const same = first.has_id == other.has_id &&
                      (first.has_id == 0 || std::memcmp(&first.id, &other.id, sizeof mine.id) == 0);
    compare("", std::string_view{"an id"}, std::string_view{same ? "an id" : "another"});
  }
  return first.id;
}

/// One rank of a communicator. What it registers ends before the handle, and memory of its own
/// after it, when the stream has run this rank's calls: neither waits for the device by itself.
struct nccl_rank {
  nccl_rank(std::shared_ptr<control_group> const& control, nccl_options const& with)
      : options{with}, version{nccl_version(control->rank())},
        sources(static_cast<std::size_t>(control->size())),
        handle{control, agree_on_nccl(*control, with), with.deadline} {}
  nccl_rank(nccl_rank const&) = delete;
  nccl_rank& operator=(nccl_rank const&) = delete;
  /// Waits for calls in flight until their deadline; ended by an exception, a peer may never make
  /// them.
  ~nccl_rank() {
    std::chrono::milliseconds most = handle.deadline();
    if (std::uncaught_exceptions() > exceptions) {
      most = std::min<std::chrono::milliseconds>(most, handle.end_time);
    }
    if (!handle.drain(most)) {
      for (std::optional<nccl_block>* const each : {&scratch, &barrier}) {
        if (*each) {
          (*each)->abandon();
        }
      }
    }
  }

  /// The first `symmetric_bytes` as a window, too, where this NCCL has such.
  void add_registration(void* memory, std::size_t bytes, std::size_t symmetric_bytes) {
    add_registration(registrations, memory, bytes, symmetric_bytes);
  }
  void end_registrations() noexcept {
    if (!registrations.empty()) {
      static_cast<void>(handle.drain(std::chrono::milliseconds::max()));
      registrations.clear();
    }
  }

  /// What must be the same on every rank of where NCCL's collective finds its buffers in symmetric
  /// windows: the offset of what peers use, and of what only this rank uses whether it is in one.
  [[nodiscard]] std::uint64_t place_of(collective const& call) const noexcept {
    std::uint64_t place = 0;
    auto const add = [&](void const* memory, bool is_shared) {
      for (nccl_registration const& each : registrations) {
        if (!each.is_window()) {
          continue;
        }
        std::uint64_t const at = each.place(memory);
        place = hash_next(place, is_shared ? at : std::min<std::uint64_t>(at, 1));
      }
    };
    bool const reduces = call.op == operation::reduce_scatter || call.op == operation::all_reduce;
    if (reduces && options.mode == nccl_mode::ordered) {
      return 0;  // sent and received
    }
    if (reduces && !nccl_writes_result(call.input_dtype, call.output_dtype, call.how)) {
      add(lent.data(), true);
    } else if (call.op == operation::broadcast) {
      add(handle.rank() == call.root ? call.input : call.output, true);
    } else {
      add(call.input, call.op != operation::all_gather);
      add(call.output, call.op != operation::reduce_scatter);
    }
    return place;
  }

  /// The memory that `call` goes through, if any: lent, or this rank's own, which the first call
  /// that needs it takes.
  /// @throws zero::usage_error  memory would be taken in a capture.
  [[nodiscard]] std::span<std::byte> memory_of(collective const& call, cuda_stream& on) {
    if (handle.size() == 1) {
      return {};
    }
    if (call.op == operation::barrier) {
      if (!barrier) {
        take(barrier, scratch_alignment, call.op, on);
        cuda::fill_zero(on, any_span{barrier->span().data(), 1, dtype::float32});
      }
      return barrier->span();
    }
    auto const ranks = static_cast<std::uint64_t>(handle.size());
    bool const reduces = call.op == operation::reduce_scatter || call.op == operation::all_reduce;
    reduction_shape const shape{.slice = partition{call.count, ranks}.slice(),
                                .input = call.input_dtype,
                                .output = call.output_dtype,
                                .how = call.how};
    if (!reduces || options.scratch_for(shape, ranks) == 0) {
      return {};
    }
    if (!lent.empty()) {
      return lent;
    }
    if (!scratch) {
      take(scratch, options.scratch_bytes, call.op, on);
    }
    return scratch->span();
  }

  nccl_options options;
  int version;
  std::span<std::byte> lent;          // scratch
  std::optional<nccl_block> scratch;  // of this rank's own, as the next
  std::optional<nccl_block> barrier;  // what a barrier sums
  std::vector<void const*> sources;
  int exceptions = std::uncaught_exceptions();
  nccl_handle handle;
  std::vector<nccl_registration> registrations;
  std::vector<nccl_registration> own_registrations;

 private:
  void take(std::optional<nccl_block>& to, std::size_t bytes, operation op, cuda_stream const& on) {
    if (on.capturing()) {
      throw usage_error{text(
          name(op), ": expected memory for it before a capture, actual none; ",
          op == operation::barrier ? "call it once before" : "call it once before, or use_scratch",
          " (rank ", handle.rank(), ")")};
    }
    device_scope const current{handle.device()};
    to.emplace(bytes, options.nccl_memory);
    if (options.nccl_memory) {
      add_registration(own_registrations, to->span().data(), bytes, bytes);
    }
  }

  /// The window first: 2.27 uses what was registered first of an address.
  void add_registration(std::vector<nccl_registration>& to, void* memory, std::size_t bytes,
                        std::size_t symmetric_bytes) {
    if (symmetric_bytes != 0 && nccl_registration::has_windows(version, symmetric_bytes != bytes)) {
      to.emplace_back(handle, memory, symmetric_bytes, true);
    }
    to.emplace_back(handle, memory, bytes, false);
  }
};

/// Ends on all ranks, or on none.
/// @throws after every rank has learnt why.
[[nodiscard]] inline std::unique_ptr<nccl_rank> make_nccl_rank(
    std::shared_ptr<control_group> const& control, nccl_options const& options) {
  try {
    auto made = std::make_unique<nccl_rank>(control, options);
    control->exchange(operation::exchange, {}, {}, options.deadline, true);
    return made;
  } catch (std::exception const& cause) {
    control->fail(control->rank(), cause.what());
    throw;
  }
}

}  // namespace zero::inline v0::detail
