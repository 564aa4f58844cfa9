// SPDX-License-Identifier: MIT
#include <zero/comm/thread_family.hpp>

#include <doctest/doctest.h>
#include <support/thrown.hpp>

#include <string>
#include <vector>

namespace {

/// A device whose events are counted: a group keeps three of them for each of its ranks.
struct device {
  struct stream {};
  struct event {
    event() { ++live; }
    event(event const&) = delete;
    event& operator=(event const&) = delete;
    ~event() { --live; }
    static inline int live = 0;
  };
};

using family = zero::detail::thread_family<device>;
using group = zero::detail::thread_group<device>;

/// How many ranks all groups have together.
int live_ranks() { return device::event::live / 3; }

void leave_all(family& all, group& of) {
  for (int rank = 0; rank < of.size(); ++rank) {
    all.leave(of, rank);
  }
}

}  // namespace

TEST_CASE("ranks of one call and color share a group; another call, color or parent has its own") {
  family all{4};
  group& root = all.root();
  CHECK(root.size() == 4);
  group& even = all.child(root, 1, 0, {0, 2});
  CHECK(even.size() == 2);
  CHECK(&all.child(root, 1, 0, {0, 2}) == &even);
  CHECK(live_ranks() == 6);
  group& odd = all.child(root, 1, 1, {1, 3});
  group& later = all.child(root, 2, 0, {0, 2});
  group& below = all.child(even, 1, 0, {1});
  CHECK(live_ranks() == 11);
  CHECK(&odd != &even);
  CHECK(&later != &even);
  CHECK(&below != &even);
  CHECK(&all.root() == &root);
}

TEST_CASE("a group is freed at the next split once all its ranks have left and ended their calls") {
  family all{2};
  group& root = all.root();
  group& part = all.child(root, 1, 0, {0, 1});
  all.leave(part, 0);
  static_cast<void>(all.child(root, 2, 0, {0}));
  CHECK(live_ranks() == 2 + 2 + 1);  // rank 1 still has its handle

  part.payload.issue(1);
  all.leave(part, 1);
  static_cast<void>(all.child(root, 3, 0, {0}));
  CHECK(live_ranks() == 2 + 2 + 2);  // and now work in a stream
  part.payload.end(1);

  CHECK(part.control.issue_alone(0));
  static_cast<void>(all.child(root, 4, 0, {0}));
  CHECK(live_ranks() == 2 + 2 + 3);  // or a control call
  part.control.end(0);

  static_cast<void>(all.child(root, 5, 0, {0}));
  CHECK(live_ranks() == 2 + 4);
}

TEST_CASE("a group outlives those that were split from it, and the first one outlives all") {
  family all{1};
  group& root = all.root();
  group& part = all.child(root, 1, 0, {0});
  group& below = all.child(part, 1, 0, {0});
  leave_all(all, part);
  leave_all(all, root);
  static_cast<void>(all.child(root, 2, 0, {0}));
  CHECK(live_ranks() == 4);  // the part has one below it
  leave_all(all, below);
  static_cast<void>(all.child(root, 3, 0, {0}));
  static_cast<void>(all.child(root, 4, 0, {0}));
  CHECK(live_ranks() == 1 + 3);
  CHECK_FALSE(root.failure.happened());
  CHECK(root.failure.has_children());
}

TEST_CASE("all groups end with the family, children first") {
  {
    family all{3};
    group* last = &all.root();
    for (int depth = 0; depth < 5; ++depth) {
      last = &all.child(*last, 1, 0, {0});
    }
    CHECK(live_ranks() == 8);
  }
  CHECK(live_ranks() == 0);
}

TEST_CASE("a failure reaches the groups that are there, by the origin's rank in each") {
  family all{4};
  group& root = all.root();
  group& gone = all.child(root, 1, 0, {0, 3});
  leave_all(all, gone);
  group& part = all.child(root, 2, 0, {3, 2});
  root.failure.fail(2, [] { return std::string{"disk full"}; });
  test::thrown const there = test::failure_of([&] { part.failure.raise_if_happened(); });
  CHECK(there.message == "the parent communicator failed: disk full");
  CHECK(there.origin == 1);
  group& late = all.child(root, 3, 0, {1, 0, 2});
  CHECK(test::failure_of([&] { late.failure.raise_if_happened(); }).origin == 2);
}
