// SPDX-License-Identifier: MIT
#include <doctest/doctest.h>

#include <zero/core/parameter.hpp>
#include <zero/train/distinct_tensors.hpp>

#include <support/owning_tensor.hpp>
#include <support/thrown.hpp>

#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace {

using tensor = test::owning_tensor<float>;

/// What the parameters are refused with; empty where they aren't.
std::string refusal(std::vector<zero::any_parameter> const& declared) {
  return test::message_of([&] { zero::detail::check_distinct(declared); });
}

}  // namespace

TEST_CASE("tensors of their own are accepted, with or without elements") {
  std::array<tensor, 2> values{tensor{3}, tensor{}};
  std::array<tensor, 2> gradients{tensor{3}, tensor{}};
  CHECK(refusal({}).empty());
  CHECK(refusal({zero::parameter("a", values[0], gradients[0]),
                 zero::parameter("b", values[1], gradients[1])})
            .empty());
}

TEST_CASE("one tensor in two places is refused, by the names of both") {
  tensor a{3};
  tensor b{3};
  CHECK(refusal({zero::parameter("a", a), zero::parameter("b", a)}) ==
        "parameter 'b': expected a value of its own, actual one that shares elements with the "
        "value of 'a'; "
        "declare the second use of a parameter as zero::tied");
  CHECK(refusal({zero::parameter("a", a, a)}).find("of its own") != std::string::npos);
  CHECK(refusal({zero::parameter("a", a, b), zero::parameter("c", b)}).find("of its own") !=
        std::string::npos);
}

TEST_CASE(
    "one gradient tensor for all frozen parameters is fine, and so are elements that will be given "
    "up") {
  tensor a{3};
  tensor b{3};
  tensor none;
  CHECK(refusal({zero::parameter("a", a, none).frozen(), zero::parameter("b", b, none).frozen()})
            .empty());

  std::vector<float> scratch(3);
  tensor a_gradient;
  tensor b_gradient;
  a_gradient.view = scratch;
  b_gradient.view = scratch;
  CHECK(
      refusal({zero::parameter("a", a, a_gradient), zero::parameter("b", b, b_gradient)}).empty());
}

TEST_CASE("gradients that stay in their tensors must have elements of their own") {
  tensor a{3};
  tensor b{3};
  std::vector<float> scratch(3);
  std::span<float> a_gradient{scratch};
  std::span<float> b_gradient{scratch};
  CHECK(refusal({zero::parameter("a", a, a_gradient), zero::parameter("b", b, b_gradient)})
            .find("parameter 'b': expected a gradient of its own") == 0);
}
