// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/concept.hpp>
#include <zero/core/dtype.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

/// @file
/// Device memory that a communicator's reductions go through, beside the spans given to them. Who
/// plans memory asks how much that is, and lends it; communicators that need none don't have this.

namespace zero::inline v0 {

/// A reduction, as far as it decides how much scratch it takes.
struct reduction_shape {
  std::size_t slice = 0;  ///< elements of a rank's slice, of the largest one
  dtype input = dtype::float32;
  dtype output = dtype::float32;
  combine how = combine::overwrite;
};

/// Says how many bytes of scratch a reduction over `ranks` ranks takes, before there is a
/// communicator. `no_scratch` and `nccl_options` are such rules.
template <class Rule>
concept scratch_rule = requires(Rule const& rule, reduction_shape const& of, std::uint64_t ranks) {
  { rule.scratch_for(of, ranks) } -> std::convertible_to<std::uint64_t>;
};

/// The rule of communicators whose reductions need no scratch.
struct no_scratch {
  [[nodiscard]] static constexpr std::uint64_t scratch_for(reduction_shape const& /*of*/,
                                                           std::uint64_t /*ranks*/) noexcept {
    return 0;
  }
};
static_assert(scratch_rule<no_scratch>);

/// A communicator that can be lent scratch. `nccl` is one.
template <class Communicator>
concept borrows_scratch = requires(Communicator& comm, Communicator const& fixed,
                                   reduction_shape const& of, std::span<std::byte> memory) {
  { fixed.scratch_for(of) } -> std::convertible_to<std::uint64_t>;
  comm.use_scratch(memory);
  { comm.end_scratch() } noexcept;
};

}  // namespace zero::inline v0
