// SPDX-License-Identifier: MIT
#include <doctest/doctest.h>
#include <support/counting_allocator.hpp>
#include <support/model_cases.hpp>
#include <zero/comm/run_threads.hpp>
#include <zero/optim/adamw.hpp>
#include <zero/train/sharded_model.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

namespace {

using model_type = zero::sharded_model<zero::thread_communicator, zero::adamw>;

constexpr std::chrono::seconds deadline{20};
constexpr zero::thread_options threads{.deadline = deadline};

/// All threads' allocations and deallocations.
struct events {
  long allocations = counting_allocator::allocations;
  long deallocations = counting_allocator::deallocations;
};

/// Read the counts while every rank waits.
events together(zero::thread_communicator& comm) {
  zero::host_stream here;
  comm.barrier(here);
  events const now;
  comm.barrier(here);
  return now;
}

enum class way { leases, recomputing, parameter_by_parameter };

/// The ids of the trainable parameters that each unit declares.
std::vector<std::vector<std::size_t>> trainable_ids(model_type const& sharded) {
  std::vector<std::vector<std::size_t>> out(sharded.units());
  for (std::size_t u = 0; u < sharded.units(); ++u) {
    for (std::size_t const id : sharded.layout().units()[u].parameters) {
      if (sharded.layout().parameters()[id].spec.trainable) {
        out[u].push_back(id);
      }
    }
  }
  return out;
}

void clear(zero::any_span out) {
  auto* const bytes = static_cast<std::byte*>(out.data());
  std::fill_n(bytes, out.bytes(), std::byte{0});
}

void run_microbatch(model_type& sharded, test::declared_model const& model,
                    std::vector<std::vector<std::size_t>> const& ids, way how, std::size_t m,
                    std::size_t count) {
  auto micro = sharded.microbatch(m, count);
  for (std::size_t u = 0; u < sharded.units(); ++u) {
    auto const lease = micro.forward(u);
  }
  for (std::size_t u = sharded.units(); u-- > 0;) {
    if (how == way::recomputing) {
      auto const lease = micro.recompute(u);
    }
    if (how != way::parameter_by_parameter) {
      auto const lease = micro.backward(u);
      model.write_gradients(sharded, lease, u);
      continue;
    }
    auto const lease = micro.backward(u, zero::by_parameter);
    for (std::size_t const id : ids[u]) {
      if ((id + m) % 4 == 3) {
        micro.skip(id);
        continue;
      }
      auto const place = micro.gradient(id);
      if (!place.accumulate) {
        clear(place.span);
      }
      micro.gradient_ready(id);
    }
  }
}

/// What a training program does between two binds.
void train(model_type& sharded, test::declared_model const& model,
           std::vector<std::vector<std::size_t>> const& ids, way how, bool clips) {
  for (std::size_t const microbatches : {1U, 2U, 1U, 3U}) {
    for (std::size_t m = 0; m < microbatches; ++m) {
      run_microbatch(sharded, model, ids, how, m, microbatches);
    }
    for (auto const& unit : ids) {
      for (std::size_t const id : unit) {
        static_cast<void>(sharded.gradient(id));
      }
    }
    auto const step = sharded.step();
    if (clips) {
      static_cast<void>(step.norm());
      static_cast<void>(step.skipped());
    }
    auto evaluation = sharded.evaluation();
    for (std::size_t u = 0; u < sharded.units(); ++u) {
      auto const lease = evaluation.forward(u);
    }
  }
  sharded.wait();
  static_cast<void>(sharded.ledger());
  static_cast<void>(sharded.sent());
}

std::string title(test::model_case const& each, test::run_case const& run, int ranks, bool overlap,
                  bool clips, way how) {
  return test::title(each, run, run.formula, 0) + ", really of " + std::to_string(ranks) +
         (overlap ? ", overlap" : "") + (clips ? ", clipping" : "") + ", way " +
         std::to_string(static_cast<int>(how));
}

/// With and without overlap and clipping, and the ways that an engine can go, in turn.
void check(test::model_case const& each, test::run_case const& run, int ranks) {
  static std::size_t turn = 0;
  for (bool const overlap : {false, true}) {
    for (bool const clips : {false, true}) {
      way how = static_cast<way>(++turn % 3);
      if (how == way::parameter_by_parameter && run.policy.open_buckets == 1) {
        how = way::leases;  // the tied bucket and the one after it are open at once
      }
      events before;
      events after;
      zero::run_threads(
          ranks,
          [&](zero::thread_communicator& comm) {
            zero::options options;
            options.overlap = overlap;
            options.precision = each.precision;
            options.bucket_bytes = 200;
            options.deadline = deadline;
            if (clips) {
              options.clip_norm = 1;
            }
            test::declared_model const model{each};
            model_type sharded{comm, model.units(), run.stage, zero::adamw{}, run.policy, options};
            auto const ids = trainable_ids(sharded);
            events const bound = together(comm);
            train(sharded, model, ids, how, clips);
            events const end = together(comm);
            if (comm.rank() == 0) {
              before = bound;
              after = end;
            }
          },
          threads);
      CHECK((before.allocations > 0) == counting_allocator::available);
      CHECK_MESSAGE(after.allocations == before.allocations,
                    title(each, run, ranks, overlap, clips, how));
      CHECK_MESSAGE(after.deallocations == before.deallocations,
                    title(each, run, ranks, overlap, clips, how));
    }
  }
}

test::model_case find_case(std::vector<test::model_case> const& cases, std::string const& name) {
  return *std::find_if(cases.begin(), cases.end(),
                       [&](auto const& each) { return each.name == name; });
}

}  // namespace

TEST_CASE(
    "from bind on nothing is allocated or freed, in any stage, policy, overlap, with clipping or "
    "not") {
  std::vector<test::model_case> const cases = test::model_cases();
  for (char const* const name : {"fp32", "16 bytes", "mixed, frozen, tied"}) {
    test::model_case const each = find_case(cases, name);
    for (test::run_case const& run : test::run_cases()) {
      for (int const ranks : {1, 3}) {
        check(each, run, ranks);
      }
    }
  }
}

TEST_CASE("eight ranks allocate nothing either") {
  test::model_case const each = find_case(test::model_cases(), "mixed, frozen, tied");
  for (test::run_case const& run : test::run_cases()) {
    if (run.policy.open_buckets == 2) {
      check(each, run, 8);
    }
  }
}

TEST_CASE("tensors that can't be rebound are staged without an allocation") {
  for (test::model_case const& each : test::staying_cases(true)) {
    for (test::run_case const& run : test::run_cases()) {
      if (run.formula.stage < 2) {
        check(each, run, 2);
      }
    }
  }
}

TEST_CASE("a unit has the same address under each of its leases, while they come in order") {
  for (test::run_case const& run : test::run_cases()) {
    zero::run_threads(
        2,
        [&](zero::thread_communicator& comm) {
          test::model_case const each = find_case(test::model_cases(), "fp32, sizes that divide");
          test::declared_model const model{each};
          zero::options options;
          options.bucket_bytes = 0;
          options.deadline = deadline;
          model_type sharded{comm, model.units(), run.stage, zero::adamw{}, run.policy, options};
          auto const ids = trainable_ids(sharded);
          std::array<void const*, 4> values{};
          std::array<void const*, 4> gradients{};
          for (std::size_t step = 0; step < 4; ++step) {
            {
              auto micro = sharded.microbatch(0, 1);
              for (std::size_t u = 0; u < 4; ++u) {
                auto const lease = micro.forward(u);
                void const* const here = lease.parameter<float>(ids[u][0]).data();
                CHECK(here != nullptr);
                CHECK((step == 0 || values[u] == here));
                values[u] = here;
              }
              for (std::size_t u = 4; u-- > 0;) {
                auto const lease = micro.backward(u);
                CHECK(lease.parameter<float>(ids[u][0]).data() == values[u]);
                void const* const here = lease.gradient<float>(ids[u][0]).data();
                CHECK(here != nullptr);
                CHECK((step == 0 || gradients[u] == here));
                gradients[u] = here;
                model.write_gradients(sharded, lease, u);
              }
            }
            sharded.step();
          }
        },
        threads);
  }
}
