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

template <class Device>
struct tensor {
  std::span<float> elements;
};

}  // namespace my

template <class Device>
struct zero::tensor_traits<my::tensor<Device>> {
  using value_type = float;
  using device = Device;
  static std::span<float> elements(my::tensor<Device>& tensor) { return tensor.elements; }
  static void rebind(my::tensor<Device>& tensor, std::span<float> storage) {
    tensor.elements = storage;
  }
};

int main() {
  zero::basic_solo<zero::cuda> comm;
  my::tensor<zero::host> host_value;
  my::tensor<zero::host> host_gradient;
  my::tensor<zero::cuda> value;
  my::tensor<zero::cuda> gradient;
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
