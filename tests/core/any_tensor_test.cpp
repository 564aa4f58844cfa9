// SPDX-License-Identifier: MIT
#include <zero/core/any_tensor.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <span>
#include <vector>

using zero::any_span;
using zero::any_tensor;

namespace {

struct gpu {};

struct tensor {
  std::vector<float> own;
  std::span<float> view;
};

}  // namespace

template <>
struct zero::tensor_traits<tensor> {
  using value_type = float;
  using device = gpu;
  static std::span<float> elements(tensor& t) { return t.view; }
  static void rebind(tensor& t, std::span<float> storage) {
    t.own = {};
    t.view = storage;
  }
  static void allocate(tensor& t, std::size_t n) {
    t.own.assign(n, 0);
    t.view = t.own;
  }
};

TEST_CASE("a default-constructed any_tensor is empty") {
  CHECK_FALSE(any_tensor{});
  std::vector<float> values(2);
  CHECK(any_tensor{values});
}

TEST_CASE("an erased container has its elements and type, and can't be rebound") {
  std::array<zero::bfloat16, 5> values{};
  any_tensor const erased{values};
  CHECK(erased.dtype() == zero::dtype::bfloat16);
  CHECK(erased.elements().data() == values.data());
  CHECK(erased.elements().size() == 5);
  CHECK(erased.elements().dtype() == zero::dtype::bfloat16);
  CHECK_FALSE(erased.rebindable());
  CHECK_FALSE(erased.allocatable());
}

TEST_CASE("an erased tensor is rebound, emptied and given storage of its own") {
  tensor t;
  any_tensor const erased{t};
  CHECK(erased.rebindable());
  CHECK(erased.allocatable());
  CHECK(erased.elements().empty());

  erased.allocate(3);
  CHECK(erased.elements().data() == t.own.data());
  CHECK(erased.elements().size() == 3);

  std::array<float, 4> storage{1, 2, 3, 4};
  erased.rebind(any_span{std::span{storage}});
  CHECK(t.own.empty());
  CHECK(t.view.data() == storage.data());
  CHECK(t.view.size() == 4);

  erased.rebind(any_span{nullptr, 0, zero::dtype::float32});
  CHECK(t.view.empty());
}

TEST_CASE("an erased tensor sees the elements that its tensor has now, not those that it had") {
  std::vector<double> values{1};
  any_tensor const erased{values};
  values.assign(9, 2.0);
  CHECK(erased.elements().size() == 9);
  CHECK(erased.elements().as<double>()[8] == 2.0);
}

TEST_CASE("an erased tensor knows its device") {
  tensor t;
  std::vector<float> values;
  CHECK(any_tensor{t}.on<gpu>());
  CHECK_FALSE(any_tensor{t}.on<zero::host>());
  CHECK(any_tensor{values}.on<zero::host>());
  CHECK_FALSE(any_tensor{values}.on<gpu>());
}
