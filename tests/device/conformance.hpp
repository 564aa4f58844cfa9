// SPDX-License-Identifier: MIT
#pragma once

#include <doctest/doctest.h>
#include <support/thrown.hpp>

#include <zero/core/error.hpp>
#include <zero/device/concept.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>

/// @file
/// What every device does. `Setup` has a `device` and a static `make_stream()`; its memory can be
/// read by the host after `synchronize`. Use: TEST_CASE_TEMPLATE_INVOKE(device, setup...).

namespace device_conformance {

/// Memory of a device for n elements.
template <class Device, class T>
class memory {
 public:
  explicit memory(std::size_t n) : span_{static_cast<T*>(Device::allocate(n * sizeof(T))), n} {}
  memory(memory const&) = delete;
  memory& operator=(memory const&) = delete;
  ~memory() { Device::deallocate(span_.data(), span_.size_bytes()); }

  std::span<T> operator*() const { return span_; }
  T& operator[](std::size_t i) const { return span_[i]; }

 private:
  std::span<T> span_;
};

}  // namespace device_conformance

TEST_CASE_TEMPLATE_DEFINE("a device", Setup, device) {
  using device = typename Setup::device;
  using namespace device_conformance;
  static_assert(zero::device<device>);
  auto stream = Setup::make_stream();

  SUBCASE("has memory that starts at a multiple of the alignment") {
    CHECK(device::alignment_bytes >= 64);
    CHECK((device::alignment_bytes & (device::alignment_bytes - 1)) == 0);
    for (std::size_t const bytes : {std::size_t{1}, std::size_t{63}, std::size_t{64},
                                    std::size_t{1000}, std::size_t{5} << 20U}) {
      void* const start = device::allocate(bytes);
      CHECK(start != nullptr);
      CHECK(reinterpret_cast<std::uintptr_t>(start) % device::alignment_bytes == 0);
      device::deallocate(start, bytes);
    }
  }

  SUBCASE("gives a null pointer for no bytes, and takes it back") {
    CHECK(device::allocate(0) == nullptr);
    device::deallocate(nullptr, 0);
  }

  SUBCASE("fills with zero") {
    memory<device, float> a{1000};
    std::fill_n((*a).begin(), 1000, 7.0F);
    device::fill_zero(stream, (*a).subspan(1, 998));
    stream.synchronize();
    CHECK(a[0] == 7.0F);
    CHECK(std::all_of(&a[1], &a[999], [](float value) { return value == 0.0F; }));
    CHECK(a[999] == 7.0F);
    device::fill_zero(stream, zero::any_span{});
    stream.synchronize();
  }

  SUBCASE("copies elements of one dtype, of any size and start") {
    for (std::size_t const n : {0U, 1U, 5U, 1000U, 700001U}) {
      memory<device, float> from{n + 4};
      memory<device, float> to{n + 4};
      std::iota((*from).begin(), (*from).end(), 1.0F);
      std::fill((*to).begin(), (*to).end(), -1.0F);
      device::copy(stream, (*from).subspan(1, n), (*to).subspan(3, n));
      stream.synchronize();
      CHECK(std::equal((*from).begin() + 1, (*from).begin() + 1 + static_cast<std::ptrdiff_t>(n),
                       (*to).begin() + 3));
      CHECK(to[2] == -1.0F);
      CHECK(to[n + 3] == -1.0F);
    }
  }

  SUBCASE("copies a span to itself") {
    memory<device, double> a{3};
    a[0] = 1.0;
    a[1] = 2.0;
    a[2] = 3.0;
    device::copy(stream, *a, *a);
    stream.synchronize();
    CHECK((a[0] == 1.0 && a[1] == 2.0 && a[2] == 3.0));
  }

  SUBCASE("refuses another size, and copies and sums of another dtype") {
    memory<device, float> a{10};
    memory<device, double> b{10};
    CHECK(test::message_of([&] {
            device::copy(stream, *a, *b);
          }).find("copy: expected float32, actual float64") != std::string::npos);
    CHECK(test::message_of([&] {
            device::copy(stream, *a, (*a).subspan(1));
          }).find("copy: expected 10 elements, actual 9") != std::string::npos);
    CHECK(test::message_of([&] {
            device::convert(stream, (*a).first(3), *b);
          }).find("convert: expected 3 elements, actual 10") != std::string::npos);
  }

  SUBCASE("converts between dtypes") {
    memory<device, float> a{7};
    memory<device, zero::bfloat16> b{7};
    memory<device, double> c{7};
    // bfloat16 has 8 bits of significand: 257 lies between 256 and 258, and 256 is even.
    std::array<float, 7> const values{0.0F, -1.5F, 257.0F, 259.0F, 3.0F, 1e30F, 0.25F};
    std::copy(values.begin(), values.end(), (*a).begin());
    device::convert(stream, *a, *b);
    device::convert(stream, *b, *c);
    stream.synchronize();
    CHECK(c[0] == 0.0);
    CHECK(c[1] == -1.5);
    CHECK(c[2] == 256.0);
    CHECK(c[3] == 260.0);
    CHECK(c[4] == 3.0);
    CHECK(c[6] == 0.25);
  }

  SUBCASE("adds elements of one dtype, rounding once") {
    for (std::size_t const n : {0U, 1U, 7U, 1000U}) {
      memory<device, float> a{n + 1};
      memory<device, float> b{n + 1};
      std::iota((*a).begin(), (*a).end(), 1.0F);
      std::fill((*b).begin(), (*b).end(), 0.5F);
      device::add(stream, (*a).first(n), (*b).first(n));
      stream.synchronize();
      bool right = b[n] == 0.5F;
      for (std::size_t i = 0; i < n; ++i) {
        right = right && b[i] == static_cast<float>(i) + 1.5F;
      }
      CHECK(right);
    }
    // bfloat16 has 8 bits of significand: 257 lies between 256 and 258, and 256 is even.
    memory<device, zero::bfloat16> c{2};
    memory<device, zero::bfloat16> d{2};
    c[0] = zero::bfloat16{1.0F};
    c[1] = zero::bfloat16{3.0F};
    d[0] = d[1] = zero::bfloat16{256.0F};
    device::add(stream, *c, *d);
    stream.synchronize();
    CHECK(d[0] == 256.0F);
    CHECK(d[1] == 260.0F);
  }

  SUBCASE("launches an elementwise function over every element once") {
    for (std::size_t const n : {0U, 1U, 1000U}) {
      memory<device, int> counts{n + 1};
      std::fill((*counts).begin(), (*counts).end(), 0);
      device::launch(stream, n, [counts = &counts[0]](std::size_t first, std::size_t count) {
        for (std::size_t i = first; i < first + count; ++i) {
          counts[i] += static_cast<int>(i) + 1;
        }
      });
      stream.synchronize();
      bool once = counts[n] == 0;
      for (std::size_t i = 0; i < n; ++i) {
        once = once && counts[i] == static_cast<int>(i) + 1;
      }
      CHECK(once);
    }
  }

  SUBCASE("adds up what a function gives, which is nothing for no elements") {
    memory<device, long> result{2};
    memory<device, long> scratch{device::reduce_blocks + 1};
    auto const sum = [](std::size_t first, std::size_t count) {
      long out = 0;
      for (std::size_t i = first; i < first + count; ++i) {
        out += static_cast<long>(i);
      }
      return out;
    };
    result[0] = 7;
    result[1] = 5;
    device::accumulate(stream, 1001, sum, &result[0], &scratch[0]);
    device::accumulate(stream, 0, sum, &result[1], &scratch[0]);
    stream.synchronize();
    CHECK(result[0] == 500507);
    CHECK(result[1] == 5);
  }

  SUBCASE("does what is enqueued on a stream in order, and orders streams by events") {
    auto other = Setup::make_stream();
    typename device::event here;
    typename device::event there;
    memory<device, float> a{300000};
    memory<device, float> b{300000};
    for (int repeat = 0; repeat < 20; ++repeat) {
      device::fill_zero(stream, *a);
      device::launch(stream, 300000, [a = &a[0]](std::size_t first, std::size_t count) {
        for (std::size_t i = first; i < first + count; ++i) {
          a[i] += 1.0F;
        }
      });
      stream.record(here);
      other.wait(here);
      device::copy(other, *a, *b);
      other.record(there);
      stream.wait(there);
    }
    stream.record(here);
    here.wait();
    CHECK(here.ready());
    CHECK(std::all_of((*b).begin(), (*b).end(), [](float value) { return value == 1.0F; }));
  }
}
