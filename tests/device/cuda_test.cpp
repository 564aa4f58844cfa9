// SPDX-License-Identifier: MIT
// The CUDA device's operations, with the bits of the host's.
#include <zero/device/cuda.hpp>
#include <zero/device/host.hpp>

#include <doctest/doctest.h>
#if defined(ZERO_FAKE_CUDA)
#include <fake/cuda.hpp>
#include <support/thrown.hpp>
#endif

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

namespace {

using zero::dtype;

/// Elements of the device's memory, from and to the host.
template <class T>
class memory {
 public:
  memory(zero::cuda_stream& stream, std::vector<T> const& values)
      : stream_{stream},
        span_{static_cast<T*>(zero::cuda::allocate(values.size() * sizeof(T))), values.size()} {
    zero::cuda::upload(stream, std::span{values}, span_);
  }
  memory(memory const&) = delete;
  memory& operator=(memory const&) = delete;
  ~memory() { zero::cuda::deallocate(span_.data(), span_.size_bytes()); }

  std::span<T> operator*() const { return span_; }
  [[nodiscard]] std::vector<T> read() const {
    std::vector<T> out(span_.size());
    zero::cuda::download(stream_, span_, std::span{out});
    return out;
  }

 private:
  zero::cuda_stream& stream_;
  std::span<T> span_;
};

template <class T>
std::vector<T> numbers(std::size_t n, unsigned seed) {
  std::vector<T> out;
  for (std::size_t i = 0; i < n; ++i) {
    seed = seed * 1664525U + 1013904223U;
    double const scale = std::ldexp(1.0, static_cast<int>(seed >> 27U) - 16);
    out.push_back(static_cast<T>(static_cast<float>(
        (static_cast<double>(seed >> 8U & 0xffffU) - 32768.0) / 1024.0 * scale)));
  }
  return out;
}

template <class T>
bool same(std::vector<T> const& a, std::vector<T> const& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

template <class Visit>
void for_each_dtype(Visit visit) {
  visit(std::type_identity<float>{});
  visit(std::type_identity<double>{});
  visit(std::type_identity<zero::float16>{});
  visit(std::type_identity<zero::bfloat16>{});
}

}  // namespace

static_assert(zero::device<zero::cuda>);

TEST_CASE("conversions between all dtypes have the host's bits") {
  zero::cuda_stream stream;
  zero::host_stream here;
  for (std::size_t const n : {0U, 1U, 7U, 8U, 1003U}) {
    for_each_dtype([&]<class From>(std::type_identity<From>) {
      for_each_dtype([&]<class To>(std::type_identity<To>) {
        std::vector<From> const values = numbers<From>(n, 7);
        memory<From> from{stream, values};
        for (std::size_t const first : {std::size_t{0}, std::min<std::size_t>(n, 1)}) {
          memory<To> to{stream, std::vector<To>(n)};
          std::vector<To> expected(n);
          zero::cuda::convert(stream, (*from).subspan(first), (*to).subspan(first));
          zero::host::convert(here, std::span{values}.subspan(first),
                              std::span{expected}.subspan(first));
          CHECK(same(to.read(), expected));
        }
      });
    });
  }
}

TEST_CASE(
    "sums of several arrays have the host's bits, for every pair of dtypes that can be summed") {
  zero::cuda_stream stream;
  zero::host_stream here;
  for (std::size_t const count : {1U, 2U, 3U, 4U, 5U, 9U}) {
    for (bool const add : {false, true}) {
      for_each_dtype([&]<class From>(std::type_identity<From>) {
        for_each_dtype([&]<class To>(std::type_identity<To>) {
          if constexpr (zero::can_sum(zero::dtype_of<From>, zero::dtype_of<To>)) {
            constexpr std::size_t n = 1003;
            std::vector<std::vector<From>> values;
            std::vector<std::unique_ptr<memory<From>>> from;
            std::vector<void const*> sources;
            std::vector<void const*> host_sources;
            for (unsigned s = 0; s < count; ++s) {
              values.push_back(numbers<From>(n, s));
              from.push_back(std::make_unique<memory<From>>(stream, values.back()));
              sources.push_back((**from.back()).data());
            }
            for (auto const& each : values) {
              host_sources.push_back(each.data());
            }
            std::vector<To> expected = numbers<To>(n, 99);
            memory<To> to{stream, expected};
            for (std::size_t const size : {n, n - 1}) {  // to the end
              zero::cuda::sum(stream, sources, zero::dtype_of<From>, (*to).last(size), add,
                              1.0 / 3);
              zero::host::sum(here, host_sources, zero::dtype_of<From>,
                              std::span{expected}.last(size), add, 1.0 / 3);
              CHECK(same(to.read(), expected));
            }
          }
        });
      });
    }
  }
}

TEST_CASE("fills, copies and adds") {
  zero::cuda_stream stream;
  memory<float> a{stream, numbers<float>(1001, 3)};
  memory<float> b{stream, std::vector<float>(1001, 1.0F)};
  zero::cuda::add(stream, *a, *b);
  std::vector<float> expected = numbers<float>(1001, 3);
  for (float& each : expected) {
    each += 1.0F;
  }
  CHECK(same(b.read(), expected));
  zero::cuda::copy(stream, *b, *a);
  zero::cuda::copy(stream, *a, *a);
  CHECK(same(a.read(), expected));
  zero::cuda::fill_zero(stream, *b);
  zero::cuda::fill_zero(stream, zero::any_span{});
  CHECK(same(b.read(), std::vector<float>(1001)));
}

TEST_CASE("streams are ordered by events") {
  zero::cuda_stream first;
  zero::cuda_stream second;
  zero::cuda_event here;
  zero::cuda_event there;
  CHECK(here.ready());
  memory<float> a{first, std::vector<float>(5000)};
  memory<float> b{first, std::vector<float>(5000)};
  memory<float> one{first, std::vector<float>(5000, 1.0F)};
  for (int i = 0; i < 50; ++i) {
    zero::cuda::add(first, *one, *a);
    first.record(here);
    second.wait(here);
    zero::cuda::copy(second, *a, *b);
    second.record(there);
    first.wait(there);
  }
  there.wait();
  CHECK(there.ready());
  CHECK(same(b.read(), std::vector<float>(5000, 50.0F)));
}

TEST_CASE("an event that isn't ready is no error") {
  zero::cuda_stream stream;
  zero::cuda_event event;
  memory<float> a{stream, std::vector<float>(1U << 20U)};
  memory<float> b{stream, std::vector<float>(1U << 20U)};
  bool waited = false;
  while (!waited) {
    for (int i = 0; i < 20; ++i) {
      zero::cuda::copy(stream, *a, *b);
    }
    stream.record(event);
    waited = !event.ready();
    CHECK(cudaGetLastError() == cudaSuccess);
  }
}

#if defined(ZERO_FAKE_CUDA)
TEST_CASE("work goes to the device of its stream, whichever is current") {
  fake::set_device_count(2);
  REQUIRE(cudaSetDevice(1) == cudaSuccess);
  {
    zero::cuda_stream stream;
    CHECK(stream.device() == 1);
    memory<float> a{stream, std::vector<float>(10, 2.0F)};
    zero::cuda_event event;
    std::thread{[&] {  // starts on device 0
      zero::cuda::add(stream, *a, *a);
      stream.record(event);
      stream.wait(event);
      stream.synchronize();
      CHECK(zero::detail::current_device() == 0);
    }}
        .join();
  }
  REQUIRE(cudaSetDevice(0) == cudaSuccess);
  fake::set_device_count(1);
}

TEST_CASE("a failed call names the call, the error and the rank") {
  zero::detail::rank_of_thread = 3;
  fake::fail_call(1, cudaErrorNotPermitted);
  std::string const failed = test::message_of<zero::error>([] { zero::cuda_event const event; });
  CHECK(failed == "cudaEventCreateWithFlags: expected success, actual cudaErrorNotPermitted: " +
                      std::string{cudaGetErrorString(cudaErrorNotPermitted)} + " (rank 3)");
  zero::detail::rank_of_thread = -1;
}

TEST_CASE("a driver that is too old for the toolkit is told with both versions") {
  int const older = CUDART_VERSION / 1000 * 1000 - 1000 + 20;  // such as 12.2 for 13.0
  std::string const toolkit =
      std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
  std::string const error = "cudaErrorInsufficientDriver: " +
                            std::string{cudaGetErrorString(cudaErrorInsufficientDriver)} +
                            "; expected a driver of CUDA " + toolkit + ", as the program, actual ";
  for (int const version : {older, 0}) {
    fake::set_driver_version(version);
    std::string const actual =
        version == 0 ? "no CUDA" : "CUDA " + std::to_string(version / 1000) + ".2";
    CHECK(test::message_of<zero::cuda_error>([] { zero::cuda_stream const stream; }) ==
          "cudaGetDevice: expected success, actual " + error + actual);
    CHECK(test::message_of<zero::cuda_error>([] { static_cast<void>(zero::cuda::allocate(8)); }) ==
          "cudaMalloc: expected success, actual " + error + actual);
  }
  fake::set_driver_version(CUDART_VERSION);
}

TEST_CASE("too little memory says how much there is") {
  fake::set_memory(std::size_t{1} << 20U);
  std::string const failed = test::message_of<zero::error>(
      [] { static_cast<void>(zero::cuda::allocate(std::size_t{2} << 20U)); });
  CHECK(failed.starts_with("cudaMalloc: expected memory for 2097152 bytes, actual "));
  CHECK(failed.ends_with(" free of 1048576"));
  fake::set_memory(std::size_t{1} << 32U);
  CHECK(zero::cuda::allocate(0) == nullptr);
}

TEST_CASE("bad arguments throw before anything is enqueued") {
  zero::cuda_stream stream;
  memory<float> a{stream, std::vector<float>(10)};
  memory<double> b{stream, std::vector<double>(10)};
  auto const calls = fake::calls();
  CHECK(test::message_of<zero::error>([&] { zero::cuda::copy(stream, *a, (*a).first(3)); }) ==
        "cuda::copy: expected 10 elements, actual 3");
  CHECK(test::message_of<zero::error>([&] { zero::cuda::copy(stream, *a, *b); }) ==
        "cuda::copy: expected float32, actual float64");
  CHECK(test::message_of<zero::error>([&] { zero::cuda::add(stream, *a, *b); }) ==
        "cuda::sum: expected a destination of float32, actual float64");
  CHECK(test::message_of<zero::error>([&] {
          zero::cuda::sum(stream, {}, dtype::float32, *a, false, 1);
        }) == "cuda::sum: expected 1 to 256 sources, actual 0");
  CHECK(fake::calls() == calls);
}
#endif
