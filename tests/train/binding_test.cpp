// SPDX-License-Identifier: MIT
#include <doctest/doctest.h>
#include <support/counting_allocator.hpp>
#include <support/engine.hpp>
#include <support/owning_tensor.hpp>
#include <support/same_bits.hpp>
#include <support/thrown.hpp>
#include <zero/comm/run_threads.hpp>
#include <zero/optim/sgd.hpp>
#include <zero/train/sharded_model.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace {

using zero::category;
using rebound_engine = test::engine<test::owning_tensor<float>>;
using staying_engine = test::engine<std::vector<float>>;

constexpr std::chrono::seconds deadline{20};
constexpr zero::thread_options threads{.deadline = deadline};
constexpr int world_sizes[] = {1, 2, 3, 4, 8};

test::unit_sizes const sizes{{100}, {7, 0}, {33, 1}, {}, {250}};
constexpr std::uint64_t all_elements = 100 + 7 + 33 + 1 + 250;

zero::stage const stages_for_any_tensor[] = {
    zero::stage0{}, zero::stage1{},
    zero::stage1{.gradients = zero::gradient_collective::all_reduce}};
zero::accumulation const policies[] = {zero::local_accumulate{}, zero::reduce_per_microbatch{}};

zero::options chosen(std::optional<std::uint64_t> bucket_bytes = {}) {
  zero::options out;
  out.deadline = deadline;
  out.bucket_bytes = bucket_bytes;
  return out;
}

/// The bytes of an arena, from outside.
long device_bytes() { return counting_allocator::of_thread.device_live_bytes; }

/// A tensor that tells how much this thread holds whenever it is rebound.
struct telling_tensor : test::owning_tensor<float> {
  using owning_tensor::owning_tensor;
  static inline thread_local std::vector<long> live_bytes;
};

}  // namespace

template <>
struct zero::tensor_traits<telling_tensor> : zero::tensor_traits<test::owning_tensor<float>> {
  static void rebind(telling_tensor& tensor, std::span<float> storage) {
    zero::tensor_traits<test::owning_tensor<float>>::rebind(tensor, storage);
    if (telling_tensor::live_bytes.size() < telling_tensor::live_bytes.capacity()) {
      telling_tensor::live_bytes.push_back(counting_allocator::of_thread.live_bytes);
    }
  }
};

TEST_CASE(
    "tensors that can't be rebound train to the same bits, without a second copy of the model") {
  for (int const ranks : world_sizes) {
    for (zero::accumulation const policy : policies) {
      std::vector<float> expected;
      for (std::uint64_t const bucket_bytes :
           {std::uint64_t{0}, std::uint64_t{200}, std::uint64_t{1} << 30U}) {
        zero::run_threads(
            ranks,
            [&](zero::thread_communicator& comm) {
              rebound_engine engine{sizes};
              zero::sharded_model sharded{
                  comm,           engine.units(),
                  zero::stage0{}, zero::sgd{.learning_rate = 0.1, .momentum = 0.9},
                  policy,         chosen(bucket_bytes)};
              for (std::size_t step = 0; step < 3; ++step) {
                engine.train(sharded, comm.rank(), step, 2);
              }
              sharded.wait();
              if (comm.rank() == 0) {
                expected = engine.all();
              }
            },
            threads);
        for (zero::stage const& at : stages_for_any_tensor) {
          zero::run_threads(
              ranks,
              [&](zero::thread_communicator& comm) {
                staying_engine engine{sizes};
                long const before = device_bytes();
                zero::sharded_model sharded{
                    comm,   engine.units(),
                    at,     zero::sgd{.learning_rate = 0.1, .momentum = 0.9},
                    policy, chosen(bucket_bytes)};
                zero::memory_bytes const ledger = sharded.ledger();
                CHECK(ledger == sharded.plan().bytes);
                CHECK(ledger[category::engine] == 2 * 4 * all_elements);
                CHECK(ledger[category::parameters] == 0);
                if (!policy.per_microbatch) {
                  CHECK(ledger[category::gradients] ==
                        0);  // reduced where the engine accumulates them
                } else if (at.reduces_whole()) {
                  CHECK(ledger[category::gradients] == 4 * all_elements);
                }
                // One bucket, for whole gradients or for whole parameters: none where neither goes
                // through it.
                bool const stages = !policy.per_microbatch || at.number() == 1;
                std::uint64_t const largest = bucket_bytes == 0     ? 250 * 4
                                              : bucket_bytes == 200 ? 250 * 4
                                                                    : 391 * 4;
                CHECK(ledger[category::staging] == (stages ? largest : 0));
                if (counting_allocator::available) {
                  CHECK(device_bytes() - before == static_cast<long>(ledger.arena()));
                }
                for (std::size_t step = 0; step < 3; ++step) {
                  engine.train(sharded, comm.rank(), step, 2);
                }
                sharded.wait();
                CHECK(test::same_bits(engine.all(), expected));
                CHECK(sharded.ledger() == sharded.plan().bytes);
                auto const sent = sharded.sent();
                CHECK(sent[zero::traffic::gradients] + sent[zero::traffic::parameters] ==
                      3 * sharded.plan().sent_bytes_per_step(2));
              },
              threads);
        }
      }
    }
  }
}

TEST_CASE("stage 2 serves values that can't be rebound, through staging") {
  using engine_type = test::engine<std::vector<float>, test::owning_tensor<float>>;
  for (int const ranks : world_sizes) {
    for (zero::accumulation const policy : policies) {
      std::vector<float> expected;
      for (bool const stays : {false, true}) {
        zero::run_threads(
            ranks,
            [&](zero::thread_communicator& comm) {
              auto const train = [&](auto engine) {
                zero::sharded_model sharded{
                    comm,           engine.units(),
                    zero::stage2{}, zero::sgd{.learning_rate = 0.1, .momentum = 0.9},
                    policy,         chosen(0)};
                CHECK(sharded.ledger() == sharded.plan().bytes);
                CHECK(sharded.ledger()[category::engine] == (stays ? 4 * all_elements : 0));
                CHECK(sharded.ledger()[category::parameters] == (stays ? 0 : 4 * all_elements));
                CHECK(sharded.ledger()[category::staging] == (stays ? 4 * 250 : 0));
                for (std::size_t step = 0; step < 3; ++step) {
                  engine.train(sharded, comm.rank(), step, 2);
                }
                sharded.wait();
                if (!stays && comm.rank() == 0) {
                  expected = engine.all();
                } else if (stays) {
                  CHECK(test::same_bits(engine.all(), expected));
                }
              };
              stays ? train(engine_type{sizes}) : train(rebound_engine{sizes});
            },
            threads);
      }
    }
  }
}

TEST_CASE("the gradient of a tied parameter that can't be rebound is the sum of its uses") {
  // e[4] = 10 is used by units 0 and 2, w[3] = 10 by unit 1; the gradient of every use is 1, the
  // rate 1.
  enum class way { tensors, spans, skips_last_use };
  for (int const ranks : world_sizes) {
    for (zero::stage const& at : stages_for_any_tensor) {
      for (zero::accumulation const policy : policies) {
        for (bool const adds : {false, true}) {
          for (way const how : {way::tensors, way::spans, way::skips_last_use}) {
            zero::run_threads(
                ranks,
                [&](zero::thread_communicator& comm) {
                  std::vector<float> e(4, 10.0F), de(4, 99.0F), w(3, 10.0F), dw(3, 99.0F);
                  std::vector<std::vector<zero::any_parameter>> const units{
                      {zero::parameter("e", e, de)},
                      {zero::parameter("w", w, dw)},
                      {zero::tied("e")}};
                  zero::options options = chosen();
                  options.engine_adds = adds;
                  zero::sharded_model sharded{comm,   units,  at, zero::sgd{.learning_rate = 1},
                                              policy, options};
                  for (float step = 1; step <= 3; ++step) {
                    for (std::size_t m = 0; m < 2; ++m) {
                      auto micro = sharded.microbatch(m, 2);
                      for (std::size_t u = 3; u-- > 0;) {
                        auto const lease = micro.backward(u);
                        std::size_t const id = sharded.find(u == 1 ? "w" : "e");
                        if (how == way::skips_last_use && u == 2) {
                          lease.skip(id);
                          continue;
                        }
                        std::span<float> const gradient = how == way::spans
                                                              ? lease.gradient<float>(id)
                                                          : u == 1 ? std::span<float>{dw}
                                                                   : std::span<float>{de};
                        for (float& each : gradient) {
                          each = lease.accumulate(id) ? each + 1 : 1;
                        }
                      }
                    }
                    sharded.step();
                    sharded.wait();
                    float const uses = how == way::skips_last_use ? 1 : 2;
                    CHECK(e == std::vector<float>(4, 10 - step * uses));
                    CHECK(w == std::vector<float>(3, 10 - step));
                  }
                },
                threads);
          }
        }
      }
    }
  }
}

TEST_CASE(
    "tensors look at the arena while a model has them, or are empty where parameters are sharded") {
  zero::run_threads(
      3,
      [&](zero::thread_communicator& comm) {
        for (zero::stage const at : {zero::stage(zero::stage0{}), zero::stage(zero::stage2{}),
                                     zero::stage(zero::stage3{})}) {
          for (zero::accumulation const policy : policies) {
            rebound_engine engine{sizes};
            zero::sharded_model sharded{comm, engine.units(), at, zero::sgd{}, policy, chosen()};
            for (std::size_t id = 0; id < engine.values.size(); ++id) {
              std::size_t const n = sharded.layout().parameters()[id].spec.size;
              CHECK(engine.values[id].own.capacity() == 0);
              CHECK(engine.gradients[id].own.capacity() == 0);
              CHECK(engine.value(id).size() == (at.shards_parameters() ? 0 : n));
              CHECK(engine.gradient(id).size() == (policy.per_microbatch ? 0 : n));
              for (std::size_t i = 0; i < engine.value(id).size(); ++i) {
                CHECK(engine.value(id)[i] == test::first_value(id, i));
              }
            }
          }
        }
      },
      threads);
}

TEST_CASE("each tensor's storage is given up in turn") {
  if (!counting_allocator::available) {
    return;
  }
  test::unit_sizes const big{{10'000, 20'000}, {30'000}, {40'000}};
  std::vector<long> const bytes{40'000, 80'000, 120'000, 160'000};
  zero::run_threads(
      2,
      [&](zero::thread_communicator& comm) {
        for (zero::stage const at : {zero::stage(zero::stage0{}), zero::stage(zero::stage3{})}) {
          test::engine<telling_tensor> engine{big};
          telling_tensor::live_bytes.clear();
          telling_tensor::live_bytes.reserve(8);  // 4 values and 4 gradients
          zero::sharded_model sharded{comm,        engine.units(),           at,
                                      zero::sgd{}, zero::local_accumulate{}, chosen()};
          std::vector<long> const live = telling_tensor::live_bytes;
          CHECK(live.size() == 8);
          for (std::size_t i = 1; i < live.size(); ++i) {
            CHECK(live[i - 1] - live[i] == bytes[i / 2]);
          }
        }
        telling_tensor::live_bytes = {};
      },
      threads);
}

TEST_CASE("the peak of taking values over is the plan's bind_peak_bytes") {
  if (!counting_allocator::available) {
    return;
  }
  struct measured {
    long peak = 0;
    long planned = 0;
  };
  auto const measure = [](zero::thread_communicator& comm, zero::stage at, std::size_t n) {
    auto& mine = counting_allocator::of_thread;
    long const before = mine.live_bytes;
    rebound_engine engine{{{n}, {n, n}, {n}}};
    mine.peak_bytes = mine.live_bytes;
    zero::sharded_model sharded{comm,        engine.units(),           at,
                                zero::sgd{}, zero::local_accumulate{}, chosen()};
    return measured{mine.peak_bytes - before, static_cast<long>(sharded.plan().bind_peak_bytes)};
  };
  for (zero::stage const at : {zero::stage(zero::stage0{}), zero::stage(zero::stage1{}),
                               zero::stage(zero::stage2{}), zero::stage(zero::stage3{})}) {
    // The same books, other elements: what grows is what the plan says, to the byte.
    measured small;
    measured large;
    zero::run_threads(
        1, [&](zero::thread_communicator& comm) { small = measure(comm, at, 1'003); }, threads);
    zero::run_threads(
        1, [&](zero::thread_communicator& comm) { large = measure(comm, at, 9'001); }, threads);
    CHECK(large.peak - small.peak == large.planned - small.planned);
    zero::run_threads(
        4,
        [&](zero::thread_communicator& comm) {
          measured const some = measure(comm, at, 50'000);
          CHECK(some.peak >= some.planned);
          CHECK(some.peak <= some.planned + 60'000);  // books: less than a third of a unit
        },
        threads);
  }
}

TEST_CASE("every rank starts from rank 0's values, which are sent once, as bind traffic") {
  for (int const ranks : world_sizes) {
    for (zero::stage const at : {zero::stage(zero::stage0{}), zero::stage(zero::stage3{})}) {
      zero::run_threads(
          ranks,
          [&](zero::thread_communicator& comm) {
            rebound_engine engine{sizes, static_cast<float>(comm.rank())};
            zero::sharded_model sharded{comm,        engine.units(),           at,
                                        zero::sgd{}, zero::local_accumulate{}, chosen()};
            zero::traffic_bytes const sent = sharded.sent();
            std::uint64_t const peers = static_cast<std::uint64_t>(ranks) - 1;
            CHECK(sent[zero::traffic::bind] == (comm.rank() == 0 ? peers * 4 * all_elements : 0));
            CHECK(sent.total() == sent[zero::traffic::bind] + sent[zero::traffic::control]);
            auto evaluation = sharded.evaluation();
            for (std::size_t u = 0; u < sharded.units(); ++u) {
              auto const lease = evaluation.forward(u);
              for (std::size_t const id : engine.ids(u)) {
                std::size_t const n = sharded.layout().parameters()[id].spec.size;
                CHECK(engine.value(id).size() == n);
                for (std::size_t i = 0; i < n; ++i) {
                  CHECK(engine.value(id)[i] == test::first_value(id, i));
                }
              }
            }
          },
          threads);
    }
  }
}

TEST_CASE(
    "ranks that must start from equal values, and don't, get an error that names the parameter, "
    "and keep theirs") {
  zero::options equal = chosen();
  equal.start = zero::start::require_equal;
  for (int const ranks : world_sizes) {
    for (zero::stage const at : {zero::stage(zero::stage0{}), zero::stage(zero::stage3{})}) {
      zero::run_threads(
          ranks,
          [&](zero::thread_communicator& comm) {
            {
              rebound_engine engine{sizes};
              zero::sharded_model sharded{comm,        engine.units(),           at,
                                          zero::sgd{}, zero::local_accumulate{}, equal};
              CHECK(sharded.sent()[zero::traffic::bind] == 0);
              sharded.release();
              CHECK(engine.value(3)[32] == test::first_value(3, 32));
            }
            if (ranks == 1) {
              return;
            }
            rebound_engine engine{sizes};
            if (comm.rank() == ranks - 1) {
              engine.value(3)[32] += 1;
            }
            std::vector<float> const before = engine.all();
            std::string const message = test::message_of([&] {
              zero::sharded_model sharded{comm,        engine.units(),           at,
                                          zero::sgd{}, zero::local_accumulate{}, equal};
            });
            CHECK(message.find("'p3'") != std::string::npos);
            CHECK(message.find("rank " + std::to_string(ranks - 1)) != std::string::npos);
            CHECK(test::same_bits(engine.all(), before));
            for (auto const& value : engine.values) {
              CHECK(value.owns());
            }
          },
          threads);
    }
  }
}
