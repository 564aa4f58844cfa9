// SPDX-License-Identifier: MIT
#include <zero/device/arena.hpp>
#include <zero/device/host.hpp>
#include <zero/device/memory_resource.hpp>

#include <doctest/doctest.h>
#include <support/thrown.hpp>

#include <cstddef>
#include <new>
#include <stdexcept>
#include <utility>

namespace {

using arena = zero::arena<zero::host>;

/// A user's allocator that counts, and that fails when it is told to.
struct pool {
  long calls = 0;
  std::size_t live_bytes = 0;
  bool throws = false;
  bool gives_null = false;

  zero::memory_resource resource() { return {allocate, deallocate, this}; }

  static void* allocate(std::size_t bytes, void* self) {
    auto& me = *static_cast<pool*>(self);
    ++me.calls;
    if (me.throws) {
      throw std::runtime_error{"the pool is empty"};
    }
    if (me.gives_null) {
      return nullptr;
    }
    me.live_bytes += bytes;
    return ::operator new(bytes, std::align_val_t{64});
  }
  static void deallocate(void* memory, std::size_t bytes, void* self) {
    if (memory != nullptr) {
      static_cast<pool*>(self)->live_bytes -= bytes;
      ::operator delete(memory, std::align_val_t{64});
    }
  }
};

}  // namespace

TEST_CASE("memory goes back to the allocator that it came from, also from a moved arena") {
  pool left;
  pool right;
  {
    arena first{64, left.resource()};
    arena second{192, right.resource()};
    first = std::move(second);
    CHECK(left.live_bytes == 0);
    CHECK(right.live_bytes == 192);
    first = arena{128};  // of the device's own
    CHECK(right.live_bytes == 0);
    first = arena{256, left.resource()};
    CHECK(left.live_bytes == 256);
  }
  CHECK(left.live_bytes == 0);
  CHECK(left.calls == 2);
  CHECK(right.calls == 1);
}

TEST_CASE("an allocator that throws is heard, and is given nothing back") {
  pool empty{.throws = true};
  CHECK(test::message_of<std::runtime_error>([&] {
          arena const memory{64, empty.resource()};
        }) == "the pool is empty");
  CHECK(empty.live_bytes == 0);
}

TEST_CASE("an allocator that gives no memory is refused") {
  pool broken{.gives_null = true};
  CHECK(test::message_of([&] {
          arena const memory{64, broken.resource()};
        }) == "memory_resource: expected memory at a multiple of 64 bytes, actual none");
}

TEST_CASE("an allocator isn't asked for no bytes") {
  pool idle;
  { arena const memory{0, idle.resource()}; }
  CHECK(idle.calls == 0);
  CHECK(idle.live_bytes == 0);
}
