// SPDX-License-Identifier: MIT
#include <zero/comm/thread_group.hpp>
#include <zero/device/host.hpp>

#include <doctest/doctest.h>
#include <support/thrown.hpp>
#include <support/watchdog.hpp>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using zero::dtype;
using zero::detail::collective;
using zero::detail::operation;
using zero::detail::thread_group;

/// The host, whose sums and copies fail in the thread that `fails` names.
struct faulty : zero::host {
  static inline thread_local bool fails = false;

  static void copy(stream& on, zero::const_any_span from, zero::any_span to) {
    if (fails) {
      throw std::runtime_error{"no kernel"};
    }
    zero::host::copy(on, from, to);
  }
};

/// A group of ranks that are threads.
template <class Device = zero::host>
struct ranks {
  explicit ranks(int size) : group{tree, size} {
    for (int rank = 0; rank < size; ++rank) {
      group.member(rank).deadline_ms = 60'000;
    }
  }

  /// What each rank's `function(rank)` throws.
  template <class Function>
  std::vector<test::thrown> run(Function const& function) {
    test::watchdog const limit;
    std::vector<test::thrown> out(static_cast<std::size_t>(group.size()));
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < group.size(); ++rank) {
      threads.emplace_back([&, rank] {
        out[static_cast<std::size_t>(rank)] = test::what_throws([&] { function(rank); });
      });
    }
    threads.clear();
    return out;
  }

  std::mutex tree;
  thread_group<Device> group;
};

/// An exchange of one byte.
collective exchange_of(std::byte const& mine, std::span<std::byte> all) {
  return {.op = operation::exchange,
          .count = 1,
          .input = &mine,
          .input_bytes = 1,
          .output = all.data(),
          .output_bytes = all.size()};
}

/// An all-gather of one float.
collective gather_of(float const& mine, std::span<float> all) {
  return {.op = operation::all_gather,
          .count = all.size(),
          .input = std::as_bytes(std::span{&mine, 1}).data(),
          .input_bytes = sizeof mine,
          .output = std::as_writable_bytes(all).data(),
          .output_bytes = all.size_bytes()};
}

}  // namespace

TEST_CASE("control calls and payload calls are counted apart, from 1") {
  ranks<> all{3};
  auto const failures = all.run([&](int rank) {
    zero::host_stream stream;
    for (std::uint64_t round = 1; round <= 5; ++round) {
      float const number = static_cast<float>(10 * rank) + static_cast<float>(round);
      std::array<float, 3> numbers{};
      all.group.payload.issue(rank);
      all.group.run_payload(rank, gather_of(number, numbers), stream);
      CHECK(numbers[2] == 20 + static_cast<float>(round));
      if (round % 2 == 0) {
        auto const mine = static_cast<std::byte>(rank);
        std::array<std::byte, 3> bytes{};
        CHECK(all.group.control.issue_alone(rank));
        CHECK(all.group.run_control(rank, exchange_of(mine, bytes)) == round / 2);
        CHECK(bytes[1] == std::byte{1});
      }
    }
    CHECK(all.group.payload.ended(rank) == 5);
    CHECK(all.group.control.ended(rank) == 2);
    CHECK(all.group.member(rank).peer_bytes_read == 5 * 2 * sizeof(float));
  });
  for (test::thrown const& each : failures) {
    CHECK_MESSAGE(each.kind == test::kind::nothing, each.message);
  }
}

TEST_CASE("a group is unused once every rank has left and ended every call of both channels") {
  ranks<> all{2};
  all.group.leave(0);
  CHECK_FALSE(all.group.is_unused());
  all.group.payload.issue(1);
  all.group.leave(1);
  CHECK_FALSE(all.group.is_unused());
  all.group.payload.end(1);
  CHECK(all.group.is_unused());
  CHECK(all.group.control.issue_alone(0));
  CHECK_FALSE(all.group.is_unused());
  all.group.control.end(0);
  CHECK(all.group.is_unused());
}

TEST_CASE("a call that throws has ended, too, and leaves no one to wait for") {
  ranks<> all{2};
  all.group.failure.fail(1, [] { return std::string{"enough"}; });
  zero::host_stream stream;
  float const number = 1;
  std::array<float, 2> numbers{};
  all.group.payload.issue(0);
  test::thrown const here =
      test::failure_of([&] { all.group.run_payload(0, gather_of(number, numbers), stream); });
  CHECK(here.message == "enough");
  CHECK(here.origin == 1);
  all.group.leave(0);
  all.group.leave(1);
  CHECK(all.group.is_unused());
}

TEST_CASE("a call that a stream never comes to fails the group with the stream's own failure") {
  for (bool const known : {true, false}) {
    ranks<> all{2};
    auto const failures = all.run([&](int rank) {
      float const number = 1;
      std::array<float, 2> numbers{};
      collective const call = gather_of(number, numbers);
      all.group.payload.issue(rank);
      if (rank == 1) {
        auto const cause = known ? std::make_exception_ptr(std::runtime_error{"disk full"})
                                 : std::make_exception_ptr(42);
        all.group.discard(1, call, cause);
        return;
      }
      zero::host_stream stream;
      all.group.run_payload(0, call, stream);
    });
    CHECK(failures[0].kind == test::kind::communication);
    CHECK(failures[0].message ==
          "all_gather: not run, since the stream failed before it: " +
              std::string{known ? "disk full" : "an exception of unknown type"} + " (rank 1)");
    CHECK(failures[0].origin == 1);
    CHECK(all.group.payload.ended(1) == 1);
  }
}

TEST_CASE("a device that fails in one rank's part of a call fails the group, and no peer waits") {
  ranks<faulty> all{3};
  auto const failures = all.run([&](int rank) {
    faulty::fails = rank == 2;
    zero::host_stream stream;
    float const number = 1;
    std::array<float, 3> numbers{};
    all.group.payload.issue(rank);
    all.group.run_payload(rank, gather_of(number, numbers), stream);
  });
  CHECK(failures[2].kind == test::kind::other);  // its own
  CHECK(failures[2].message == "no kernel");
  for (std::size_t const peer : {0U, 1U}) {
    CHECK(failures[peer].kind == test::kind::communication);
    CHECK(failures[peer].message == "all_gather: no kernel");
    CHECK(failures[peer].origin == 2);
  }
}

TEST_CASE("a result that meets a peer's memory is found on the rank that would write it") {
  ranks<> all{2};
  std::array<float, 4> shared{};
  auto const failures = all.run([&](int rank) {
    zero::host_stream stream;
    float const number = 1;
    // Elements 0 and 1, and 1 and 2.
    auto const numbers = std::span{shared}.subspan(static_cast<std::size_t>(rank), 2);
    all.group.payload.issue(rank);
    all.group.run_payload(rank, gather_of(number, numbers), stream);
  });
  for (test::thrown const& each : failures) {
    CHECK(each.kind == test::kind::communication);
    CHECK_MESSAGE(
        each.says({"all_gather #1: expected memory of its own for every rank, actual a result that "
                   "overlaps rank ",
                   "'s (rank "}),
        each.message);
  }
  CHECK(shared == std::array<float, 4>{});  // nothing was written
}
