// SPDX-License-Identifier: MIT
#include <zero/core/config.hpp>

#include <doctest/doctest.h>

#include <type_traits>

TEST_CASE("the version's macros and its constant agree") {
  CHECK(zero::version.major == ZERO_VERSION_MAJOR);
  CHECK(zero::version.minor == ZERO_VERSION_MINOR);
  CHECK(zero::version.patch == ZERO_VERSION_PATCH);
}

TEST_CASE("public names live in the inline namespace of the major version") {
  CHECK(std::is_same_v<zero::version_number, zero::v0::version_number>);
  CHECK(ZERO_VERSION_MAJOR == 0);  // another major version needs another namespace
}
