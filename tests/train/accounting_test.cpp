// SPDX-License-Identifier: MIT
#include <doctest/doctest.h>
#include <support/counting_allocator.hpp>
#include <support/formula.hpp>
#include <support/model_cases.hpp>
#include <zero/comm/run_threads.hpp>
#include <zero/optim/adamw.hpp>
#include <zero/train/sharded_model.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace {

using zero::traffic;

constexpr std::chrono::seconds deadline{20};
constexpr zero::thread_options threads{.deadline = deadline};
constexpr int world_sizes[] = {1, 2, 3, 4, 8};

/// Threads, and a way to the communicators that a model splits off: what they really read from its
/// peers.
class watched_communicator {
 public:
  using device = zero::host;
  using stream = zero::host_stream;

  explicit watched_communicator(zero::thread_communicator inner)
      : inner_{std::make_shared<counted>(counted{std::move(inner), 0})},
        parts_{std::make_shared<std::vector<std::shared_ptr<counted>>>()} {}

  [[nodiscard]] int rank() const noexcept { return inner_->comm.rank(); }
  [[nodiscard]] int size() const noexcept { return inner_->comm.size(); }
  void set_deadline(std::chrono::milliseconds most) { inner_->comm.set_deadline(most); }
  void reduce_scatter(zero::const_any_span full, zero::any_span shard, zero::combine how,
                      zero::reduction what, stream& on) {
    inner_->comm.reduce_scatter(full, shard, how, what, on);
  }
  void all_gather(zero::const_any_span shard, zero::any_span full, stream& on) {
    inner_->comm.all_gather(shard, full, on);
  }
  void all_reduce(zero::const_any_span full, zero::any_span result, zero::combine how,
                  zero::reduction what, stream& on) {
    inner_->comm.all_reduce(full, result, how, what, on);
  }
  void broadcast(zero::any_span data, int root, stream& on) {
    inner_->comm.broadcast(data, root, on);
  }
  void barrier(stream& on) { inner_->comm.barrier(on); }
  void exchange(std::span<std::byte const> mine, std::span<std::byte> all) {
    inner_->comm.exchange(mine, all);
    inner_->exchanged_bytes += static_cast<std::uint64_t>(size() - 1) * mine.size();
  }
  [[nodiscard]] watched_communicator split(int color, int key) {
    watched_communicator part{inner_->comm.split(color, key)};
    parts_->push_back(part.inner_);
    part.parts_ = parts_;
    return part;
  }
  void abort(std::string_view reason) noexcept { inner_->comm.abort(reason); }

  /// The bytes that all parts split off have read from their peers' memory in collectives.
  [[nodiscard]] std::uint64_t bytes_read() const {
    std::uint64_t sum = 0;
    for (auto const& part : *parts_) {
      sum += part->comm.peer_bytes_read();
    }
    return sum;
  }
  /// The bytes that they have sent by exchanges, which the others count apart.
  [[nodiscard]] std::uint64_t bytes_exchanged() const {
    std::uint64_t sum = 0;
    for (auto const& part : *parts_) {
      sum += part->exchanged_bytes;
    }
    return sum;
  }
  void forget() { parts_->clear(); }

 private:
  struct counted {
    zero::thread_communicator comm;
    std::uint64_t exchanged_bytes;
  };

  std::shared_ptr<counted> inner_;
  std::shared_ptr<std::vector<std::shared_ptr<counted>>> parts_;
};

zero::options options_of(test::model_case const& model, test::shape_case const& shape,
                         bool overlap) {
  zero::options out;
  out.precision = model.precision;
  out.bucket_bytes = shape.bucket_bytes;
  out.alignment = shape.alignment;
  out.overlap = overlap;
  out.deadline = deadline;
  return out;
}

struct pair_of_cases {
  test::model_case model;
  std::vector<test::run_case> runs;
};

/// Every model with every stage and policy that accepts it.
std::vector<pair_of_cases> all_pairs() {
  auto const below = [](int stage) {
    std::vector<test::run_case> out;
    for (test::run_case const& each : test::run_cases()) {
      if (each.formula.stage < stage) {
        out.push_back(each);
      }
    }
    return out;
  };
  std::vector<pair_of_cases> out;
  for (test::model_case const& each : test::model_cases()) {
    out.push_back({each, test::run_cases()});
  }
  for (test::model_case const& each : test::staying_cases(true)) {
    out.push_back({each, below(2)});
  }
  for (test::model_case const& each : test::staying_cases(false)) {
    out.push_back({each, below(3)});
  }
  return out;
}

using model_type = zero::sharded_model<watched_communicator, zero::adamw>;

/// One micro-batch with leases in order.
void run_microbatch(model_type& sharded, test::declared_model const& model, std::size_t m,
                    std::size_t count) {
  auto micro = sharded.microbatch(m, count);
  for (std::size_t u = 0; u < sharded.units(); ++u) {
    auto const lease = micro.forward(u);
  }
  for (std::size_t u = sharded.units(); u-- > 0;) {
    auto const lease = micro.backward(u);
    model.write_gradients(sharded, lease, u);
  }
}

/// What was sent between two readings of a meter.
zero::traffic_bytes between(zero::traffic_bytes const& before, zero::traffic_bytes const& after) {
  zero::traffic_bytes out;
  for (std::size_t i = 0; i < zero::traffic_count; ++i) {
    out[static_cast<traffic>(i)] = after[static_cast<traffic>(i)] - before[static_cast<traffic>(i)];
  }
  return out;
}

std::uint64_t payload(zero::traffic_bytes const& sent) {
  return sent.total() - sent[traffic::control];
}

/// Five units of 10 floats, and the plain formula of stage 3 for them.
test::model_case five_units() {
  test::model_case out{"five units", zero::fp32, formula::type::f32, {}};
  for (int u = 0; u < 5; ++u) {
    out.units.push_back({{"p" + std::to_string(u), static_cast<std::uint64_t>(10 + u)}});
  }
  return out;
}

}  // namespace

TEST_CASE(
    "ledger, plan, formula and a replaced allocator agree, for every stage, policy, precision and "
    "P") {
  std::vector<pair_of_cases> const pairs = all_pairs();
  std::vector<test::shape_case> const shapes = test::shape_cases();
  for (int const ranks : world_sizes) {
    zero::run_threads(
        ranks,
        [&](zero::thread_communicator& world) {
          watched_communicator comm{world.split(0, world.rank())};
          auto const rank = static_cast<std::uint64_t>(comm.rank());
          std::size_t turn = static_cast<std::size_t>(ranks);
          for (pair_of_cases const& each : pairs) {
            for (test::run_case const& run : each.runs) {
              ++turn;  // a sixth of the shapes, another sixth each time
              for (std::size_t s = turn % 6; s < shapes.size(); s += 6) {
                formula::settings const settings =
                    test::settings_of(run, shapes[s], static_cast<std::uint64_t>(ranks));
                std::string const title = test::title(each.model, run, settings, rank);
                test::declared_model model{each.model};
                formula::memory const expected =
                    formula::expectation{model.formula(), settings}.of_rank(rank);
                counting_allocator::counts const before = counting_allocator::of_thread;
                {
                  model_type const sharded{
                      comm,       model.units(),
                      run.stage,  zero::adamw{},
                      run.policy, options_of(each.model, shapes[s], turn % 16 == 0)};
                  comm.forget();
                  std::uint64_t const bind_peak = sharded.plan().bind_peak_bytes;
                  CHECK_MESSAGE(test::in_words(sharded.plan().bytes, bind_peak) == expected, title);
                  CHECK_MESSAGE(test::in_words(sharded.ledger(), bind_peak) == expected, title);
                  if (counting_allocator::available) {
                    counting_allocator::counts const& now = counting_allocator::of_thread;
                    long const arenas = expected.arena() == 0 ? 0 : 1;
                    CHECK_MESSAGE(now.device_allocations - before.device_allocations == arenas,
                                  title);
                    CHECK_MESSAGE(now.device_live_bytes - before.device_live_bytes ==
                                      static_cast<long>(expected.arena()),
                                  title);
                  }
                }
                if (counting_allocator::available) {
                  CHECK(counting_allocator::of_thread.device_live_bytes ==
                        before.device_live_bytes);
                }
              }
            }
          }
        },
        threads);
  }
}

TEST_CASE("a bigger model takes more memory by what the plan says, and by nothing else") {
  if (!counting_allocator::available) {
    return;
  }
  // The same names and as many digits: the library's books are equally large.
  auto const held = [](test::run_case const& run, std::uint64_t elements, long& planned) {
    long live = 0;
    zero::run_threads(
        1,
        [&](zero::thread_communicator& world) {
          watched_communicator comm{world.split(0, 0)};
          test::model_case const each{
              "", zero::fp32, formula::type::f32, {{{"a", elements}}, {{"b", elements}, {"c", 5}}}};
          test::declared_model const model{each};
          long const before = counting_allocator::live_bytes;
          model_type const sharded{comm,          model.units(), run.stage,
                                   zero::adamw{}, run.policy,    options_of(each, {}, false)};
          // What tensors held is given up: model.units() holds no elements any more.
          std::uint64_t held_before = 0;
          for (formula::unit const& unit : model.formula()) {
            for (formula::parameter const& p : unit.parameters) {
              held_before += p.held_bytes;
            }
          }
          live = counting_allocator::live_bytes - before + static_cast<long>(held_before);
          planned = static_cast<long>(sharded.plan().bytes.peak());
        },
        threads);
    return live;
  };
  for (test::run_case const& run : test::run_cases()) {
    long small_plan = 0;
    long large_plan = 0;
    long const small = held(run, 1'009, small_plan);
    long const large = held(run, 9'973, large_plan);
    CHECK(large - small == large_plan - small_plan);
    CHECK(small - small_plan < 16'384);
  }
}

TEST_CASE("the bytes that leave a rank are the formula's, by name, and those that its peers read") {
  std::vector<pair_of_cases> const pairs = all_pairs();
  std::vector<test::shape_case> const shapes = test::shape_cases();
  for (int const ranks : world_sizes) {
    std::size_t turn = static_cast<std::size_t>(ranks);
    for (pair_of_cases const& each : pairs) {
      std::vector<std::uint64_t> sent(each.runs.size() * static_cast<std::size_t>(ranks));
      std::vector<std::uint64_t> read(sent.size());
      std::size_t const first_turn = turn;
      zero::run_threads(
          ranks,
          [&](zero::thread_communicator& world) {
            watched_communicator comm{world.split(0, world.rank())};
            auto const rank = static_cast<std::uint64_t>(comm.rank());
            for (std::size_t r = 0; r < each.runs.size(); ++r) {
              test::run_case const& run = each.runs[r];
              if (ranks == 8 && run.policy.open_buckets == 1) {
                continue;  // the others take long enough
              }
              test::shape_case const& shape = shapes[(first_turn + r) % shapes.size()];
              formula::settings const settings =
                  test::settings_of(run, shape, static_cast<std::uint64_t>(ranks));
              std::string const title = test::title(each.model, run, settings, rank);
              test::declared_model model{each.model};
              formula::expectation const expected{model.formula(), settings};
              zero::options options = options_of(each.model, shape, (first_turn + r) % 3 == 0);
              if (r % 2 == 0) {
                options.clip_norm = 1;
              }
              std::size_t const at = r * static_cast<std::size_t>(ranks) + rank;
              {
                model_type sharded{comm,          model.units(), run.stage,
                                   zero::adamw{}, run.policy,    options};
                CHECK_MESSAGE(payload(sharded.sent()) == sharded.sent()[traffic::bind], title);
                bool const trains = expected.of_step(1).gradients != 0 || ranks == 1;
                for (std::size_t const microbatches : {2U, 3U, 1U}) {
                  zero::traffic_bytes const before = sharded.sent();
                  for (std::size_t m = 0; m < microbatches; ++m) {
                    run_microbatch(sharded, model, m, microbatches);
                  }
                  sharded.step();
                  zero::traffic_bytes const step = between(before, sharded.sent());
                  formula::sent const formula = expected.of_step(microbatches);
                  CHECK_MESSAGE(step[traffic::gradients] == formula.gradients, title);
                  CHECK_MESSAGE(step[traffic::parameters] == formula.parameters, title);
                  CHECK_MESSAGE(payload(step) == formula.total(), title);
                  CHECK_MESSAGE(sharded.plan().sent_bytes_per_step(microbatches) == formula.total(),
                                title);
                }
                zero::traffic_bytes const before = sharded.sent();
                {
                  auto evaluation = sharded.evaluation();
                  for (std::size_t u = 0; u < sharded.units(); ++u) {
                    auto const lease = evaluation.forward(u);
                  }
                }
                zero::traffic_bytes const passes = between(before, sharded.sent());
                std::uint64_t const gathers = run.formula.stage == 3 ? expected.gather_bytes() : 0;
                CHECK_MESSAGE(passes[traffic::evaluation] == gathers, title);
                CHECK_MESSAGE(payload(passes) == gathers, title);
                if (ranks == 1) {
                  CHECK_MESSAGE(sharded.sent().total() == 0, title);
                } else if (trains) {
                  CHECK_MESSAGE(sharded.sent()[traffic::control] > 0, title);
                }
                CHECK_MESSAGE(sharded.ledger() == sharded.plan().bytes, title);
                sent[at] = sharded.sent().total();
              }
              sent[at] -= comm.bytes_exchanged();
              read[at] = comm.bytes_read();
              comm.forget();
            }
          },
          threads);
      for (std::size_t r = 0; r < each.runs.size(); ++r) {
        std::uint64_t sent_by_all = 0;
        std::uint64_t read_by_all = 0;
        for (std::size_t rank = 0; rank < static_cast<std::size_t>(ranks); ++rank) {
          sent_by_all += sent[r * static_cast<std::size_t>(ranks) + rank];
          read_by_all += read[r * static_cast<std::size_t>(ranks) + rank];
        }
        CHECK_MESSAGE(sent_by_all == read_by_all,
                      test::title(each.model, each.runs[r], each.runs[r].formula, 0));
        bool const left_out = ranks == 8 && each.runs[r].policy.open_buckets == 1;
        CHECK((sent_by_all == 0) == (ranks == 1 || left_out));
      }
      turn += each.runs.size() + 1;
    }
  }
}

TEST_CASE("what recomputation gathers is metered by that name") {
  // 3 ranks, alignment 1: a unit of n floats is gathered for 2 * ceil(n / 3) * 4 bytes; n = 10,
  // ..., 14.
  std::uint64_t const unit_bytes[] = {2 * 4 * 4, 2 * 4 * 4, 2 * 4 * 4, 2 * 5 * 4, 2 * 5 * 4};
  std::uint64_t const pass_bytes = 4 * (8 + 8 + 8 + 10 + 10);
  zero::options options;
  options.alignment = 1;
  options.bucket_bytes = 0;
  options.deadline = deadline;
  enum class way { apart, around, none };
  for (zero::accumulation const policy : {zero::accumulation(zero::local_accumulate{}),
                                          zero::accumulation(zero::reduce_per_microbatch{})}) {
    for (zero::stage const at :
         {zero::stage(zero::stage0{}), zero::stage(zero::stage1{}), zero::stage(zero::stage2{}),
          zero::stage(zero::stage3{.prefetch = 0}), zero::stage(zero::stage3{.prefetch = 1}),
          zero::stage(zero::stage3{.prefetch = 4}), zero::stage(zero::stage3{.keep_last = true}),
          zero::stage(zero::stage3{.keep_after_forward = true})}) {
      for (way const how : {way::none, way::apart, way::around}) {
        zero::run_threads(
            3,
            [&](zero::thread_communicator& world) {
              watched_communicator comm{world.split(0, world.rank())};
              test::declared_model const model{five_units()};
              model_type sharded{comm, model.units(), at, zero::adamw{}, policy, options};
              for (std::size_t step = 0; step < 3; ++step) {
                zero::traffic_bytes const before = sharded.sent();
                {
                  auto micro = sharded.microbatch(0, 1);
                  for (std::size_t u = 0; u < 5; ++u) {
                    auto const lease = micro.forward(u);
                  }
                  for (std::size_t u = 5; u-- > 0;) {
                    if (how == way::apart) {
                      auto const again = micro.recompute(u);
                    }
                    if (how == way::around) {
                      auto const again = micro.recompute(u);
                      auto const lease = micro.backward(u);
                      model.write_gradients(sharded, lease, u);
                    } else {
                      auto const lease = micro.backward(u);
                      model.write_gradients(sharded, lease, u);
                    }
                  }
                }
                sharded.step();
                zero::traffic_bytes const sent = between(before, sharded.sent());
                // Around a backward lease, the gather serves both, and is the pass's own. Apart
                // from it each unit is gathered once more, or with prefetch the last one, as the
                // others are there; or none, where the last one stays.
                bool const gathers =
                    at.shards_parameters() && !at.keep_after_forward && !at.keep_last;
                std::uint64_t const again = at.prefetch == 0 ? pass_bytes : unit_bytes[4];
                CHECK(sent[traffic::recomputation] == (how == way::apart && gathers ? again : 0));
                CHECK(payload(sent) - sent[traffic::recomputation] ==
                      sharded.plan().sent_bytes_per_step(1));
                CHECK(sent[traffic::mispredicted] == 0);
                CHECK(sharded.gathered().occupied == 0);
              }
            },
            threads);
      }
    }
  }
}

TEST_CASE("gathers ahead of a use that never comes are metered as mispredicted") {
  // As above. An evaluation that ends after its first unit has gathered one more.
  zero::options options;
  options.alignment = 1;
  options.deadline = deadline;
  zero::run_threads(
      3,
      [&](zero::thread_communicator& world) {
        watched_communicator comm{world.split(0, world.rank())};
        for (std::size_t const prefetch : {0U, 1U, 3U}) {
          comm.forget();
          test::declared_model const model{five_units()};
          std::uint64_t sent = 0;
          {
            model_type sharded{comm,
                               model.units(),
                               zero::stage3{.prefetch = prefetch},
                               zero::adamw{},
                               zero::local_accumulate{},
                               options};
            zero::traffic_bytes const before = sharded.sent();
            {
              auto evaluation = sharded.evaluation();
              auto const lease = evaluation.forward(0);
            }
            zero::traffic_bytes const passes = between(before, sharded.sent());
            CHECK(passes[traffic::evaluation] == 2 * 4 * 4);
            CHECK(passes[traffic::mispredicted] == (prefetch == 0   ? 0
                                                    : prefetch == 1 ? 2 * 4 * 4
                                                                    : 2 * 4 * (4 + 4 + 5)));
            CHECK(payload(passes) == passes[traffic::evaluation] + passes[traffic::mispredicted]);
            CHECK(sharded.gathered().occupied == 0);
            sent = payload(sharded.sent()) - sharded.sent()[traffic::bind];
          }
          // Broadcasts at bind are read by all but the root.
          std::uint64_t bound = 0;
          for (std::size_t u = 0; u < 5; u += 3) {
            bound += comm.rank() == 0 ? 0 : 4 * (10 + u);
          }
          CHECK(comm.bytes_read() == sent + bound);
        }
      },
      threads);
}
