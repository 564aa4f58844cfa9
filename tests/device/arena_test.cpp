// SPDX-License-Identifier: MIT
#include <doctest/doctest.h>

#include <support/counting_allocator.hpp>
#include <support/thrown.hpp>
#include <zero/device/arena.hpp>
#include <zero/device/host.hpp>

#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

using arena = zero::arena<zero::host>;
using zero::category;

static_assert(!std::is_copy_constructible_v<arena> && std::is_nothrow_move_constructible_v<arena> &&
              std::is_nothrow_move_assignable_v<arena>);

TEST_CASE("ranges lie one after another, each at a multiple of 64 bytes") {
  arena memory{64 * 10};
  std::byte* const a = memory.take(category::parameters, 100, 100);
  std::byte* const b = memory.take(category::gradients, 64, 64);
  std::byte* const c = memory.take(category::staging, 1, 65);
  std::byte* const d = memory.take(category::optimizer_state, 0, 192);
  CHECK(reinterpret_cast<std::uintptr_t>(a) % 64 == 0);
  CHECK(b - a == 128);
  CHECK(c - a == 192);
  CHECK(d - a == 320);
  CHECK(arena::taken_bytes(100) == 128);
  CHECK(arena::taken_bytes(0) == 0);
}

TEST_CASE("the ledger counts real bytes by category and all others as padding") {
  arena memory{64 * 10};
  static_cast<void>(memory.take(category::parameters, 100, 100));    // 128
  static_cast<void>(memory.take(category::parameters, 60, 64));      // 64
  static_cast<void>(memory.take(category::gathered_units, 1, 321));  // 384
  static_cast<void>(memory.take(category::staging, 64, 64));         // 64
  zero::memory_bytes const& ledger = memory.ledger();
  CHECK(ledger[category::parameters] == 160);
  CHECK(ledger[category::gathered_units] == 1);
  CHECK(ledger[category::staging] == 64);
  CHECK(ledger[category::gradients] == 0);
  CHECK(ledger.padding == 28 + 4 + 383);
  CHECK(ledger.peak() == 640);
  CHECK(ledger.arena() == memory.size());
}

TEST_CASE("an arena is one allocation, and its ledger is what the allocator gave") {
  if (!counting_allocator::available) {
    return;
  }
  for (std::size_t const bytes : {std::size_t{128}, std::size_t{6400}, std::size_t{6} << 20U}) {
    long const calls = counting_allocator::allocations;
    long const live = counting_allocator::live_bytes;
    {
      arena memory{bytes};
      static_cast<void>(memory.take(category::gradients, bytes / 2 - 7, bytes / 2));
      static_cast<void>(memory.take(category::parameters, bytes / 2, bytes / 2));
      CHECK(counting_allocator::allocations == calls + 1);
      CHECK(counting_allocator::live_bytes - live == static_cast<long>(memory.ledger().peak()));
      CHECK(memory.ledger().padding == 7);
      arena const moved{std::move(memory)};
      CHECK(counting_allocator::live_bytes - live == static_cast<long>(moved.ledger().peak()));
    }
    CHECK(counting_allocator::allocations == calls + 1);
    CHECK(counting_allocator::live_bytes == live);
  }
}

TEST_CASE("an arena that is too small says what was asked for, and stays as it was") {
  arena memory{128};
  static_cast<void>(memory.take(category::gradients, 60, 60));
  CHECK(test::message_of([&] { static_cast<void>(memory.take(category::staging, 65, 65)); }) ==
        "arena::take: expected at most 64 bytes of staging, actual 128");
  CHECK(test::message_of([&] { static_cast<void>(memory.take(category::engine, 9, 8)); }) ==
        "arena::take: expected at most 8 real bytes of engine, actual 9");
  CHECK(memory.ledger().peak() == 64);
  CHECK(memory.take(category::staging, 64, 64) != nullptr);
  CHECK(test::message_of([&] { static_cast<void>(memory.take(category::staging, 1, 1)); }) ==
        "arena::take: expected at most 0 bytes of staging, actual 64");
}

TEST_CASE("an empty arena holds empty ranges only") {
  arena memory{0};
  CHECK(memory.size() == 0);
  CHECK(memory.take(category::parameters, 0, 0) == nullptr);
  CHECK(test::message_of([&] { static_cast<void>(memory.take(category::parameters, 1, 1)); }) ==
        "arena::take: expected at most 0 bytes of parameters, actual 64");
  arena const none;
  CHECK(none.ledger() == zero::memory_bytes{});
}

TEST_CASE("a moved arena keeps its addresses and its ledger, and leaves an empty one") {
  arena first{256};
  std::byte* const start = first.take(category::parameters, 64, 64);
  arena second{std::move(first)};
  CHECK(second.take(category::parameters, 64, 64) == start + 64);
  CHECK(first.size() == 0);  // NOLINT: moved from
  CHECK(first.ledger().peak() == 0);
  first = std::move(second);
  CHECK(first.take(category::parameters, 64, 64) == start + 128);
  CHECK(first.ledger()[category::parameters] == 192);
  CHECK(second.size() == 0);  // NOLINT: moved from
}

TEST_CASE("memory that doesn't exist is an error that names its size") {
  if (!counting_allocator::available) {
    return;
  }
  CHECK(test::message_of<zero::error>([] { arena const memory{std::size_t{1} << 60U}; }) ==
        "host::allocate: no memory for 1152921504606846976 bytes");
}

TEST_CASE("an arena takes its memory from a user's allocator, once, and gives it back") {
  struct allocator {
    std::vector<std::size_t> taken;
    std::vector<std::size_t> given_back;
    std::size_t shift = 0;

    static void* allocate(std::size_t bytes, void* self) {
      auto& me = *static_cast<allocator*>(self);
      me.taken.push_back(bytes);
      return static_cast<std::byte*>(::operator new(bytes + 64, std::align_val_t{64})) + me.shift;
    }
    static void deallocate(void* memory, std::size_t bytes, void* self) {
      auto& me = *static_cast<allocator*>(self);
      me.given_back.push_back(bytes);
      ::operator delete(static_cast<std::byte*>(memory) - me.shift, std::align_val_t{64});
    }
  };
  allocator mine;
  zero::memory_resource const from{allocator::allocate, allocator::deallocate, &mine};
  {
    arena memory{192, from};
    CHECK(memory.take(category::staging, 100, 100) != nullptr);
    arena const moved{std::move(memory)};
    CHECK(mine.taken == std::vector<std::size_t>{192});
    CHECK(mine.given_back.empty());
  }
  CHECK(mine.given_back == std::vector<std::size_t>{192});

  mine.shift = 8;
  CHECK(test::message_of([&] {
          arena const memory{64, from};
        }) ==
        "memory_resource: expected memory at a multiple of 64 bytes, actual at another address");
  CHECK(mine.given_back == std::vector<std::size_t>{192, 64});
  CHECK(test::message_of([&] {
          zero::memory_resource one;
          one.allocate = allocator::allocate;
          arena const memory{64, one};
        }) == "memory_resource: expected both functions or none, actual one");
}
