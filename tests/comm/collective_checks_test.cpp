// SPDX-License-Identifier: MIT
#include <zero/comm/collective_checks.hpp>

#include <doctest/doctest.h>
#include <support/thrown.hpp>

#include <array>
#include <chrono>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace {

using zero::any_span;
using zero::combine;
using zero::const_any_span;
using zero::dtype;
using zero::reduction;
using zero::detail::collective;
using zero::detail::collective_checks;
using zero::detail::operation;

constexpr std::array types{dtype::float32, dtype::float64, dtype::float16, dtype::bfloat16};

/// Memory for elements of any type.
struct memory {
  alignas(16) std::array<std::byte, 1024> bytes{};

  any_span at(std::size_t first_byte, std::size_t count, dtype type = dtype::float32) {
    return {bytes.data() + first_byte, count, type};
  }
};

}  // namespace

TEST_CASE("a call has the count of the larger span, the types, and where this rank's bytes are") {
  memory m;
  collective_checks const second{1, 4};
  collective call = second.reduce_scatter(m.at(0, 8, dtype::bfloat16), m.at(512, 2), combine::add,
                                          reduction::average);
  CHECK(call.op == operation::reduce_scatter);
  CHECK(call.count == 8);
  CHECK(call.input_dtype == dtype::bfloat16);
  CHECK(call.output_dtype == dtype::float32);
  CHECK(call.how == combine::add);
  CHECK(call.what == reduction::average);
  CHECK(call.input == m.bytes.data());
  CHECK(call.input_bytes == 16);
  CHECK(call.output == m.bytes.data() + 512);
  CHECK(call.output_bytes == 8);

  call = second.all_gather(m.at(512, 2), m.at(0, 8));
  CHECK(call.count == 8);
  CHECK(call.input_bytes == 8);
  CHECK(call.output_bytes == 32);
}

TEST_CASE("of a broadcast only the ranks that aren't the root write") {
  memory m;
  for (int const rank : {0, 1, 2}) {
    collective const call = collective_checks{rank, 3}.broadcast(m.at(0, 4, dtype::float16), 1);
    CHECK(call.input == m.bytes.data());
    CHECK(call.output_bytes == (rank == 1 ? 0 : 8));
    CHECK(call.output_dtype == dtype::float16);  // on every rank, or they would not agree
    CHECK(call.root == 1);
  }
}

TEST_CASE("a shard may be the rank's own slice of full, and nothing else in it") {
  memory m;
  for (int const ranks : {1, 2, 3, 4, 8}) {
    auto const size = static_cast<std::size_t>(ranks);
    for (int rank = 0; rank < ranks; ++rank) {
      collective_checks const mine{rank, ranks};
      auto const full = m.at(128, 4 * size);
      for (std::size_t place = 0; place <= 4 * size - 4; ++place) {
        auto const shard = m.at(128 + 4 * place, 4);
        std::string const expected =
            place == 4 * static_cast<std::size_t>(rank)
                ? ""
                : ": expected spans apart, or a shard that is the rank's slice of full, actual an "
                  "overlap at byte ";
        std::string const suffix = " (rank " + std::to_string(rank) + ")";
        std::string const scatter = test::message_of([&] {
          static_cast<void>(mine.reduce_scatter(full, shard, combine::overwrite, reduction::sum));
        });
        CHECK(scatter == (expected.empty()
                              ? ""
                              : "reduce_scatter" + expected + std::to_string(4 * place) + suffix));
        std::string const gather =
            test::message_of([&] { static_cast<void>(mine.all_gather(shard, full)); });
        CHECK(gather == (expected.empty() ? ""
                                          : "all_gather" + expected + (place == 0 ? "" : "-") +
                                                std::to_string(4 * place) + suffix));
      }
      // Side by side is apart.
      CHECK_NOTHROW(static_cast<void>(mine.all_gather(m.at(112, 4), full)));
      CHECK_NOTHROW(static_cast<void>(mine.all_gather(m.at(128 + 16 * size, 4), full)));
    }
  }
}

TEST_CASE("a slice of another type is an overlap, wherever it is") {
  memory m;
  CHECK(test::message_of([&] {
          static_cast<void>(collective_checks{0, 2}.reduce_scatter(
              m.at(0, 4, dtype::bfloat16), m.at(0, 2), combine::overwrite, reduction::sum));
        }) ==
        "reduce_scatter: expected spans apart, or a shard that is the rank's slice of full, actual "
        "an overlap at byte 0 (rank 0)");
  CHECK(test::message_of([&] {
          static_cast<void>(collective_checks{0, 2}.all_reduce(
              m.at(0, 4), m.at(0, 4, dtype::bfloat16), combine::overwrite, reduction::sum));
        }) ==
        "all_reduce: expected spans apart, or (without add) the same, actual an overlap at byte 0 "
        "(rank 0)");
}

TEST_CASE("an exchange in place is at the rank's own bytes of all, and its sizes don't overflow") {
  memory m;
  collective_checks const last{2, 3};
  auto const bytes = std::span{m.bytes};
  auto const all = bytes.first(12);
  CHECK(last.exchange(bytes.subspan(8, 4), all).count == 4);
  CHECK(test::message_of([&] { static_cast<void>(last.exchange(bytes.first(4), all)); }) ==
        "exchange: expected spans apart, or mine that is the rank's slice of all, actual an "
        "overlap at byte 0 (rank 2)");
  CHECK(test::message_of([&] { static_cast<void>(last.exchange(bytes.subspan(20, 5), all)); }) ==
        "exchange: expected 5 bytes for each of 3 ranks, actual 12 (rank 2)");
  CHECK(test::message_of([&] {
          static_cast<void>(last.exchange(bytes.subspan(20, 4), bytes.first(13)));
        }) == "exchange: expected 4 bytes for each of 3 ranks, actual 13 (rank 2)");
  // Three times this is 2 modulo 2^64.
  std::size_t const many = (~std::size_t{0} / 3) + 1;
  CHECK(test::message_of([&] {
          static_cast<void>(
              last.exchange(std::span{static_cast<std::byte const*>(m.bytes.data() + 100), many},
                            bytes.first(2)));
        }) == "exchange: expected " + std::to_string(many) +
                  " bytes for each of 3 ranks, actual 2 (rank 2)");
}

TEST_CASE("a null pointer is fine for no elements, and named with its bytes for some") {
  memory m;
  collective_checks const alone{0, 1};
  any_span const nothing{nullptr, 0, dtype::float64};
  any_span const nowhere{nullptr, 3, dtype::float64};
  auto const reduce = [&](const_any_span full, any_span result) {
    return test::message_of([&] {
      static_cast<void>(alone.all_reduce(full, result, combine::overwrite, reduction::sum));
    });
  };
  CHECK(reduce(nothing, nothing).empty());
  std::string const expected =
      "all_reduce: expected memory for 24 bytes, actual a null pointer (rank 0)";
  CHECK(reduce(nowhere, m.at(0, 3, dtype::float64)) == expected);
  CHECK(reduce(m.at(0, 3, dtype::float64), nowhere) == expected);
}

TEST_CASE("a result has the input's type, or float32 and 16 bits go together") {
  memory m;
  for (dtype const from : types) {
    for (dtype const to : types) {
      bool const half_from = from == dtype::float16 || from == dtype::bfloat16;
      bool const half_to = to == dtype::float16 || to == dtype::bfloat16;
      bool const works =
          from == to || (from == dtype::float32 && half_to) || (half_from && to == dtype::float32);
      std::string const accepted = from == dtype::float64   ? ""
                                   : from == dtype::float32 ? " or of 16 bits"
                                                            : " or float32";
      std::string const refusal =
          works ? ""
                : ": expected a result of " + std::string{zero::name(from)} + accepted +
                      ", actual " + std::string{zero::name(to)} + " (rank 1)";
      collective_checks const second{1, 2};
      CHECK(test::message_of([&] {
              static_cast<void>(second.all_reduce(m.at(0, 4, from), m.at(512, 4, to),
                                                  combine::overwrite, reduction::sum));
            }) == (works ? "" : "all_reduce" + refusal));
      CHECK(test::message_of([&] {
              static_cast<void>(second.reduce_scatter(m.at(0, 4, from), m.at(512, 2, to),
                                                      combine::overwrite, reduction::sum));
            }) == (works ? "" : "reduce_scatter" + refusal));
    }
  }
}

TEST_CASE("no elements are cut into shards of none, and the cut is checked before the types") {
  memory m;
  collective_checks const first{0, 4};
  CHECK(first.all_gather(m.at(0, 0), m.at(0, 0)).count == 0);
  CHECK(test::message_of([&] {
          static_cast<void>(first.all_gather(m.at(0, 1), m.at(64, 6, dtype::float64)));
        }) == "all_gather: expected a multiple of 4 elements, actual 6 (rank 0)");
}

TEST_CASE("roots, colors and deadlines at the edge of what is accepted") {
  memory m;
  collective_checks const second{1, 3};
  auto const data = m.at(0, 1);
  CHECK_NOTHROW(static_cast<void>(second.broadcast(data, 0)));
  CHECK_NOTHROW(static_cast<void>(second.broadcast(data, 2)));
  CHECK(test::message_of([&] { static_cast<void>(second.broadcast(data, 3)); }) ==
        "broadcast: expected a root in [0, 3), actual 3 (rank 1)");
  CHECK_NOTHROW(second.split(0));
  CHECK(test::message_of([&] { second.split(-1); }) ==
        "split: expected a color of at least 0, actual -1 (rank 1)");
  CHECK_NOTHROW(second.deadline(std::chrono::milliseconds{1}));
  CHECK(test::message_of([&] { second.deadline(std::chrono::milliseconds{-5}); }) ==
        "set_deadline: expected at least 1 ms, actual -5 ms (rank 1)");
}
