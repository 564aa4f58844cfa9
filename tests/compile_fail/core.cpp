// SPDX-License-Identifier: MIT
// Uses of core/ that must not compile, one a section; the last section is what to write instead.
#include <zero/core/any_span.hpp>
#include <zero/core/dtype.hpp>
#include <zero/core/float16.hpp>

#include <array>
#include <span>

using zero::any_span;
using zero::const_any_span;

int main() {
  std::array<float const, 2> const constants{1.0F, 2.0F};
  std::array<float, 2> variables{1.0F, 2.0F};

#if defined(MUTABLE_FROM_CONST_ELEMENTS)
  // expect: no (matching|viable) .*any_span
  any_span const span{std::span{constants}};
#elif defined(MUTABLE_FROM_CONST_ANY_SPAN)
  // expect: (no viable conversion|conversion from).*basic_any_span<.*const.*basic_any_span<void>
  any_span const span = const_any_span{std::span{constants}};
#elif defined(MUTABLE_VIEW_OF_CONST_ANY_SPAN)
  // expect: no matching .*function
  auto const span = const_any_span{std::span{variables}}.as<float>();
#elif defined(FOREIGN_TYPE_WITHOUT_DTYPE)
  // expect: no (matching|viable) .*any_span
  std::array<int, 2> integers{1, 2};
  any_span const span{std::span{integers}};
#elif defined(IMPLICIT_ROUNDING)
  // expect: conversion from .*float.* to .*float16
  zero::float16 const span = 1.0F;
#else
  const_any_span const from_constants{std::span{constants}};
  const_any_span const from_any{any_span{std::span{variables}}};
  auto const span = from_any.as<float const>();
  zero::float16 const rounded{span[0]};
  static_cast<void>(from_constants);
  static_cast<void>(rounded);
#endif
  static_cast<void>(span);
}
