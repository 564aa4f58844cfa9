// SPDX-License-Identifier: MIT
// Faults that other systems had, as tiny cases with the right result; the numbers are those of the
// list in the project's design. SGD is plain, with learning rate 1, where nothing else is said, so
// that a parameter is its start less the mean gradient.
#include <doctest/doctest.h>

#include <zero/comm/run_threads.hpp>
#include <zero/comm/solo.hpp>
#include <zero/core/bfloat16.hpp>
#include <zero/core/float16.hpp>
#include <zero/optim/adamw.hpp>
#include <zero/optim/sgd.hpp>
#include <zero/train/sharded_model.hpp>

#include <support/check_values.hpp>
#include <support/failures.hpp>
#include <support/hooked_communicator.hpp>
#include <support/mock_model.hpp>
#include <support/settings.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <map>
#include <memory>
#include <new>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace {

using communicator = test::hooked<zero::thread_communicator>;
using values = std::vector<float>;
using optional_gradient = std::optional<float>;

constexpr zero::sgd plain{.learning_rate = 1};

/// Every setting at each world size, with hooks that a body may set.
template <class Body>
void everywhere(std::initializer_list<int> world_sizes, zero::options const& options, Body body) {
  test::everywhere(world_sizes, options,
                   [&](zero::thread_communicator& comm, test::setting const& how) {
                     auto const hooks = std::make_shared<test::hooks>();
                     communicator hooked{comm.split(0, comm.rank()), hooks};
                     body(hooked, how, *hooks);
                   });
}

template <class Optimizer>
zero::sharded_model<communicator, Optimizer> make_sharded(
    communicator& comm, std::vector<std::vector<zero::any_parameter>> const& units,
    Optimizer const& optimizer, test::setting const& how) {
  return {comm, units, how.stage, optimizer, how.policy, how.options};
}

/// The mean over ranks of rank + 1.
float mean_of_ranks(communicator const& comm) { return static_cast<float>(comm.size() + 1) / 2; }

/// This rank's all-gathers since `clear()`, and how many places they went to, as its communicator
/// saw them.
class gather_log {
 public:
  explicit gather_log(test::hooks& hooks) {
    hooks.before_call = [this](test::collective_call const& call) {
      if (std::string_view{call.operation} == "all_gather") {
        ++count_;
        places_.insert(call.output.data());
      }
    };
  }
  void clear() { count_ = 0; }
  [[nodiscard]] std::size_t count() const { return count_; }
  [[nodiscard]] std::size_t places() const { return places_.size(); }

 private:
  std::size_t count_ = 0;
  std::set<void const*> places_;
};

/// In stage 3, the engine's tensors of `names` have no elements: nothing is gathered.
bool all_released(test::model& engine, std::string_view names, test::setting const& how) {
  return !how.stage.shards_parameters() || std::ranges::all_of(names, [&](char name) {
    return engine.value(std::string{name}).view.empty();
  });
}

/// Memory that is full of what isn't a number when it is handed out.
zero::memory_resource dirty_memory() {
  constexpr std::align_val_t alignment{zero::host::alignment_bytes};
  return {
      .allocate =
          [](std::size_t bytes, void*) {
            void* const memory = ::operator new(bytes, alignment);
            std::memset(memory, 0xff, bytes);
            return memory;
          },
      .deallocate = [](void* memory, std::size_t, void*) { ::operator delete(memory, alignment); }};
}

}  // namespace

TEST_CASE(
    "case 7: a gradient that is not finite on one rank skips the step on all, without a residue") {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  constexpr float huge = 3e38F;  // the sum over ranks overflows
  struct fault {
    int rank;
    std::size_t element;
    std::size_t microbatch;
    float value;
  };
  zero::options const options{.clip_norm = 100.0, .alignment = 1};
  for (fault const bad : {fault{0, 3, 0, infinity}, fault{1, 0, 2, nan}, fault{0, 3, 1, -infinity},
                          fault{-1, 2, 0, huge}}) {
    everywhere({2, 3}, options, [&](communicator& comm, test::setting const& how, test::hooks&) {
      test::model engine{{{{"p", 4}}}};
      auto sharded =
          make_sharded(comm, engine.units(), zero::sgd{.learning_rate = 1, .momentum = 0.5}, how);
      auto const window = [&](bool is_bad) {
        for (std::size_t m = 0; m < 3; ++m) {
          bool const here =
              is_bad && m == bad.microbatch && (bad.rank == -1 || bad.rank == comm.rank());
          test::run_microbatch(sharded, engine, m, 3, [&](std::string const&, std::size_t i) {
            return here && i == bad.element ? bad.value : 1.0F;
          });
        }
        return sharded.step();
      };
      auto const first = window(false);
      CHECK_MESSAGE(!first.skipped(), how.name);
      CHECK_MESSAGE(first.norm() == 2.0, how.name);
      test::check_values(sharded, engine, {{"p", values(4, 9.0F)}}, how);

      auto const second = window(true);
      CHECK_MESSAGE(second.skipped(), how.name);
      CHECK_MESSAGE(!std::isfinite(second.norm()), how.name);
      CHECK_MESSAGE(sharded.steps(sharded.find("p")) == 1, how.name);
      test::check_values(sharded, engine, {{"p", values(4, 9.0F)}}, how);

      auto const third = window(false);  // the momentum is 1, and becomes 0.5 * 1 + 1
      CHECK_MESSAGE(!third.skipped(), how.name);
      CHECK_MESSAGE(third.norm() == 2.0, how.name);
      CHECK_MESSAGE(sharded.steps(sharded.find("p")) == 2, how.name);
      test::check_values(sharded, engine, {{"p", values(4, 7.5F)}}, how);
    });
  }
}

TEST_CASE("case 7: without clipping, what is not a number reaches the parameter on every rank") {
  everywhere({2}, {}, [](communicator& comm, test::setting const& how, test::hooks&) {
    test::model engine{{{{"p", 4}}}};
    auto sharded = make_sharded(comm, engine.units(), plain, how);
    bool const bad = comm.rank() == 1;
    test::run_microbatch(sharded, engine, 0, 1, [bad](std::string const&, std::size_t i) {
      return bad && i == 2 ? std::numeric_limits<float>::quiet_NaN() : 1.0F;
    });
    CHECK_MESSAGE(!sharded.step().skipped(), how.name);
    values const p = test::read(sharded, engine).at("p");
    CHECK_MESSAGE(std::isnan(p[2]), how.name);
    CHECK_MESSAGE((p[0] == 9 && p[1] == 9 && p[3] == 9), how.name);
  });
}

TEST_CASE("case 9: a window's micro-batches are averaged, however many ran") {
  everywhere({1, 2, 3, 4}, {}, [](communicator& comm, test::setting const& how, test::hooks&) {
    test::model engine{{{{"a", 5}}, {{"b", 3}, {"c", 1}}}};
    auto sharded = make_sharded(comm, engine.units(), plain, how);
    auto const window = [&](std::initializer_list<float> gradients, std::size_t announced) {
      std::size_t m = 0;
      for (float const g : gradients) {
        test::run_microbatch(sharded, engine, m++, announced,
                             [g](std::string const&, std::size_t) { return g; });
      }
      sharded.step();
    };
    auto const check = [&](float p) {
      test::check_values(sharded, engine,
                         {{"a", values(5, p)}, {"b", values(3, p)}, {"c", values(1, p)}}, how);
    };
    window({1, 3}, 2);
    check(8);
    window({5}, 1);
    check(3);
    window({1, 2, 6}, 3);
    check(0);
    window({1, 3}, 4);  // fewer than announced
    check(-2);
  });
}

TEST_CASE("case 11: a parameter without a gradient isn't updated from an old one") {
  everywhere({1, 2, 3}, {.clip_norm = 1e6},
             [](communicator& comm, test::setting const& how, test::hooks&) {
               test::model engine{{{{"p", 3}, {"q", 2}}}};
               auto sharded = make_sharded(comm, engine.units(), plain, how);
               auto const step = [&](optional_gradient p) {
                 test::run_microbatch(sharded, engine, 0, 1,
                                      [p](std::string const& name, std::size_t) {
                                        return name == "p" ? p : optional_gradient{1.0F};
                                      });
                 return sharded.step();
               };
               std::size_t const id = sharded.find("p");
               step(1.0F);
               test::check_values(sharded, engine, {{"p", values(3, 9)}, {"q", values(2, 9)}}, how);
               step({});
               test::check_values(sharded, engine, {{"p", values(3, 9)}, {"q", values(2, 8)}}, how);
               CHECK_MESSAGE(sharded.steps(id) == 1, how.name);
               step(1.0F);
               test::check_values(sharded, engine, {{"p", values(3, 8)}, {"q", values(2, 7)}}, how);

               CHECK_MESSAGE(step(std::numeric_limits<float>::infinity()).skipped(), how.name);
               auto const after = step({});
               CHECK_MESSAGE(after.norm() == doctest::Approx(std::sqrt(2.0)), how.name);
               test::check_values(sharded, engine, {{"p", values(3, 8)}, {"q", values(2, 6)}}, how);
               step(1.0F);
               test::check_values(sharded, engine, {{"p", values(3, 7)}, {"q", values(2, 5)}}, how);
               CHECK_MESSAGE(sharded.steps(id) == 3, how.name);
             });
}

TEST_CASE("case 13: the norm is that of the mean gradient, and the same on every rank") {
  for (bool const clips : {true, false}) {
    zero::options const options{.clip_norm = clips ? 1.0 : std::numeric_limits<double>::infinity(),
                                .alignment = 1};
    everywhere(
        {1, 2, 3, 4}, options, [&](communicator& comm, test::setting const& how, test::hooks&) {
          test::model engine{{{{"p", 4}}}};
          auto sharded = make_sharded(comm, engine.units(), plain, how);
          auto const result =
              test::run_step(sharded, engine, static_cast<float>(2 * comm.rank() + 1));
          auto const mean = static_cast<float>(comm.size());  // of 1, 3, 5, ...
          CHECK_MESSAGE(result.norm() == 2.0 * comm.size(), how.name);
          CHECK_MESSAGE(!result.skipped(), how.name);
          test::check_values(sharded, engine, {{"p", values(4, clips ? 9.5F : 10 - mean)}}, how);
        });
  }
}

TEST_CASE("case 15: a tied parameter adds up its uses, and counts once in norm and memory") {
  everywhere({1, 2, 3, 4}, {.clip_norm = 1e6, .alignment = 1},
             [](communicator& comm, test::setting const& how, test::hooks&) {
               test::model engine{{{{"e", 4}}, {test::use_of("e")}}};
               test::setting both = how;
               both.stage.max_live_units = 2;
               auto sharded = make_sharded(comm, engine.units(), plain, both);
               for (float const expected : {8.0F, 6.0F}) {
                 auto const result = test::run_step(sharded, engine, 1);
                 CHECK_MESSAGE(result.norm() == 4.0, how.name);
                 test::check_values(sharded, engine, {{"e", values(4, expected)}}, how);
                 auto evaluation = sharded.evaluation();  // seen by both of its uses
                 for (std::size_t u = 0; u < 2; ++u) {
                   auto const lease = evaluation.forward(u);
                   std::span<float> const elements = lease.parameter<float>(sharded.find("e"));
                   CHECK_MESSAGE(std::all_of(elements.begin(), elements.end(),
                                             [&](float e) { return e == expected; }),
                                 how.name);
                 }
                 auto const one = evaluation.forward(0);
                 auto const other = evaluation.forward(1);
                 CHECK_MESSAGE(one.parameter<float>(0).data() == other.parameter<float>(0).data(),
                               how.name);
               }
               std::size_t const world = static_cast<std::size_t>(comm.size());
               std::size_t const whole = 4 * sizeof(float);
               std::size_t const slice = (4 + world - 1) / world;
               std::size_t const rank = static_cast<std::size_t>(comm.rank());
               std::size_t const mine =
                   std::min<std::size_t>(slice, 4 - std::min<std::size_t>(4, rank * slice));
               CHECK_MESSAGE(sharded.ledger()[zero::category::optimizer_state] ==
                                 (how.stage.number() == 0 ? whole : mine * sizeof(float)),
                             how.name);
             });
}

TEST_CASE("case 17: a parameter as big as a bucket, or bigger, is reduced like any other") {
  using structure = test::model::structure;
  for (structure const& units : {structure{{{"a", 16}}, {{"b", 16}}, {{"c", 3}}},
                                 structure{{{"a", 15}}, {{"b", 17}}, {{"c", 32}}, {{"d", 33}}},
                                 structure{{{"a", 33}}, {{"b", 1}}, {{"c", 15}}, {{"d", 16}}}}) {
    everywhere({1, 2, 3, 4}, {.bucket_bytes = 16 * sizeof(float)},
               [&](communicator& comm, test::setting const& how, test::hooks&) {
                 test::model engine{units};
                 auto sharded = make_sharded(comm, engine.units(), plain, how);
                 test::run_step(sharded, engine, static_cast<float>(comm.rank() + 1));
                 test::whole_values expected;
                 for (auto const& unit : units) {
                   expected[unit[0].name] = values(unit[0].size, 10 - mean_of_ranks(comm));
                 }
                 test::check_values(sharded, engine, expected, how);
               });
  }
}

TEST_CASE(
    "case 17: what lies between and behind parameters in a slot that others used is reduced as "
    "zero") {
  zero::options const options{.bucket_bytes = 0, .alignment = 4};
  everywhere({2, 3}, options, [](communicator& comm, test::setting const& how, test::hooks& hooks) {
    test::model engine{
        {{{"a", 50}}, {{"b", 1}, {"c", 2}, {"d", 5}}, {{"e", 30}}, {{"f", 3}, {"g", 3}}}};
    auto sharded = make_sharded(comm, engine.units(), plain, how);
    std::size_t reductions = 0;
    hooks.before_call = [&](test::collective_call const& call) {
      if (std::string_view{call.operation} == "all_gather") {
        return;
      }
      ++reductions;
      for (zero::layout::segment const& segment : sharded.layout().segments()) {
        if (segment.cut.padded() != call.input.size()) {
          continue;  // each of the four has a size of its own
        }
        std::span<float const> const all = call.input.as<float const>();
        float const sum = std::accumulate(all.begin(), all.end(), 0.0F);
        CHECK_MESSAGE(sum == static_cast<float>(segment.real), how.name);
      }
    };
    for (int step = 0; step < 2; ++step) {
      test::run_step(sharded, engine, 1);
    }
    CHECK_MESSAGE(reductions == 8, how.name);
  });
}

TEST_CASE("case 19: small units share a reduction, in every step alike") {
  zero::options const options{.clip_norm = 1e6, .bucket_bytes = 10 * sizeof(float)};
  everywhere({2}, options, [](communicator& comm, test::setting const& how, test::hooks& hooks) {
    test::model engine{{{{"a", 4}}, {{"b", 4}}, {{"c", 4}}, {{"d", 4}}, {{"e", 4}}, {{"f", 4}}}};
    auto sharded = make_sharded(comm, engine.units(), plain, how);
    int reductions = 0;
    hooks.before_call = [&](test::collective_call const& call) {
      std::string_view const what = call.operation;
      reductions += what == "reduce_scatter" || what == "all_reduce" ? 1 : 0;
    };
    float const bad = std::numeric_limits<float>::infinity();
    for (float const gradient : {1.0F, 1.0F, bad, 1.0F}) {
      reductions = 0;
      test::run_step(sharded, engine, gradient);
      CHECK_MESSAGE(reductions == 3, how.name);
    }
  });
}

TEST_CASE("case 21: the first real update is step 1, and nothing happens before it") {
  everywhere({1, 2, 3}, {}, [](communicator& comm, test::setting const& how, test::hooks&) {
    test::model engine{{{{"p", 3, 0.0F}, {"q", 2, 5.0F}}}};
    zero::adamw const optimizer{.learning_rate = 0.1, .weight_decay = 0.01};
    auto sharded = make_sharded(comm, engine.units(), optimizer, how);
    CHECK_MESSAGE(sharded.steps(sharded.find("p")) == 0, how.name);
    test::check_values(sharded, engine, {{"p", values(3, 0)}, {"q", values(2, 5)}}, how);
    test::run_step(sharded, engine, 1);
    CHECK_MESSAGE(sharded.steps(sharded.find("p")) == 1, how.name);
    test::whole_values const after = test::read(sharded, engine);
    for (float const p : after.at("p")) {
      CHECK_MESSAGE(p == doctest::Approx(-0.1).epsilon(1e-6), how.name);
    }
    for (float const q : after.at("q")) {  // 5 (1 - 0.1 * 0.01) - 0.1
      CHECK_MESSAGE(q == doctest::Approx(4.895).epsilon(1e-6), how.name);
    }
  });
}

TEST_CASE("case 21: both of Adam's averages are zero before the first step") {
  // The gradient is 2, and one beta is 0. m = 0.5 * 2, so m / (1 - 0.5) = 2, over sqrt(v) = 2; or
  // m = 2 over the root of v / (1 - 0.75) = 4, where v = 0.25 * 2^2. The quotient is 1, exactly.
  for (auto const& [beta1, beta2] : {std::pair{0.5, 0.0}, std::pair{0.0, 0.75}}) {
    zero::adamw const optimizer{
        .learning_rate = 0.5, .beta1 = beta1, .beta2 = beta2, .epsilon = 0, .weight_decay = 0};
    everywhere({1, 2, 3}, {.memory = dirty_memory()},
               [&](communicator& comm, test::setting const& how, test::hooks&) {
                 test::model engine{{{{"p", 3}, {"q", 2}}}};
                 auto sharded = make_sharded(comm, engine.units(), optimizer, how);
                 test::run_step(sharded, engine, 2);
                 test::check_values(sharded, engine,
                                    {{"p", values(3, 9.5F)}, {"q", values(2, 9.5F)}}, how);
               });
  }
}

TEST_CASE("case 23: parameters of no elements change nothing for their neighbours") {
  using structure = test::model::structure;
  for (structure const& units :
       {structure{{{"a", 8}}, {{"z", 0}}, {{"b", 24}}}, structure{{{"a", 8}, {"z", 0}, {"b", 24}}},
        structure{{{"a", 8}, {"b", 24}}, {{"z", 0}}},
        structure{{{"z", 0}, {"a", 8}}, {{"b", 24}}}}) {
    everywhere({1, 2, 3, 4}, {.clip_norm = 1e6},
               [&](communicator& comm, test::setting const& how, test::hooks&) {
                 test::model engine{units};
                 auto sharded = make_sharded(comm, engine.units(), plain, how);
                 for (float const expected : {9.0F, 8.0F}) {
                   auto const result = test::run_step(sharded, engine, 1);
                   CHECK_MESSAGE(result.norm() == doctest::Approx(std::sqrt(32.0)).epsilon(1e-15),
                                 how.name);
                   test::check_values(
                       sharded, engine,
                       {{"a", values(8, expected)}, {"z", {}}, {"b", values(24, expected)}}, how);
                 }
               });
  }
}

namespace {

/// An engine's tensor with a shape, which notes how many elements it was told to own again.
struct shaped_tensor {
  test::tensor elements;
  std::optional<std::size_t> given_back;
};

}  // namespace

template <>
struct zero::tensor_traits<shaped_tensor> {
  using value_type = float;
  using device = zero::host;
  static std::span<float> elements(shaped_tensor& tensor) { return tensor.elements.view; }
  static void rebind(shaped_tensor& tensor, std::span<float> storage) {
    zero::tensor_traits<test::tensor>::rebind(tensor.elements, storage);
  }
  static void allocate(shaped_tensor& tensor, std::size_t n) {
    zero::tensor_traits<test::tensor>::allocate(tensor.elements, n);
    tensor.given_back = n;
  }
};

// The engine keeps the shape: the library knows it from the declaration, compares it over ranks,
// and gives back as many elements as it has.
TEST_CASE("case 23: a shape with no elements alone in its unit, and a model of nothing else") {
  for (bool const alone : {false, true}) {
    everywhere({1, 2, 3}, {.clip_norm = 1.0},
               [&](communicator& comm, test::setting const& how, test::hooks&) {
                 test::tensor a;
                 test::tensor a_gradient;
                 shaped_tensor z;
                 test::tensor z_gradient;
                 auto const ten = [](std::span<float> out, std::size_t) {
                   std::fill(out.begin(), out.end(), 10.0F);
                 };
                 std::vector<std::vector<zero::any_parameter>> units{
                     {zero::parameter("z", z, z_gradient, zero::shape{0, 8}, ten)}};
                 if (!alone) {
                   units.push_back({zero::parameter("a", a, a_gradient, zero::shape{2, 2}, ten)});
                 }
                 auto sharded = make_sharded(comm, units, plain, how);
                 {
                   auto micro = sharded.microbatch(0, 1);
                   for (std::size_t u = 0; u < sharded.units(); ++u) {
                     auto const lease = micro.forward(u);
                   }
                   for (std::size_t u = sharded.units(); u-- > 0;) {
                     auto const lease = micro.backward(u);
                     if (u == 1) {
                       std::fill(a_gradient.view.begin(), a_gradient.view.end(), 0.25F);
                     }
                   }
                 }
                 auto const result = sharded.step();
                 CHECK_MESSAGE(result.norm() == (alone ? 0.0 : 0.5), how.name);
                 CHECK_MESSAGE(!result.skipped(), how.name);
                 CHECK_MESSAGE(sharded.layout().parameters()[0].spec.size == 0, how.name);
                 {
                   auto evaluation = sharded.evaluation();
                   for (std::size_t u = 0; u < sharded.units(); ++u) {
                     auto const lease = evaluation.forward(u);
                     CHECK_MESSAGE(z.elements.view.empty(), how.name);
                     CHECK_MESSAGE((u == 0 || std::ranges::equal(a.view, values(4, 9.75F))),
                                   how.name);
                   }
                 }
                 CHECK_MESSAGE(!z.given_back, how.name);
                 sharded.release();
                 CHECK_MESSAGE(z.given_back == 0U, how.name);
                 CHECK_MESSAGE((alone || a.own == values(4, 9.75F)), how.name);
               });
  }
}

TEST_CASE("case 23: shapes of no elements that differ between ranks are refused") {
  test::failures const caught = test::run_failing(2, [](zero::thread_communicator& comm) {
    shaped_tensor z;
    test::tensor z_gradient;
    zero::shape const shape = comm.rank() == 0 ? zero::shape{0, 8} : zero::shape{8, 0};
    std::vector<std::vector<zero::any_parameter>> const units{
        {zero::parameter("z", z, z_gradient, shape, [](std::span<float>, std::size_t) {})}};
    zero::sharded_model const sharded{comm, units, zero::stage3{}, plain, zero::local_accumulate{}};
  });
  CHECK_MESSAGE(caught.all_say({"expected unit 0: parameter 'z' float32 [0, 8]",
                                "actual unit 0: parameter 'z' float32 [8, 0]", "(rank 1)"}),
                caught.text());
}

TEST_CASE("case 25: no read is stale, whatever the order of units and however slow the gather") {
  everywhere({2, 3}, {}, [](communicator& comm, test::setting const& how, test::hooks& hooks) {
    test::model engine{{{{"A", 5}}, {{"B", 5}}, {{"C", 5}}}};
    auto sharded = make_sharded(comm, engine.units(), plain, how);
    hooks.in_stream = [](test::collective_call const& call) {
      if (std::string_view{call.operation} == "all_gather") {
        std::this_thread::sleep_for(std::chrono::milliseconds{1});
      }
    };
    std::array<std::string, 3> const names{"A", "B", "C"};
    auto const check = [&](auto& pass, float expected) {
      for (std::size_t const u : {0U, 2U, 1U}) {
        auto const lease = pass.forward(u);
        for (float const each : engine.value(names[u]).view) {
          CHECK_MESSAGE(each == expected, how.name, ", unit ", u);
        }
      }
    };
    for (float const expected : {10.0F, 9.0F, 8.0F}) {
      if (expected != 10) {
        auto evaluation = sharded.evaluation();
        check(evaluation, expected);
      }
      {
        auto micro = sharded.microbatch(0, 1);
        check(micro, expected);
        for (std::size_t const u : {1U, 2U, 0U}) {
          auto const lease = micro.backward(u);
          test::write_gradients(sharded, engine, lease,
                                [](std::string const&, std::size_t) { return 1.0F; });
        }
      }
      sharded.step();
    }
  });
}

TEST_CASE("case 27: passes without a backward leave nothing gathered and change nothing") {
  everywhere(
      {1, 2, 3}, {.bucket_bytes = 0},
      [](communicator& comm, test::setting const& how, test::hooks& hooks) {
        test::model engine{{{{"a", 5}}, {{"b", 7}}, {{"c", 2}}}};
        auto sharded = make_sharded(comm, engine.units(), plain, how);
        gather_log log{hooks};
        bool const gathers = how.stage.shards_parameters();
        auto const check_released = [&](std::size_t gathered) {
          CHECK_MESSAGE(log.count() == (gathers ? gathered : 0), how.name);
          CHECK_MESSAGE(all_released(engine, "abc", how), how.name);
          CHECK_MESSAGE(sharded.gathered().occupied == 0, how.name);
          log.clear();
        };
        auto const forward_only = [&] {
          {
            auto micro = sharded.microbatch(0, 1);
            for (std::size_t u = 0; u < 3; ++u) {
              auto const lease = micro.forward(u);
            }
          }
          check_released(3);
        };
        for (float const expected : {9.0F, 8.0F}) {
          test::run_microbatch(sharded, engine, 0, 1,
                               [](std::string const&, std::size_t) { return 1.0F; });
          // Forward, and backward without what forward kept.
          check_released(how.stage.keep_after_forward ? 3 : how.stage.keep_last ? 5 : 6);
          sharded.step();
          log.clear();
          test::check_values(
              sharded, engine,
              {{"a", values(5, expected)}, {"b", values(7, expected)}, {"c", values(2, expected)}},
              how);
          check_released(3);
          forward_only();
          forward_only();
        }
      });
}

namespace {

/// In stage 3, the gathers of a micro-batch over four units, each recomputed before its backward:
/// in forward four, and then by hand what the schedule needs.
std::size_t gathers_with_recomputation(zero::stage const& at, bool nested) {
  if (at.keep_after_forward) {
    return 4;
  }
  if (at.prefetch > 0) {  // the last unit's recomputation, and backward, which gathers ahead
    return nested ? 4 + 4 : 4 + 1 + 4;
  }
  std::size_t const units = at.keep_last ? 3 : 4;
  return nested ? 4 + units : 4 + units + units;
}

}  // namespace

TEST_CASE("case 29: recomputation gathers and releases, frozen units too") {
  for (bool const nested : {false, true}) {
    everywhere({1, 2, 3}, {.bucket_bytes = 0},
               [&](communicator& comm, test::setting const& how, test::hooks& hooks) {
                 test::model engine{
                     {{{"a", 1000}}, {{"b", 1000, 10, true}}, {{"c", 1000}}, {{"d", 1000}}}};
                 auto sharded = make_sharded(comm, engine.units(), plain, how);
                 gather_log log{hooks};
                 bool const gathers = how.stage.shards_parameters();
                 for (std::size_t m = 0; m < 2; ++m) {
                   {
                     auto micro = sharded.microbatch(m, 2);
                     for (std::size_t u = 0; u < 4; ++u) {
                       auto const lease = micro.forward(u);
                     }
                     for (std::size_t u = 4; u-- > 0;) {
                       auto again = micro.recompute(u);
                       if (!nested) {
                         again.end();
                       }
                       auto const lease = micro.backward(u);
                       test::write_gradients(sharded, engine, lease,
                                             [](std::string const&, std::size_t) { return 1.0F; });
                     }
                   }
                   CHECK_MESSAGE(
                       log.count() == (gathers ? gathers_with_recomputation(how.stage, nested) : 0),
                       how.name);
                   CHECK_MESSAGE(all_released(engine, "abcd", how), how.name);
                   log.clear();
                 }
                 std::size_t const slots = !gathers                       ? 0
                                           : how.stage.keep_after_forward ? 4
                                                                          : 1 + how.stage.prefetch;
                 CHECK_MESSAGE(log.places() == slots, how.name);
                 sharded.step();
                 CHECK_MESSAGE(all_released(engine, "abcd", how), how.name);
                 auto const counts = sharded.gathered();
                 CHECK_MESSAGE(counts.occupied == 0, how.name);
                 CHECK_MESSAGE(counts.gathers == counts.releases, how.name);
                 CHECK_MESSAGE(counts.high_water == slots, how.name);
                 test::check_values(
                     sharded, engine,
                     {{"a", values(1000, 9)}, {"b", values(1000, 10)}, {"c", values(1000, 9)}},
                     how);
               });
  }
}

namespace {

/// A 16-bit and a float32 parameter of one unit, and a float64 one, keep their bits.
template <class Half>
void check_mixed_types(zero::precision const& precision, bool half_first) {
  float const odd = 1.0F + std::ldexp(1.0F, -20);
  double const odder = 1.0 + std::ldexp(1.0, -50);
  everywhere({1, 2, 3}, {.precision = precision},
             [&](communicator& comm, test::setting const& how, test::hooks&) {
               test::owning_tensor<Half> b{6, Half{1.5F}};
               test::owning_tensor<Half> b_gradient;
               test::owning_tensor<float> f{5, odd};
               test::owning_tensor<float> f_gradient;
               test::owning_tensor<double> d{3, odder};
               test::owning_tensor<double> d_gradient;
               std::vector<zero::any_parameter> unit{zero::parameter("b", b, b_gradient),
                                                     zero::parameter("f", f, f_gradient),
                                                     zero::parameter("d", d, d_gradient)};
               if (!half_first) {
                 std::reverse(unit.begin(), unit.end());
               }
               auto sharded = make_sharded(comm, {unit}, plain, how);
               for (int step = 0; step < 2; ++step) {
                 {
                   auto micro = sharded.microbatch(0, 1);
                   {
                     auto const lease = micro.forward(0);
                     CHECK_MESSAGE(std::vector(f.view.begin(), f.view.end()) == std::vector(5, odd),
                                   how.name);
                     CHECK_MESSAGE(
                         std::vector(d.view.begin(), d.view.end()) == std::vector(3, odder),
                         how.name);
                     for (Half const each : b.view) {
                       CHECK_MESSAGE(static_cast<float>(each) == 1.5F, how.name);
                     }
                   }
                   auto const lease = micro.backward(0);
                   std::fill(b_gradient.view.begin(), b_gradient.view.end(), Half{0.0F});
                   std::fill(f_gradient.view.begin(), f_gradient.view.end(), 0.0F);
                   std::fill(d_gradient.view.begin(), d_gradient.view.end(), 0.0);
                 }
                 sharded.step();
               }
             });
}

}  // namespace

TEST_CASE("case 31: types in one bucket are packed apart and keep their bits") {
  for (bool const half_first : {true, false}) {
    check_mixed_types<zero::bfloat16>(zero::bf16, half_first);
    check_mixed_types<zero::bfloat16>(zero::bf16_reduced, half_first);
    check_mixed_types<zero::float16>({.parameters = zero::dtype::float16}, half_first);
  }
}

TEST_CASE("case 31: a model with both 16-bit types is refused, and nothing is cast") {
  zero::solo comm;
  test::owning_tensor<zero::bfloat16> b{6};
  test::owning_tensor<zero::float16> h{6, zero::float16{0.5F}};
  test::owning_tensor<float> f{5};
  std::vector<std::vector<zero::any_parameter>> const units{
      {zero::parameter("b", b), zero::parameter("h", h), zero::parameter("f", f)}};
  std::string const message = test::message_of([&] {
    zero::sharded_model const model{comm,
                                    units,
                                    zero::stage2{},
                                    plain,
                                    zero::reduce_per_microbatch{},
                                    {.precision = zero::bf16}};
  });
  CHECK(message ==
        "sharded_model: parameter 'h': expected bfloat16 or wider, as the precision says, actual "
        "float16 (rank 0)");
  CHECK(static_cast<float>(h.view[0]) == 0.5F);
}

TEST_CASE("case 33: 16-bit gradients neither overflow nor underflow on the way to their mean") {
  for (zero::dtype const reduced : {zero::dtype::float16, zero::dtype::float32}) {
    for (float const gradient : {20000.0F, std::ldexp(1.0F, -24)}) {
      zero::options const options{.clip_norm = std::numeric_limits<double>::infinity(),
                                  .precision = {zero::dtype::float16, reduced}};
      everywhere({4}, options, [&](communicator& comm, test::setting const& how, test::hooks&) {
        test::owning_tensor<zero::float16> p{9, zero::float16{1.0F}};
        test::owning_tensor<zero::float16> p_gradient;
        auto sharded = make_sharded(comm, {{zero::parameter("p", p, p_gradient)}},
                                    zero::sgd{.learning_rate = 0}, how);
        {
          auto micro = sharded.microbatch(0, 1);
          auto const lease = micro.backward(0);
          std::fill(p_gradient.view.begin(), p_gradient.view.end(), zero::float16{gradient});
        }
        zero::gradient_part const part = sharded.gradient(0);
        for (std::size_t i = 0; i < part.elements.size(); ++i) {
          float const actual = reduced == zero::dtype::float32
                                   ? part.elements.as<float>()[i]
                                   : static_cast<float>(part.elements.as<zero::float16>()[i]);
          CHECK_MESSAGE(actual == gradient, how.name);
        }
        auto const result = sharded.step();
        CHECK_MESSAGE(!result.skipped(), how.name);
        CHECK_MESSAGE(result.norm() == 3.0 * static_cast<double>(gradient), how.name);
      });
    }
  }
}

TEST_CASE("case 35: a gradient slot isn't filled again before its slow reduction has read it") {
  // Buckets of one unit, of two, of four, and one of all.
  for (std::uint64_t const bucket_elements : {1U, 40U, 64U, 1000U}) {
    zero::options const options{.bucket_bytes = bucket_elements * sizeof(float)};
    everywhere({2}, options, [](communicator& comm, test::setting const& how, test::hooks& hooks) {
      test::model::structure units;
      test::whole_values expected;
      for (std::size_t i = 0; i < 8; ++i) {
        std::string const name = "p" + std::to_string(i);
        units.push_back({{name, 16}});
        expected[name] = values(16, 9 - static_cast<float>(i));
      }
      test::model engine{units};
      auto sharded = make_sharded(comm, engine.units(), plain, how);
      hooks.in_stream = [](test::collective_call const& call) {
        if (std::string_view{call.operation} != "all_gather") {
          std::this_thread::sleep_for(std::chrono::microseconds{500});
        }
      };
      test::run_microbatch(sharded, engine, 0, 1, [](std::string const& name, std::size_t) {
        return static_cast<float>(name[1] - '0' + 1);
      });
      sharded.step();
      test::check_values(sharded, engine, expected, how);
    });
  }
}

TEST_CASE(
    "case 37: what a lease shows stays as it is until the lease ends, whatever is gathered "
    "meanwhile") {
  zero::options const options{.bucket_bytes = 0};
  everywhere({2, 3}, options, [](communicator& comm, test::setting const& how, test::hooks&) {
    test::model engine{{{{"p0", 40, 0}}, {{"p1", 40, 1}}, {{"p2", 40, 2}}, {{"p3", 40, 3}}}};
    auto sharded = make_sharded(comm, engine.units(), zero::sgd{.learning_rate = 0}, how);
    auto const slowly_read = [&](std::size_t u) {
      std::span<float> const elements = engine.value("p" + std::to_string(u)).view;
      std::this_thread::sleep_for(std::chrono::microseconds{200});
      CHECK_MESSAGE(std::all_of(elements.begin(), elements.end(),
                                [u](float e) { return e == static_cast<float>(u); }),
                    how.name);
    };
    for (int repeat = 0; repeat < 10; ++repeat) {
      {
        auto micro = sharded.microbatch(0, 1);
        for (std::size_t u = 0; u < 4; ++u) {
          auto const lease = micro.forward(u);
          slowly_read(u);
        }
        for (std::size_t u = 4; u-- > 0;) {
          auto const lease = micro.backward(u);
          slowly_read(u);
          test::write_gradients(sharded, engine, lease,
                                [](std::string const&, std::size_t) { return 1.0F; });
        }
      }
      sharded.step();
    }
  });
}

TEST_CASE("case 37: a model may be destroyed while its slow communication is in flight") {
  everywhere({1, 2, 3}, {}, [](communicator& comm, test::setting const& how, test::hooks& hooks) {
    hooks.in_stream = [](test::collective_call const&) {
      std::this_thread::sleep_for(std::chrono::microseconds{300});
    };
    test::model engine{{{{"a", 40}}, {{"b", 40}}}};
    {
      auto sharded = make_sharded(comm, engine.units(), plain, how);
      test::run_step(sharded, engine, 1);
    }
    CHECK_MESSAGE(engine.value("a").view.empty(), how.name);
    CHECK_MESSAGE(engine.gradient("b").view.empty(), how.name);
  });
}

namespace {

/// Ten steps of decoupled decay with no gradient, over parameters that the slices cut.
template <class T>
void check_decay(zero::precision const& precision) {
  float expected = 1;
  for (int step = 0; step < 10; ++step) {
    expected = 0.9F * expected;
  }
  zero::options const options{.alignment = 1, .precision = precision};
  everywhere({1, 2, 3}, options, [&](communicator& comm, test::setting const& how, test::hooks&) {
    std::array<std::size_t, 4> const sizes{3, 2, 2, 1};
    std::vector<test::owning_tensor<T>> p(4);
    std::vector<test::owning_tensor<T>> gradients(4);
    std::vector<zero::any_parameter> unit;
    for (std::size_t i = 0; i < 4; ++i) {
      p[i] = test::owning_tensor<T>{sizes[i], T{1.0F}};
      unit.push_back(zero::parameter("p" + std::to_string(i), p[i], gradients[i]));
    }
    auto sharded =
        make_sharded(comm, {unit}, zero::adamw{.learning_rate = 1, .weight_decay = 0.1}, how);
    for (int step = 0; step < 10; ++step) {
      {
        auto micro = sharded.microbatch(0, 1);
        auto const lease = micro.backward(0);
        for (auto& each : gradients) {
          std::fill(each.view.begin(), each.view.end(), T{0.0F});
        }
      }
      sharded.step();
    }
    auto evaluation = sharded.evaluation();
    auto const lease = evaluation.forward(0);
    for (auto const& each : p) {
      for (T const element : each.view) {
        CHECK_MESSAGE(static_cast<float>(element) == static_cast<float>(T{expected}), how.name);
      }
    }
  });
}

}  // namespace

TEST_CASE("case 39: weight decay acts on the master weights, whatever the slices cut") {
  check_decay<float>(zero::fp32);
  check_decay<zero::bfloat16>(zero::bf16);
  check_decay<zero::bfloat16>(zero::bf16_reduced);
}

TEST_CASE("case 55: a layout of the engine's own is kept, the gradient being written in it") {
  constexpr std::size_t rows = 3;
  constexpr std::size_t columns = 4;
  auto const at = [](std::size_t i, std::size_t j) { return i + rows * j; };  // column-major
  everywhere({1, 2, 3}, {}, [&](communicator& comm, test::setting const& how, test::hooks&) {
    test::tensor p{rows * columns};
    test::tensor p_gradient;
    for (std::size_t i = 0; i < rows; ++i) {
      for (std::size_t j = 0; j < columns; ++j) {
        p.view[at(i, j)] = static_cast<float>(4 * i + j);
      }
    }
    auto sharded = make_sharded(comm, {{zero::parameter("p", p, p_gradient)}}, plain, how);
    {
      std::array<float, rows * columns> row_major{};
      for (std::size_t i = 0; i < row_major.size(); ++i) {
        row_major[i] = static_cast<float>(i);
      }
      auto micro = sharded.microbatch(0, 1);
      auto const lease = micro.backward(0);
      std::span<float> const place = lease.gradient<float>(0);
      for (std::size_t i = 0; i < rows; ++i) {
        for (std::size_t j = 0; j < columns; ++j) {
          place[at(i, j)] = row_major[columns * i + j];
        }
      }
    }
    sharded.step();
    auto evaluation = sharded.evaluation();
    auto const lease = evaluation.forward(0);
    CHECK_MESSAGE(values(p.view.begin(), p.view.end()) == values(12, 0), how.name);
  });
}

namespace {

/// Tiny parameters of type T that start from `start`; every number here is exact in it.
template <class T>
void check_alone(zero::precision const& precision, T start) {
  for (test::setting const& how : test::every_setting({.precision = precision})) {
    zero::solo comm;
    test::owning_tensor<T> a{1, start};
    test::owning_tensor<T> b{3, start};
    test::owning_tensor<T> a_gradient;
    test::owning_tensor<T> b_gradient;
    std::vector<std::vector<zero::any_parameter>> const units{
        {zero::parameter("a", a, a_gradient)}, {zero::parameter("b", b, b_gradient)}};
    zero::sharded_model sharded{comm,       units,
                                how.stage,  zero::sgd{.learning_rate = 0.5, .momentum = 0.5},
                                how.policy, how.options};
    auto const are = [](std::span<T const> elements, double expected) {
      return !elements.empty() && std::ranges::all_of(elements, [expected](T element) {
        return static_cast<double>(element) == expected;
      });
    };
    double momentum = 0;
    double p = start;
    for (float const gradient : {1.0F, -2.0F, 4.0F}) {
      momentum = 0.5 * momentum + static_cast<double>(gradient);
      p -= 0.5 * momentum;
      {
        auto micro = sharded.microbatch(0, 1);
        for (std::size_t u = 2; u-- > 0;) {
          auto const lease = micro.backward(u);
          std::ranges::fill(u == 0 ? a_gradient.view : b_gradient.view, T{gradient});
        }
      }
      sharded.step();
      auto evaluation = sharded.evaluation();
      {
        auto const lease = evaluation.forward(0);
        CHECK_MESSAGE(are(a.view, p), how.name);
      }
      auto const lease = evaluation.forward(1);
      CHECK_MESSAGE(are(b.view, p), how.name);
    }
    CHECK_MESSAGE(sharded.sent().total() == 0, how.name);
    CHECK_MESSAGE(sharded.ledger() == sharded.plan().bytes, how.name);
  }
}

}  // namespace

TEST_CASE("case 57: one rank updates tiny tensors as one dense process does, and sends nothing") {
  check_alone<float>(zero::fp32, 10.0F);
  check_alone<double>(zero::fp32, 10.0 + std::ldexp(1.0, -40));
  check_alone<zero::bfloat16>(zero::bf16, zero::bfloat16{10.0F});
  check_alone<zero::bfloat16>(zero::bf16_reduced, zero::bfloat16{10.0F});
  check_alone<zero::float16>({.parameters = zero::dtype::float16}, zero::float16{10.0F});
}
