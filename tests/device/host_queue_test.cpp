// SPDX-License-Identifier: MIT
#include <zero/device/host_queue.hpp>

#include <doctest/doctest.h>
#include <support/thrown.hpp>
#include <support/watchdog.hpp>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <stdexcept>
#include <thread>
#include <vector>

namespace {

using zero::detail::host_queue;
using zero::detail::stream_work;

/// Work that says whether it ran or was discarded, and when.
struct witness {
  std::vector<int>* order;
  int number;

  void operator()() const { order->push_back(number); }
  void discarded(std::exception_ptr const&) const noexcept { order->push_back(-number); }
};

}  // namespace

TEST_CASE("what was enqueued and what is finished is counted, discarded work included") {
  test::watchdog const limit;
  host_queue queue;
  CHECK(queue.enqueued() == 0);
  CHECK(queue.finished() == 0);
  queue.wait(0);
  for (int i = 0; i < 3; ++i) {
    queue.enqueue([] {});
  }
  CHECK(queue.enqueued() == 3);
  queue.wait(3);
  CHECK(queue.finished() == 3);
  queue.enqueue([] { throw std::runtime_error{"disk full"}; });
  queue.enqueue([] {});
  CHECK(test::what_throws([&] { queue.wait(5); }).message == "disk full");
  CHECK(queue.enqueued() == 5);
  CHECK(queue.finished() == 5);
}

TEST_CASE("who waits for less than what failed hears of no failure") {
  test::watchdog const limit;
  host_queue queue;
  std::atomic<bool> go{false};
  queue.enqueue([] {});
  queue.enqueue([&go] {
    while (!go) {
      std::this_thread::yield();
    }
    throw std::runtime_error{"disk full"};
  });
  CHECK_NOTHROW(queue.wait(1));
  go = true;
  CHECK(test::what_throws([&] { queue.wait(2); }).message == "disk full");
  CHECK_NOTHROW(queue.wait(1));
  CHECK_NOTHROW(queue.wait(0));
}

TEST_CASE("after a failure work is discarded in order, over more than a ring") {
  test::watchdog const limit;
  std::vector<int> order;
  int const most = 2 * static_cast<int>(host_queue::capacity) + 3;
  {
    host_queue queue;
    queue.enqueue(witness{&order, 1});
    queue.enqueue([] { throw 42; });  // NOLINT: no std::exception
    for (int i = 2; i <= most; ++i) {
      queue.enqueue(witness{&order, i});
    }
    CHECK_THROWS_AS(queue.wait(2), int);
  }  // waits for all of it
  std::vector<int> expected{1};
  for (int i = 2; i <= most; ++i) {
    expected.push_back(-i);
  }
  CHECK(order == expected);
}

TEST_CASE("work of the largest size and alignment is whole at every place of the ring") {
  struct largest {
    alignas(alignof(std::max_align_t)) std::array<std::uint64_t, 14> words;
    std::atomic<int>* right;
    std::uint64_t number;

    void operator()() const {
      bool whole = reinterpret_cast<std::uintptr_t>(this) % alignof(std::max_align_t) == 0;
      for (std::uint64_t const word : words) {
        whole = whole && word == number * 3 + 1;
      }
      *right += whole ? 1 : 0;
    }
  };
  static_assert(sizeof(largest) == 128 && stream_work<largest>);
  test::watchdog const limit;
  std::atomic<int> right{0};
  host_queue queue;
  for (std::uint64_t i = 0; i < 300; ++i) {
    largest work{{}, &right, i};
    work.words.fill(i * 3 + 1);
    queue.enqueue(work);
  }
  queue.wait(300);
  CHECK(right == 300);
}

TEST_CASE("work that changes while it runs changes its own copy") {
  test::watchdog const limit;
  host_queue queue;
  int seen = 0;
  auto work = [&seen, count = 0]() mutable { seen += ++count; };
  for (int i = 0; i < 200; ++i) {  // also where the ring holds what ran before
    queue.enqueue(work);
  }
  queue.wait(200);
  CHECK(seen == 200);
}

struct aligned_to_64 {
  alignas(64) char byte;
  void operator()() const {}
};
static_assert(!stream_work<aligned_to_64>);
