// SPDX-License-Identifier: MIT
#include <doctest/doctest.h>
#include <support/formula.hpp>
#include <support/model_cases.hpp>
#include <zero/shard/layout.hpp>
#include <zero/train/memory_map.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace {

using zero::category;
using zero::memory_map;

zero::dtype dtype_of(formula::type of) {
  switch (of) {
    case formula::type::f64: return zero::dtype::float64;
    case formula::type::f16: return zero::dtype::float16;
    case formula::type::bf16: return zero::dtype::bfloat16;
    case formula::type::f32: break;
  }
  return zero::dtype::float32;
}

struct described {
  std::vector<zero::unit_spec> units;
  std::vector<std::uint64_t> value_stays;
  std::vector<std::uint64_t> gradient_stays;
};

described describe(test::model_case const& of) {
  described out;
  for (auto const& unit : of.units) {
    zero::unit_spec& spec = out.units.emplace_back();
    for (test::entry const& e : unit) {
      if (e.tied) {
        spec.tied.push_back(e.name);
        continue;
      }
      formula::type const reduced = formula::width(e.value) == 2 ? of.reduced : e.value;
      spec.parameters.push_back({.name = e.name,
                                 .size = e.elements,
                                 .value = dtype_of(e.value),
                                 .gradient = dtype_of(e.gradient),
                                 .reduced = dtype_of(reduced),
                                 .trainable = !e.frozen});
      out.value_stays.push_back(e.value_stays ? e.elements * formula::width(e.value) : 0);
      out.gradient_stays.push_back(e.gradient_stays ? e.elements * formula::width(e.gradient) : 0);
    }
  }
  return out;
}

/// Ranges of bytes that must not meet.
class ranges {
 public:
  void add(std::uint64_t begin, std::uint64_t bytes) {
    if (begin != memory_map::none && bytes != 0) {
      ranges_.emplace_back(begin, begin + bytes);
    }
  }

  [[nodiscard]] bool aligned() const {
    return std::all_of(ranges_.begin(), ranges_.end(),
                       [](auto const& range) { return range.first % 64 == 0; });
  }
  [[nodiscard]] bool apart() {
    std::sort(ranges_.begin(), ranges_.end());
    for (std::size_t i = 1; i < ranges_.size(); ++i) {
      if (ranges_[i].first < ranges_[i - 1].second) {
        return false;
      }
    }
    return true;
  }
  [[nodiscard]] std::uint64_t end() const {
    std::uint64_t out = 0;
    for (auto const& range : ranges_) {
      out = std::max(out, range.second);
    }
    return out;
  }

 private:
  std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges_;
};

/// The bytes of bucket `b` in a slot, whose segments must lie apart in it.
template <class Wanted, class Width>
std::uint64_t slot_bytes(zero::layout const& layout, memory_map const& map, std::size_t b,
                         std::uint64_t memory_map::segment::*offset, Wanted wanted, Width width) {
  ranges inside;
  for (std::size_t const s : layout.buckets()[b].segments) {
    if (wanted(s)) {
      inside.add(map.segments[s].*offset, layout.segments()[s].cut.padded() * width(s));
    }
  }
  CHECK(inside.aligned());
  CHECK(inside.apart());
  return inside.end();
}

void check(zero::layout const& layout, memory_map const& map,
           zero::memory_map_options const& options) {
  ranges all;
  zero::stage const& at = options.stage;
  for (std::size_t s = 0; s < layout.segments().size(); ++s) {
    zero::layout::segment const& segment = layout.segments()[s];
    memory_map::segment const& where = map.segments[s];
    std::uint64_t const slice = segment.cut.slice();
    std::uint64_t const padded = segment.cut.padded();
    std::uint64_t const b = zero::size_bytes(segment.gradient);
    std::uint64_t const g = zero::size_bytes(segment.reduced);
    all.add(where.values,
            (at.shards_parameters() ? slice : padded) * zero::size_bytes(segment.value));
    all.add(where.gradients, padded * b);
    if (segment.trainable && where.gradients != memory_map::none && b == g) {
      std::uint64_t const mine = at.reduces_whole() ? 0 : options.rank * slice * g;
      CHECK(where.reduced == where.gradients + mine);  // in place
    } else {
      all.add(where.reduced, (at.reduces_whole() ? padded : slice) * g);
    }
    std::uint64_t const width = segment.value == zero::dtype::float64 ? 8 : 4;
    for (std::uint64_t const state : where.states) {
      all.add(state, (at.replicates_updates() ? padded : slice) * width);
    }
    if (!segment.trainable) {
      CHECK(where.gradients == memory_map::none);
      CHECK(where.reduced == memory_map::none);
      CHECK(where.states.empty());
    }
  }
  for (std::size_t id = 0; id < layout.parameters().size(); ++id) {
    zero::parameter_spec const& spec = layout.parameters()[id].spec;
    all.add(map.value_homes[id], spec.size * zero::size_bytes(spec.value));
    all.add(map.gradient_homes[id], spec.size * zero::size_bytes(spec.gradient));
  }
  std::uint64_t gathered = 0;
  std::uint64_t unreduced = 0;
  std::uint64_t staged = 0;
  for (std::size_t b = 0; b < layout.buckets().size(); ++b) {
    auto const value_width = [&](std::size_t s) {
      return zero::size_bytes(layout.segments()[s].value);
    };
    auto const gradient_width = [&](std::size_t s) {
      return zero::size_bytes(layout.segments()[s].gradient);
    };
    auto const trainable = [&](std::size_t s) { return layout.segments()[s].trainable; };
    if (at.shards_parameters()) {
      std::uint64_t const here = slot_bytes(
          layout, map, b, &memory_map::segment::gather_offset, [](std::size_t) { return true; },
          value_width);
      all.add(at.keep_after_forward ? map.gather_slots[b] : memory_map::none, here);
      gathered = std::max(gathered, here);
    }
    if (options.policy.per_microbatch) {
      unreduced =
          std::max(unreduced, slot_bytes(layout, map, b, &memory_map::segment::gradient_offset,
                                         trainable, gradient_width));
    }
    staged = std::max(
        {staged,
         slot_bytes(
             layout, map, b, &memory_map::segment::gradient_staging,
             [&](std::size_t s) { return map.segments[s].staged_gradients; }, gradient_width),
         slot_bytes(
             layout, map, b, &memory_map::segment::value_staging,
             [&](std::size_t s) {
               return map.segments[s].staged_values && trainable(s) && !at.replicates_updates();
             },
             value_width)});
  }
  for (std::uint64_t const slot : map.gather_slots) {
    all.add(slot, at.keep_after_forward ? 0 : gathered);
  }
  for (std::uint64_t const slot : map.gradient_slots) {
    all.add(slot, unreduced);
    CHECK(slot >= map.symmetric_bytes);
  }
  CHECK(map.symmetric_bytes + map.gradient_slots.size() * zero::round_up(unreduced, 64) ==
        map.bytes.arena());
  all.add(map.staging, staged);
  all.add(map.control, options.control_bytes);
  all.add(map.scratch, options.scratch_bytes);
  CHECK((staged == 0) == (map.staging == memory_map::none));

  CHECK(all.aligned());
  CHECK(all.apart());
  CHECK(all.end() <= map.bytes.arena());
  std::uint64_t total = 0;
  std::uint64_t real = 0;
  for (memory_map::region const& region : map.regions) {
    CHECK(region.total_bytes % 64 == 0);
    CHECK(region.real_bytes <= region.total_bytes);
    total += region.total_bytes;
    real += region.real_bytes;
  }
  CHECK(total == map.bytes.arena());
  CHECK(total - real == map.bytes.padding);
}

void check_all(std::vector<test::model_case> const& models, int below_stage) {
  for (test::model_case const& each : models) {
    described const model = describe(each);
    for (test::run_case const& run : test::run_cases()) {
      if (run.formula.stage >= below_stage) {
        continue;
      }
      for (test::shape_case const& shape : test::shape_cases()) {
        for (std::uint64_t const ranks : {1U, 3U, 8U}) {
          formula::settings const settings = test::settings_of(run, shape, ranks);
          zero::layout const layout{
              model.units,
              ranks,
              {.bucket_bytes = settings.bucket_bytes, .alignment = settings.alignment}};
          for (std::uint64_t const rank : {std::uint64_t{0}, ranks - 1}) {
            zero::memory_map_options const options{.stage = run.stage,
                                                   .policy = run.policy,
                                                   .rank = rank,
                                                   .states = 2,
                                                   .value_stays = model.value_stays,
                                                   .gradient_stays = model.gradient_stays,
                                                   .control_bytes = 1000,
                                                   .scratch_bytes = 700};
            INFO(test::title(each, run, settings, rank));
            check(layout, memory_map{layout, options}, options);
          }
        }
      }
    }
  }
}

}  // namespace

TEST_CASE("everything in the arena has a place of its own, at a multiple of 64 bytes") {
  check_all(test::model_cases(), 4);
}

TEST_CASE("so has what tensors that can't be rebound need") {
  check_all(test::staying_cases(true), 2);
  check_all(test::staying_cases(false), 3);
}

TEST_CASE("a map by hand: one bucket of bfloat16 weights and a float norm, rank 1 of 2") {
  // Alignment 32 elements (64 bytes of bfloat16). Weights: 40 + 24 in slices of 64 elements, since
  // the second starts at 64 and ends at 88. Norm: 10 in slices of 32.
  zero::layout const layout{
      {{.parameters = {{"w", 40, zero::dtype::bfloat16, zero::dtype::bfloat16},
                       {"v", 24, zero::dtype::bfloat16, zero::dtype::bfloat16},
                       {"norm", 10}},
        .tied = {}}},
      2,
      {}};
  auto const map_of = [&](zero::stage at, zero::accumulation policy) {
    return memory_map{layout,
                      {.stage = at,
                       .policy = policy,
                       .rank = 1,
                       .states = 2,
                       .value_stays = {0, 0, 0},
                       .gradient_stays = {0, 0, 0}}};
  };
  memory_map const local = map_of(zero::stage1{}, zero::local_accumulate{});
  CHECK(local.segments[0].values == 0);       // 128 * 2 = 256 bytes
  CHECK(local.segments[0].gradients == 256);  // 256 bytes
  CHECK(local.segments[0].reduced == 512);    // a slice: 64 * 4 = 256 bytes
  CHECK(local.segments[0].states == std::vector<std::uint64_t>{768, 1024, 1280});  // master, m, v
  CHECK(local.segments[1].values == 1536);            // 64 * 4 = 256 bytes
  CHECK(local.segments[1].gradients == 1792);         // 256 bytes
  CHECK(local.segments[1].reduced == 1792 + 32 * 4);  // in place: the second slice
  CHECK(local.segments[1].states == std::vector<std::uint64_t>{2048, 2176});
  CHECK(local.bytes.arena() == 2304);
  CHECK(local.bytes[category::parameters] == 64 * 2 + 10 * 4);
  CHECK(local.bytes[category::gradients] == 64 * 2 + 24 * 4 + 10 * 4);  // v is in this rank's slice
  CHECK(local.bytes[category::optimizer_state] == 3 * 24 * 4);          // the norm is all rank 0's
  CHECK(local.gather_slots.empty());
  CHECK(local.gradient_slots.empty());
  CHECK(local.staging == memory_map::none);
  CHECK(local.scratch == memory_map::none);
  CHECK(local.symmetric_bytes == 2304);

  memory_map const sharded = map_of(zero::stage3{.prefetch = 0}, zero::reduce_per_microbatch{});
  CHECK(sharded.segments[0].values == 0);     // a slice: 128 bytes
  CHECK(sharded.segments[0].reduced == 128);  // 256 bytes
  CHECK(sharded.segments[0].states == std::vector<std::uint64_t>{384, 640, 896});
  CHECK(sharded.segments[0].gradients == memory_map::none);
  CHECK(sharded.segments[1].values == 1152);
  CHECK(sharded.gather_slots == std::vector<std::uint64_t>{1664});  // one: 256 + 256 bytes
  CHECK(sharded.segments[0].gather_offset == 0);
  CHECK(sharded.segments[1].gather_offset == 256);
  CHECK(sharded.gradient_slots == std::vector<std::uint64_t>{2176});  // there is one bucket
  CHECK(sharded.symmetric_bytes == 2176);
  CHECK(sharded.bytes.arena() == 2688);

  // What a step keeps beside tensors is behind them, and is padding.
  memory_map const with_control{layout,
                                {.stage = zero::stage1{},
                                 .policy = zero::local_accumulate{},
                                 .rank = 1,
                                 .states = 2,
                                 .value_stays = {0, 0, 0},
                                 .gradient_stays = {0, 0, 0},
                                 .control_bytes = 100}};
  zero::memory_bytes expected = local.bytes;
  expected.padding += 128;
  CHECK(local.control == memory_map::none);
  CHECK(with_control.control == 2304);
  CHECK(with_control.bytes == expected);
}
