// SPDX-License-Identifier: MIT
// Real faults of other systems that need a device with streams, as small inputs with the right
// answer.
#include <zero/comm/loopback.hpp>
#include <zero/comm/solo.hpp>
#include <zero/optim/adamw.hpp>
#include <zero/optim/sgd.hpp>

#include <doctest/doctest.h>
#include <fake/cuda.hpp>
#include <support/device_engine.hpp>
#include <support/failures.hpp>
#include <support/watchdog.hpp>

#include <array>
#include <chrono>
#include <cstddef>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

using namespace std::chrono_literals;

namespace {

using tensor = test::device_tensor<zero::cuda, float>;

/// out[i] = value.
struct fill {
  float* out;
  float value;
  void operator()(std::size_t first, std::size_t count) const {
    for (std::size_t i = first; i < first + count; ++i) {
      out[i] = value;
    }
  }
};

/// out[i] = in[i].
struct read_slowly {
  float const* in;
  float* out;
  void operator()(std::size_t first, std::size_t count) const {
    for (std::size_t i = first; i < first + count; ++i) {
      out[i] = in[i];
    }
  }
};

std::vector<float> download(zero::cuda_stream& stream, std::span<float> from) {
  std::vector<float> out(from.size());
  zero::cuda::download(stream, from, std::span{out});
  return out;
}

/// Every work item of every stream sleeps, while this lives.
struct slow {
  explicit slow(std::chrono::microseconds each) { fake::delay_all(each); }
  slow(slow const&) = delete;
  slow& operator=(slow const&) = delete;
  ~slow() { fake::delay_all(0us); }
};

/// Ranks that share a device, for `test::run_failing`.
constexpr auto on_loopback = [](int ranks, auto const& function) {
  zero::run_loopback(ranks, function, {.deadline = 3s});
};

}  // namespace

// DeepSpeed#5606: a bucket's buffer was filled again before its reduction had finished.
TEST_CASE("two gradient slots and slow reductions: parameter i gets the gradient i + 1") {
  constexpr std::size_t units = 8;
  for (std::uint64_t const bucket_bytes : {0U, 28U, 256U, 1U << 20U}) {
    for (bool const overlap : {false, true}) {
      test::watchdog const limit;
      zero::run_loopback(2, [&](zero::loopback& comm) {
        slow const delay{300us};
        zero::cuda_stream stream;
        std::vector<std::unique_ptr<tensor>> values;
        std::vector<std::unique_ptr<tensor>> gradients;
        std::vector<std::vector<zero::any_parameter>> declared;
        for (std::size_t u = 0; u < units; ++u) {
          values.push_back(std::make_unique<tensor>(stream, std::vector<float>(7)));
          gradients.push_back(std::make_unique<tensor>(stream, std::vector<float>(7)));
          declared.push_back({zero::parameter("p" + std::to_string(u), *values[u], *gradients[u])});
        }
        zero::sharded_model model{
            comm,
            declared,
            zero::stage2{},
            zero::plain_sgd{.learning_rate = 1.0},
            zero::reduce_per_microbatch{},
            {.bucket_bytes = bucket_bytes, .overlap = overlap, .stream = stream.native()}};
        {
          auto micro = model.microbatch(0, 1);
          for (std::size_t u = units; u-- > 0;) {
            auto const lease = micro.backward(u);
            zero::cuda::launch(stream, 7,
                               fill{gradients[u]->view().data(), static_cast<float>(u + 1)});
          }
        }
        model.step();
        model.wait();
        for (std::size_t u = 0; u < units; ++u) {
          CHECK(download(stream, values[u]->view()) ==
                std::vector<float>(7, -static_cast<float>(u + 1)));
        }
      });
    }
  }
}

// DeepSpeed#7965: memory went back to the allocator while compute still used it.
TEST_CASE("a unit that is released at once stays until the kernel that reads it has run") {
  zero::basic_solo<zero::cuda> comm;
  zero::cuda_stream stream;
  test::device_engine<zero::cuda, float> engine{stream};
  zero::sharded_model model{comm,
                            engine.units(),
                            zero::stage3{.prefetch = 1},
                            zero::adamw{},
                            zero::reduce_per_microbatch{},
                            {.bucket_bytes = 0, .stream = stream.native()}};
  std::vector<std::vector<float>> const expected{test::start_values<zero::cuda, float>(0, 0, 37),
                                                 test::start_values<zero::cuda, float>(1, 0, 64),
                                                 test::start_values<zero::cuda, float>(2, 2, 130),
                                                 test::start_values<zero::cuda, float>(3, 0, 19)};
  std::array<std::size_t, 4> const ids{model.find("0.0"), model.find("1.0"), model.find("2.2"),
                                       model.find("3.0")};
  for (int repeat = 0; repeat < 50; ++repeat) {
    fake::delay(stream.native(), 200us);  // slow compute, fast gathers
    std::vector<std::unique_ptr<tensor>> copies;
    {
      auto evaluation = model.evaluation();
      for (std::size_t u = 0; u < 4; ++u) {
        auto const lease = evaluation.forward(u);
        auto const value = lease.parameter<float>(ids[u]);
        copies.push_back(std::make_unique<tensor>(stream, std::vector<float>(value.size())));
        zero::cuda::launch(stream, value.size(),
                           read_slowly{value.data(), copies.back()->view().data()});
      }
    }
    fake::delay(stream.native(), 0us);
    bool right = true;
    for (std::size_t u = 0; u < 4; ++u) {
      right = right && download(stream, copies[u]->view()) == expected[u];
    }
    CHECK(right);
  }
}

TEST_CASE("a model that is destroyed with work in flight waits for it") {
  for (int repeat = 0; repeat < 20; ++repeat) {
    zero::basic_solo<zero::cuda> comm;
    zero::cuda_stream stream;
    test::device_engine<zero::cuda, float> engine{stream};
    {
      zero::sharded_model model{comm,
                                engine.units(),
                                zero::stage3{},
                                zero::adamw{},
                                zero::reduce_per_microbatch{},
                                {.stream = stream.native()}};
      slow const delay{50us};
      engine.step(model, {}, 0, 0);
    }
    CHECK(cudaStreamSynchronize(stream.native()) == cudaSuccess);
  }
}

// nccl#279: a rank dies, and the others wait for ever.
TEST_CASE("a rank that throws in its second bucket ends the others within the deadline") {
  test::failures const caught = test::run_failing(
      3,
      [](zero::loopback& comm) {
        zero::cuda_stream stream;
        test::device_engine<zero::cuda, float> engine{stream};
        zero::sharded_model model{comm,
                                  engine.units(),
                                  zero::stage3{},
                                  zero::adamw{},
                                  zero::reduce_per_microbatch{},
                                  {.stream = stream.native(), .deadline = 3s}};
        auto micro = model.microbatch(0, 1);
        for (std::size_t u = 4; u-- > 0;) {
          auto const lease = micro.backward(u);
          if (comm.rank() == 2 && u == 2) {
            throw std::runtime_error{"dies"};
          }
          for (std::size_t p = 0; p < test::device_units()[u].size(); ++p) {
            auto const gradient = lease.gradient<float>(
                model.find(test::device_engine<zero::cuda, float>::name(u, p)));
            zero::cuda::launch(stream, gradient.size(), fill{gradient.data(), 1.0F});
          }
        }
      },
      on_loopback);
  CHECK(caught.ranks[2].message == "dies");
  CHECK(caught.took < 10s);
  CHECK_MESSAGE((caught.ranks[0].says("rank 2") && caught.ranks[1].says("rank 2")), caught.text());
}

TEST_CASE("too little memory for the plan says so on every rank") {
  test::failures const caught = test::run_failing(
      2,
      [](zero::loopback& comm) {
        zero::cuda_stream stream;
        std::vector<std::vector<zero::any_parameter>> const units{
            {zero::parameter<float>("big", {1U << 20U}, [](std::span<float>, std::size_t) {})}};
        fake::set_memory(std::size_t{1} << 20U);
        zero::sharded_model const model{comm,
                                        units,
                                        zero::stage0{},
                                        zero::adamw{},
                                        zero::local_accumulate{},
                                        {.stream = stream.native()}};
      },
      on_loopback);
  fake::reset();
  // Value, gradient and two states of 4 MiB; 4592 bytes beside them, to a multiple of 256.
  CHECK_MESSAGE(caught.all_say({"the plan's 16781824 bytes", " free of 1048576"}), caught.text());
}
