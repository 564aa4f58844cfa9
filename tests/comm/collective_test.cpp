// SPDX-License-Identifier: MIT
#include <zero/comm/collective.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <string>
#include <vector>

namespace {

using namespace zero::detail;
using zero::combine;
using zero::dtype;
using zero::reduction;

collective const usual{.op = operation::reduce_scatter,
                       .how = combine::overwrite,
                       .what = reduction::sum,
                       .input_dtype = dtype::float32,
                       .output_dtype = dtype::float32,
                       .root = 0,
                       .count = 8};

/// `usual` with one thing changed, and what rank 2 is told to differ in from rank 1.
struct variant {
  collective call;
  std::string difference;
};

/// In the order in which differences are looked for.
std::vector<variant> variants() {
  std::vector<variant> out(8, {usual, {}});
  out[0].call.op = operation::all_gather;
  out[0].difference = "expected reduce_scatter as on rank 1, actual all_gather (rank 2)";
  out[1].call.count = 9;
  out[1].difference = "expected 8 elements as on rank 1, actual 9 elements (rank 2)";
  out[2].call.input_dtype = dtype::bfloat16;
  out[2].difference = "expected float32 as on rank 1, actual bfloat16 (rank 2)";
  out[3].call.output_dtype = dtype::float16;
  out[3].difference = "expected float32 results as on rank 1, actual float16 results (rank 2)";
  out[4].call.how = combine::add;
  out[4].difference = "expected overwrite as on rank 1, actual add (rank 2)";
  out[5].call.what = reduction::average;
  out[5].difference = "expected sum as on rank 1, actual average (rank 2)";
  out[6].call.root = 3;
  out[6].difference = "expected root 0 as on rank 1, actual root 3 (rank 2)";
  out[7].call.place = 5;
  out[7].difference =
      "expected the place in the symmetric window as on rank 1, actual another (rank 2)";
  return out;
}

}  // namespace

TEST_CASE("calls agree where nothing that matters differs; where their memory is does not matter") {
  std::array<std::byte, 8> memory{};
  collective elsewhere = usual;
  elsewhere.input = memory.data();
  elsewhere.input_bytes = 4;
  elsewhere.output = memory.data() + 4;
  elsewhere.output_bytes = 4;
  CHECK(agree(usual, elsewhere));
  CHECK(difference(usual, 0, elsewhere, 1).empty());
}

TEST_CASE(
    "a difference names expected and actual with their ranks, and no agreement overlooks it") {
  for (variant const& each : variants()) {
    CHECK(difference(usual, 1, each.call, 2) == each.difference);
    CHECK_FALSE(agree(usual, each.call));
    CHECK_FALSE(agree(each.call, usual));
    CHECK(agree(each.call, each.call));
  }
}

TEST_CASE("of several differences the first one is named: the operation, the size, the types") {
  std::vector<variant> const all = variants();
  collective every = usual;
  for (std::size_t last = all.size(); last-- > 0;) {
    collective const& one = all[last].call;
    every.op = one.op != usual.op ? one.op : every.op;
    every.count = one.count != usual.count ? one.count : every.count;
    every.input_dtype = one.input_dtype != usual.input_dtype ? one.input_dtype : every.input_dtype;
    every.output_dtype =
        one.output_dtype != usual.output_dtype ? one.output_dtype : every.output_dtype;
    every.how = one.how != usual.how ? one.how : every.how;
    every.what = one.what != usual.what ? one.what : every.what;
    every.root = one.root != usual.root ? one.root : every.root;
    every.place = one.place != usual.place ? one.place : every.place;
    CHECK(difference(usual, 1, every, 2) == all[last].difference);
  }
}

TEST_CASE("an exchange counts bytes") {
  collective mine{.op = operation::exchange, .count = 8};
  collective other = mine;
  other.count = 0;
  CHECK(difference(mine, 0, other, 3) == "expected 8 bytes as on rank 0, actual 0 bytes (rank 3)");
}

TEST_CASE("ranges overlap where they have a byte in common") {
  std::array<std::byte, 16> memory{};
  std::byte* const m = memory.data();
  for (std::size_t a = 0; a <= 8; ++a) {
    for (std::size_t b = 0; b <= 8; ++b) {
      for (std::size_t a_bytes = 0; a_bytes <= 3; ++a_bytes) {
        for (std::size_t b_bytes = 0; b_bytes <= 3; ++b_bytes) {
          bool common = false;
          for (std::size_t i = 0; i < memory.size(); ++i) {
            common = common || (i >= a && i < a + a_bytes && i >= b && i < b + b_bytes);
          }
          CHECK(overlap(m + a, a_bytes, m + b, b_bytes) == common);
        }
      }
    }
  }
  CHECK_FALSE(overlap(nullptr, 0, nullptr, 0));
  CHECK_FALSE(overlap(nullptr, 0, m, 16));
}

TEST_CASE("a rank writes into a peer's memory where its result meets the peer's input or result") {
  std::array<std::byte, 32> memory{};
  std::byte* const m = memory.data();
  auto const with = [](std::byte const* input, std::byte* output) {
    collective out = usual;
    out.input = input;
    out.input_bytes = 8;
    out.output = output;
    out.output_bytes = 8;
    return out;
  };
  collective const mine = with(m, m + 8);
  CHECK_FALSE(mine.writes_into(with(m, m + 16)));  // both read the same
  CHECK(mine.writes_into(with(m + 15, m + 24)));
  CHECK(mine.writes_into(with(m + 24, m + 15)));
  CHECK_FALSE(mine.writes_into(with(m + 16, m + 24)));
  CHECK_FALSE(mine.writes_into(with(m + 24, m)));  // there the peer writes into this rank's input
  CHECK(with(m + 24, m).writes_into(mine));
}

TEST_CASE("each operation has the name that users call it by") {
  CHECK(name(operation::reduce_scatter) == "reduce_scatter");
  CHECK(name(operation::all_gather) == "all_gather");
  CHECK(name(operation::all_reduce) == "all_reduce");
  CHECK(name(operation::broadcast) == "broadcast");
  CHECK(name(operation::barrier) == "barrier");
  CHECK(name(operation::exchange) == "exchange");
  CHECK(name(operation::split) == "split");
}
