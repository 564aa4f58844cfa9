// SPDX-License-Identifier: MIT
#include <zero/core/dtype.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <type_traits>

namespace stranger {

/// As `__half` and `Eigen::bfloat16` are: 16 bits in a type that zero has never heard of.
struct half {
  std::uint16_t bits;
};
/// Says float16, but has another size.
struct wide_half {
  float value;
};
/// Says float32, but can't be copied byte by byte.
struct counted_float {
  float value;
  counted_float(counted_float const& other) : value{other.value} {}
};
struct unknown {
  float value;
};

}  // namespace stranger

template <>
struct zero::dtype_traits<stranger::half> {
  static constexpr zero::dtype value = zero::dtype::float16;
};
template <>
struct zero::dtype_traits<stranger::wide_half> {
  static constexpr zero::dtype value = zero::dtype::float16;
};
template <>
struct zero::dtype_traits<stranger::counted_float> {
  static constexpr zero::dtype value = zero::dtype::float32;
};

using zero::dtype;

static_assert(zero::element<float> && zero::element<double>);
static_assert(zero::element<zero::float16> && zero::element<zero::bfloat16>);
static_assert(zero::element<float const>);
static_assert(zero::element<stranger::half> && zero::dtype_of<stranger::half> == dtype::float16);
static_assert(std::is_same_v<zero::accumulate_type<stranger::half const>, float>);
static_assert(!zero::element<stranger::wide_half> && !zero::element<stranger::counted_float>);
static_assert(!zero::element<stranger::unknown>);
static_assert(!zero::element<int> && !zero::element<long double> && !zero::element<void>);

TEST_CASE("a dtype has the name and the size of its type") {
  CHECK(std::string{zero::name(dtype::float32)} == "float32");
  CHECK(std::string{zero::name(dtype::float64)} == "float64");
  CHECK(std::string{zero::name(dtype::float16)} == "float16");
  CHECK(std::string{zero::name(dtype::bfloat16)} == "bfloat16");
  CHECK(zero::size_bytes(dtype::float32) == 4);
  CHECK(zero::size_bytes(dtype::float64) == 8);
  CHECK(zero::size_bytes(dtype::float16) == 2);
  CHECK(zero::size_bytes(dtype::bfloat16) == 2);
}

TEST_CASE("sums are accumulated in double for float64 and in float for all others") {
  CHECK(zero::accumulate_dtype(dtype::float64) == dtype::float64);
  CHECK(zero::accumulate_dtype(dtype::float32) == dtype::float32);
  CHECK(zero::accumulate_dtype(dtype::float16) == dtype::float32);
  CHECK(zero::accumulate_dtype(dtype::bfloat16) == dtype::float32);
  CHECK(std::is_same_v<zero::accumulate_type<double>, double>);
  CHECK(std::is_same_v<zero::accumulate_type<zero::bfloat16>, float>);
}

TEST_CASE("visit calls with the type of the dtype, and gives back what the call gives") {
  for (dtype const type : {dtype::float32, dtype::float64, dtype::float16, dtype::bfloat16}) {
    dtype const seen =
        zero::visit(type, []<class T>(std::type_identity<T>) { return zero::dtype_of<T>; });
    CHECK(seen == type);
  }
}
