// SPDX-License-Identifier: MIT
#include <doctest/doctest.h>

#include <zero/comm/run_threads.hpp>
#include <zero/comm/solo.hpp>
#include <zero/train/agreement.hpp>

#include <support/failures.hpp>

#include <cstddef>
#include <stdexcept>
#include <string>

namespace {

/// The message that every rank throws, when rank r has the text `texts(r)`; empty where none does.
template <class Texts>
std::string disagreement(int ranks, Texts texts) {
  test::failures const caught = test::run_failing(ranks, [&](zero::thread_communicator& comm) {
    zero::detail::agree(comm, "model", texts(comm.rank()));
  });
  for (test::thrown const& each : caught.ranks) {
    CHECK_MESSAGE(each.message == caught.ranks[0].message, caught.text());
    CHECK((each.kind == test::kind::usage || each.kind == test::kind::nothing));
  }
  return caught.ranks[0].message;
}

}  // namespace

TEST_CASE("equal texts agree, at any world size") {
  for (int const ranks : {1, 2, 3, 4, 8}) {
    CHECK(disagreement(ranks, [](int) { return "a\nb\n"; }).empty());
    CHECK(disagreement(ranks, [](int) { return ""; }).empty());
  }
  zero::solo alone;
  CHECK_NOTHROW(zero::detail::agree(alone, "model", "a\n"));
}

TEST_CASE("every rank gets the first line that differs from rank 0's, and which rank has it") {
  for (int const ranks : {2, 3, 4, 8}) {
    for (int odd = 1; odd < ranks; ++odd) {
      std::string const rank = std::to_string(odd);
      CHECK(disagreement(ranks, [odd](int r) { return r == odd ? "a\nx\nc\n" : "a\nb\nc\n"; }) ==
            "model: expected b (as rank 0), actual x (rank " + rank + ")");
      CHECK(disagreement(ranks, [odd](int r) { return r == odd ? "a\nb\n" : "a\nb\nc\n"; }) ==
            "model: expected c (as rank 0), actual  (rank " + rank + ")");
      CHECK(disagreement(ranks, [odd](int r) { return r == odd ? "" : "a\n"; }) ==
            "model: expected a (as rank 0), actual  (rank " + rank + ")");
    }
    CHECK(disagreement(ranks, [](int r) { return r == 0 ? "z\n" : "a\n"; }) ==
          "model: expected z (as rank 0), actual a (rank 1)");
  }
}

TEST_CASE("a line is found wherever it is") {
  for (std::size_t const odd : {0UL, 1UL, 2UL, 511UL, 512UL, 998UL, 999UL}) {
    auto const text = [odd](int rank) {
      std::string out;
      for (std::size_t i = 0; i < 1000; ++i) {
        out += std::to_string(rank == 2 && i >= odd ? i + 1 : i) + "\n";
      }
      return out;
    };
    CHECK(disagreement(3, text) == "model: expected " + std::to_string(odd) +
                                       " (as rank 0), actual " + std::to_string(odd + 1) +
                                       " (rank 2)");
  }
}

TEST_CASE("a failure of some ranks is thrown by all, with the first one's message") {
  for (int const ranks : {1, 2, 3, 4, 8}) {
    int const failing = ranks / 2;
    test::failures const caught = test::run_failing(ranks, [&](zero::thread_communicator& comm) {
      zero::detail::throw_together(
          comm, "bind", comm.rank() >= failing ? "no " + std::to_string(comm.rank()) : "");
    });
    std::string const which = std::to_string(failing);
    for (test::thrown const& each : caught.ranks) {
      CHECK(each.kind == test::kind::usage);
      CHECK(each.message == "bind: no " + which + " (rank " + which + ")");
    }
  }
}

TEST_CASE("no failure throws nothing, and a long message is cut") {
  zero::run_threads(3, [](zero::thread_communicator& comm) {
    CHECK_NOTHROW(zero::detail::throw_together(comm, "bind", ""));
  });
  zero::solo alone;
  test::thrown const caught = test::what_throws(
      [&] { zero::detail::throw_together(alone, "bind", std::string(10000, 'x')); });
  CHECK(caught.message.size() < 1000);
  CHECK(caught.says({"bind: xxx", "(rank 0)"}));
}
