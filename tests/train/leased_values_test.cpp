// SPDX-License-Identifier: MIT
#include <zero/comm/solo.hpp>
#include <zero/device/host.hpp>
#include <zero/optim/sgd.hpp>
#include <zero/train/leased_values.hpp>

#include <doctest/doctest.h>
#include <support/mock_model.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

namespace {

using zero::pass;
using zero::detail::lease_kind;

/// A model of one rank, of the units e | w, and a use of e | x, whose tensors have been taken over.
struct bench {
  explicit bench(zero::stage at)
      : spec{std::type_identity<zero::host>{},
             engine.units(),
             at,
             zero::sgd{.learning_rate = 1},
             zero::local_accumulate{},
             zero::options{.bucket_bytes = 0},
             1,
             0,
             [](zero::reduction_shape const&) { return std::uint64_t{0}; }},
        bound{spec, at, 0}, comm{zero::solo{}}, values{taken_over(), comm, stream, stream} {}

  zero::detail::binding<zero::host>& taken_over() {
    bound.take_over(comm, zero::start::broadcast, true);
    return bound;
  }

  /// The tensor is bound to where the library says that it is whole, and has its values.
  [[nodiscard]] bool is_whole(std::string const& name, float value) {
    std::span<float> const view = engine.value(name).view;
    return !view.empty() && view.data() == values.whole(spec.of().find(name)).data() &&
           std::ranges::all_of(view, [value](float each) { return each == value; });
  }
  [[nodiscard]] bool is_empty(std::string const& name) { return engine.value(name).view.empty(); }

  test::model engine{{{{"e", 4, 1}}, {{"w", 3, 2}, test::use_of("e")}, {{"x", 5, 3}}}};
  zero::detail::model_spec spec;
  zero::detail::binding<zero::host> bound;
  zero::metered<zero::solo> comm;
  zero::host_stream stream;
  zero::detail::leased_values<zero::solo> values;
};

}  // namespace

TEST_CASE("in stages 0 to 2 tensors are whole without a lease, and with one, and nothing moves") {
  for (zero::stage const& at :
       {zero::stage(zero::stage0{}), zero::stage(zero::stage1{}), zero::stage(zero::stage2{})}) {
    bench on{at};
    CHECK(!on.values.sharded());
    auto const check_whole = [&] {
      CHECK(on.is_whole("e", 1));
      CHECK(on.is_whole("w", 2));
      CHECK(on.is_whole("x", 3));
    };
    check_whole();
    on.values.begin(pass::forward);
    on.values.open(1, lease_kind::forward);
    check_whole();
    on.values.close(1, lease_kind::forward);
    on.values.release_all();
    check_whole();
    CHECK(on.values.counts().gathers == 0);
  }
}

TEST_CASE("in stage 3 a tensor is whole from the first of its unit's leases to the last") {
  bench on{zero::stage3{}};
  CHECK(on.values.sharded());
  CHECK(on.is_empty("x"));
  on.values.begin(pass::forward);
  on.values.open(2, lease_kind::forward);
  on.values.open(2, lease_kind::forward);
  CHECK(on.is_whole("x", 3));
  CHECK(on.is_empty("e"));
  on.values.close(2, lease_kind::forward);
  CHECK(on.is_whole("x", 3));
  on.values.close(2, lease_kind::forward);
  CHECK(on.is_empty("x"));
}

TEST_CASE("in stage 3 a tied parameter is whole while any unit that uses it is leased") {
  bench on{zero::stage3{.prefetch = 0, .max_live_units = 2}};
  on.values.begin(pass::forward);
  on.values.open(1, lease_kind::forward);  // the user first
  CHECK(on.is_whole("w", 2));
  CHECK(on.is_whole("e", 1));
  on.values.open(0, lease_kind::forward);
  on.values.close(1, lease_kind::forward);
  CHECK(on.is_empty("w"));
  CHECK(on.is_whole("e", 1));
  on.values.close(0, lease_kind::forward);
  CHECK(on.is_empty("e"));
  CHECK(on.values.counts().gathers == 2);
}

TEST_CASE("in stage 3 a recomputation and the backward lease inside it share what is gathered") {
  bench on{zero::stage3{.prefetch = 0}};
  on.values.begin(pass::backward);
  on.values.open(2, lease_kind::recomputation);
  CHECK(on.is_whole("x", 3));
  on.values.open(2, lease_kind::backward);
  on.values.close(2, lease_kind::backward);
  CHECK(on.is_whole("x", 3));
  on.values.close(2, lease_kind::recomputation);
  CHECK(on.is_empty("x"));
  CHECK(on.values.counts().gathers == 1);
  CHECK(on.values.counts().releases == 1);
}

TEST_CASE("what is given back is whole in storage of the tensors' own, in every stage") {
  for (zero::stage const& at :
       {zero::stage(zero::stage0{}), zero::stage(zero::stage3{.prefetch = 0})}) {
    bench on{at};
    on.values.begin(pass::evaluation);
    on.values.give_back(1, on.stream);  // what the unit declares, and not what it uses
    CHECK(on.engine.value("w").own == std::vector<float>(3, 2));
    CHECK(on.engine.value("w").owns());
    CHECK(on.engine.value("e").own.empty());
    CHECK(on.values.counts().occupied == 0);
  }
}
