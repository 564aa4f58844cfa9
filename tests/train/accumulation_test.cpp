// SPDX-License-Identifier: MIT
// How gradients come together: over uses, micro-batches and ranks, in every order and way of
// delivery.
#include <doctest/doctest.h>

#include <zero/comm/run_threads.hpp>
#include <zero/optim/sgd.hpp>
#include <zero/train/accumulation.hpp>
#include <zero/train/sharded_model.hpp>

#include <support/check_values.hpp>
#include <support/mock_model.hpp>
#include <support/settings.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using zero::thread_communicator;
using sharded_model = zero::sharded_model<thread_communicator, zero::sgd>;
using values = std::vector<float>;
using optional_gradient = std::optional<float>;
using test::everywhere;

constexpr zero::sgd plain{.learning_rate = 1};
constexpr zero::sgd with_momentum{.learning_rate = 0.1, .momentum = 0.9};

/// Checks that what comes first for a key comes every time, to the bit.
class same_bits {
 public:
  void check(std::string const& key, test::whole_values const& actual, std::string const& how) {
    std::lock_guard const lock{mutex_};
    auto const made = first_.emplace(key, std::pair{actual, how});
    auto const& first = made.first->second;
    CHECK_MESSAGE((made.second || first.first == actual), how, " differs from ", first.second);
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::pair<test::whole_values, std::string>> first_;
};

/// Some gradient, which rounds everywhere.
float some_gradient(std::string const& name, std::size_t i, int rank, std::size_t m,
                    std::size_t use = 0) {
  return 0.1F * static_cast<float>(name.back() % 13) + 0.37F * static_cast<float>(i % 11) -
         0.7F * static_cast<float>(rank) + 1.3F * static_cast<float>(m) +
         0.21F * static_cast<float>(use);
}

std::string key_of(thread_communicator const& comm, test::setting const& how) {
  return std::to_string(comm.size()) + (how.policy.per_microbatch ? " per micro-batch" : " local");
}

}  // namespace

TEST_CASE("a policy written as a type is the same as data") {
  zero::accumulation const local = zero::local_accumulate{};
  CHECK_FALSE(local.per_microbatch);
  zero::accumulation const reduce = zero::reduce_per_microbatch{};
  CHECK(reduce.per_microbatch);
  CHECK(reduce.open_buckets == 2);
  zero::accumulation const more = zero::reduce_per_microbatch{.open_buckets = 5};
  CHECK(more.open_buckets == 5);
}

TEST_CASE("a unit used twice in forward and backward adds up both uses") {
  same_bits bits;
  everywhere({1, 2, 3}, {}, [&](thread_communicator& comm, test::setting const& how) {
    test::model engine{{{{"a", 5}}, {{"b", 7}}, {{"c", 40}}}};
    sharded_model sharded{comm, engine.units(), how.stage, with_momentum, how.policy, how.options};
    for (std::size_t step = 0; step < 3; ++step) {
      for (std::size_t m = 0; m < 2; ++m) {
        auto micro = sharded.microbatch(m, 2);
        for (std::size_t const u : {0U, 1U, 0U, 2U}) {
          auto const lease = micro.forward(u);
        }
        std::size_t use = 0;
        for (std::size_t const u : {2U, 0U, 1U, 0U}) {
          auto const lease = micro.backward(u);
          CHECK_MESSAGE(lease.accumulate() == (use == 3 || (m == 1 && !how.policy.per_microbatch)),
                        how.name);
          test::write_gradients(sharded, engine, lease,
                                [&](std::string const& name, std::size_t i) {
                                  return some_gradient(name, i, comm.rank(), m, use);
                                });
          ++use;
        }
      }
      sharded.step();
    }
    bits.check(key_of(comm, how), test::read(sharded, engine), how.name);
  });

  everywhere({1, 2}, {}, [](thread_communicator& comm, test::setting const& how) {
    test::model engine{{{{"a", 5}}}};
    sharded_model sharded{comm, engine.units(), how.stage, plain, how.policy, how.options};
    {
      auto micro = sharded.microbatch(0, 1);
      for (int i = 0; i < 2; ++i) {
        auto const lease = micro.forward(0);
      }
      for (float const gradient : {1.0F, 2.0F}) {
        auto const lease = micro.backward(0);
        test::write_gradients(sharded, engine, lease,
                              [&](std::string const&, std::size_t) { return gradient; });
      }
    }
    sharded.step();
    test::check_values(sharded, engine, {{"a", values(5, 7)}}, how);
  });
}

namespace {

/// A parameter that three units use, over two micro-batches and three steps.
template <class Tensor>
test::whole_values run_tied(thread_communicator& comm, test::setting const& how) {
  test::basic_model<Tensor> engine{{{{"a", 5}},
                                    {{"e", 33}, {"b", 7}},
                                    {test::use_of("e"), {"c", 40}},
                                    {test::use_of("e")},
                                    {{"d", 1}}}};
  sharded_model sharded{comm, engine.units(), how.stage, with_momentum, how.policy, how.options};
  for (std::size_t step = 0; step < 3; ++step) {
    for (std::size_t m = 0; m < 2; ++m) {
      std::size_t use = 0;
      test::run_microbatch(sharded, engine, m, 2, [&](std::string const& name, std::size_t i) {
        use += i == 0 ? 1 : 0;
        return some_gradient(name, i, comm.rank(), m, use);
      });
    }
    sharded.step();
  }
  CHECK_MESSAGE(sharded.steps(sharded.find("e")) == 3, how.name);
  CHECK_MESSAGE(sharded.gathered().occupied == 0, how.name);
  CHECK_MESSAGE(sharded.sent()[zero::traffic::mispredicted] == 0, how.name);
  return test::read(sharded, engine);
}

}  // namespace

TEST_CASE(
    "a tied parameter has the same bits in every stage, and in tensors that can't be rebound") {
  same_bits bits;
  for (std::uint64_t const bucket_bytes : {0U, 100U, 100000U}) {
    everywhere({1, 2, 3, 4}, {.bucket_bytes = bucket_bytes},
               [&](thread_communicator& comm, test::setting const& how) {
                 bits.check(key_of(comm, how), run_tied<test::tensor>(comm, how), how.name);
                 if (how.stage.number() < 2) {
                   bits.check(key_of(comm, how), run_tied<std::vector<float>>(comm, how),
                              how.name + ", vectors");
                 }
               });
  }
}

TEST_CASE(
    "a rank's skip counts as zero there; with no gradient anywhere a parameter's steps stand "
    "still") {
  everywhere({2, 4}, {}, [](thread_communicator& comm, test::setting const& how) {
    test::model engine{{{{"p", 3}}, {{"q", 2}}}};
    zero::sgd const optimizer{.learning_rate = 1, .momentum = 0.5};
    sharded_model sharded{comm, engine.units(), how.stage, optimizer, how.policy, how.options};
    std::size_t const id = sharded.find("p");
    bool const even = comm.rank() % 2 == 0;
    auto const window = [&](std::initializer_list<optional_gradient> gradients) {
      std::size_t m = 0;
      for (optional_gradient const p : gradients) {
        test::run_microbatch(sharded, engine, m++, gradients.size(),
                             [p](std::string const& name, std::size_t) {
                               return name == "p" ? p : optional_gradient{0.0F};
                             });
      }
      sharded.step();
    };
    window({even ? optional_gradient{} : 4.0F});  // the mean is 2, and so is the momentum
    CHECK_MESSAGE(sharded.steps(id) == 1, how.name);
    test::check_values(sharded, engine, {{"p", values(3, 8)}}, how);
    window({{}, {}});  // nothing: the momentum stays
    CHECK_MESSAGE(sharded.steps(id) == 1, how.name);
    CHECK_MESSAGE(sharded.steps(sharded.find("q")) == 2, how.name);
    test::check_values(sharded, engine, {{"p", values(3, 8)}}, how);
    window({{}, even ? 8.0F : optional_gradient{}});  // the mean is 2 again: momentum 0.5 * 2 + 2
    CHECK_MESSAGE(sharded.steps(id) == 2, how.name);
    test::check_values(sharded, engine, {{"p", values(3, 5)}}, how);
    window({even ? 8.0F : optional_gradient{}, {}});  // 0.5 * 3 + 2
    CHECK_MESSAGE(sharded.steps(id) == 3, how.name);
    test::check_values(sharded, engine, {{"p", values(3, 1.5F)}}, how);
  });
}

TEST_CASE("a use that is skipped leaves what other uses of the parameter added") {
  for (std::size_t const skipped : {0U, 1U}) {
    everywhere({1, 2}, {}, [&](thread_communicator& comm, test::setting const& how) {
      test::model engine{{{{"e", 3}}, {test::use_of("e")}}};
      sharded_model sharded{comm, engine.units(), how.stage, plain, how.policy, how.options};
      {
        auto micro = sharded.microbatch(0, 1);
        for (std::size_t const u : {1U, 0U}) {
          auto const lease = micro.backward(u);
          test::write_gradients(sharded, engine, lease, [&](std::string const&, std::size_t) {
            return u == skipped ? optional_gradient{} : 2.0F;
          });
        }
      }
      sharded.step();
      CHECK_MESSAGE(sharded.steps(0) == 1, how.name);
      test::check_values(sharded, engine, {{"e", values(3, 8)}}, how);
    });
  }
}

TEST_CASE("an engine that only adds needs no answer, and gets the same bits") {
  same_bits bits;
  for (bool const adds : {false, true}) {
    everywhere(
        {1, 2, 3}, {.bucket_bytes = 120, .engine_adds = adds},
        [&](thread_communicator& comm, test::setting const& how) {
          test::model engine{
              {{{"a", 5}}, {{"e", 33}, {"b", 7}}, {test::use_of("e"), {"c", 40}}, {{"d", 1}}}};
          sharded_model sharded{comm,          engine.units(), how.stage,
                                with_momentum, how.policy,     how.options};
          for (std::size_t step = 0; step < 3; ++step) {
            for (std::size_t m = 0; m < 2; ++m) {
              auto const gradient = [&](std::string const& name, std::size_t i) {
                return some_gradient(name, i, comm.rank(), m);
              };
              if (!adds) {
                test::run_microbatch(sharded, engine, m, 2, gradient);
                continue;
              }
              auto micro = sharded.microbatch(m, 2);
              for (std::size_t u = sharded.units(); u-- > 0;) {
                auto const lease = micro.backward(u);
                CHECK_MESSAGE(lease.accumulate(), how.name);
                for (test::declaration const& each : engine.declared()[u]) {
                  std::span<float> const place = engine.gradient(each.name).view;
                  for (std::size_t i = 0; i < place.size(); ++i) {
                    place[i] += gradient(each.name, i);
                  }
                }
              }
            }
            sharded.step();
          }
          bits.check(key_of(comm, how), test::read(sharded, engine), how.name);
        });
  }
}

TEST_CASE("a frozen parameter stays as it is, and has neither gradient nor optimizer state") {
  everywhere({1, 2, 3}, {.alignment = 1}, [](thread_communicator& comm, test::setting const& how) {
    test::model engine{{{{"a", 6}, {"f", 12, 3, true}}, {{"g", 6, 4, true}}, {{"b", 6}}}};
    sharded_model sharded{comm, engine.units(), how.stage, plain, how.policy, how.options};
    for (float const expected : {9.0F, 8.0F}) {
      auto const gradient = [](std::string const&, std::size_t) { return 1.0F; };
      test::run_microbatch(sharded, engine, 0, 1, gradient);
      sharded.step();
      test::check_values(sharded, engine,
                         {{"a", values(6, expected)},
                          {"f", values(12, 3)},
                          {"g", values(6, 4)},
                          {"b", values(6, expected)}},
                         how);
    }
    CHECK_MESSAGE(engine.gradient("f").view.empty(), how.name);
    CHECK_MESSAGE(engine.gradient("g").view.empty(), how.name);
    auto const world = static_cast<std::uint64_t>(comm.size());
    std::uint64_t const trainable = 12 * sizeof(float);
    zero::memory_bytes const taken = sharded.ledger();
    CHECK_MESSAGE(taken[zero::category::optimizer_state] ==
                      (how.stage.replicates_updates() ? trainable : trainable / world),
                  how.name);
    bool const whole = !how.policy.per_microbatch || how.stage.reduces_whole();
    CHECK_MESSAGE(taken[zero::category::gradients] == (whole ? trainable : trainable / world),
                  how.name);
  });
}

TEST_CASE("the two policies agree to the bit where sums are exact") {
  same_bits bits;
  everywhere({1, 2, 4}, {}, [&](thread_communicator& comm, test::setting const& how) {
    test::model engine{{{{"a", 5}}, {{"b", 40}}}};
    sharded_model sharded{comm, engine.units(), how.stage, plain, how.policy, how.options};
    for (std::size_t m = 0; m < 4; ++m) {
      test::run_microbatch(sharded, engine, m, 4, [&](std::string const&, std::size_t i) {
        return static_cast<float>(i + m) + static_cast<float>(comm.rank());
      });
    }
    sharded.step();
    bits.check(std::to_string(comm.size()), test::read(sharded, engine), how.name);
  });
}

namespace {

enum class delivery { leases, copies, places, both };

/// The gradient of one parameter, handed over, or nothing.
template <class Microbatch, class Gradient>
void hand_over(Microbatch& micro, std::size_t id, std::size_t size, bool copies,
               Gradient gradient) {
  if (!optional_gradient{gradient(std::size_t{0})}) {
    micro.skip(id);
    return;
  }
  if (copies) {
    values elements(size);
    for (std::size_t i = 0; i < size; ++i) {
      elements[i] = *optional_gradient{gradient(i)};
    }
    micro.gradient_ready(id, std::span{elements});
    std::fill(elements.begin(), elements.end(), std::nanf(""));  // the engine may free it
    return;
  }
  zero::gradient_place const place = micro.gradient(id);
  std::span<float> const elements = place.span.template as<float>();
  for (std::size_t i = 0; i < size; ++i) {
    elements[i] = (place.accumulate ? elements[i] : 0.0F) + *optional_gradient{gradient(i)};
  }
  micro.gradient_ready(id);
}

/// A micro-batch whose gradients come one by one, in an order and at moments of this rank's own.
template <class Gradient>
void run_by_parameter(sharded_model& sharded, std::size_t m, std::size_t count, delivery way,
                      std::minstd_rand& chance, Gradient gradient) {
  std::vector<zero::layout::parameter> const& parameters = sharded.layout().parameters();
  auto micro = sharded.microbatch(m, count);
  for (std::size_t u = 0; u < sharded.units(); ++u) {
    auto const lease = micro.forward(u);
  }
  std::vector<std::size_t> waiting;
  auto const deliver_some = [&](std::size_t kept) {
    std::shuffle(waiting.begin(), waiting.end(), chance);
    while (waiting.size() > kept) {
      std::size_t const id = waiting.back();
      waiting.pop_back();
      bool const copies = way == delivery::copies || (way == delivery::both && id % 2 == 0);
      hand_over(micro, id, parameters[id].spec.size, copies,
                [&](std::size_t i) { return gradient(parameters[id].spec.name, i); });
    }
  };
  for (std::size_t u = sharded.units(); u-- > 0;) {
    {
      auto const lease = micro.backward(u, zero::by_parameter);
      for (std::size_t const id : sharded.layout().units()[u].parameters) {
        waiting.push_back(id);
      }
    }
    deliver_some(std::min<std::size_t>(waiting.size(), chance() % 4));
  }
  deliver_some(0);
}

}  // namespace

TEST_CASE(
    "gradients that come one by one, in an order that differs by rank, have the bits of leases") {
  same_bits bits;
  for (std::uint64_t const bucket_bytes : {0U, 120U}) {
    for (delivery const way :
         {delivery::leases, delivery::copies, delivery::places, delivery::both}) {
      everywhere(
          {1, 2, 3, 4}, {.clip_norm = 1.0, .bucket_bytes = bucket_bytes},
          [&](thread_communicator& comm, test::setting const& how) {
            test::model engine{{{{"a", 5}},
                                {{"b", 33}, {"c", 7}, {"d", 2}},
                                {{"e", 40}},
                                {{"f", 1}, {"g", 3}},
                                {{"h", 9}}}};
            zero::accumulation policy = how.policy;
            policy.open_buckets = 5;
            sharded_model sharded{comm,          engine.units(), how.stage,
                                  with_momentum, policy,         how.options};
            std::minstd_rand chance{static_cast<std::minstd_rand::result_type>(comm.rank() + 1)};
            for (std::size_t step = 0; step < 3; ++step) {
              for (std::size_t m = 0; m < 2; ++m) {
                auto const gradient = [&](std::string const& name, std::size_t i) {
                  bool const skipped =
                      name == "g" || (name == "c" && comm.rank() == 1) || (name == "d" && m == 1);
                  return skipped ? optional_gradient{} : some_gradient(name, i, comm.rank(), m);
                };
                if (way == delivery::leases) {
                  test::run_microbatch(sharded, engine, m, 2, gradient);
                } else {
                  run_by_parameter(sharded, m, 2, way, chance, gradient);
                }
              }
              sharded.step();
            }
            CHECK_MESSAGE(sharded.steps(sharded.find("g")) == 0, how.name);
            bits.check(key_of(comm, how), test::read(sharded, engine), how.name);
          });
    }
  }
}

TEST_CASE("with two open buckets, gradients that come last unit first are reduced as they come") {
  everywhere(
      {1, 2, 3}, {.bucket_bytes = 0}, [](thread_communicator& comm, test::setting const& how) {
        test::model engine{{{{"a", 5}}, {{"b", 7}}, {{"c", 40}}, {{"d", 1}}, {{"e", 9}}}};
        sharded_model sharded{comm, engine.units(), how.stage, plain, how.policy, how.options};
        {
          auto micro = sharded.microbatch(0, 1);
          for (std::size_t u = 5; u-- > 0;) {
            auto const lease = micro.backward(u, zero::by_parameter);
            hand_over(micro, u, engine.declared()[u][0].size, u % 2 == 0,
                      [&](std::size_t) { return static_cast<float>(comm.rank() + 1); });
          }
        }
        sharded.step();
        float const mean = static_cast<float>(comm.size() + 1) / 2;
        test::check_values(sharded, engine,
                           {{"a", values(5, 10 - mean)},
                            {"c", values(40, 10 - mean)},
                            {"e", values(9, 10 - mean)}},
                           how);
        CHECK_MESSAGE(sharded.gradient_high_water() <= (how.policy.per_microbatch ? 2 : 0),
                      how.name);
      });
}

TEST_CASE("a tied parameter's gradient comes once, after its last use") {
  everywhere({1, 2, 3}, {}, [](thread_communicator& comm, test::setting const& how) {
    test::model engine{{{{"e", 4}}, {{"a", 3}}, {test::use_of("e")}}};
    sharded_model sharded{comm, engine.units(), how.stage, plain, how.policy, how.options};
    for (std::size_t m = 0; m < 2; ++m) {
      auto micro = sharded.microbatch(m, 2);
      for (std::size_t u = 3; u-- > 0;) {
        auto const lease = micro.backward(u, zero::by_parameter);
        CHECK_MESSAGE((u == 1 || lease.parameter<float>(0)[3] == 10), how.name);
        if (u == 1) {
          hand_over(micro, 1, 3, true, [](std::size_t) { return 1.0F; });
        }
      }
      hand_over(micro, 0, 4, m == 0, [](std::size_t) { return 3.0F; });
    }
    sharded.step();
    test::check_values(sharded, engine, {{"e", values(4, 7)}, {"a", values(3, 9)}}, how);
  });
}

TEST_CASE("a gradient that a stream still computes is waited for") {
  everywhere({2}, {}, [](thread_communicator& comm, test::setting const& how) {
    test::model engine{{{{"a", 5}}}};
    sharded_model sharded{comm, engine.units(), how.stage, plain, how.policy, how.options};
    values gradient(5, std::nanf(""));
    {
      zero::host_stream producer{true};
      auto micro = sharded.microbatch(0, 1);
      producer.enqueue([&gradient] {
        std::this_thread::sleep_for(std::chrono::milliseconds{1});
        std::fill(gradient.begin(), gradient.end(), 2.0F);
      });
      micro.gradient_ready(0, std::span{gradient}, producer);
    }
    sharded.step();
    test::check_values(sharded, engine, {{"a", values(5, 8)}}, how);
  });
}
