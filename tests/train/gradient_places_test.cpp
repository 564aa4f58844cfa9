// SPDX-License-Identifier: MIT
#include <zero/device/host.hpp>
#include <zero/optim/sgd.hpp>
#include <zero/train/gradient_places.hpp>

#include <doctest/doctest.h>
#include <support/mock_model.hpp>
#include <support/thrown.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using values = std::vector<float>;
using units = std::vector<std::vector<zero::any_parameter>>;

/// Buckets a | b, c | d, frozen | e: the trainable ones are 0, 1 and 3. A segment's parameters
/// begin at multiples of 4 elements, and so do its two slices: 4 + 4, 8 + 8, and 4 + 4 elements.
test::model make_engine() {
  return test::model{{{{"a", 3}}, {{"b", 5}, {"c", 2}}, {{"d", 4, 10, true}}, {{"e", 6}}}};
}
constexpr std::size_t a = 0;
constexpr std::size_t b = 1;
constexpr std::size_t c = 2;
constexpr std::size_t e = 4;

/// The places of rank 1 of 2, alone: nothing here communicates.
struct bench {
  bench(units const& of, zero::stage at, zero::accumulation policy, bool engine_adds = false)
      : spec{std::type_identity<zero::host>{},
             of,
             at,
             zero::sgd{.learning_rate = 1},
             policy,
             zero::options{.bucket_bytes = 0, .alignment = 4},
             2,
             1,
             [](zero::reduction_shape const&) { return std::uint64_t{0}; }},
        bound{spec, at, 1}, places{bound, stream, policy, engine_adds} {}

  [[nodiscard]] std::span<float> place(std::size_t id) { return places.place(id).as<float>(); }
  /// The whole segment of bucket `bucket`, each of which has one.
  [[nodiscard]] std::span<float> segment(std::size_t bucket) {
    std::size_t const s = spec.of().buckets()[bucket].segments[0];
    return {reinterpret_cast<float*>(places.full(s)),
            static_cast<std::size_t>(spec.of().segments()[s].cut.padded())};
  }

  zero::detail::model_spec spec;
  zero::detail::binding<zero::host> bound;
  zero::host_stream stream;
  zero::detail::gradient_places<zero::host> places;
};

bool equal(std::span<float const> actual, values const& expected) {
  return std::ranges::equal(actual, expected);
}

}  // namespace

TEST_CASE("a bucket's slot is its number among trainable ones modulo the slots, or any free one") {
  test::model engine = make_engine();
  bench on{engine.units(), zero::stage2{}, zero::reduce_per_microbatch{.open_buckets = 2}};
  CHECK(on.places.slots() == 2);
  on.places.open(3);
  float* const even = on.place(e).data();
  on.places.open(1);
  float* const odd = on.place(b).data();
  CHECK(even != odd);
  CHECK(engine.gradient("b").view.data() == odd);
  on.places.free_slot(3, on.stream);
  on.places.open(0);
  CHECK(on.place(a).data() == even);
  on.places.free_slot(1, on.stream);
  on.places.open(3);  // its own is taken
  CHECK(on.place(e).data() == odd);
  CHECK(on.places.high_water() == 2);
}

TEST_CASE("with every slot taken another bucket is refused, and has one when one is free") {
  test::model engine = make_engine();
  bench on{engine.units(), zero::stage2{}, zero::reduce_per_microbatch{.open_buckets = 1}};
  on.places.open(3);
  on.places.open(3);  // it is open already
  test::thrown const caught = test::what_throws([&] { on.places.open(1); });
  CHECK(caught.kind == test::kind::usage);
  CHECK(caught.refuses("gradients of bucket 1", 1));
  CHECK(caught.says("actual all open: 3 (rank 1)"));
  on.places.free_slot(3, on.stream);
  on.places.free_slot(3, on.stream);  // it has none any more
  on.places.open(1);
  CHECK(on.places.high_water() == 1);
}

TEST_CASE("what lies around parameters in a slot is zero, and parameters are left to the engine") {
  test::model engine = make_engine();
  bench on{engine.units(), zero::stage2{}, zero::reduce_per_microbatch{.open_buckets = 1}};
  on.places.open(1);
  std::ranges::fill(on.segment(1), 7.0F);
  on.places.free_slot(1, on.stream);
  on.places.begin_microbatch();
  on.places.open(1);
  CHECK(equal(on.segment(1), {7, 7, 7, 7, 7, 0, 0, 0, 7, 7, 0, 0, 0, 0, 0, 0}));
  on.places.mark_present(b);
  on.places.close(1);  // c is absent: its gradient is zero
  CHECK(equal(on.segment(1), {7, 7, 7, 7, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}));
  CHECK(engine.gradient("b").view.empty());
}

TEST_CASE("for an engine that adds, a place is zero and present when it is opened") {
  for (bool const per_microbatch : {false, true}) {
    test::model engine = make_engine();
    bench on{engine.units(),
             zero::stage1{},
             {.per_microbatch = per_microbatch, .open_buckets = 1},
             true};
    for (int window = 0; window < 2; ++window) {
      on.places.begin_window();
      on.places.begin_microbatch();
      on.places.open(1);
      CHECK(on.places.present(b));
      CHECK(equal(on.place(b), values(5, 0)));
      std::ranges::fill(on.place(b), 7.0F);
      on.places.begin_microbatch();
      on.places.open(1);  // in the same slot, or in the same window
      CHECK(equal(on.place(b), values(5, 7)));
      on.places.free_slot(1, on.stream);
    }
  }
}

TEST_CASE("what is present is forgotten by a micro-batch where it is reduced, else by a window") {
  for (bool const per_microbatch : {false, true}) {
    test::model engine = make_engine();
    bench on{engine.units(), zero::stage1{}, {.per_microbatch = per_microbatch}};
    CHECK(!on.places.present(a));
    on.places.mark_present(a);
    CHECK(on.places.present(a));
    CHECK(!on.places.present(b));
    on.places.begin_microbatch();
    CHECK(on.places.present(a) == !per_microbatch);
    on.places.begin_window();
    CHECK(!on.places.present(a));
  }
}

TEST_CASE("a gradient from elsewhere is copied, added to what is present, or refused") {
  test::model engine = make_engine();
  bench on{engine.units(), zero::stage2{}, zero::reduce_per_microbatch{}};
  on.places.open(0);
  std::ranges::fill(on.place(a), 9.0F);
  values const gradient{1, 2, 3};
  on.places.add(a, std::span{gradient});
  CHECK(equal(on.place(a), {1, 2, 3}));
  on.places.mark_present(a);
  on.places.add(a, std::span{gradient});
  CHECK(equal(on.place(a), {2, 4, 6}));

  auto const check_refused = [&](zero::const_any_span wrong) {
    test::thrown const caught = test::what_throws([&] { on.places.add(a, wrong); });
    CHECK(caught.kind == test::kind::usage);
    CHECK(caught.refuses("gradient_ready", 1));
    CHECK(caught.says("'a'"));
    CHECK(equal(on.place(a), {2, 4, 6}));
  };
  std::vector<double> const wide(3, 1.0);
  check_refused(std::span{gradient}.first(2));
  check_refused(std::span{wide});
  check_refused(on.place(a));
  check_refused(on.segment(0).subspan(2, 3));  // overlaps it
}

TEST_CASE("a gradient that stays in its tensor is written there, and copied to its slot") {
  values p(3, 1);
  values p_gradient(3, 0);
  bench on{{{zero::parameter("p", p, p_gradient)}}, zero::stage1{}, zero::reduce_per_microbatch{}};
  on.places.open(0);
  CHECK(on.places.leased_place(0).data() == p_gradient.data());
  CHECK(on.place(0).data() != p_gradient.data());
  p_gradient = {1, 2, 3};
  on.places.written(0);
  CHECK(equal(on.place(0), {1, 2, 3}));
}

TEST_CASE("a rank's part of a parameter's average is its slice, or all where that is replicated") {
  using part = std::pair<std::size_t, std::size_t>;  // elements, the first one's index
  auto const part_of = [](bench const& on, std::size_t id) {
    auto const [elements, first] = on.places.reduced_part(id);
    return part{elements.size(), first};
  };
  test::model engine = make_engine();
  for (bool const per_microbatch : {false, true}) {
    zero::accumulation const policy{.per_microbatch = per_microbatch};
    bench const sharded{engine.units(), zero::stage2{}, policy};
    CHECK(part_of(sharded, a) == part{0, 0});  // rank 0 has all of it
    CHECK(part_of(sharded, b) == part{0, 0});
    CHECK(part_of(sharded, c) == part{2, 0});
    CHECK(part_of(sharded, e) == part{2, 4});
    bench const replicated{engine.units(), zero::stage0{}, policy};
    CHECK(part_of(replicated, a) == part{3, 0});
    CHECK(part_of(replicated, b) == part{5, 0});
    CHECK(part_of(replicated, e) == part{6, 0});
  }
}
