// SPDX-License-Identifier: MIT
#include <zero/comm/scratch.hpp>
#include <zero/comm/solo.hpp>
#include <zero/comm/threads.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace {

struct borrower {
  [[nodiscard]] static std::uint64_t scratch_for(zero::reduction_shape const& of) {
    return of.slice;
  }
  void use_scratch(std::span<std::byte> /*memory*/) {}
  void end_scratch() noexcept {}
};

/// An end that throws can't be called from a destructor.
struct throwing_borrower : borrower {
  void end_scratch() {}
};

/// It asks for ranks, which a communicator has.
struct rule_only {
  [[nodiscard]] static std::uint64_t scratch_for(zero::reduction_shape const& of,
                                                 std::uint64_t ranks) {
    return of.slice * ranks;
  }
};

static_assert(zero::borrows_scratch<borrower>);
static_assert(!zero::borrows_scratch<throwing_borrower>);
static_assert(!zero::borrows_scratch<rule_only>);
static_assert(!zero::borrows_scratch<zero::solo>);
static_assert(!zero::borrows_scratch<zero::thread_communicator>);

static_assert(zero::scratch_rule<rule_only>);
static_assert(zero::scratch_rule<zero::no_scratch>);
static_assert(!zero::scratch_rule<borrower>);

}  // namespace

TEST_CASE("without scratch, a reduction of any size takes none") {
  CHECK(zero::no_scratch::scratch_for({.slice = 1'000'000}, 8) == 0);
}
