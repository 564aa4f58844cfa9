// SPDX-License-Identifier: MIT
// Models that must not compile, one a section; the last section is what to write instead.
#include <zero/comm/solo.hpp>
#include <zero/optim/sgd.hpp>
#include <zero/train/sharded_model.hpp>

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

namespace my {

/// Elements that are there, and stay there.
using fixed = std::vector<float>;

/// A tensor that can be pointed at other elements.
struct tensor {
  std::span<float> elements;
};

/// Every other element of something: not one contiguous span.
struct every_other {
  float* first = nullptr;
  std::size_t size = 0;
};

/// A device of its own.
struct far_away {};
struct far_tensor {
  std::span<float> elements;
};

}  // namespace my

template <>
struct zero::tensor_traits<my::tensor> {
  using value_type = float;
  using device = zero::host;
  static std::span<float> elements(my::tensor& tensor) { return tensor.elements; }
  static void rebind(my::tensor& tensor, std::span<float> storage) { tensor.elements = storage; }
};

template <>
struct zero::tensor_traits<my::far_tensor> {
  using value_type = float;
  using device = my::far_away;
  static std::span<float> elements(my::far_tensor& tensor) { return tensor.elements; }
  static void rebind(my::far_tensor& tensor, std::span<float> storage) {
    tensor.elements = storage;
  }
};

int main() {
  zero::solo comm;
  my::fixed fixed(4);
  my::fixed fixed_gradient(4);
  my::tensor value;
  my::tensor gradient;
  my::every_other strided;
  my::far_tensor far;
  auto const units = [](auto parameter) {
    return std::vector<std::vector<decltype(parameter)>>{{std::move(parameter)}};
  };
  zero::sgd const optimizer;
  zero::local_accumulate const policy;

#if defined(STAGE_3_VALUE_THAT_STAYS)
  // expect: this stage shards parameters: the value tensor must give up its storage. Add
  zero::sharded_model model{comm, units(zero::parameter("w", fixed, gradient)), zero::stage3{},
                            optimizer, policy};
#elif defined(STAGE_3_GRADIENT_THAT_STAYS)
  // expect: this stage shards gradients: the gradient tensor must give up its storage. Add
  zero::sharded_model model{comm, units(zero::parameter("w", value, fixed_gradient)),
                            zero::stage3{}, optimizer, policy};
#elif defined(STAGE_2_GRADIENT_THAT_STAYS)
  // expect: this stage shards gradients: the gradient tensor must give up its storage. Add
  zero::sharded_model model{comm, units(zero::parameter("w", fixed, fixed_gradient)),
                            zero::stage2{}, optimizer, policy};
#elif defined(VALUE_ON_ANOTHER_DEVICE)
  // expect: the value tensor's elements are on another device than the communicator's: give its
  zero::sharded_model model{comm, units(zero::parameter("w", far)), zero::stage0{}, optimizer,
                            policy};
#elif defined(GRADIENT_ON_ANOTHER_DEVICE)
  // expect: the gradient tensor's elements are on another device than the communicator's: give its
  zero::sharded_model model{comm, units(zero::parameter("w", value, far)), zero::stage0{},
                            optimizer, policy};
#elif defined(TENSOR_THAT_IS_NOT_CONTIGUOUS)
  // expect: zero doesn't know this tensor: specialize zero::tensor_traits for it
  zero::sharded_model model{comm, units(zero::parameter("w", strided)), zero::stage0{}, optimizer,
                            policy};
#elif defined(INITIALISER_WITHOUT_THE_FIRST_INDEX)
  // expect: an initialiser is called as .std::span<T> out, std::size_t first.
  zero::sharded_model model{comm, units(zero::parameter<float>("w", {4}, [](std::span<float>) {})),
                            zero::stage3{}, optimizer, policy};
#elif defined(NUMBER_FOR_AN_OPTIMIZER)
  // expect: elementwise_optimizer|constraints not satisfied .*Optimizer = double
  zero::sharded_model model{comm, units(zero::parameter("w", value)), zero::stage0{}, 0.1, policy};
#elif defined(FLAT_LIST_OF_PARAMETERS)
  // expect: unit_list
  zero::sharded_model model{comm, std::vector{zero::parameter("w", value)}, zero::stage0{},
                            optimizer, policy};
#elif defined(COPY_OF_A_LEASE)
  // expect: deleted
  zero::sharded_model model{comm, units(zero::parameter("w", value)), zero::stage0{}, optimizer,
                            policy};
  auto evaluation = model.evaluation();
  auto lease = evaluation.forward(0);
  auto const copy = lease;
#else
  zero::sharded_model model{comm, units(zero::parameter("w", value, gradient)), zero::stage3{},
                            optimizer, policy};
  zero::sharded_model spans{
      comm, units(zero::parameter<float>("w", {4}, [](std::span<float>, std::size_t) {})),
      zero::stage3{}, optimizer, policy};
  zero::sharded_model stays{comm, units(zero::parameter("w", fixed, fixed_gradient)),
                            zero::stage1{}, optimizer, policy};
  static_cast<void>(spans);
  static_cast<void>(stays);
#endif
  static_cast<void>(model);
  static_cast<void>(strided);
  static_cast<void>(far);
}
