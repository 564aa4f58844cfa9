// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/any_span.hpp>
#include <zero/core/error.hpp>
#include <zero/device/concept.hpp>
#include <zero/device/host_convert.hpp>
#include <zero/device/host_copy.hpp>
#include <zero/device/host_stream.hpp>
#include <zero/device/ordered_sum.hpp>

#include <array>
#include <cstddef>
#include <cstring>
#include <new>
#include <span>
#include <string_view>

#if defined(__linux__)
#include <sys/mman.h>
#endif

/// @file
/// `host`: the device whose memory is the process's own and whose work runs on the processor.
/// Operations with kernels are templates, so that who doesn't call them doesn't compile them.

namespace zero::inline v0 {

class host {
 public:
  using stream = host_stream;
  using event = host_event;

  static constexpr std::string_view name = "host";
  /// Every allocation starts at a multiple of this.
  static constexpr std::size_t alignment_bytes = 64;
  static constexpr std::size_t reduce_blocks = 0;
  static constexpr bool has_host_memory = true;
  static constexpr bool any_collective_order = true;

  /// The engine runs in the caller.
  /// @throws zero::usage_error  `native` isn't null.
  [[nodiscard]] static stream engine_stream(void* native) {
    check_native(native);
    return stream{};
  }
  /// With `overlap`, a thread.
  [[nodiscard]] static stream communication_stream(bool overlap, void* native) {
    check_native(native);
    return stream{overlap};
  }

  /// Memory with indeterminate contents, by one aligned `operator new` of exactly `bytes`; 0 bytes
  /// give a null pointer. From 4 MiB on it is aligned for huge pages, and on Linux asks for them.
  /// @throws zero::error  there is not that much memory.
  [[nodiscard]] static void* allocate(std::size_t bytes) {
    if (bytes == 0) {
      return nullptr;
    }
    void* memory = nullptr;
    try {
      memory = ::operator new(bytes, alignment(bytes));
    } catch (std::bad_alloc const&) {
      throw error{detail::text("host::allocate: no memory for ", bytes, " bytes")};
    }
#if defined(__linux__)
    if (bytes >= huge_bytes) {
      ::madvise(memory, bytes, MADV_HUGEPAGE);  // a wish: small pages work too
    }
#endif
    return memory;
  }

  /// Give back what `allocate(bytes)` returned.
  static void deallocate(void* memory, std::size_t bytes) noexcept {
    ::operator delete(memory, alignment(bytes));
  }

  [[nodiscard]] static void* allocate_host(std::size_t bytes) { return allocate(bytes); }
  static void deallocate_host(void* memory, std::size_t bytes) noexcept {
    deallocate(memory, bytes);
  }

  /// Call `work()` at an end; what it throws is dropped.
  template <class Work>
  static void clean_up(Work const& work) noexcept {
    try {
      work();
    } catch (...) {  // was thrown before, or the next call throws it
    }
  }

  /// Set every element of `to` to zero.
  static void fill_zero(stream& stream, any_span to) {
    stream.enqueue([to] {
      if (!to.empty()) {
        std::memset(to.data(), 0, to.bytes());
      }
    });
  }

  /// Copy elements of one dtype. The spans don't overlap, or are the same.
  /// @throws zero::usage_error  another size or dtype.
  static void copy(stream& stream, const_any_span from, any_span to) {
    check_dtypes("host::copy", from, to);
    check_sizes("host::copy", from, to);
    stream.enqueue([from, to] { detail::host_copy(to.data(), from.data(), from.bytes()); });
  }

  /// Copy from the host, which is here, and wait.
  static void upload(stream& stream, const_any_span from, any_span to) {
    copy(stream, from, to);
    stream.synchronize();
  }
  /// Copy to the host, and wait.
  static void download(stream& stream, const_any_span from, any_span to) {
    upload(stream, from, to);
  }
  /// Copy to the host.
  static void publish(stream& stream, const_any_span from, any_span to) { copy(stream, from, to); }

  /// Convert elements between dtypes, rounding to nearest, ties to even. The spans don't overlap.
  /// @throws zero::usage_error  another size.
  template <class = void>
  static void convert(stream& stream, const_any_span from, any_span to) {
    check_sizes("host::convert", from, to);
    stream.enqueue([from, to] { detail::host_convert(from, to); });
  }

  /// Add elements to others: `sum` of one source. The spans don't overlap.
  /// @throws zero::usage_error  another size, or dtypes that `sum` doesn't take.
  template <class = void>
  static void add(stream& stream, const_any_span from, any_span to) {
    check_sizes("host::add", from, to);
    if (!can_sum(from.dtype(), to.dtype())) {
      check_dtypes("host::add", from, to);
    }
    stream.enqueue([from, to] {
      std::array<void const*, 1> const sources{from.data()};
      detail::ordered_sum(sources, from.dtype(), to, true, 1);
    });
  }

  /// to[i] = (sources[0][i] + sources[1][i] + ...) * scale, or with `add` that much more: in order,
  /// in the accumulate type of `source`, rounded to `to` once. With `add` the rounded value is
  /// added in the arithmetic of `to`, and rounded.
  ///
  /// Shapes:   every source has `to.size()` elements; `to` may be one of them. The list of sources
  ///           outlives the work.
  /// @throws zero::usage_error  no source, or dtypes that differ, unless one is float32 and the
  ///                            other 16 bits wide.
  template <class = void>
  static void sum(stream& stream, std::span<void const* const> sources, dtype source, any_span to,
                  bool add, double scale) {
    stream.enqueue([=] { detail::ordered_sum(sources, source, to, add, scale); });
  }

  /// Run `function(first, count)` over ranges that cover the elements [0, n) once each.
  template <class Function>
  static void launch(stream& stream, std::size_t n, Function function) {
    stream.enqueue([n, function]() mutable {
      if (n != 0) {
        function(std::size_t{0}, n);
      }
    });
  }

  /// Add to `*result` what `function(first, count)` gives over ranges that cover [0, n) once each.
  template <class T, class Function>
  static void accumulate(stream& stream, std::size_t n, Function function, T* result,
                         void* /*scratch*/) {
    stream.enqueue([n, function, result]() mutable {
      if (n != 0) {
        *result += function(std::size_t{0}, n);
      }
    });
  }

 private:
  static constexpr std::size_t huge_bytes = std::size_t{4} << 20U;
  static constexpr std::size_t huge_page_bytes = std::size_t{2} << 20U;

  static std::align_val_t alignment(std::size_t bytes) noexcept {
    return std::align_val_t{bytes >= huge_bytes ? huge_page_bytes : alignment_bytes};
  }

  static void check_native(void const* native) {
    if (native != nullptr) {
      throw usage_error{"host: expected no native stream (options::stream), actual one"};
    }
  }

  static void check_dtypes(std::string_view operation, const_any_span from, any_span to) {
    if (from.dtype() != to.dtype()) {
      throw usage_error{detail::text(operation, ": expected ", zero::name(from.dtype()),
                                     ", actual ", zero::name(to.dtype()))};
    }
  }

  static void check_sizes(std::string_view operation, const_any_span from, any_span to) {
    if (from.size() != to.size()) {
      throw usage_error{
          detail::text(operation, ": expected ", from.size(), " elements, actual ", to.size())};
    }
  }
};

static_assert(device<host>);

}  // namespace zero::inline v0
