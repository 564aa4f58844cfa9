// SPDX-License-Identifier: MIT
#include <doctest/doctest.h>
#include <support/thrown.hpp>

#include <zero/core/error.hpp>
#include <zero/train/options.hpp>

#include <chrono>
#include <cstdint>
#include <limits>
#include <string>

namespace {

/// What `chosen` is refused with; empty where it is accepted.
std::string refusal(zero::options const& chosen, zero::stage const& stage = zero::stage3{},
                    zero::accumulation const& policy = zero::reduce_per_microbatch{}) {
  test::thrown const caught = test::what_throws([&] { chosen.validate(stage, policy); });
  CHECK(caught.kind != test::kind::communication);
  CHECK(caught.kind != test::kind::other);
  return caught.message;
}

}  // namespace

TEST_CASE("options as they come are accepted in every stage") {
  for (zero::stage const& stage : {zero::stage(zero::stage0{}), zero::stage(zero::stage1{}),
                                   zero::stage(zero::stage2{}), zero::stage(zero::stage3{})}) {
    CHECK(refusal({}, stage, zero::local_accumulate{}).empty());
    CHECK(refusal({}, stage, zero::reduce_per_microbatch{}).empty());
  }
}

TEST_CASE("a clip norm is above zero; infinity measures and clips nothing") {
  CHECK(refusal({.clip_norm = 0.5}).empty());
  CHECK(refusal({.clip_norm = std::numeric_limits<double>::infinity()}).empty());
  CHECK(refusal({.clip_norm = 0.0}) == "options: expected clip_norm above 0, actual 0");
  CHECK(refusal({.clip_norm = -1.5}) == "options: expected clip_norm above 0, actual -1.5");
  std::string const nan = refusal({.clip_norm = std::numeric_limits<double>::quiet_NaN()});
  CHECK(nan.find("options: expected clip_norm above 0, actual ") == 0);
  CHECK(nan.find("nan") != std::string::npos);
}

TEST_CASE("an alignment is at least one element") {
  CHECK(refusal({.alignment = 1}).empty());
  CHECK(refusal({.alignment = 0}) ==
        "options: expected an alignment of at least 1 element, actual 0");
}

TEST_CASE("a deadline is in the future") {
  using std::chrono::milliseconds;
  CHECK(refusal({.deadline = milliseconds{1}}).empty());
  CHECK(refusal({.deadline = milliseconds{0}}) ==
        "options: expected a deadline above 0 ms, actual 0 ms");
  CHECK(refusal({.deadline = milliseconds{-5}}) ==
        "options: expected a deadline above 0 ms, actual -5 ms");
}

TEST_CASE("at least one unit may be live, and one bucket open") {
  CHECK(refusal({}, zero::stage3{.max_live_units = 0}) ==
        "options: expected max_live_units of at least 1, actual 0");
  CHECK(refusal({}, zero::stage3{}, zero::reduce_per_microbatch{.open_buckets = 0}) ==
        "options: expected open_buckets of at least 1, actual 0");
  CHECK(refusal({}, zero::stage3{.prefetch = 0}, zero::reduce_per_microbatch{.open_buckets = 1})
            .empty());
}

TEST_CASE(
    "small units are joined up to 16 MiB in stages 0 to 2, and not in stage 3, unless one says "
    "so") {
  constexpr std::uint64_t mib = 1U << 20U;
  CHECK(zero::options{}.bucket_bytes_in(zero::stage0{}) == 16 * mib);
  CHECK(zero::options{}.bucket_bytes_in(zero::stage1{}) == 16 * mib);
  CHECK(zero::options{}.bucket_bytes_in(zero::stage2{}) == 16 * mib);
  CHECK(zero::options{}.bucket_bytes_in(zero::stage3{}) == 0);
  CHECK(zero::options{.bucket_bytes = 0}.bucket_bytes_in(zero::stage1{}) == 0);
  CHECK(zero::options{.bucket_bytes = 12}.bucket_bytes_in(zero::stage3{}) == 12);
}
