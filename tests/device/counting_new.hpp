// SPDX-License-Identifier: MIT
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

/// @file
/// Replaces the program's allocator by one that counts: included by one source of a test program.
/// The sanitizers of clang++ have an allocator that can't be replaced, and that ends the program
/// where there is no memory; there `available` is false, and what is counted stays 0.

// Under a sanitizer too, memory that there isn't is an exception.
extern "C" char const* __asan_default_options() { return "allocator_may_return_null=1"; }
extern "C" char const* __tsan_default_options() { return "allocator_may_return_null=1"; }

namespace counting_new {

inline std::atomic<long> calls{0};       ///< allocations so far
inline std::atomic<long> live_bytes{0};  ///< as asked for, without what the allocator adds
inline std::atomic<long> peak_bytes{0};  ///< of `live_bytes`; may be set back

#if defined(__clang__)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer)
#define COUNTING_NEW_NOT_AVAILABLE
#endif
#endif

#ifdef COUNTING_NEW_NOT_AVAILABLE
inline constexpr bool available = false;
#else
inline constexpr bool available = true;

/// The size is kept before the block, in as many bytes as the alignment asks for.
inline void* allocate(std::size_t bytes, std::size_t alignment) {
  std::size_t const total = (bytes + 2 * alignment - 1) / alignment * alignment;
  auto* const start = static_cast<std::byte*>(std::aligned_alloc(alignment, total));
  if (start == nullptr) {
    throw std::bad_alloc{};
  }
  ::new (static_cast<void*>(start)) std::size_t{bytes};
  ++calls;
  long const live = live_bytes += static_cast<long>(bytes);
  long peak = peak_bytes;
  while (peak < live && !peak_bytes.compare_exchange_weak(peak, live)) {
  }
  return start + alignment;
}

inline void deallocate(void* memory, std::size_t alignment) noexcept {
  if (memory != nullptr) {
    std::byte* const start = static_cast<std::byte*>(memory) - alignment;
    live_bytes -= static_cast<long>(*std::launder(reinterpret_cast<std::size_t*>(start)));
    std::free(start);
  }
}

inline constexpr std::size_t default_alignment = __STDCPP_DEFAULT_NEW_ALIGNMENT__;
#endif

}  // namespace counting_new

#ifndef COUNTING_NEW_NOT_AVAILABLE
// All forms but those of arrays, which call these.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  return counting_new::allocate(bytes, counting_new::default_alignment);
}
[[gnu::noinline]] void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return counting_new::allocate(bytes, static_cast<std::size_t>(alignment));
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  counting_new::deallocate(memory, counting_new::default_alignment);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  counting_new::deallocate(memory, counting_new::default_alignment);
}
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t alignment) noexcept {
  counting_new::deallocate(memory, static_cast<std::size_t>(alignment));
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t,
                                       std::align_val_t alignment) noexcept {
  counting_new::deallocate(memory, static_cast<std::size_t>(alignment));
}
[[gnu::noinline]] void* operator new(std::size_t bytes, std::nothrow_t const&) noexcept {
  try {
    return ::operator new(bytes);
  } catch (std::bad_alloc const&) {
    return nullptr;
  }
}
[[gnu::noinline]] void* operator new(std::size_t bytes, std::align_val_t alignment,
                                     std::nothrow_t const&) noexcept {
  try {
    return ::operator new(bytes, alignment);
  } catch (std::bad_alloc const&) {
    return nullptr;
  }
}
[[gnu::noinline]] void operator delete(void* memory, std::nothrow_t const&) noexcept {
  ::operator delete(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t alignment,
                                       std::nothrow_t const&) noexcept {
  ::operator delete(memory, alignment);
}
#endif
