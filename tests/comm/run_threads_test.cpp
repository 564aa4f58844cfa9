// SPDX-License-Identifier: MIT
#include <zero/comm/run_threads.hpp>

#include <doctest/doctest.h>
#include <comm/ranks.hpp>
#include <support/thrown.hpp>

#include <atomic>
#include <chrono>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using namespace std::chrono_literals;
using test::run_ranks;
using zero::thread_communicator;

/// What all ranks do while one of them fails: wait for it, in the group or in a part of it.
void wait_for_all(thread_communicator& comm) {
  zero::host_stream stream;
  comm.barrier(stream);
}

}  // namespace

TEST_CASE("every rank runs once, in a thread of its own") {
  for (int const ranks : {1, 2, 3, 4, 8}) {
    std::vector<int> runs(static_cast<std::size_t>(ranks));
    std::vector<std::thread::id> threads(runs.size());
    run_ranks(ranks, [&](thread_communicator& comm) {
      CHECK(comm.size() == ranks);
      ++runs[static_cast<std::size_t>(comm.rank())];
      threads[static_cast<std::size_t>(comm.rank())] = std::this_thread::get_id();
      wait_for_all(comm);
    });
    CHECK(runs == std::vector<int>(runs.size(), 1));
    CHECK(std::set<std::thread::id>(threads.begin(), threads.end()).size() == runs.size());
  }
}

TEST_CASE("no ranks, or no time, is refused") {
  auto const nothing = [](thread_communicator&) { CHECK(false); };
  for (int const ranks : {0, -1}) {
    CHECK(test::message_of([&] { zero::run_threads(ranks, nothing); }) ==
          "thread_communicator: expected at least 1 rank, actual " + std::to_string(ranks));
  }
  CHECK(test::message_of([&] { zero::run_threads(2, nothing, {.deadline = 0ms}); }) ==
        "set_deadline: expected at least 1 ms, actual 0 ms (rank 0)");
}

TEST_CASE("the error of the rank that failed comes out, not those of its peers") {
  for (int const ranks : {1, 2, 3, 4, 8}) {
    for (int culprit = 0; culprit < ranks; ++culprit) {
      std::atomic<int> ended{0};
      CHECK_THROWS_WITH_AS(run_ranks(ranks,
                                     [&](thread_communicator& comm) {
                                       struct counter {
                                         std::atomic<int>& count;
                                         ~counter() { ++count; }
                                       } const at_end{ended};
                                       auto part = comm.split(0, comm.rank());
                                       wait_for_all(part);
                                       if (comm.rank() == culprit) {
                                         throw std::out_of_range{"layer 17"};
                                       }
                                       // The part reports that the culprit left before the group
                                       // does.
                                       wait_for_all(part);
                                     }),
                           "layer 17", std::out_of_range);
      CHECK(ended == ranks);
    }
  }
}

TEST_CASE("peers learn why a rank failed") {
  std::vector<test::thrown> failures(3);
  CHECK_THROWS_WITH(run_ranks(3,
                              [&](thread_communicator& comm) {
                                if (comm.rank() == 1) {
                                  throw std::runtime_error{"layer 17"};
                                }
                                auto& mine = failures[static_cast<std::size_t>(comm.rank())];
                                mine = test::failure_of([&] { wait_for_all(comm); });
                              }),
                    "layer 17");
  CHECK(failures[0].message == "aborted by rank 1: layer 17");
  CHECK(failures[2].message == failures[0].message);
}

TEST_CASE("an exception of any type comes out") {
  CHECK_THROWS_AS(run_ranks(2,
                            [](thread_communicator& comm) {
                              if (comm.rank() == 0) {
                                throw 42;  // NOLINT: no std::exception
                              }
                              wait_for_all(comm);
                            }),
                  int);
}

TEST_CASE("a communication error comes out if there is no other") {
  CHECK_THROWS_AS(run_ranks(2,
                            [](thread_communicator& comm) {
                              if (comm.rank() == 0) {
                                wait_for_all(comm);
                              }
                            }),
                  zero::communication_error);
  CHECK_THROWS_WITH_AS(run_ranks(3,
                                 [](thread_communicator& comm) {
                                   comm.abort("disk full");
                                   wait_for_all(comm);
                                 }),
                       doctest::Contains("disk full"), zero::communication_error);
}

TEST_CASE("a rank that hides its error from run_threads ends it without one") {
  run_ranks(2, [](thread_communicator& comm) {
    CHECK(test::failure_of([&] {
            comm.abort("a test");
            wait_for_all(comm);
          }).says("a test"));
  });
}

TEST_CASE("a function and a function object, shared by all ranks, can be run") {
  struct counting {
    std::atomic<int> calls{0};
    void operator()(thread_communicator&) { ++calls; }
  };
  counting object;
  run_ranks(3, object);
  CHECK(object.calls == 3);
  run_ranks(2, wait_for_all);
}
