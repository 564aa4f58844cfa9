// SPDX-License-Identifier: MIT
// Random models and random training loops: in every stage and overlap the same bits, and where
// arithmetic is exact those of a dense process that knows nothing of ranks.
#include <doctest/doctest.h>

#include <zero/comm/run_threads.hpp>
#include <zero/optim/sgd.hpp>
#include <zero/train/sharded_model.hpp>

#include <support/mock_model.hpp>
#include <support/settings.hpp>
#include <support/thrown.hpp>
#include <support/watchdog.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace {

using zero::thread_communicator;
using sharded_model = zero::sharded_model<thread_communicator, zero::sgd>;
using forward_lease = decltype(std::declval<sharded_model&>().microbatch(0, 1).forward(0));
using backward_lease = decltype(std::declval<sharded_model&>().microbatch(0, 1).backward(0));

constexpr zero::sgd optimizer{.learning_rate = 1, .momentum = 0.5};

/// Numbers that follow from a seed, the same with every standard library.
class dice {
 public:
  explicit dice(std::uint64_t seed) : state_{seed * 2 + 1} {}

  std::size_t below(std::size_t n) {
    state_ = state_ * 6364136223846793005U + 1442695040888963407U;
    return static_cast<std::size_t>(state_ >> 33U) % n;
  }
  bool one_in(std::size_t n) { return below(n) == 0; }
  template <class T>
  T const& among(std::vector<T> const& choices) {
    return choices[below(choices.size())];
  }
  void shuffle(std::vector<std::size_t>& order) {
    for (std::size_t i = order.size(); i > 1; --i) {
      std::swap(order[i - 1], order[below(i)]);
    }
  }

 private:
  std::uint64_t state_;
};

/// A backward lease, and what is around it.
struct backward_use {
  std::size_t unit;
  bool recomputed = false;
  bool nested = false;  // the recomputation's lease ends after the backward's
  bool held = false;    // until the next lease has begun
};

struct microbatch_plan {
  std::vector<std::size_t> forward;
  std::vector<bool> forward_held;
  std::vector<backward_use> backward;
  bool by_parameter = false;
  std::vector<std::size_t> evaluation_before;  // units
};

/// A model, and what is done with it.
struct program {
  test::model::structure units;
  std::vector<std::string> trainable;
  std::vector<std::vector<microbatch_plan>> windows;
  zero::options options;
  std::uint64_t seed;
};

program make_program(std::uint64_t seed) {
  dice roll{seed};
  program out{{}, {}, {}, {}, seed};
  std::size_t const units = 1 + roll.below(6);
  std::vector<std::string> names;
  for (std::size_t u = 0; u < units; ++u) {
    out.units.emplace_back();
    for (std::size_t n = roll.below(4); n-- > 0;) {
      std::string const name = "p" + std::to_string(names.size());
      bool const frozen = roll.one_in(6);
      std::size_t const size = roll.among<std::size_t>({0, 1, 2, 3, 5, 7, 16, 17, 33, 64, 100});
      out.units[u].push_back({name, size, static_cast<float>(roll.below(50)), frozen});
      names.push_back(name);
      if (!frozen) {
        out.trainable.push_back(name);
      }
    }
  }
  if (out.trainable.empty()) {
    out.units[0].push_back({"last", 4});
    out.trainable.emplace_back("last");
    names.emplace_back("last");
  }
  for (std::size_t u = 0; u < units; ++u) {
    std::string const& name = names[roll.below(names.size())];
    bool const own = std::any_of(out.units[u].begin(), out.units[u].end(),
                                 [&](test::declaration const& each) { return each.name == name; });
    if (!own && roll.one_in(3)) {
      out.units[u].push_back(test::use_of(name));
    }
  }

  if (!roll.one_in(3)) {
    out.options.bucket_bytes = roll.among<std::uint64_t>({0, 40, 200, 1000, 1U << 20U});
  }
  if (!roll.one_in(3)) {
    out.options.alignment = roll.among<std::uint64_t>({1, 3, 16});
  }
  if (roll.one_in(3)) {
    out.options.clip_norm = roll.one_in(2) ? 1.0 : 1e6;
  }
  out.options.deadline = std::chrono::seconds{20};

  auto const all = [&] {
    std::vector<std::size_t> order(units);
    std::iota(order.begin(), order.end(), std::size_t{0});
    return order;
  };
  for (std::size_t steps = 1 + roll.below(3); steps-- > 0;) {
    std::size_t const count = std::size_t{1} << roll.below(3);
    out.windows.emplace_back();
    for (std::size_t m = 0; m < count; ++m) {
      microbatch_plan& plan = out.windows.back().emplace_back();
      if (roll.one_in(4)) {
        plan.evaluation_before = all();
        roll.shuffle(plan.evaluation_before);
      }
      plan.by_parameter = roll.one_in(4);
      plan.forward = all();
      if (roll.one_in(3)) {
        roll.shuffle(plan.forward);
      }
      while (!plan.by_parameter && roll.one_in(3)) {
        plan.forward.push_back(roll.below(units));
      }
      for (std::size_t i = 0; i < plan.forward.size(); ++i) {
        plan.forward_held.push_back(roll.one_in(5));
      }
      std::vector<std::size_t> order = plan.forward;
      std::reverse(order.begin(), order.end());
      if (roll.one_in(4)) {
        roll.shuffle(order);
      }
      for (std::size_t const u : order) {
        bool const recomputed = roll.one_in(4);
        plan.backward.push_back({u, recomputed, roll.one_in(2), roll.one_in(5)});
      }
      if (m + 1 != count && roll.one_in(4)) {
        plan.backward.resize(
            roll.below(plan.backward.size() + 1));  // the rest has no gradient this time
      }
      if (m + 1 != count && roll.one_in(6)) {
        plan.forward.resize(1 + roll.below(plan.forward.size()));
        plan.backward.clear();  // a forward alone: no micro-batch of the window
      }
    }
  }
  return out;
}

/// A small whole number, or nothing where this rank skips.
std::optional<float> gradient(program const& of, std::string const& name, std::size_t i,
                              std::size_t rank, std::size_t step, std::size_t m, std::size_t use) {
  auto const last = static_cast<std::uint64_t>(name.back());
  std::uint64_t const place = last + 131 * (name.size() + 31 * (step + 17 * (m + 13 * use)));
  dice skips{of.seed ^ (place * 7919 + rank)};
  if (skips.one_in(7)) {
    return std::nullopt;
  }
  dice roll{of.seed ^ ((place * 1009 + i) * 127 + rank)};
  return static_cast<float>(roll.below(17)) - 8.0F;
}

/// Calls use(name, n) for each trainable parameter that unit `u` uses, the n-th time in this
/// micro-batch.
template <class Use>
void for_each_use(program const& of, std::size_t u, std::map<std::string, std::size_t>& uses,
                  Use use) {
  for (test::declaration const& each : of.units[u]) {
    if (std::find(of.trainable.begin(), of.trainable.end(), each.name) != of.trainable.end()) {
      use(each.name, uses[each.name]++);
    }
  }
}

/// Whether a micro-batch has gradients: a backward lease, or one that is handed over.
bool counts(program const& of, microbatch_plan const& plan) {
  bool any = false;
  std::map<std::string, std::size_t> uses;
  for (backward_use const& each : plan.backward) {
    for_each_use(of, each.unit, uses, [&](std::string const&, std::size_t) { any = true; });
  }
  return plan.by_parameter ? any : !plan.backward.empty();
}

/// What a dense process makes of it, in double. Exact, as long as ranks and micro-batches are
/// powers of two and nothing is clipped.
std::vector<test::whole_values> run_dense(program const& of, std::size_t ranks) {
  std::map<std::string, std::vector<double>> values;
  std::map<std::string, std::vector<double>> momentum;
  for (auto const& unit : of.units) {
    for (test::declaration const& each : unit) {
      if (each.size != test::use_of("").size) {
        values[each.name].assign(each.size, static_cast<double>(each.value));
        momentum[each.name].assign(each.size, 0.0);
      }
    }
  }
  std::vector<test::whole_values> out;
  for (std::size_t step = 0; step < of.windows.size(); ++step) {
    std::map<std::string, std::vector<double>> sums;
    std::map<std::string, bool> had;
    double ran = 0;
    for (std::size_t m = 0; m < of.windows[step].size(); ++m) {
      microbatch_plan const& plan = of.windows[step][m];
      ran += counts(of, plan) ? 1 : 0;
      std::map<std::string, std::size_t> uses;
      for (backward_use const& each : plan.backward) {
        for_each_use(of, each.unit, uses, [&](std::string const& name, std::size_t use) {
          if (plan.by_parameter && use != 0) {
            return;
          }
          std::vector<double>& sum = sums[name];
          sum.resize(values[name].size());
          for (std::size_t rank = 0; rank < ranks; ++rank) {
            if (!gradient(of, name, 0, rank, step, m, use)) {
              continue;
            }
            had[name] = true;
            for (std::size_t i = 0; i < sum.size(); ++i) {
              sum[i] += static_cast<double>(*gradient(of, name, i, rank, step, m, use));
            }
          }
        });
      }
    }
    test::whole_values& after = out.emplace_back();
    for (auto& [name, elements] : values) {
      for (std::size_t i = 0; i < elements.size() && had[name]; ++i) {
        double& b = momentum[name][i];
        b = 0.5 * b + sums[name][i] / (static_cast<double>(ranks) * ran);
        elements[i] -= b;
      }
      after[name].assign(elements.begin(), elements.end());
    }
  }
  return out;
}

/// One rank of a run.
class runner {
 public:
  runner(program const& of, thread_communicator& comm, test::setting const& how)
      : of_{of}, rank_{static_cast<std::size_t>(comm.rank())}, engine_{of.units},
        sharded_{comm, engine_.units(), how.stage, optimizer, how.policy, how.options},
        chance_{of.seed * 31 + rank_} {}

  /// The values after every step.
  [[nodiscard]] std::vector<test::whole_values> run(std::string const& what) {
    std::vector<test::whole_values> out;
    for (step_ = 0; step_ < of_.windows.size(); ++step_) {
      auto const& window = of_.windows[step_];
      for (m_ = 0; m_ < window.size(); ++m_) {
        evaluate(window[m_]);
        auto micro = sharded_.microbatch(m_, window.size());
        uses_.clear();
        forward(micro, window[m_]);
        if (window[m_].by_parameter) {
          backward_by_parameter(micro, window[m_]);
        } else {
          backward(micro, window[m_]);
        }
      }
      sharded_.step();
      out.push_back(test::read(sharded_, engine_));
      CHECK_MESSAGE(sharded_.gathered().occupied == 0, what);
      CHECK_MESSAGE(sharded_.gathered().gathers == sharded_.gathered().releases, what);
    }
    CHECK_MESSAGE(sharded_.ledger() == sharded_.plan().bytes, what);
    return out;
  }

 private:
  void evaluate(microbatch_plan const& plan) {
    for (std::size_t const u : plan.evaluation_before) {
      auto const lease = sharded_.evaluation().forward(u);
    }
  }

  template <class Microbatch>
  void forward(Microbatch& micro, microbatch_plan const& plan) {
    std::optional<forward_lease> held;
    for (std::size_t i = 0; i < plan.forward.size(); ++i) {
      auto lease = micro.forward(plan.forward[i]);
      held.reset();
      if (plan.forward_held[i]) {
        held.emplace(std::move(lease));
      }
    }
  }

  template <class Microbatch>
  void backward(Microbatch& micro, microbatch_plan const& plan) {
    std::optional<backward_lease> held;
    for (backward_use const& each : plan.backward) {
      std::optional<forward_lease> again;
      if (each.recomputed) {
        again.emplace(micro.recompute(each.unit));
      }
      if (!each.nested) {
        again.reset();
      }
      if (held && shares(held->unit(), each.unit)) {
        held.reset();
      }
      auto lease = micro.backward(each.unit);
      if (chance_of_all_.one_in(2)) {
        held.reset();
      }
      write(lease);
      held.reset();
      if (each.held) {
        held.emplace(std::move(lease));
      }
    }
  }

  /// Whether two units write the gradient of one parameter.
  [[nodiscard]] bool shares(std::size_t a, std::size_t b) const {
    auto const& units = of_.units;
    return std::any_of(units[a].begin(), units[a].end(), [&](test::declaration const& each) {
      return std::any_of(units[b].begin(), units[b].end(),
                         [&](test::declaration const& other) { return other.name == each.name; });
    });
  }

  void write(backward_lease const& lease) {
    for_each_use(of_, lease.unit(), uses_, [&](std::string const& name, std::size_t use) {
      std::size_t const id = sharded_.find(name);
      if (!gradient(of_, name, 0, rank_, step_, m_, use)) {
        lease.skip(id);
        return;
      }
      bool const add = lease.accumulate(id);
      std::span<float> const place = lease.gradient<float>(id);
      for (std::size_t i = 0; i < place.size(); ++i) {
        place[i] = (add ? place[i] : 0.0F) + *gradient(of_, name, i, rank_, step_, m_, use);
      }
    });
  }

  template <class Microbatch>
  void backward_by_parameter(Microbatch& micro, microbatch_plan const& plan) {
    std::vector<std::size_t> waiting;
    auto const deliver = [&](std::size_t kept) {
      chance_.shuffle(waiting);
      for (; waiting.size() > kept; waiting.pop_back()) {
        hand_over(micro, waiting.back());
      }
    };
    for (backward_use const& each : plan.backward) {
      {
        auto const lease = micro.backward(each.unit, zero::by_parameter);
        for_each_use(of_, each.unit, uses_, [&](std::string const& name, std::size_t use) {
          if (use == 0) {
            waiting.push_back(sharded_.find(name));
          }
        });
      }
      deliver(std::min(waiting.size(), chance_.below(4)));
    }
    deliver(0);
  }

  template <class Microbatch>
  void hand_over(Microbatch& micro, std::size_t id) {
    zero::parameter_spec const& spec = sharded_.layout().parameters()[id].spec;
    if (!gradient(of_, spec.name, 0, rank_, step_, m_, 0)) {
      micro.skip(id);
      return;
    }
    std::vector<float> elements(spec.size);
    for (std::size_t i = 0; i < spec.size; ++i) {
      elements[i] = *gradient(of_, spec.name, i, rank_, step_, m_, 0);
    }
    micro.gradient_ready(id, std::span{elements});
  }

  program const& of_;
  std::size_t rank_;
  test::model engine_;
  sharded_model sharded_;
  dice chance_;            // of this rank
  dice chance_of_all_{7};  // the same on all ranks
  std::size_t step_ = 0;
  std::size_t m_ = 0;
  std::map<std::string, std::size_t> uses_;
};

bool is_power_of_two(std::size_t n) { return (n & (n - 1)) == 0; }

/// Run a program in every setting on `ranks` ranks.
void check_program(std::uint64_t seed, int ranks) {
  program const of = make_program(seed);
  bool const clips = of.options.clip_norm.value_or(1e6) < 1e6;
  bool const exact =
      !clips && is_power_of_two(static_cast<std::size_t>(ranks)) &&
      std::all_of(
          of.windows.begin(), of.windows.end(), [&](std::vector<microbatch_plan> const& window) {
            return is_power_of_two(static_cast<std::size_t>(
                std::count_if(window.begin(), window.end(),
                              [&](microbatch_plan const& each) { return counts(of, each); })));
          });
  std::vector<test::whole_values> const dense = run_dense(of, static_cast<std::size_t>(ranks));
  std::map<bool, std::vector<test::whole_values>> first;  // by policy
  for (test::setting how : test::every_setting(of.options)) {
    how.policy.open_buckets = 100;
    how.stage.max_live_units = 2;
    std::string const what =
        "seed " + std::to_string(seed) + ", " + std::to_string(ranks) + " ranks, " + how.name;
    test::watchdog const limit{std::chrono::seconds{60}, what};
    std::vector<std::vector<test::whole_values>> after(static_cast<std::size_t>(ranks));
    test::thrown const caught = test::what_throws([&] {
      zero::run_threads(ranks, [&](thread_communicator& comm) {
        runner each{of, comm, how};
        after[static_cast<std::size_t>(comm.rank())] = each.run(what);
      });
    });
    CHECK_MESSAGE(caught.kind == test::kind::nothing, what, ": ", caught.message);
    std::vector<test::whole_values> const& expected =
        first.emplace(how.policy.per_microbatch, after[0]).first->second;
    for (std::vector<test::whole_values> const& each : after) {
      CHECK_MESSAGE(each == expected, what);
      CHECK_MESSAGE((!exact || each == dense), what);
    }
  }
}

}  // namespace

TEST_CASE(
    "random programs have the same bits in every setting, which are those of a dense process") {
  for (int const ranks : {1, 2, 3, 4}) {
    for (std::uint64_t seed = 0; seed < 40; ++seed) {
      check_program(seed, ranks);
    }
  }
}
