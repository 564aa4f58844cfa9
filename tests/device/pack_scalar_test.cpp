// SPDX-License-Identifier: MIT
// What CUDA's device compiler sees, compiled for the host in a namespace of its own, beside the
// pack that the host has: the bits are the same.

// GCC 12's vectorizer reads memory as aligned where another branch has tested that it is.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-tree-vectorize")
#endif

#include <zero/core/dtype.hpp>
#include <zero/device/vector.hpp>

#include <math.h>  // `::fabs` of a float, too
#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

namespace {

// CUDA's intrinsics: one operation, rounded by itself. No compiler fuses what isn't inlined.
[[gnu::noinline]] float __fadd_rn(float a, float b) { return a + b; }     // NOLINT
[[gnu::noinline]] double __dadd_rn(double a, double b) { return a + b; }  // NOLINT
[[gnu::noinline]] float __fmul_rn(float a, float b) { return a * b; }     // NOLINT
[[gnu::noinline]] double __dmul_rn(double a, double b) { return a * b; }  // NOLINT
[[gnu::noinline]] float __fdiv_rn(float a, float b) { return a / b; }     // NOLINT
[[gnu::noinline]] double __ddiv_rn(double a, double b) { return a / b; }  // NOLINT
[[gnu::noinline]] float __fsqrt_rn(float a) { return std::sqrt(a); }      // NOLINT
[[gnu::noinline]] double __dsqrt_rn(double a) { return std::sqrt(a); }    // NOLINT

struct alignas(16) uint4 {
  std::uint32_t x, y, z, w;
};
void __stwb(uint4* to, uint4 from) { *to = from; }  // NOLINT

}  // namespace

namespace zero::inline v0::device_detail {
using detail::double_vector;
using detail::float_vector;
}  // namespace zero::inline v0::device_detail

#define __CUDA_ARCH__ 900
#define __device__
#define detail device_detail
#include <zero/device/pack_scalar.hpp>
#undef detail
#undef __device__
#undef __CUDA_ARCH__

// The host's. It includes nothing of the above again.
#include <zero/device/pack.hpp>

#include <doctest/doctest.h>

namespace {

namespace device = zero::device_detail;
namespace host = zero::detail;
using zero::bfloat16;
using zero::float16;

/// What the compiler knows of memory ends here: packs read and write it as other types, too.
template <class T>
T* opaque(T* memory) {
  asm volatile("" : "+r"(memory) : : "memory");
  return memory;
}

/// The same bits, or both NaN, whose bits are left open.
template <class T>
bool same(T a, T b) {
  return std::memcmp(&a, &b, sizeof a) == 0 ||
         (std::isnan(static_cast<double>(a)) && std::isnan(static_cast<double>(b)));
}
template <class T>
bool same(device::pack<T> const& a, host::pack<T> const& b) {
  bool all = true;
  for (std::size_t i = 0; i < host::pack<T>::size; ++i) {
    all = all && same(a[i], b[i]);
  }
  return all;
}

/// Numbers of every exponent, and between them zeros, infinities and NaN.
template <class T>
std::vector<T> numbers(std::size_t n) {
  using bits = std::conditional_t<sizeof(T) == 8, std::uint64_t,
                                  std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint16_t>>;
  constexpr float infinity = std::numeric_limits<float>::infinity();
  constexpr std::array special{0.0F,     -0.0F,     1.0F,
                               infinity, -infinity, std::numeric_limits<float>::quiet_NaN()};
  std::mt19937_64 random{7};
  std::vector<T> out(n);
  for (std::size_t i = 0; i < n; ++i) {
    out[i] = i % 5 == 0 ? static_cast<T>(special[random() % special.size()])
                        : std::bit_cast<T>(static_cast<bits>(random()));
  }
  return out;
}

/// Two packs of memory for elements E, and a place in it that isn't aligned to 16 bytes.
template <class T, class E>
struct places {
  static constexpr std::size_t size = 2 * host::pack<T>::size;
  alignas(16) std::array<E, size + 2> device{};
  alignas(16) std::array<E, size + 2> host{};

  [[nodiscard]] bool equal() const {
    bool all = true;
    for (std::size_t i = 0; i < device.size(); ++i) {
      all = all && same(device[i], host[i]);
    }
    return all;
  }
};

/// Loads and stores of E, from and to places that are a multiple of 16 bytes, and that aren't.
template <class T, class E>
void check_memory() {
  constexpr std::size_t half = host::pack<T>::size;
  std::vector<E> const from = numbers<E>(4003);
  long wrong = 0;
  for (std::size_t i = 0; i + 2 * half <= from.size(); ++i) {
    E const* const here = opaque(from.data() + i);
    auto const one = device::pack<T>::load(here);
    wrong += same(one, host::pack<T>::load(here)) ? 0 : 1;
    auto const two = device::load_two<T>(here);
    auto const expected = host::load_two<T>(here);
    wrong += same(two[0], expected[0]) && same(two[1], expected[1]) ? 0 : 1;
  }
  CHECK(wrong == 0);

  if constexpr (std::is_same_v<T, float> || sizeof(E) > 2) {
    std::vector<T> const values = numbers<T>(4003);
    for (std::size_t i = 0; i + 2 * half <= values.size(); ++i) {
      auto const here = device::load_two<T>(opaque(values.data() + i));
      auto const expected = host::load_two<T>(values.data() + i);
      places<T, E> to;
      for (std::size_t const first : {0U, 1U}) {
        here[0].store(opaque(to.device.data() + first));
        expected[0].store(to.host.data() + first);
        opaque(to.device.data());
        wrong += to.equal() ? 0 : 1;
        device::store_two(here, opaque(to.device.data() + first));
        host::store_two(expected, to.host.data() + first);
        opaque(to.device.data());
        wrong += to.equal() ? 0 : 1;
      }
      if constexpr (std::is_same_v<T, float> || sizeof(E) == sizeof(T)) {
        auto const rounded = here[1].template rounded_to<E>();
        wrong += same(rounded, expected[1].template rounded_to<E>()) ? 0 : 1;
      }
    }
    CHECK(wrong == 0);
  }
}

}  // namespace

TEST_CASE_TEMPLATE("an operation of the device's pack has the bits of the host's", T, float,
                   double) {
  std::vector<T> const values = numbers<T>(5003);
  long wrong = 0;
  for (std::size_t i = 0; i + 8 <= values.size(); ++i) {
    T const* const left = opaque(values.data() + i);
    T const* const right = opaque(values.data() + (i * 7 + 3) % (values.size() - 4));
    auto const a = device::pack<T>::load(left);
    auto const b = device::pack<T>::load(right);
    auto const x = host::pack<T>::load(left);
    auto const y = host::pack<T>::load(right);
    auto sum = a;
    auto host_sum = x;
    sum += b;
    sum *= a;
    sum -= b;
    sum /= a;
    host_sum += y;
    host_sum *= x;
    host_sum -= y;
    host_sum /= x;
    bool const right_bits = same(a + b, x + y) && same(a - b, x - y) && same(a * b, x * y) &&
                            same(a / b, x / y) && same(-a, -x) && same(abs(a), abs(x)) &&
                            same(sqrt(a), sqrt(x)) && same(max(a, b), max(x, y)) &&
                            same(sum, host_sum) &&
                            same(device::square_root_of(b), host::square_root_of(y)) &&
                            same(select(a < b, a, b), select(x < y, x, y)) &&
                            same(select(a > b, a, b), select(x > y, x, y)) &&
                            same(select(a <= b, a, b), select(x <= y, x, y)) &&
                            same(select(a >= b, a, b), select(x >= y, x, y)) &&
                            same(select(a == b, a, -b), select(x == y, x, -y)) &&
                            same(select(a != b, a, -b), select(x != y, x, -y));
    wrong += right_bits ? 0 : 1;
  }
  CHECK(wrong == 0);
}

TEST_CASE_TEMPLATE("equal lanes compare as numbers do, and NaN as nothing", T, float, double) {
  T const nan = std::numeric_limits<T>::quiet_NaN();
  device::pack<T> const one{T(1)};
  device::pack<T> const zero{-T(0)};
  CHECK(select(zero == device::pack<T>{T(0)}, one, zero)[0] == T(1));
  CHECK(select(one <= one, one, zero)[1] == T(1));
  CHECK(select(one < one, one, zero)[1] == T(0));
  CHECK(select(device::pack<T>{nan} == device::pack<T>{nan}, one, zero)[0] == T(0));
  CHECK(max(one, device::pack<T>{nan})[0] != max(one, device::pack<T>{nan})[0]);
  CHECK(max(device::pack<T>{nan}, one)[0] == T(1));
}

TEST_CASE("a value of the other type is rounded to every lane") {
  device::pack<float> const tenth{0.1};
  device::pack<double> const exact{0.1F};
  for (std::size_t i = 0; i < 4; ++i) {
    CHECK(tenth[i] == 0.1F);
    CHECK(exact[i / 2] == double{0.1F});
  }
}

TEST_CASE_TEMPLATE("elements are read and written as on the host, wherever they are", E, float,
                   double, float16, bfloat16) {
  check_memory<float, E>();
  check_memory<double, E>();
}
