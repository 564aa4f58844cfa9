// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/collective.hpp>
#include <zero/core/any_span.hpp>
#include <zero/core/error.hpp>

#include <chrono>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>

/// @file
/// The checks of a collective's arguments that a rank makes on its own, before any communication.
/// Nothing here is for users.

namespace zero::inline v0::detail {

/// Turns the arguments of rank `rank` of `size` into calls.
/// @throws zero::usage_error  from each function: an argument is wrong.
class collective_checks {
 public:
  collective_checks(int rank, int size) noexcept : rank_{rank}, size_{size} {}

  [[nodiscard]] collective reduce_scatter(const_any_span full, any_span shard, combine how,
                                          reduction what) const {
    collective call = make(operation::reduce_scatter, full, shard);
    check_slices(call.op, full.size(), shard.size());
    check_reducible(call);
    bool const in_place = shard.dtype() == full.dtype() && call.output == slice(call.input, shard);
    check_overlap(call, in_place, "a shard that is the rank's slice of full");
    call.how = how;
    call.what = what;
    return call;
  }

  [[nodiscard]] collective all_gather(const_any_span shard, any_span full) const {
    collective call = make(operation::all_gather, shard, full);
    call.count = full.size();
    check_slices(call.op, full.size(), shard.size());
    if (shard.dtype() != full.dtype()) {
      refuse(call.op, text(name(shard.dtype()), " in full, as in the shard"), name(full.dtype()));
    }
    check_overlap(call, call.input == slice(call.output, shard),
                  "a shard that is the rank's slice of full");
    return call;
  }

  [[nodiscard]] collective all_reduce(const_any_span full, any_span result, combine how,
                                      reduction what) const {
    collective call = make(operation::all_reduce, full, result);
    if (full.size() != result.size()) {
      refuse(call.op, text(full.size(), " elements in the result"), text(result.size()));
    }
    check_reducible(call);
    bool const in_place = result.dtype() == full.dtype() && call.input == call.output;
    check_overlap(call, in_place && how == combine::overwrite, "(without add) the same");
    call.how = how;
    call.what = what;
    return call;
  }

  [[nodiscard]] collective broadcast(any_span data, int root) const {
    collective call = make(operation::broadcast, data, rank_ == root ? any_span{} : data);
    call.output_dtype = data.dtype();
    if (root < 0 || root >= size_) {
      refuse(call.op, text("a root in [0, ", size_, ")"), text(root));
    }
    call.root = root;
    return call;
  }

  [[nodiscard]] static collective barrier() noexcept { return {}; }

  [[nodiscard]] collective exchange(std::span<std::byte const> mine,
                                    std::span<std::byte> all) const {
    collective call{.op = operation::exchange,
                    .count = mine.size(),
                    .input = mine.data(),
                    .input_bytes = mine.size(),
                    .output = all.data(),
                    .output_bytes = all.size()};
    if (all.size() / ranks() != mine.size() || all.size() % ranks() != 0) {
      refuse(call.op, text(mine.size(), " bytes for each of ", size_, " ranks"), text(all.size()));
    }
    check_memory(call);
    check_overlap(call, call.input == call.output + mine.size() * index(),
                  "mine that is the rank's slice of all");
    return call;
  }

  void split(int color) const {
    if (color < 0) {
      refuse(operation::split, "a color of at least 0", text(color));
    }
  }

  void deadline(std::chrono::milliseconds deadline) const {
    if (deadline.count() <= 0) {
      refuse("set_deadline", "at least 1 ms", text(deadline.count(), " ms"));
    }
  }

 private:
  [[noreturn]] void refuse(std::string_view operation, std::string_view expected,
                           std::string_view actual) const {
    throw usage_error{
        text(operation, ": expected ", expected, ", actual ", actual, " (rank ", rank_, ")")};
  }
  [[noreturn]] void refuse(operation op, std::string_view expected, std::string_view actual) const {
    refuse(name(op), expected, actual);
  }

  [[nodiscard]] std::size_t ranks() const noexcept { return static_cast<std::size_t>(size_); }
  [[nodiscard]] std::size_t index() const noexcept { return static_cast<std::size_t>(rank_); }

  [[nodiscard]] collective make(operation op, const_any_span input, any_span output) const {
    collective call{.op = op,
                    .input_dtype = input.dtype(),
                    .output_dtype = output.dtype(),
                    .count = input.size(),
                    .input = static_cast<std::byte const*>(input.data()),
                    .input_bytes = input.bytes(),
                    .output = static_cast<std::byte*>(output.data()),
                    .output_bytes = output.bytes()};
    check_memory(call);
    return call;
  }

  /// Where this rank's slice of `full` is, in slices as large as `shard`.
  [[nodiscard]] std::byte const* slice(std::byte const* full, const_any_span shard) const noexcept {
    return full + shard.bytes() * index();
  }

  void check_memory(collective const& call) const {
    if ((call.input == nullptr && call.input_bytes != 0) ||
        (call.output == nullptr && call.output_bytes != 0)) {
      std::size_t const bytes = call.input == nullptr ? call.input_bytes : call.output_bytes;
      refuse(call.op, text("memory for ", bytes, " bytes"), "a null pointer");
    }
  }

  void check_slices(operation op, std::size_t full, std::size_t shard) const {
    if (full % ranks() != 0) {
      refuse(op, text("a multiple of ", size_, " elements"), text(full));
    }
    if (full / ranks() != shard) {
      refuse(op, text("a shard of ", full / ranks(), " elements"), text(shard));
    }
  }

  /// Sums are computed in the accumulate type of the input, and rounded to the result once.
  void check_reducible(collective const& call) const {
    dtype const from = call.input_dtype;
    dtype const to = call.output_dtype;
    if (!can_sum(from, to)) {
      refuse(call.op,
             text("a result of ", name(from),
                  from == dtype::float64   ? ""
                  : from == dtype::float32 ? " or of 16 bits"
                                           : " or float32"),
             name(to));
    }
  }

  void check_overlap(collective const& call, bool in_place, std::string_view place) const {
    if (!in_place && overlap(call.input, call.input_bytes, call.output, call.output_bytes)) {
      refuse(call.op, text("spans apart, or ", place),
             text("an overlap at byte ", call.output - call.input));
    }
  }

  int rank_;
  int size_;
};

}  // namespace zero::inline v0::detail
