// SPDX-License-Identifier: MIT
#include <doctest/doctest.h>
#include <zero/core/dtype.hpp>
#include <zero/core/error.hpp>
#include <zero/shard/layout.hpp>
#include <zero/train/loop_state.hpp>

#include <cstddef>
#include <string>
#include <vector>

namespace {

using kind = zero::detail::lease_kind;
using source = zero::detail::gradient_source;
using zero::usage_error;
using zero::detail::loop_state;

zero::parameter_spec spec(std::string const& name, bool trainable = true) {
  return {.name = name,
          .size = 4,
          .value = zero::dtype::float32,
          .gradient = zero::dtype::float32,
          .reduced = zero::dtype::float32,
          .trainable = trainable};
}

/// Three units: 0 declares `a` and the frozen `b`, 1 declares `c`, 2 uses `a` again.
zero::layout three_units() {
  std::vector<zero::unit_spec> units(3);
  units[0].parameters = {spec("a"), spec("b", false)};
  units[1].parameters = {spec("c")};
  units[2].tied = {"a"};
  return {units, 2, {.bucket_bytes = 0, .alignment = 0, .alignment_bytes = 64}};
}

struct fixture {
  zero::layout of = three_units();
  loop_state loop{of, 1, 2};

  void lease(std::size_t unit, kind as) {
    loop.check_lease(unit, as);
    static_cast<void>(loop.enter(as));
    loop.begin_lease(unit, as);
  }
  void end(std::size_t unit, kind as) {
    loop.end_lease(unit);
    if (as == kind::backward) {
      loop.end_backward(unit);
    }
  }
  void use(std::size_t unit, kind as) {
    lease(unit, as);
    end(unit, as);
  }
};

}  // namespace

TEST_CASE_FIXTURE(fixture, "a window has as many micro-batches as its first one says") {
  CHECK_THROWS_WITH_AS(loop.check_microbatch(2, 2),
                       "microbatch: expected an index below 2, actual 2 (rank 1)", usage_error);
  for (std::size_t m = 0; m < 2; ++m) {
    loop.check_microbatch(m, 2);
    CHECK(loop.begin_microbatch(2) == (m == 1));
    CHECK_THROWS_WITH_AS(loop.check_microbatch(m, 2),
                         "microbatch: expected no open micro-batch, actual one (rank 1)",
                         usage_error);
    loop.use_source(source::parameters);
    loop.end_microbatch();
    CHECK(loop.finish_microbatch());
    CHECK_FALSE(loop.finish_microbatch());
    CHECK(loop.ran() == m + 1);
  }
  CHECK_THROWS_WITH_AS(
      loop.check_microbatch(0, 2),
      "microbatch: expected at most 2 in a window, actual one more (rank 1); call step first",
      usage_error);
  CHECK_THROWS_WITH_AS(
      loop.check_microbatch(0, 3),
      "microbatch: expected a window of 2 micro-batches as announced, actual 3 (rank 1)",
      usage_error);
  CHECK_NOTHROW(loop.check_step());
  CHECK_NOTHROW(loop.check_whole_window("gradient"));
  loop.end_window();
  CHECK_THROWS_WITH_AS(loop.check_step(),
                       "step: expected a micro-batch with a backward, actual none (rank 1)",
                       usage_error);
  CHECK_NOTHROW(loop.check_microbatch(0, 3));
}

TEST_CASE_FIXTURE(fixture, "a micro-batch without a backward doesn't count") {
  static_cast<void>(loop.begin_microbatch(2));
  use(0, kind::forward);
  loop.end_microbatch();
  CHECK(loop.ran() == 0);
  CHECK_FALSE(loop.finish_microbatch());
  CHECK_NOTHROW(loop.check_microbatch(0, 5));
}

TEST_CASE_FIXTURE(fixture, "as many units are leased at once as may be, each as often as wanted") {
  lease(0, kind::evaluation);
  lease(0, kind::evaluation);
  lease(1, kind::evaluation);
  CHECK_THROWS_WITH_AS(loop.check_lease(2, kind::evaluation),
                       "lease of unit 2: expected at most 2 live units (max_live_units), actual "
                       "also units 0 1 (rank 1)",
                       usage_error);
  CHECK_NOTHROW(loop.check_lease(1, kind::evaluation));
  CHECK_THROWS_WITH_AS(loop.check_lease(3, kind::evaluation),
                       "lease: expected a unit below 3, actual 3 (rank 1)", usage_error);
  CHECK_THROWS_WITH_AS(loop.check_idle("step"),
                       "step: expected no open lease, actual units 0 1 (rank 1)", usage_error);
  end(0, kind::evaluation);
  CHECK_THROWS_AS(loop.check_lease(2, kind::evaluation), usage_error);
  end(0, kind::evaluation);
  CHECK_NOTHROW(loop.check_lease(2, kind::evaluation));
}

TEST_CASE_FIXTURE(fixture, "a pass begins with a lease of another kind, and ends with everything") {
  static_cast<void>(loop.begin_microbatch(1));
  CHECK(loop.enter(kind::forward));
  CHECK_FALSE(loop.enter(kind::forward));
  CHECK(loop.current() == zero::pass::forward);
  CHECK(loop.enter(kind::recomputation));
  CHECK(loop.current() == zero::pass::backward);
  CHECK_FALSE(loop.enter(kind::backward));
  CHECK_FALSE(loop.enter(kind::by_parameter));
  CHECK_FALSE(loop.end_pass());  // in the micro-batch
  lease(0, kind::backward);
  loop.end_microbatch();
  CHECK_FALSE(loop.end_pass());           // a lease
  CHECK_FALSE(loop.finish_microbatch());  // its gradients come at its end
  end(0, kind::backward);
  CHECK(loop.end_pass());
  CHECK(loop.current() == zero::pass::none);
  CHECK(loop.finish_microbatch());

  loop.begin_evaluation();
  CHECK(loop.enter(kind::evaluation));
  CHECK_THROWS_WITH_AS(loop.check_idle("step"),
                       "step: expected no open evaluation, actual one (rank 1)", usage_error);
  CHECK_FALSE(loop.end_pass());
  loop.end_evaluation();
  CHECK(loop.end_pass());
}

TEST_CASE_FIXTURE(fixture, "a unit has as many backwards as forwards") {
  static_cast<void>(loop.begin_microbatch(1));
  use(1, kind::forward);
  use(1, kind::forward);
  use(1, kind::backward);
  CHECK_FALSE(loop.users_finished(1));
  use(1, kind::backward);
  CHECK(loop.users_finished(1));
  CHECK_THROWS_WITH_AS(loop.check_lease(1, kind::backward),
                       "backward: expected unit 1 2 time(s) in this micro-batch, as in forward, "
                       "actual once more (rank 1)",
                       usage_error);
  use(0, kind::backward);               // one where forward was elsewhere
  CHECK_FALSE(loop.users_finished(0));  // unit 2 uses its bucket, too
  use(2, kind::backward);
  CHECK(loop.users_finished(0));
  loop.end_microbatch();
  loop.end_window();
  static_cast<void>(loop.begin_microbatch(1));
  CHECK_NOTHROW(loop.check_lease(1, kind::backward));
}

TEST_CASE_FIXTURE(fixture, "one lease at a time writes a gradient") {
  static_cast<void>(loop.begin_microbatch(1));
  lease(2, kind::backward);
  CHECK_THROWS_WITH_AS(loop.check_lease(0, kind::backward),
                       "backward: expected unit 0 after the lease of unit 2 has ended, which "
                       "writes the gradient of 'a', too, actual before (rank 1)",
                       usage_error);
  CHECK_NOTHROW(loop.check_lease(1, kind::backward));
  CHECK_NOTHROW(loop.check_lease(0, kind::recomputation));
  end(2, kind::backward);
  CHECK_NOTHROW(loop.check_lease(0, kind::backward));
}

TEST_CASE_FIXTURE(fixture, "gradients come in one way in a micro-batch") {
  CHECK_THROWS_WITH_AS(loop.check_source(source::parameters),
                       "gradient: expected an open micro-batch, actual none (rank 1)", usage_error);
  CHECK_THROWS_AS(loop.check_lease(0, kind::backward), usage_error);
  static_cast<void>(loop.begin_microbatch(2));
  loop.use_source(source::parameters);
  CHECK_THROWS_WITH_AS(loop.check_lease(0, kind::backward),
                       "gradient: expected one way of delivering gradients in a micro-batch, "
                       "actual both backward leases and gradient_ready (rank 1); lease with "
                       "backward(u, zero::by_parameter)",
                       usage_error);
  CHECK_NOTHROW(loop.check_lease(0, kind::by_parameter));
  loop.end_microbatch();
  static_cast<void>(loop.begin_microbatch(2));
  use(0, kind::backward);
  CHECK_THROWS_AS(loop.check_source(source::parameters), usage_error);
}

TEST_CASE_FIXTURE(fixture, "parameters are asked for by the units that use them") {
  CHECK_NOTHROW(loop.check_member(0, 0));
  CHECK_NOTHROW(loop.check_member(2, 0));  // tied
  CHECK_THROWS_WITH_AS(loop.check_member(2, 1),
                       "lease of unit 2: expected one of its parameters, actual id 1 (rank 1)",
                       usage_error);
  CHECK_THROWS_AS(loop.check_member(0, 3), usage_error);
  CHECK_THROWS_WITH_AS(loop.check_trainable(1),
                       "gradient: expected a trainable parameter, actual 'b', which is frozen "
                       "(rank 1)",
                       usage_error);
  CHECK_THROWS_WITH_AS(loop.check_parameter(3),
                       "sharded_model: expected a parameter below 3, actual 3 (rank 1)",
                       usage_error);
  CHECK_NOTHROW(loop.check_dtype(0, zero::dtype::float32, zero::dtype::float32));
  CHECK_THROWS_WITH_AS(
      loop.check_dtype(2, zero::dtype::float32, zero::dtype::bfloat16),
      "lease: expected parameter 'c' to be asked for as float32, actual bfloat16 (rank 1)",
      usage_error);
}
