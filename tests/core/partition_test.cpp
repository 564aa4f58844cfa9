// SPDX-License-Identifier: MIT
#include <zero/core/partition.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <vector>

using zero::partition;

namespace {

std::vector<std::uint64_t> sizes(partition const& cut) {
  std::vector<std::uint64_t> out;
  for (std::uint64_t part = 0; part < cut.parts(); ++part) {
    out.push_back(cut.size(part));
  }
  return out;
}

constexpr std::uint64_t largest = std::numeric_limits<std::uint64_t>::max();

}  // namespace

static_assert(partition{10, 4}.offset(3) == 9 && partition{10, 4}.padding() == 2);
static_assert(partition{} == partition{0, 1});
static_assert(zero::round_up(33, 32) == 64 && zero::round_up(32, 32) == 32);
static_assert(zero::round_up(0, 32) == 0 && zero::round_up(7, 1) == 7);

TEST_CASE("6 elements over 4 parts are 2, 2, 2 and none") {  // pytorch/pytorch#108869
  CHECK(sizes(partition{6, 4}) == std::vector<std::uint64_t>{2, 2, 2, 0});
  CHECK(partition{6, 4}.padded() == 8);
}

TEST_CASE("33 elements over 4 parts aligned to 32 are 32, 1 and twice none") {  // Megatron-LM#6191
  partition const cut{33, 4, 32};
  CHECK(sizes(cut) == std::vector<std::uint64_t>{32, 1, 0, 0});
  CHECK(cut.slice() == 32);
  CHECK(cut.padding() == 95);
}

TEST_CASE("fewer elements than parts, and none at all, leave whole parts empty") {
  CHECK(sizes(partition{1, 8}) == std::vector<std::uint64_t>{1, 0, 0, 0, 0, 0, 0, 0});
  CHECK(sizes(partition{0, 3}) == std::vector<std::uint64_t>{0, 0, 0});
  CHECK(partition{0, 3, 16}.padded() == 0);
}

TEST_CASE("the parts tile the elements, in the smallest aligned slices that hold them") {
  int wrong = 0;
  for (std::uint64_t const parts : {1U, 2U, 3U, 4U, 5U, 7U, 8U}) {
    for (std::uint64_t const alignment : {1U, 2U, 3U, 16U, 32U}) {
      for (std::uint64_t elements = 0; elements <= 300; ++elements) {
        std::uint64_t slice = 0;
        while (slice * parts < elements) {
          slice += alignment;
        }
        partition const cut{elements, parts, alignment};
        std::uint64_t next = 0;  // the first element that no part has had yet
        for (std::uint64_t part = 0; part < parts; ++part) {
          bool const starts_there = cut.offset(part) == next || cut.size(part) == 0;
          wrong += starts_there && cut.offset(part) == part * slice ? 0 : 1;
          next += cut.size(part);
        }
        bool const right = next == elements && cut.slice() == slice &&
                           cut.padded() == slice * parts &&
                           cut.padding() == slice * parts - elements;
        wrong += right ? 0 : 1;
      }
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("sizes past 2^31 and up to 2^64 - 1 are exact") {
  constexpr partition past_int{2'147'483'653, 8};  // 2^31 + 5
  static_assert(past_int.slice() == 268'435'457);
  CHECK(past_int.size(6) == 268'435'457);
  CHECK(past_int.size(7) == 268'435'454);

  constexpr partition huge{9'223'372'036'854'775'807, 3};  // 2^63 - 1
  static_assert(huge.slice() == 3'074'457'345'618'258'603);
  CHECK(huge.offset(2) == 6'148'914'691'236'517'206);
  CHECK(huge.size(2) == 3'074'457'345'618'258'601);

  constexpr partition whole{largest, 3};  // a multiple of 3
  static_assert(whole.padding() == 0);
  CHECK(whole.size(2) == 6'148'914'691'236'517'205);
  CHECK(partition{largest, 1}.size(0) == largest);
}

TEST_CASE("a padded size past 64 bits is refused") {
  CHECK_THROWS_WITH_AS(
      (partition{largest, 2}),
      "partition: expected a padded size that fits 64 bits, actual 18446744073709551615 elements "
      "over 2 parts aligned to 1",
      zero::usage_error);
  CHECK_THROWS_WITH_AS(
      (partition{largest, 1, 2}),
      "round_up: expected a multiple of 2 that fits 64 bits, actual 18446744073709551615 to be "
      "rounded up",
      zero::usage_error);
}

TEST_CASE("no parts and no alignment are refused") {
  CHECK_THROWS_WITH_AS((partition{4, 0}), "partition: expected at least 1 part, actual 0",
                       zero::usage_error);
  CHECK_THROWS_WITH_AS((partition{4, 2, 0}),
                       "partition: expected an alignment of at least 1 element, actual 0",
                       zero::usage_error);
}
