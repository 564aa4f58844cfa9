// SPDX-License-Identifier: MIT
// The engine's stream and the model's: each waits for what the other still reads or writes.
#include <zero/comm/loopback.hpp>
#include <zero/comm/solo.hpp>
#include <zero/optim/sgd.hpp>
#include <zero/train/sharded_model.hpp>

#include <doctest/doctest.h>
#include <fake/cuda.hpp>
#include <support/device_engine.hpp>
#include <support/settings.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <span>
#include <vector>

namespace {

using namespace std::chrono_literals;
using tensor = test::device_tensor<zero::cuda, float>;

constexpr std::size_t size = 100;

struct fill {
  float* to;
  float value;
  ZERO_HOST_DEVICE void operator()(std::size_t first, std::size_t count) const {
    for (std::size_t i = first; i < first + count; ++i) {
      to[i] = value;
    }
  }
};

struct copy {
  float const* from;
  float* to;
  ZERO_HOST_DEVICE void operator()(std::size_t first, std::size_t count) const {
    for (std::size_t i = first; i < first + count; ++i) {
      to[i] = from[i];
    }
  }
};

std::vector<std::vector<zero::any_parameter>> units(tensor& value, tensor& gradient) {
  return {{zero::parameter("a", value, gradient)}};
}

bool all_are(zero::cuda_stream& stream, std::span<float> elements, float value) {
  std::vector<float> host(elements.size());
  zero::cuda::download(stream, elements, std::span{host});
  return std::all_of(host.begin(), host.end(), [value](float each) { return each == value; });
}

}  // namespace

TEST_CASE("a model takes over values that the engine's stream still makes") {
  for (test::setting const& how : test::every_setting({})) {
    zero::run_loopback(2, [&](zero::loopback& comm) {
      zero::cuda_stream stream;
      tensor value{stream, std::vector<float>(size)};
      tensor gradient{stream, std::vector<float>(size)};
      zero::options options = how.options;
      options.stream = stream.native();
      fake::delay(stream.native(), 2ms);
      zero::cuda::launch(stream, size, fill{value.view().data(), 3.0F});
      zero::sharded_model model{
          comm, units(value, gradient), how.stage, zero::plain_sgd{}, how.policy, options};
      fake::delay(stream.native(), 0us);
      auto evaluation = model.evaluation();
      auto const lease = evaluation.forward(0);
      CHECK_MESSAGE(all_are(stream, lease.parameter<float>(0), 3.0F), how.name);
    });
  }
}

TEST_CASE("an update waits for what the engine reads between the last backward and the step") {
  for (test::setting const& how : test::every_setting({})) {
    zero::basic_solo<zero::cuda> comm;
    zero::cuda_stream stream;
    tensor value{stream, std::vector<float>(size, 3.0F)};
    tensor gradient{stream, std::vector<float>(size)};
    tensor seen{stream, std::vector<float>(size)};
    zero::options options = how.options;
    options.stream = stream.native();
    zero::sharded_model model{comm,       units(value, gradient),
                              how.stage,  zero::plain_sgd{.learning_rate = 1},
                              how.policy, options};
    {
      auto micro = model.microbatch(0, 1);
      auto const lease = micro.backward(0);
      zero::cuda::launch(stream, size, fill{lease.gradient<float>(0).data(), 1.0F});
    }
    {
      auto evaluation = model.evaluation();
      auto const lease = evaluation.forward(0);
      fake::delay(stream.native(), 2ms);
      zero::cuda::launch(stream, size, copy{lease.parameter<float>(0).data(), seen.view().data()});
    }
    model.step();
    fake::delay(stream.native(), 0us);
    CHECK_MESSAGE(all_are(stream, seen.view(), 3.0F), how.name);
    auto evaluation = model.evaluation();
    auto const lease = evaluation.forward(0);
    CHECK_MESSAGE(all_are(stream, lease.parameter<float>(0), 2.0F), how.name);
  }
}
