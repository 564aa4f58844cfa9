// SPDX-License-Identifier: MIT
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

/// @file
/// Replaces the program's allocator by one that counts, for every thread and for all together:
/// included by one source of a test program. Memory with the alignment that `zero::host` asks for
/// is counted apart, too. The sanitizers of clang++ have an allocator that can't be replaced, and
/// that ends the program where there is no memory; there `available` is false, and nothing is
/// counted.

// Under a sanitizer too, memory that there isn't is an exception.
extern "C" char const* __asan_default_options() { return "allocator_may_return_null=1"; }
extern "C" char const* __tsan_default_options() { return "allocator_may_return_null=1"; }

namespace counting_allocator {

struct counts {
  long allocations = 0;
  long deallocations = 0;
  long live_bytes = 0;  ///< as asked for, without what the allocator adds
  long peak_bytes = 0;  ///< of `live_bytes`; may be set back
  long device_allocations = 0;
  long device_live_bytes = 0;  ///< allocated less deallocated by the thread
};

/// What the calling thread has done.
inline thread_local constinit counts of_thread{};

/// What all threads have done.
inline std::atomic<long> allocations{0};
inline std::atomic<long> deallocations{0};
inline std::atomic<long> live_bytes{0};
inline std::atomic<long> peak_bytes{0};

#if defined(__clang__)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer)
#define COUNTING_ALLOCATOR_NOT_AVAILABLE
#endif
#endif

#ifdef COUNTING_ALLOCATOR_NOT_AVAILABLE
inline constexpr bool available = false;
#else
inline constexpr bool available = true;

/// The alignments of `zero::host`: a cache line, or a huge page.
inline constexpr bool is_device(std::size_t alignment) {
  return alignment == 64 || alignment == std::size_t{2} << 20U;
}

/// The size is kept before the block, in as many bytes as the alignment asks for. Null without
/// memory.
inline void* allocate(std::size_t bytes, std::size_t alignment) noexcept {
  std::size_t const total = (bytes + 2 * alignment - 1) / alignment * alignment;
  if (total < bytes) {
    return nullptr;
  }
  auto* const start = static_cast<std::byte*>(std::aligned_alloc(alignment, total));
  if (start == nullptr) {
    return nullptr;
  }
  ::new (static_cast<void*>(start)) std::size_t{bytes};
  auto const size = static_cast<long>(bytes);
  ++of_thread.allocations;
  of_thread.live_bytes += size;
  if (of_thread.peak_bytes < of_thread.live_bytes) {
    of_thread.peak_bytes = of_thread.live_bytes;
  }
  if (is_device(alignment)) {
    ++of_thread.device_allocations;
    of_thread.device_live_bytes += size;
  }
  ++allocations;
  long const live = live_bytes += size;
  long peak = peak_bytes;
  while (peak < live && !peak_bytes.compare_exchange_weak(peak, live)) {
  }
  return start + alignment;
}

inline void* allocate_or_throw(std::size_t bytes, std::size_t alignment) {
  void* const memory = allocate(bytes, alignment);
  if (memory == nullptr) {
    throw std::bad_alloc{};
  }
  return memory;
}

inline void deallocate(void* memory, std::size_t alignment) noexcept {
  if (memory == nullptr) {
    return;
  }
  std::byte* const start = static_cast<std::byte*>(memory) - alignment;
  auto const size = static_cast<long>(*std::launder(reinterpret_cast<std::size_t*>(start)));
  ++of_thread.deallocations;
  of_thread.live_bytes -= size;
  of_thread.device_live_bytes -= is_device(alignment) ? size : 0;
  ++deallocations;
  live_bytes -= size;
  std::free(start);
}

inline constexpr std::size_t plain = __STDCPP_DEFAULT_NEW_ALIGNMENT__;
#endif

}  // namespace counting_allocator

#ifndef COUNTING_ALLOCATOR_NOT_AVAILABLE
// All forms: a sanitizer's library has those that are not here, and they would not call these.
[[gnu::noinline]] void* operator new(std::size_t n) {
  return counting_allocator::allocate_or_throw(n, counting_allocator::plain);
}
[[gnu::noinline]] void* operator new[](std::size_t n) {
  return counting_allocator::allocate_or_throw(n, counting_allocator::plain);
}
[[gnu::noinline]] void* operator new(std::size_t n, std::nothrow_t const& /*tag*/) noexcept {
  return counting_allocator::allocate(n, counting_allocator::plain);
}
[[gnu::noinline]] void* operator new[](std::size_t n, std::nothrow_t const& /*tag*/) noexcept {
  return counting_allocator::allocate(n, counting_allocator::plain);
}
[[gnu::noinline]] void* operator new(std::size_t n, std::align_val_t a) {
  return counting_allocator::allocate_or_throw(n, static_cast<std::size_t>(a));
}
[[gnu::noinline]] void* operator new[](std::size_t n, std::align_val_t a) {
  return counting_allocator::allocate_or_throw(n, static_cast<std::size_t>(a));
}
[[gnu::noinline]] void* operator new(std::size_t n, std::align_val_t a,
                                     std::nothrow_t const& /*tag*/) noexcept {
  return counting_allocator::allocate(n, static_cast<std::size_t>(a));
}
[[gnu::noinline]] void* operator new[](std::size_t n, std::align_val_t a,
                                       std::nothrow_t const& /*tag*/) noexcept {
  return counting_allocator::allocate(n, static_cast<std::size_t>(a));
}

[[gnu::noinline]] void operator delete(void* p) noexcept {
  counting_allocator::deallocate(p, counting_allocator::plain);
}
[[gnu::noinline]] void operator delete[](void* p) noexcept {
  counting_allocator::deallocate(p, counting_allocator::plain);
}
[[gnu::noinline]] void operator delete(void* p, std::size_t /*n*/) noexcept {
  counting_allocator::deallocate(p, counting_allocator::plain);
}
[[gnu::noinline]] void operator delete[](void* p, std::size_t /*n*/) noexcept {
  counting_allocator::deallocate(p, counting_allocator::plain);
}
[[gnu::noinline]] void operator delete(void* p, std::nothrow_t const& /*tag*/) noexcept {
  counting_allocator::deallocate(p, counting_allocator::plain);
}
[[gnu::noinline]] void operator delete[](void* p, std::nothrow_t const& /*tag*/) noexcept {
  counting_allocator::deallocate(p, counting_allocator::plain);
}
[[gnu::noinline]] void operator delete(void* p, std::align_val_t a) noexcept {
  counting_allocator::deallocate(p, static_cast<std::size_t>(a));
}
[[gnu::noinline]] void operator delete[](void* p, std::align_val_t a) noexcept {
  counting_allocator::deallocate(p, static_cast<std::size_t>(a));
}
[[gnu::noinline]] void operator delete(void* p, std::size_t /*n*/, std::align_val_t a) noexcept {
  counting_allocator::deallocate(p, static_cast<std::size_t>(a));
}
[[gnu::noinline]] void operator delete[](void* p, std::size_t /*n*/, std::align_val_t a) noexcept {
  counting_allocator::deallocate(p, static_cast<std::size_t>(a));
}
[[gnu::noinline]] void operator delete(void* p, std::align_val_t a,
                                       std::nothrow_t const& /*tag*/) noexcept {
  counting_allocator::deallocate(p, static_cast<std::size_t>(a));
}
[[gnu::noinline]] void operator delete[](void* p, std::align_val_t a,
                                         std::nothrow_t const& /*tag*/) noexcept {
  counting_allocator::deallocate(p, static_cast<std::size_t>(a));
}
#endif
