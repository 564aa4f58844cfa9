// SPDX-License-Identifier: MIT
// Models on CUDA that must not compile, one a section; the last section is what to write instead.
#include <zero/comm/solo.hpp>
#include <zero/device/cuda.hpp>
#include <zero/optim/sgd.hpp>
#include <zero/train/sharded_model.hpp>

#include <span>
#include <utility>
#include <vector>

namespace my {

struct host_tensor {
  std::span<float> elements;
};

struct device_tensor {
  std::span<float> elements;
};

}  // namespace my

template <>
struct zero::tensor_traits<my::host_tensor> {
  using value_type = float;
  using device = zero::host;
  static std::span<float> elements(my::host_tensor& tensor) { return tensor.elements; }
  static void rebind(my::host_tensor& tensor, std::span<float> storage) {
    tensor.elements = storage;
  }
};

template <>
struct zero::tensor_traits<my::device_tensor> {
  using value_type = float;
  using device = zero::cuda;
  static std::span<float> elements(my::device_tensor& tensor) { return tensor.elements; }
  static void rebind(my::device_tensor& tensor, std::span<float> storage) {
    tensor.elements = storage;
  }
};

int main() {
  zero::basic_solo<zero::cuda> comm;
  my::host_tensor host_value;
  my::host_tensor host_gradient;
  my::device_tensor value;
  my::device_tensor gradient;
  auto const units = [](auto parameter) {
    return std::vector<std::vector<decltype(parameter)>>{{std::move(parameter)}};
  };
  zero::sgd const optimizer;
  zero::reduce_per_microbatch const policy;

#if defined(VALUE_ON_THE_HOST)
  // expect: the value tensor's elements are on another device .*`using device = zero::cuda.` and
  zero::sharded_model model{comm, units(zero::parameter("w", host_value, gradient)), zero::stage3{},
                            optimizer, policy};
#elif defined(GRADIENT_ON_THE_HOST)
  // expect: the gradient tensor's elements are on another device .*`using device = zero::cuda.` and
  zero::sharded_model model{comm, units(zero::parameter("w", value, host_gradient)), zero::stage3{},
                            optimizer, policy};
#elif defined(FROZEN_VALUE_ON_THE_HOST)
  // expect: the value tensor's elements are on another device .*`using device = zero::cuda.` and
  zero::sharded_model model{comm, units(zero::parameter("w", host_value).frozen()), zero::stage1{},
                            optimizer, policy};
#else
  zero::sharded_model model{comm, units(zero::parameter("w", value, gradient)), zero::stage3{},
                            optimizer, policy};
#endif
  static_cast<void>(model);
  static_cast<void>(host_value);
  static_cast<void>(host_gradient);
}
