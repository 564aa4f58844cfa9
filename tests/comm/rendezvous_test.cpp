// SPDX-License-Identifier: MIT
#include <zero/comm/rendezvous.hpp>

#include <doctest/doctest.h>
#include <support/watchdog.hpp>

#include <atomic>
#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

using namespace std::chrono_literals;
using zero::detail::failure_scope;
using zero::detail::meeting;
using zero::detail::phase;
using zero::detail::rendezvous;

void wait_for(std::atomic<bool> const& flag) {
  while (!flag) {
    std::this_thread::yield();
  }
}

}  // namespace

TEST_CASE("a rank that gives up waits for a peer that is reading") {
  for (phase const during : {phase::reducing, phase::copying}) {
    test::watchdog const limit;
    std::mutex tree;
    failure_scope failure{tree};
    rendezvous meet{2, failure};
    std::atomic<bool> reading{false};
    std::atomic<bool> read_on{false};
    std::atomic<bool> gave_up{false};

    std::thread reader{[&] {
      auto const sequence = meet.arrive(0, {});
      CHECK(meet.wait_for_arrivals(0, sequence, 60s) == meeting::complete);
      CHECK(meet.read_peers(0, sequence, during, phase::finished, [&] {
        reading = true;
        wait_for(read_on);
        CHECK_FALSE(gave_up);
      }));
      meet.end(0);
    }};
    std::thread quitter{[&] {
      auto const sequence = meet.arrive(1, {});
      CHECK(meet.wait_for_arrivals(1, sequence, 60s) == meeting::complete);
      wait_for(reading);
      failure.fail(1, [] { return std::string{"enough"}; });
      CHECK(meet.wait_for(sequence, phase::finished) == meeting::failed);
      meet.wait_until_unread(1);
      gave_up = true;
      meet.end(1);
    }};
    wait_for(reading);
    std::this_thread::sleep_for(20ms);  // let the quitter try
    CHECK_FALSE(gave_up);
    read_on = true;
    reader.join();
    quitter.join();
    CHECK(gave_up);
  }
}

TEST_CASE("a rank that comes to its copy after a failure reads nothing") {
  std::mutex tree;
  failure_scope failure{tree};
  rendezvous meet{2, failure};
  auto const sequence = meet.arrive(0, {});
  CHECK(meet.arrive(1, {}) == sequence);
  CHECK(meet.wait_for_arrivals(0, sequence, 60s) == meeting::complete);
  failure.fail(1, [] { return std::string{"enough"}; });
  meet.wait_until_unread(1);  // rank 0 may not read from here on
  bool read = false;
  CHECK_FALSE(meet.read_peers(0, sequence, phase::copying, phase::finished, [&] { read = true; }));
  CHECK_FALSE(read);
  CHECK(meet.wait_for(sequence, phase::finished) == meeting::failed);
}

TEST_CASE("a peer that is one call ahead still counts as having finished the one before") {
  test::watchdog const limit;
  std::mutex tree;
  failure_scope failure{tree};
  rendezvous meet{2, failure};
  for (int rank : {0, 1}) {
    CHECK(meet.arrive(rank, {}) == 1);
  }
  CHECK(meet.read_peers(1, 1, phase::copying, phase::finished, [] {}));
  CHECK(meet.read_peers(0, 1, phase::copying, phase::finished, [] {}));
  meet.end(1);
  CHECK(meet.arrive(1, {}) == 2);
  CHECK(meet.wait_for(1, phase::finished) == meeting::complete);
  CHECK(meet.waits_in(1) == 2);
  CHECK(meet.waits_in(0) == 0);
}

TEST_CASE("a rank is gone only once it has come to every call that it has issued") {
  std::mutex tree;
  failure_scope failure{tree};
  rendezvous meet{3, failure};
  meet.issue(1);
  meet.leave(1);
  CHECK(meet.first_gone(1) == 3);
  CHECK(meet.first_gone(2) == 1);
  meet.leave(0);
  CHECK(meet.first_gone(1) == 0);
  CHECK(meet.arrive(2, {}) == 1);
  CHECK(meet.wait_for_arrivals(2, 1, 60s) == meeting::absent);
}

TEST_CASE("two calls of one rank are not issued at once") {
  std::mutex tree;
  failure_scope failure{tree};
  rendezvous meet{1, failure};
  CHECK(meet.issue_alone(0));
  CHECK_FALSE(meet.issue_alone(0));
  meet.end(0);
  CHECK(meet.issue_alone(0));
}
