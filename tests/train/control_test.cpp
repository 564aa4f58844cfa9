// SPDX-License-Identifier: MIT
#include <zero/device/host.hpp>
#include <zero/optim/adamw.hpp>
#include <zero/optim/sgd.hpp>
#include <zero/train/control.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using zero::detail::control_map;

/// A device that sums in four blocks.
struct four_blocks {
  static constexpr std::size_t reduce_blocks = 4;
};

/// Where each range begins, and what it holds at least, in the order of the memory.
template <class Map>
std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges(Map const& map,
                                                            std::uint64_t parameters,
                                                            std::uint64_t ranks,
                                                            std::uint64_t optimizer_bytes) {
  return {{map.state, 96},
          {map.optimizer, optimizer_bytes},
          {map.constants_of, parameters * map.constants_bytes},
          {map.steps, parameters * 8},
          {map.had, parameters},
          {map.types, parameters},
          {map.message, 40 + parameters},
          {map.messages, ranks * map.message_bytes},
          {map.sum, 16},
          {map.sums, ranks * 16}};
}

}  // namespace

// What peers read of each other, and the host of the device.
static_assert(sizeof(zero::detail::step_header) == 40 && sizeof(zero::norm_sum) == 16);
static_assert(std::is_trivially_copyable_v<zero::detail::step_header> &&
              std::is_trivially_copyable_v<zero::detail::step_report>);

TEST_CASE(
    "three parameters on two ranks: each range follows the one before, in units of 16 bytes") {
  control_map<four_blocks, zero::plain_sgd> const map{3, 2};
  CHECK(map.state == 0);
  CHECK(map.optimizer == 96);
  CHECK(map.constants_bytes == 32);  // a learning rate and a decay, of 16 bytes each
  CHECK(map.constants_of == 96 + 16);
  CHECK(map.steps == 112 + 3 * 32);
  CHECK(map.had == 208 + 32);  // 24 bytes of counts
  CHECK(map.types == 240 + 16);
  CHECK(map.message_bytes == 48);  // 40, and a flag for each parameter
  CHECK(map.message == 256 + 16);
  CHECK(map.messages == 272 + 48);
  CHECK(map.sum == 320 + 2 * 48);
  CHECK(map.sums == 416 + 16);
  CHECK(map.scratch == 432 + 2 * 16);
  CHECK(map.bytes == 464 + 4 * 16);  // a sum for each block
}

TEST_CASE_TEMPLATE("no two ranges overlap, and each starts at a multiple of 16 bytes", Optimizer,
                   zero::plain_sgd, zero::sgd, zero::adamw) {
  for (std::uint64_t const parameters : {0U, 1U, 7U, 8U, 9U, 16U, 17U, 1000U}) {
    for (std::uint64_t const ranks : {1U, 2U, 3U, 4U, 8U}) {
      control_map<zero::host, Optimizer> const map{parameters, ranks};
      std::uint64_t end = 0;
      for (auto const& [first, bytes] : ranges(map, parameters, ranks, sizeof(Optimizer))) {
        CHECK(first % 16 == 0);
        CHECK(first >= end);
        CHECK(first - end < 16);
        end = first + bytes;
      }
      CHECK(map.message_bytes % 16 == 0);
      CHECK(map.bytes >= end);
      CHECK(map.bytes - end < 16);
    }
  }
}
