// SPDX-License-Identifier: MIT
#include <zero/core/error.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

TEST_CASE("every exception is a zero::error, and that is a std::runtime_error") {
  CHECK_THROWS_AS(throw zero::usage_error{"x"}, zero::error);
  CHECK_THROWS_AS(throw zero::communication_error{"x"}, zero::error);
  CHECK_THROWS_AS(throw zero::error{"x"}, std::runtime_error);
  CHECK_THROWS_WITH(throw zero::usage_error{"step: expected 1, actual 2"},
                    "step: expected 1, actual 2");
}

TEST_CASE("a communication error knows the rank that failed first, or says that nobody does") {
  CHECK(zero::communication_error{"x", 3}.origin() == 3);
  CHECK(zero::communication_error{"x"}.origin() == -1);
}

TEST_CASE("text joins words and numbers, small and large") {
  using zero::detail::text;
  CHECK(text() == "");
  CHECK(text("rank ", 2, " of ", std::size_t{4}) == "rank 2 of 4");
  CHECK(text(std::numeric_limits<std::uint64_t>::max()) == "18446744073709551615");
  CHECK(text(std::numeric_limits<std::int64_t>::min()) == "-9223372036854775808");
  CHECK(text(std::string{"learning_rate "}, -0.001F) == "learning_rate -0.001");
  CHECK(text(1e-8, " ", 1.5, " ", -2e30) == "1e-08 1.5 -2e+30");
  CHECK(text(std::nan("")) == "nan");
}
