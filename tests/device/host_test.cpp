// SPDX-License-Identifier: MIT
#include <doctest/doctest.h>

#include <device/conformance.hpp>
#include <support/counting_allocator.hpp>
#include <support/thrown.hpp>
#include <zero/device/host.hpp>

namespace {

struct inline_host {
  using device = zero::host;
  static zero::host_stream make_stream() { return zero::host_stream{}; }
};

struct threaded_host {
  using device = zero::host;
  static zero::host_stream make_stream() { return zero::host_stream{true}; }
};

}  // namespace

TEST_CASE_TEMPLATE_INVOKE(device, inline_host, threaded_host);

TEST_CASE("an allocation is exactly one, of exactly the bytes asked for") {
  if (!counting_allocator::available) {
    return;
  }
  for (std::size_t const bytes : {std::size_t{1}, std::size_t{4097}, (std::size_t{4} << 20U) + 5}) {
    long const calls = counting_allocator::allocations;
    long const live = counting_allocator::live_bytes;
    void* const memory = zero::host::allocate(bytes);
    CHECK(counting_allocator::allocations == calls + 1);
    CHECK(counting_allocator::live_bytes == live + static_cast<long>(bytes));
    zero::host::deallocate(memory, bytes);
    CHECK(counting_allocator::live_bytes == live);
  }
}

TEST_CASE("memory that doesn't exist is an error that names the bytes") {
  if (!counting_allocator::available) {
    return;
  }
  CHECK(test::message_of<zero::error>([] {
          static_cast<void>(zero::host::allocate(std::size_t{1} << 60U));
        }) == "host::allocate: no memory for 1152921504606846976 bytes");
}

TEST_CASE("large memory is aligned for huge pages") {
  std::size_t const bytes = std::size_t{4} << 20U;
  void* const memory = zero::host::allocate(bytes);
  CHECK(reinterpret_cast<std::uintptr_t>(memory) % (std::size_t{2} << 20U) == 0);
  zero::host::deallocate(memory, bytes);
}

TEST_CASE("the host's operations allocate nothing") {
  std::array<float, 100> a{};
  std::array<zero::bfloat16, 100> b{};
  float sum = 1.0F;
  for (bool const threaded : {false, true}) {
    zero::host_stream stream{threaded};
    stream.synchronize();
    sum = 0.0F;
    long const calls = counting_allocator::allocations;
    zero::host::fill_zero(stream, std::span{a});
    zero::host::convert(stream, std::span{a}, std::span{b});
    zero::host::copy(stream, std::span{a}.first(50), std::span{a}.last(50));
    zero::host::launch(stream, 100, [&a](std::size_t first, std::size_t count) {
      std::fill_n(a.begin() + first, count, 2.0F);
    });
    zero::host::accumulate(
        stream, 100,
        [&a](std::size_t first, std::size_t count) {
          return std::accumulate(a.begin() + first, a.begin() + first + count, 0.0F);
        },
        &sum, nullptr);
    stream.synchronize();
    CHECK(counting_allocator::allocations == calls);
    CHECK(sum == 200.0F);
  }
}
