// SPDX-License-Identifier: MIT
#include <zero/comm/failure_scope.hpp>

#include <doctest/doctest.h>
#include <support/thrown.hpp>

#include <mutex>
#include <new>
#include <string>

namespace {

using zero::detail::failure_scope;

void fail(failure_scope& scope, int origin, std::string const& message) {
  scope.fail(origin, [&] { return message; });
}

test::thrown raised(failure_scope const& scope) {
  return test::failure_of([&] { scope.raise_if_happened(); });
}

}  // namespace

TEST_CASE("the first failure counts") {
  std::mutex tree;
  failure_scope scope{tree};
  CHECK_FALSE(scope.happened());
  CHECK(raised(scope).kind == test::kind::nothing);
  fail(scope, 3, "first");
  fail(scope, 4, "second");
  CHECK(scope.happened());
  CHECK(raised(scope).message == "first");
  CHECK(raised(scope).origin == 3);
}

TEST_CASE("a failure goes down the tree, with the origin's rank there, and not up") {
  std::mutex tree;
  failure_scope top{tree};
  failure_scope left{top, {4, 2}};
  failure_scope right{top, {1, 3}};
  failure_scope below{left, {1}};
  CHECK(top.has_children());
  CHECK_FALSE(below.has_children());
  fail(right, 0, "one part");
  CHECK_FALSE(top.happened());
  CHECK_FALSE(left.happened());
  fail(top, 2, "all");
  CHECK(raised(top).message == "all");
  CHECK(raised(left).message == "the parent communicator failed: all");
  CHECK(raised(left).origin == 1);
  CHECK(raised(below).message == "the parent communicator failed: all");
  CHECK(raised(below).origin == 0);
  CHECK(raised(right).message == "one part");
  failure_scope const late{top, {0}};
  CHECK(raised(late).message == "the parent communicator failed: all");
  CHECK(raised(late).origin == -1);
}

TEST_CASE("a scope that is gone is no child any more") {
  std::mutex tree;
  failure_scope top{tree};
  {
    failure_scope const part{top, {0}};
    CHECK(top.has_children());
  }
  CHECK_FALSE(top.has_children());
  fail(top, 0, "all");
}

TEST_CASE("a failure needs no memory") {
  std::mutex tree;
  failure_scope scope{tree};
  scope.fail(1, []() -> std::string { throw std::bad_alloc{}; });
  CHECK(raised(scope).message == "out of memory");
  CHECK(raised(scope).origin == 1);
}
