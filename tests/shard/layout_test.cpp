// SPDX-License-Identifier: MIT
#include <zero/shard/layout.hpp>

#include <doctest/doctest.h>
#include <support/thrown.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

using zero::dtype;
using zero::layout;
using zero::layout_options;
using zero::parameter_spec;
using zero::unit_spec;

namespace {

using groups = std::vector<std::vector<std::size_t>>;

constexpr std::uint64_t world_sizes[] = {1, 2, 3, 4, 8};

parameter_spec fp32(std::string name, std::uint64_t size) {
  return {.name = std::move(name), .size = size};
}

parameter_spec bf16(std::string name, std::uint64_t size) {
  return {.name = std::move(name),
          .size = size,
          .value = dtype::bfloat16,
          .gradient = dtype::bfloat16,
          .reduced = dtype::float32};
}

parameter_spec frozen(parameter_spec of) {
  of.trainable = false;
  return of;
}

/// One fp32 parameter a unit, named 0, 1, ...
std::vector<unit_spec> units_of(std::vector<std::uint64_t> const& sizes) {
  std::vector<unit_spec> units;
  for (std::uint64_t const size : sizes) {
    units.push_back({.parameters = {fp32(std::to_string(units.size()), size)}, .tied = {}});
  }
  return units;
}

groups buckets_of(layout const& of) {
  groups out;
  for (layout::bucket const& each : of.buckets()) {
    out.push_back(each.units);
  }
  return out;
}

/// Buckets of fp32 units, `capacity` counted in elements.
groups joined(std::vector<std::uint64_t> const& sizes, std::uint64_t capacity) {
  return buckets_of(layout{units_of(sizes), 2, {.bucket_bytes = 4 * capacity}});
}

std::vector<std::uint64_t> offsets_of(layout const& of) {
  std::vector<std::uint64_t> out;
  for (layout::parameter const& each : of.parameters()) {
    out.push_back(each.offset);
  }
  return out;
}

bool mentions(std::string const& text, std::string const& part) {
  return text.find(part) != text.npos;
}

/// Check a layout from its parameters alone: every element of every parameter lies in one place of
/// one slice, nothing overlaps, and every parameter and slice starts where it is aligned.
void check_cover(layout const& of, std::uint64_t alignment) {
  std::vector<std::vector<int>> visits;  // of each element of each parameter, over all slices
  for (layout::parameter const& each : of.parameters()) {
    visits.emplace_back(each.spec.size, 0);
    CHECK(each.offset % alignment == 0);
  }
  for (std::size_t s = 0; s < of.segments().size(); ++s) {
    layout::segment const& segment = of.segments()[s];
    std::uint64_t const slice = segment.cut.slice();
    CHECK(slice % alignment == 0);
    std::vector<int> taken(slice * of.ranks(), 0);  // places of the segment
    std::uint64_t real = 0;
    for (std::uint64_t rank = 0; rank < of.ranks(); ++rank) {
      std::uint64_t in_slice = 0;
      of.for_each_piece(
          segment, rank * slice, (rank + 1) * slice,
          [&](std::size_t id, std::uint64_t first, std::uint64_t offset, std::uint64_t count) {
            CHECK(of.parameters()[id].segment == s);
            CHECK(offset == of.parameters()[id].offset + first);
            CHECK(offset >= rank * slice);
            CHECK(offset + count <= (rank + 1) * slice);
            for (std::uint64_t i = 0; i < count; ++i) {
              ++visits[id][first + i];
              ++taken[offset + i];
            }
            in_slice += count;
          });
      CHECK(of.real_in_slice(segment, rank) == in_slice);
      real += in_slice;
    }
    CHECK(segment.real == real);
    for (int const count : taken) {
      CHECK(count <= 1);
    }
  }
  for (std::vector<int> const& of_one : visits) {
    CHECK(of_one == std::vector<int>(of_one.size(), 1));
  }
}

}  // namespace

TEST_CASE("units are joined up to exactly the limit") {  // DeepSpeed#4321
  CHECK(joined({16, 16, 3}, 16) == groups{{0}, {1}, {2}});
  CHECK(joined({16}, 16) == groups{{0}});
  CHECK(joined({15, 1, 1}, 16) == groups{{0, 1}, {2}});
  CHECK(joined({15, 2}, 16) == groups{{0}, {1}});
  CHECK(joined({8, 8, 8, 8}, 16) == groups{{0, 1}, {2, 3}});
  CHECK(joined({1, 15, 16, 1, 15}, 16) == groups{{0, 1}, {2}, {3, 4}});
}

TEST_CASE("a unit larger than the limit is a bucket of its own, never cut and never joined") {
  CHECK(joined({17, 16, 3}, 16) == groups{{0}, {1}, {2}});
  CHECK(joined({3, 32, 3}, 16) == groups{{0}, {1}, {2}});
  CHECK(joined({3, 3, 33, 3, 3}, 16) == groups{{0, 1}, {2}, {3, 4}});
  CHECK(joined({33, 32, 17}, 16) == groups{{0}, {1}, {2}});
}

TEST_CASE("every bucket is filled, not only the first") {  // DeepSpeed#7415
  CHECK(joined({4, 4, 4, 4, 4, 4}, 10) == groups{{0, 1}, {2, 3}, {4, 5}});
}

TEST_CASE("a limit of no bytes joins nothing, a large one everything") {
  CHECK(joined({1, 0, 1}, 0) == groups{{0}, {1}, {2}});
  CHECK(joined({1, 0, 1}, 1'000'000) == groups{{0, 1, 2}});
  CHECK(joined({0, 0}, 1) == groups{{0, 1}});
  CHECK(joined({}, 16) == groups{});
}

TEST_CASE("the limit counts unpadded parameter bytes, of frozen parameters too") {
  // 8 bf16 and 4 fp32 are 32 bytes; padding would make 128 of them.
  std::vector<unit_spec> const units{{{bf16("a", 8), frozen(fp32("b", 4))}, {}},
                                     {{fp32("c", 8)}, {}}};
  CHECK(buckets_of(layout{units, 4, {.bucket_bytes = 64}}) == groups{{0, 1}});
  CHECK(buckets_of(layout{units, 4, {.bucket_bytes = 63}}) == groups{{0}, {1}});
}

TEST_CASE("a unit that owns a tied parameter is joined to neither neighbour") {
  std::vector<unit_spec> units = units_of({4, 4, 4, 4});
  units[3].tied = {"1"};
  layout const of{units, 2, {.bucket_bytes = 1024}};
  CHECK(buckets_of(of) == groups{{0}, {1}, {2, 3}});
  CHECK_FALSE(of.buckets()[0].tied);
  CHECK(of.buckets()[1].tied);
  CHECK_FALSE(of.buckets()[2].tied);
  CHECK(of.buckets()[1].users == std::vector<std::size_t>{1, 3});
  CHECK(of.units()[3].buckets == std::vector<std::size_t>{2, 1});
  CHECK(of.units()[3].tied == std::vector<std::size_t>{1});
  CHECK(of.units()[3].parameters == std::vector<std::size_t>{3});
}

TEST_CASE(
    "a tied parameter may be used before its unit, by many units, and be named twice in one") {
  std::vector<unit_spec> units = units_of({4, 4, 4});
  units[0].tied = {"1", "1"};
  units[2].tied = {"1"};
  layout const of{units, 2, {}};
  CHECK(of.units()[0].tied == std::vector<std::size_t>{1});
  CHECK(of.units()[0].buckets == std::vector<std::size_t>{0, 1});
  CHECK(of.buckets()[1].users == std::vector<std::size_t>{1, 0, 2});
  CHECK(of.parameters().size() == 3);  // stored once
}

TEST_CASE("a unit may consist of tied uses only") {
  std::vector<unit_spec> units = units_of({4});
  units.push_back({.parameters = {}, .tied = {"0"}});
  layout const of{units, 3, {.bucket_bytes = 1024}};
  CHECK(of.units()[1].parameters.empty());
  CHECK(of.buckets()[of.parameters()[0].bucket].users == std::vector<std::size_t>{0, 1});
}

TEST_CASE("bf16 weights, fp32 norms and frozen weights are three segments of a bucket") {
  std::vector<unit_spec> const units{
      {{bf16("weight", 100), fp32("norm", 10), frozen(bf16("table", 50)), bf16("more", 7)}, {}}};
  layout const of{units, 2, {}};
  CHECK(of.buckets().size() == 1);
  CHECK(of.segments().size() == 3);
  CHECK(of.segments()[0].value == dtype::bfloat16);
  CHECK(of.segments()[0].gradient == dtype::bfloat16);
  CHECK(of.segments()[0].reduced == dtype::float32);
  CHECK(of.segments()[0].trainable);
  CHECK(of.segments()[0].parameters == std::vector<std::size_t>{0, 3});
  CHECK(of.segments()[0].real == 107);
  CHECK(of.segments()[1].value == dtype::float32);
  CHECK(of.segments()[1].real == 10);
  CHECK_FALSE(of.segments()[2].trainable);
  CHECK(of.segments()[2].real == 50);
  CHECK(of.buckets()[0].segments == std::vector<std::size_t>{0, 1, 2});
  CHECK(of.buckets()[0].trainable);
}

TEST_CASE("frozen parameters of one type share a segment, whatever gradients they would have") {
  std::vector<unit_spec> const units{
      {{frozen(bf16("a", 3)), frozen(parameter_spec{.name = "b",
                                                    .size = 3,
                                                    .value = dtype::bfloat16,
                                                    .gradient = dtype::float32,
                                                    .reduced = dtype::bfloat16})},
       {}}};
  layout const of{units, 2, {}};
  CHECK(of.segments().size() == 1);
  CHECK_FALSE(of.buckets()[0].trainable);
}

TEST_CASE("parameters of one type with gradients of different types are segments apart") {
  parameter_spec wide = bf16("wide", 3);
  wide.gradient = dtype::float32;
  layout const of{{{{bf16("narrow", 3), wide}, {}}}, 2, {}};
  CHECK(of.segments().size() == 2);
}

TEST_CASE("joined units share segments, in order") {
  std::vector<unit_spec> const units{{{bf16("a", 3), fp32("b", 5)}, {}},
                                     {{fp32("c", 1), bf16("d", 2)}, {}}};
  layout const of{units, 1, {.bucket_bytes = 1024, .alignment = 1}};
  CHECK(of.segments().size() == 2);
  CHECK(of.segments()[0].parameters == std::vector<std::size_t>{0, 3});
  CHECK(of.segments()[1].parameters == std::vector<std::size_t>{1, 2});
  CHECK(offsets_of(of) == std::vector<std::uint64_t>{0, 0, 5, 3});
}

TEST_CASE("by default parameters and slices start at 64 bytes of the bucket's narrowest type") {
  // fp32: 16 elements. 5, then 20 from 16 to 36: 36 elements over 2 ranks are slices of 18, or 32
  // aligned.
  layout const wide{units_of({5, 20}), 2, {.bucket_bytes = 1024}};
  CHECK(offsets_of(wide) == std::vector<std::uint64_t>{0, 16});
  CHECK(wide.segments()[0].cut.elements() == 36);
  CHECK(wide.segments()[0].cut.slice() == 32);

  // bf16 in the bucket: 32 elements, for its fp32 segment too.
  layout const mixed{{{{fp32("a", 1), bf16("b", 1), fp32("c", 1)}, {}}}, 1, {}};
  CHECK(offsets_of(mixed) == std::vector<std::uint64_t>{0, 0, 32});

  // float64 alone: 8 elements, but a narrower gradient counts.
  parameter_spec twice{.name = "x",
                       .size = 1,
                       .value = dtype::float64,
                       .gradient = dtype::float64,
                       .reduced = dtype::float64};
  CHECK(layout{{{{twice}, {}}}, 1, {}}.segments()[0].cut.slice() == 8);
  twice.reduced = dtype::float32;
  CHECK(layout{{{{twice}, {}}}, 1, {}}.segments()[0].cut.slice() == 16);
  CHECK(layout{{{{frozen(twice)}, {}}}, 1, {}}.segments()[0].cut.slice() == 8);

  // A device may ask for more.
  CHECK(layout{units_of({1}), 1, {.alignment_bytes = 256}}.segments()[0].cut.slice() == 64);
}

TEST_CASE("an alignment of 1 element packs without gaps") {
  layout const of{units_of({5, 0, 1, 4}), 4, {.bucket_bytes = 1024, .alignment = 1}};
  CHECK(offsets_of(of) == std::vector<std::uint64_t>{0, 5, 5, 6});
  CHECK(of.segments()[0].cut.slice() == 3);  // 10 over 4
  CHECK(of.real_in_slice(of.segments()[0], 0) == 3);
  CHECK(of.real_in_slice(of.segments()[0], 3) == 1);
}

TEST_CASE("ranks beyond the last element own padding only") {  // pytorch/pytorch#108869
  layout const of{units_of({6}), 4, {.alignment = 1}};
  std::vector<std::uint64_t> real;
  for (std::uint64_t rank = 0; rank < 4; ++rank) {
    real.push_back(of.real_in_slice(of.segments()[0], rank));
  }
  CHECK(real == std::vector<std::uint64_t>{2, 2, 2, 0});
}

TEST_CASE("slices hold every element once, for any sizes, types and joins") {
  std::uint64_t state = 1;
  auto const random = [&state](std::uint64_t below) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    return (state >> 33U) % below;
  };
  for (std::uint64_t const ranks : world_sizes) {
    for (std::uint64_t const alignment : {0U, 1U, 3U, 32U}) {
      for (std::uint64_t const bucket_bytes : {0U, 100U, 1000U, 1'000'000U}) {
        std::vector<unit_spec> units(1 + random(8));
        std::size_t names = 0;
        for (unit_spec& unit : units) {
          for (std::uint64_t i = random(5); i > 0; --i) {
            std::uint64_t const size = random(4) == 0 ? random(2) : random(150);
            std::string const name = std::to_string(names++);
            parameter_spec const spec = random(2) == 0 ? fp32(name, size) : bf16(name, size);
            unit.parameters.push_back(random(4) == 0 ? frozen(spec) : spec);
          }
        }
        if (names > 0 && units.front().parameters.empty()) {
          units.front().tied = {"0"};
        }
        layout const of{units, ranks, {.bucket_bytes = bucket_bytes, .alignment = alignment}};
        check_cover(
            of, alignment == 0 ? 16 : alignment);  // 16 divides what 0 means for any bucket here
      }
    }
  }
}

TEST_CASE("zero-element parameters may be anywhere") {  // DeepSpeed#8279, #8297, #8375, #8467
  for (std::uint64_t const ranks : world_sizes) {
    for (std::uint64_t const bucket_bytes : {0U, 1024U}) {
      for (auto const& sizes : std::vector<std::vector<std::uint64_t>>{
               {8, 0, 24}, {8, 24, 0}, {0, 8, 24}, {0}, {0, 0, 0}}) {
        layout const of{units_of(sizes), ranks, {.bucket_bytes = bucket_bytes, .alignment = 1}};
        check_cover(of, 1);
        CHECK(of.parameters().size() == sizes.size());
      }
    }
  }
}

TEST_CASE("more than 2^31 elements keep their places") {
  std::uint64_t const many = (std::uint64_t{1} << 31U) + 5;
  std::vector<unit_spec> units = units_of({3, many, many, 7});
  layout const of{units, 3, {.bucket_bytes = 8 * many + 1000, .alignment = 1}};
  CHECK(buckets_of(of) == groups{{0, 1, 2, 3}});
  CHECK(offsets_of(of) == std::vector<std::uint64_t>{0, 3, 3 + many, 3 + 2 * many});
  layout::segment const& segment = of.segments()[0];
  std::uint64_t const total = 4'294'967'316;  // 2^32 + 20
  CHECK(segment.real == total);
  CHECK(segment.cut.slice() == 1'431'655'772);
  std::uint64_t sum = 0;
  for (std::uint64_t rank = 0; rank < 3; ++rank) {
    sum += of.real_in_slice(segment, rank);
  }
  CHECK(sum == total);
  // Joined up to the limit in bytes, which has more than 32 bits.
  CHECK(buckets_of(layout{units, 3, {.bucket_bytes = 8 * many + 12}}) == groups{{0, 1, 2}, {3}});
}

TEST_CASE("sizes whose bytes 64 bits can't count are refused") {
  std::uint64_t const limit = std::uint64_t{1} << 56U;
  // Over 4 ranks 2^56 - 4 elements need no padding, and 2^56 - 2 are padded to 2^56.
  layout const largest{units_of({limit - 4}), 4, {.alignment = 1}};
  CHECK(largest.segments()[0].cut.slice() == limit / 4 - 1);
  CHECK(mentions(test::message_of([&] {
                   layout{units_of({limit - 2}), 4, {.alignment = 1}};
                 }),
                 "expected fewer than 2^56 elements in a segment"));
  for (auto const& sizes :
       std::vector<std::vector<std::uint64_t>>{{limit},
                                               {limit - 1, 1},
                                               {1, ~std::uint64_t{0}},
                                               {~std::uint64_t{0} - 5, ~std::uint64_t{0} - 5}}) {
    std::string const what = test::message_of([&] {
      layout{units_of(sizes), 1, {.alignment = 1}};
    });
    CHECK(mentions(what, "expected fewer than 2^56 elements"));
  }
}

TEST_CASE("a parameter is found by its name") {
  layout const of{units_of({1, 2, 3}), 2, {.bucket_bytes = 8}};
  CHECK(of.find("2") == 2);
  CHECK(of.parameters()[2].unit == 2);
  CHECK(of.parameters()[2].bucket == 2);
  CHECK(of.find("3") == layout::none);
}

TEST_CASE("bad declarations are refused by name") {
  std::vector<unit_spec> twice = units_of({1, 2});
  twice[1].parameters[0].name = "0";
  CHECK(mentions(test::message_of([&] { layout{twice, 2, {}}; }), "'0'"));

  std::vector<unit_spec> unknown = units_of({1, 2});
  unknown[1].tied = {"embedding"};
  std::string const nobody = test::message_of([&] { layout{unknown, 2, {}}; });
  CHECK(mentions(nobody, "'embedding'"));
  CHECK(mentions(nobody, "unit 1"));

  std::vector<unit_spec> itself = units_of({1});
  itself[0].tied = {"0"};
  CHECK(mentions(test::message_of([&] { layout{itself, 2, {}}; }), "'0'"));

  CHECK(mentions(test::message_of([&] {
                   layout{units_of({1}), 0, {}};
                 }),
                 "expected at least 1 rank, actual 0"));
}
