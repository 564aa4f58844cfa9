// SPDX-License-Identifier: MIT
#pragma once

#include "kernels.hpp"
#include "products.hpp"
#include "random.hpp"
#include "tensor.hpp"

#include <zero/core/any_span.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

/// @file
/// A multi-layer perceptron with ReLU between its layers and softmax cross entropy at its end:
/// forward and backward layer by layer, on tensors whose storage somebody else may own, and give
/// and take away between two layers. Of `zero` it uses a device's stream, copies and launches.

namespace mlp {

/// output = input * weight + bias. Weight [inputs, outputs], bias [outputs].
template <class T, class Device>
struct layer {
  std::size_t inputs;
  std::size_t outputs;
  tensor<T, Device> weight;
  tensor<T, Device> bias;
  tensor<T, Device> weight_gradient;
  tensor<T, Device> bias_gradient;
};

/// Fill `out` with elements [first, first + out.size()) of a parameter: uniform within +-bound, the
/// same for every way of cutting it.
template <class T>
void initialise(std::span<T> out, std::size_t first, std::uint64_t key, float bound) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<T>(bound * uniform(key, first + i));
  }
}

/// The type T of parameters and gradients is float or a bfloat16; all else is float. Work is
/// enqueued on `stream`.
template <class T, class Device>
class network {
 public:
  using stream = typename Device::stream;

  /// `widths`: of the input, of every hidden layer, of the output. The tensors stay empty.
  network(std::vector<std::size_t> const& widths, stream& on)
      : stream_{on}, products_{on}, activations_(widths.size()) {
    for (std::size_t u = 0; u + 1 < widths.size(); ++u) {
      layers_.push_back({widths[u], widths[u + 1], {}, {}, {}, {}});
    }
  }

  [[nodiscard]] std::vector<layer<T, Device>>& layers() { return layers_; }

  /// The next forward is about `rows` samples, one a row of `input`, which stays until the last
  /// backward has run.
  void read(float* input, std::size_t rows) {
    rows_ = rows;
    activations_.front().look_at(input, rows * layers_.front().inputs);
  }

  void forward(std::size_t u) {
    layer<T, Device> const& l = layers_[u];
    activations_[u + 1].grow(rows_ * l.outputs);
    float* const output = activations_[u + 1].data();
    products_.forward(shape(u), activations_[u].data(), l.weight.data(), output);
    bool const relu = u + 1 < layers_.size();
    Device::launch(stream_, rows_ * l.outputs, add_bias<T>{l.bias.data(), output, l.outputs, relu});
  }

  /// The samples' losses, and what backward of `scale` times their sum starts from.
  void loss(float const* labels, float scale) {
    losses_.grow(rows_);
    Device::launch(stream_, rows_,
                   softmax_cross_entropy{activations_.back().data(), labels, losses_.data(),
                                         layers_.back().outputs, scale});
  }

  /// The mean of the last losses. The host waits for them.
  [[nodiscard]] double mean_loss() {
    double sum = 0;
    for (double const each : download(losses_, rows_)) {
      sum += each;
    }
    return rows_ == 0 ? 0
                      : static_cast<double>(static_cast<float>(sum / static_cast<double>(rows_)));
  }

  /// Gradients of layer u's weight and bias, added to what is there or overwriting it, and of its
  /// input.
  void backward(std::size_t u, bool accumulate) {
    auto& [inputs, outputs, weight, bias, weight_gradient, bias_gradient] = layers_[u];
    float* const input = activations_[u].data();
    float const* const output_gradient = activations_[u + 1].data();
    products_.weight_gradient(shape(u), input, output_gradient, weight_gradient.data(), accumulate);
    Device::launch(stream_, outputs,
                   sum_rows<T>{output_gradient, bias_gradient.data(), rows_, outputs, accumulate});
    if (u > 0) {
      input_gradient_.grow(rows_ * inputs);
      products_.input_gradient(shape(u), output_gradient, weight.data(), input_gradient_.data());
      Device::launch(stream_, rows_ * inputs, mask_gradient{input_gradient_.data(), input});
    }
  }

  /// Which class the last forward gives each sample. The host waits for it.
  [[nodiscard]] std::vector<std::size_t> classes() {
    std::size_t const count = layers_.back().outputs;
    std::vector<float> const logits = download(activations_.back(), rows_ * count);
    std::vector<std::size_t> out(rows_);
    for (std::size_t r = 0; r < rows_; ++r) {
      std::span const row = std::span{logits}.subspan(r * count, count);
      out[r] = static_cast<std::size_t>(std::max_element(row.begin(), row.end()) - row.begin());
    }
    return out;
  }

  /// A copy for the host, which waits for it.
  template <class Element>
  [[nodiscard]] std::vector<Element> download(tensor<Element, Device> const& from,
                                              std::size_t size) {
    std::vector<Element> out(size);
    Device::download(stream_, std::span{from.data(), size}, std::span{out});
    return out;
  }

 private:
  [[nodiscard]] product_shape shape(std::size_t u) const {
    return {rows_, layers_[u].inputs, layers_[u].outputs};
  }

  stream& stream_;
  products<T, Device> products_;
  std::vector<layer<T, Device>> layers_;
  std::vector<tensor<float, Device>>
      activations_;  // [0]: the input; [u + 1]: the output of layer u, then its gradient
  tensor<float, Device> input_gradient_;
  tensor<double, Device> losses_;
  std::size_t rows_ = 0;
};

}  // namespace mlp
