// SPDX-License-Identifier: MIT
#include <doctest/doctest.h>

#include <zero/device/wait.hpp>

#include <atomic>
#include <chrono>
#include <ctime>
#include <thread>
#include <vector>

using zero::detail::waiter;
using namespace std::chrono_literals;

TEST_CASE("a condition that holds already is true even past the deadline") {
  waiter done;
  CHECK(done.wait_until([] { return true; }, waiter::clock::now() - 1s));
}

TEST_CASE("a condition that never holds is false at the deadline and not before") {
  waiter done;
  for (auto const delay : {0us, 1us, 50us, 1000us, 20000us}) {
    auto const deadline = waiter::clock::now() + delay;
    CHECK_FALSE(done.wait_until([] { return false; }, deadline));
    CHECK(waiter::clock::now() >= deadline);
  }
}

TEST_CASE("a notification wakes waiters that spin, that yield and that sleep") {
  for (auto const delay : {0us, 1us, 50us, 1000us, 20000us}) {
    waiter done;
    std::atomic<bool> ready{false};
    int written = 0;
    std::thread notifier{[&] {
      std::this_thread::sleep_for(delay);
      written = 1;
      ready.store(true, std::memory_order_release);
      done.notify();
    }};
    CHECK(done.wait_until([&] { return ready.load(std::memory_order_acquire); }));
    CHECK(written == 1);
    notifier.join();
  }
}

TEST_CASE("eight threads take turns without a lost wake-up") {
  constexpr int threads = 8;
  constexpr int turns = 400;
  waiter turn_changed;
  std::atomic<int> turn{0};
  long sum = 0;  // guarded by the turns
  std::vector<std::thread> all;
  for (int rank = 0; rank < threads; ++rank) {
    all.emplace_back([&, rank] {
      for (int i = 0; i < turns; ++i) {
        int const mine = i * threads + rank;
        turn_changed.wait_until([&] { return turn.load(std::memory_order_acquire) == mine; });
        sum += mine;
        if (i % 64 == 0) {
          std::this_thread::sleep_for(300us);  // until the others sleep
        }
        turn.store(mine + 1, std::memory_order_release);
        turn_changed.notify();
      }
    });
  }
  for (auto& thread : all) {
    thread.join();
  }
  CHECK(sum == 3199L * 3200 / 2);
}

#if defined(__linux__)
TEST_CASE("a long wait costs no processor time") {
  auto const used = [] {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return std::chrono::seconds{time.tv_sec} + std::chrono::nanoseconds{time.tv_nsec};
  };
  waiter done;
  auto const before = used();
  done.wait_until([] { return false; }, waiter::clock::now() + 300ms);
  CHECK(used() - before < 30ms);
}
#endif
