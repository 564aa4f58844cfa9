// SPDX-License-Identifier: MIT
#include <zero/core/tensor_traits.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <list>
#include <span>
#include <string>
#include <vector>

namespace stranger {

/// An engine's element type, laid out like a bfloat16.
struct brain {
  std::uint16_t bits;
};

/// Owns its elements until it is bound to others.
struct tensor {
  std::vector<brain> own;
  std::span<brain> view;
};

/// Owns its elements for good.
struct fixed {
  std::array<double, 3> values{};
};

// Almost tensors.
struct without_device {};
struct of_integers {};
struct of_another_type {};
struct rebound_by_size {};

struct gpu {};
struct on_gpu {};

}  // namespace stranger

template <>
struct zero::dtype_traits<stranger::brain> {
  static constexpr dtype value = dtype::bfloat16;
};

template <>
struct zero::tensor_traits<stranger::tensor> {
  using value_type = stranger::brain;
  using device = zero::host;
  static std::span<value_type> elements(stranger::tensor& t) { return t.view; }
  static void rebind(stranger::tensor& t, std::span<value_type> storage) {
    t.own = {};
    t.view = storage;
  }
  static void allocate(stranger::tensor& t, std::size_t n) {
    t.own.resize(n);
    t.view = t.own;
  }
};
template <>
struct zero::tensor_traits<stranger::fixed> {
  using value_type = double;
  using device = zero::host;
  static std::span<double> elements(stranger::fixed& t) { return t.values; }
};
template <>
struct zero::tensor_traits<stranger::without_device> {
  using value_type = float;
  static std::span<float> elements(stranger::without_device& t);
};
template <>
struct zero::tensor_traits<stranger::of_integers> {
  using value_type = int;
  using device = zero::host;
  static std::span<int> elements(stranger::of_integers& t);
};
template <>
struct zero::tensor_traits<stranger::of_another_type> {
  using value_type = float;
  using device = zero::host;
  static std::span<double> elements(stranger::of_another_type& t);
};
template <>
struct zero::tensor_traits<stranger::rebound_by_size> {
  using value_type = float;
  using device = zero::host;
  static std::span<float> elements(stranger::rebound_by_size& t);
  static void rebind(stranger::rebound_by_size& t, std::size_t n);
};
template <>
struct zero::tensor_traits<stranger::on_gpu> {
  using value_type = float;
  using device = stranger::gpu;
  static std::span<float> elements(stranger::on_gpu& t);
};

using zero::allocatable_tensor;
using zero::contiguous_tensor;
using zero::rebindable_tensor;

// Host containers and spans need no specialization, and can't give their storage up.
static_assert(contiguous_tensor<std::vector<float>> && !rebindable_tensor<std::vector<float>>);
static_assert(contiguous_tensor<std::array<double, 4>> && !allocatable_tensor<std::vector<float>>);
static_assert(contiguous_tensor<std::span<float>> && contiguous_tensor<zero::bfloat16[7]>);
static_assert(std::is_same_v<zero::tensor_traits<std::vector<float>>::device, zero::host>);
static_assert(std::is_same_v<zero::tensor_traits<std::span<double>>::value_type, double>);

// Elements that can't be written, that are no numbers to train, or that aren't contiguous.
static_assert(!contiguous_tensor<std::vector<float> const>);
static_assert(!contiguous_tensor<std::span<float const>>);
static_assert(!contiguous_tensor<std::vector<int>> && !contiguous_tensor<std::vector<bool>>);
static_assert(!contiguous_tensor<std::list<float>> && !contiguous_tensor<std::string>);
static_assert(!contiguous_tensor<float> && !contiguous_tensor<int>);

// A stranger's tensors.
static_assert(contiguous_tensor<stranger::tensor> && rebindable_tensor<stranger::tensor>);
static_assert(allocatable_tensor<stranger::tensor>);
static_assert(contiguous_tensor<stranger::fixed> && !rebindable_tensor<stranger::fixed>);
static_assert(contiguous_tensor<stranger::on_gpu>);

// What is almost a tensor is none.
static_assert(!contiguous_tensor<stranger::without_device>);
static_assert(!contiguous_tensor<stranger::of_integers>);
static_assert(!contiguous_tensor<stranger::of_another_type>);
static_assert(!rebindable_tensor<stranger::rebound_by_size>);

TEST_CASE("the elements of a container are its own") {
  std::vector<float> values{1, 2, 3};
  std::span<float> const elements = zero::tensor_traits<std::vector<float>>::elements(values);
  CHECK(elements.data() == values.data());
  CHECK(elements.size() == 3);
  elements[1] = 7;
  CHECK(values[1] == 7);
}

TEST_CASE("an empty container is a tensor of no elements") {
  std::vector<double> none;
  CHECK(zero::tensor_traits<std::vector<double>>::elements(none).empty());
}
