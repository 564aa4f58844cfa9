// SPDX-License-Identifier: MIT
#include <doctest/doctest.h>
#include <support/counting_allocator.hpp>
#include <support/engine.hpp>
#include <support/owning_tensor.hpp>
#include <support/same_bits.hpp>
#include <support/thrown.hpp>
#include <zero/comm/run_threads.hpp>
#include <zero/core/bfloat16.hpp>
#include <zero/optim/sgd.hpp>
#include <zero/train/sharded_model.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace my {

/// The tensor of the README.
struct tensor {
  explicit tensor(std::size_t n, float value = 0) : own(n, value), view{own} {}

  std::vector<float> own;
  std::span<float> view;
};

}  // namespace my

// [tensor]
template <>
struct zero::tensor_traits<my::tensor> {
  using value_type = float;
  using device = zero::host;
  static std::span<float> elements(my::tensor& t) { return t.view; }
  static void rebind(my::tensor& t, std::span<float> storage) {
    t.own = {};
    t.view = storage;
  }
  static void allocate(my::tensor& t, std::size_t n) {  // for release()
    t.own.resize(n);
    t.view = t.own;
  }
};
// [end of tensor]

namespace {

using engine_type = test::engine<test::owning_tensor<float>>;

constexpr std::chrono::seconds deadline{20};
constexpr zero::thread_options threads{.deadline = deadline};
constexpr int world_sizes[] = {1, 2, 3, 4, 8};
constexpr zero::sgd optimizer{.learning_rate = 0.1, .momentum = 0.9};

test::unit_sizes const sizes{{100}, {7, 0}, {33, 1}, {}, {250}};

zero::stage const stages[] = {zero::stage0{},
                              zero::stage1{},
                              zero::stage1{.gradients = zero::gradient_collective::all_reduce},
                              zero::stage2{},
                              zero::stage3{.prefetch = 0},
                              zero::stage3{.prefetch = 3},
                              zero::stage3{.keep_after_forward = true}};
zero::accumulation const policies[] = {zero::local_accumulate{}, zero::reduce_per_microbatch{}};

zero::options chosen() {
  zero::options out;
  out.deadline = deadline;
  out.precision = zero::bf16;
  return out;
}

/// The values after three steps, computed without the library: one window of two micro-batches a
/// step.
std::vector<float> trained_by_hand(int ranks) {
  std::vector<float> out;
  for (std::size_t id = 0; id < 6; ++id) {
    std::size_t const n = std::vector<std::size_t>{100, 7, 0, 33, 1, 250}[id];
    for (std::size_t i = 0; i < n; ++i) {
      double value = test::first_value(id, i);
      double momentum = 0;
      for (std::size_t step = 0; step < 3; ++step) {
        double sum = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          for (std::size_t m = 0; m < 2; ++m) {
            sum +=
                0.3 * value + engine_type::seed(rank, step, m) + 0.125 * static_cast<double>(i % 7);
          }
        }
        momentum = 0.9 * momentum + sum / (2.0 * ranks);
        value -= 0.1 * momentum;
      }
      out.push_back(static_cast<float>(value));
    }
  }
  return out;
}

}  // namespace

TEST_CASE("the README's tensor trains in every stage, and release gives it back") {
  for (int const ranks : world_sizes) {
    for (zero::stage const& at : stages) {
      zero::run_threads(
          ranks,
          [&](zero::thread_communicator& comm) {
            my::tensor value{7, 10};
            my::tensor gradient{7};
            std::vector<std::vector<zero::any_parameter>> const units{
                {zero::parameter("p", value, gradient)}};
            zero::sharded_model sharded{comm, units, at, zero::sgd{.learning_rate = 1},
                                        zero::reduce_per_microbatch{}};
            {
              auto micro = sharded.microbatch(0, 1);
              auto const lease = micro.backward(0);
              std::ranges::fill(gradient.view, static_cast<float>(comm.rank()));
            }
            sharded.step();
            sharded.release();
            float const mean = static_cast<float>(ranks - 1) / 2;
            CHECK(value.own == std::vector<float>(7, 10 - mean));
            CHECK(value.view.data() == value.own.data());
          },
          threads);
    }
  }
}

TEST_CASE("release gives whole values back, in storage that the tensors own, in every stage") {
  for (int const ranks : world_sizes) {
    std::vector<float> const near = trained_by_hand(ranks);
    for (zero::accumulation const policy : policies) {
      std::vector<float> first;
      for (zero::stage const& at : stages) {
        for (std::optional<std::uint64_t> const bucket_bytes :
             {std::optional<std::uint64_t>{}, std::optional<std::uint64_t>{200}}) {
          zero::run_threads(
              ranks,
              [&](zero::thread_communicator& comm) {
                engine_type engine{sizes};
                zero::options options = chosen();
                options.bucket_bytes = bucket_bytes;
                {
                  zero::sharded_model sharded{comm, engine.units(), at, optimizer, policy, options};
                  for (std::size_t step = 0; step < 3; ++step) {
                    engine.train(sharded, comm.rank(), step, 2);
                  }
                  sharded.release();  // without a wait: the last step still runs
                  for (std::size_t id = 0; id < engine.values.size(); ++id) {
                    CHECK(engine.values[id].owns());
                    CHECK(engine.gradient(id).empty());
                  }
                  std::string const refused = test::message_of([&] { sharded.wait(); });
                  CHECK(refused.find("released") != std::string::npos);
                }
                std::vector<float> const all = engine.all();  // after the model's end
                CHECK(all.size() == near.size());
                for (std::size_t i = 0; i < all.size(); ++i) {
                  CHECK(all[i] == doctest::Approx(near[i]).epsilon(1e-5));
                }
                if (comm.rank() == 0 && first.empty()) {
                  first = all;
                }
                zero::host_stream here;
                comm.barrier(here);
                CHECK(test::same_bits(all, first));
              },
              threads);
        }
      }
    }
  }
}

TEST_CASE("what release gives back can be bound again, in another stage") {
  for (int const ranks : world_sizes) {
    zero::run_threads(
        ranks,
        [&](zero::thread_communicator& comm) {
          engine_type once{sizes};
          engine_type again{sizes};
          auto const train = [&](engine_type& engine, zero::stage at, std::size_t first,
                                 std::size_t end) {
            zero::sharded_model sharded{comm,
                                        engine.units(),
                                        at,
                                        zero::sgd{.learning_rate = 0.1},
                                        zero::reduce_per_microbatch{},
                                        chosen()};
            for (std::size_t step = first; step < end; ++step) {
              engine.train(sharded, comm.rank(), step, 2);
            }
            sharded.release();
          };
          train(once, zero::stage0{}, 0,
                4);  // without momentum nothing but the values is carried over
          train(again, zero::stage3{}, 0, 1);
          train(again, zero::stage2{}, 1, 2);
          train(again, zero::stage1{}, 2, 3);
          train(again, zero::stage3{.keep_after_forward = true}, 3, 4);
          CHECK(test::same_bits(once.all(), again.all()));
        },
        threads);
  }
}

TEST_CASE("release gives every byte of the arena back") {
  if (!counting_allocator::available) {
    return;
  }
  zero::run_threads(
      2,
      [&](zero::thread_communicator& comm) {
        for (zero::stage const& at : stages) {
          engine_type engine{sizes};
          long const before = counting_allocator::of_thread.device_live_bytes;
          zero::sharded_model sharded{comm,      engine.units(),           at,
                                      optimizer, zero::local_accumulate{}, chosen()};
          CHECK(counting_allocator::of_thread.device_live_bytes > before);
          sharded.release();
          CHECK(counting_allocator::of_thread.device_live_bytes == before);
          CHECK(sharded.ledger() == zero::memory_bytes{});
        }
      },
      threads);
}

TEST_CASE("destruction alone leaves tensors empty, also when an exception is its cause") {
  for (zero::stage const& at : stages) {
    for (zero::accumulation const policy : policies) {
      for (bool const throws : {false, true}) {
        std::vector<engine_type> engines;
        engines.reserve(3);
        for (int rank = 0; rank < 3; ++rank) {
          engines.emplace_back(sizes);
        }
        std::string message;
        try {
          zero::run_threads(
              3,
              [&](zero::thread_communicator& comm) {
                engine_type& engine = engines[static_cast<std::size_t>(comm.rank())];
                zero::sharded_model sharded{comm, engine.units(), at, optimizer, policy, chosen()};
                engine.train(sharded, comm.rank(), 0, 2);
                if (throws && comm.rank() == 1) {
                  auto micro = sharded.microbatch(0, 2);
                  auto const lease = micro.forward(0);
                  throw std::runtime_error{"the engine failed"};
                }
                if (throws) {
                  engine.train(sharded, comm.rank(), 1, 2);
                  sharded.wait();
                }
              },
              threads);
        } catch (std::runtime_error const& failure) {
          message = failure.what();
        }
        CHECK(message == (throws ? "the engine failed" : ""));
        for (engine_type& engine : engines) {
          for (std::size_t id = 0; id < engine.values.size(); ++id) {
            CHECK(engine.value(id).data() == nullptr);
            CHECK(engine.value(id).empty());
            CHECK(engine.gradient(id).data() == nullptr);
            CHECK(engine.gradient(id).empty());
            CHECK(engine.values[id].own.capacity() == 0);
          }
        }
      }
    }
  }
}

TEST_CASE("a tensor that can't own elements is named by release, which changes nothing") {
  using engine_without = test::engine<test::unreturnable_tensor<float>>;
  for (zero::stage const& at : stages) {
    for (int const ranks : {1, 3}) {
      std::vector<std::string> messages(static_cast<std::size_t>(ranks));
      zero::run_threads(
          ranks,
          [&](zero::thread_communicator& comm) {
            engine_without engine{sizes};
            zero::sharded_model sharded{
                comm, engine.units(), at, optimizer, zero::reduce_per_microbatch{}, chosen()};
            messages[static_cast<std::size_t>(comm.rank())] =
                test::message_of([&] { sharded.release(); });
            if (!at.shards_parameters()) {
              CHECK(engine.value(0).size() == 100);
              CHECK(engine.value(0)[99] == test::first_value(0, 99));
            }
          },
          threads);
      for (std::size_t rank = 0; rank < messages.size(); ++rank) {
        CHECK(messages[rank].find("release: parameter 'p0'") == 0);
        CHECK(messages[rank].find("(rank " + std::to_string(rank) + ")") != std::string::npos);
        CHECK(messages[rank].find("allocate") != std::string::npos);
      }
    }
  }
}

TEST_CASE(
    "release fills only the tensors that there are, of any type, and leaves those that stay "
    "alone") {
  for (int const ranks : world_sizes) {
    for (zero::stage const& at : stages) {
      zero::run_threads(
          ranks,
          [&](zero::thread_communicator& comm) {
            test::owning_tensor<zero::bfloat16> half{70, zero::bfloat16{1.5F}};
            test::owning_tensor<double> wide{31, 0.1};
            test::owning_tensor<float> frozen{45, 7.0F};
            std::vector<float> stays(19, 3.0F);
            std::vector<std::vector<zero::any_parameter>> units{
                {zero::parameter("half", half)},
                {zero::parameter("wide", wide),
                 zero::parameter<float>("bare", {12},
                                        [](std::span<float> /*out*/, std::size_t /*first*/) {})},
                {zero::parameter("frozen", frozen).frozen(), zero::tied("half")}};
            if (!at.shards_parameters()) {
              units.push_back({zero::parameter("stays", stays)});
            }
            zero::sharded_model sharded{
                comm, units, at, optimizer, zero::reduce_per_microbatch{}, chosen()};
            sharded.release();
            CHECK(half.owns());
            CHECK(wide.owns());
            CHECK(frozen.owns());
            CHECK(half.own == std::vector<zero::bfloat16>(70, zero::bfloat16{1.5F}));
            CHECK(wide.own == std::vector<double>(31, 0.1));
            CHECK(frozen.own == std::vector<float>(45, 7.0F));
            CHECK(stays == std::vector<float>(19, 3.0F));
          },
          threads);
    }
  }
}
