// SPDX-License-Identifier: MIT
#pragma once

#include "random.hpp"
#include "tensor.hpp"

#include <Eigen/Core>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

/// @file
/// A multi-layer perceptron with ReLU between its layers and softmax cross entropy at its end:
/// forward and backward layer by layer, on tensors whose storage somebody else may own, and give
/// and take away between two layers.

namespace mlp {

/// Rows are samples; columns are what a layer has computed for them.
using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// output = input * weight + bias. Weight [inputs, outputs], bias [outputs].
template <class T>
struct layer {
  std::size_t inputs;
  std::size_t outputs;
  tensor<T> weight;
  tensor<T> bias;
  tensor<T> weight_gradient;
  tensor<T> bias_gradient;
};

/// Fill `out` with elements [first, first + out.size()) of a parameter: uniform within +-bound, the
/// same for every way of cutting it.
template <class T>
void initialise(std::span<T> out, std::size_t first, std::uint64_t key, float bound) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<T>(bound * uniform(key, first + i));
  }
}

/// T is float or Eigen::bfloat16; sums and products are computed in float.
template <class T>
class network {
 public:
  /// `widths`: of the input, of every hidden layer, of the output. The tensors stay empty.
  explicit network(std::vector<std::size_t> const& widths) : activations_(widths.size()) {
    for (std::size_t u = 0; u + 1 < widths.size(); ++u) {
      layers_.push_back({widths[u], widths[u + 1], {}, {}, {}, {}});
    }
  }

  [[nodiscard]] std::vector<layer<T>>& layers() { return layers_; }

  /// The samples that the next forward is about, one a row.
  [[nodiscard]] matrix& input() { return activations_.front(); }

  void forward(std::size_t u) {
    matrix const& input = activations_[u];
    matrix& output = activations_[u + 1];
    output.noalias() = input * weight(u);
    output.rowwise() += bias(u);
    if (u + 1 < layers_.size()) {
      output = output.cwiseMax(0.0F);
    }
  }

  /// The mean loss over the samples. Prepares backward of `scale` times the sum of their losses.
  [[nodiscard]] float loss(std::span<std::size_t const> labels, float scale) {
    matrix& logits = activations_.back();
    double sum = 0;
    for (std::size_t i = 0; i < labels.size(); ++i) {
      auto row = logits.row(static_cast<Eigen::Index>(i));
      float const largest = row.maxCoeff();
      float total = 0;
      for (float& value : row) {
        value = std::exp(value - largest);
        total += value;
      }
      float& right = row[static_cast<Eigen::Index>(labels[i])];
      sum -= std::log(static_cast<double>(right / total));
      row /= total;
      right -= 1.0F;
      row *= scale;
    }
    return labels.empty() ? 0.0F : static_cast<float>(sum / static_cast<double>(labels.size()));
  }

  /// Gradients of layer u's weight and bias, added to what is there or overwriting it, and of its
  /// input.
  void backward(std::size_t u, bool accumulate) {
    matrix const& input = activations_[u];
    matrix& output_gradient = activations_[u + 1];
    store(layers_[u].weight_gradient, input.transpose() * output_gradient, accumulate);
    store(layers_[u].bias_gradient, sum_of_rows(output_gradient), accumulate);
    if (u > 0) {
      matrix input_gradient = output_gradient * weight(u).transpose();
      activations_[u] = (input.array() > 0.0F).select(input_gradient, 0.0F);
    }
  }

  /// How many samples the last forward has classified right.
  [[nodiscard]] std::size_t correct(std::span<std::size_t const> labels) const {
    std::size_t count = 0;
    for (std::size_t i = 0; i < labels.size(); ++i) {
      Eigen::Index best = 0;
      activations_.back().row(static_cast<Eigen::Index>(i)).maxCoeff(&best);
      count += static_cast<std::size_t>(best) == labels[i] ? 1U : 0U;
    }
    return count;
  }

 private:
  using row_vector = Eigen::Matrix<float, 1, Eigen::Dynamic>;

  /// A view of floats, a widened copy of anything narrower.
  template <class Matrix>
  static auto widen(tensor<T> const& values, std::size_t rows, std::size_t columns) {
    using stored =
        Eigen::Matrix<T, Matrix::RowsAtCompileTime, Matrix::ColsAtCompileTime, Eigen::RowMajor>;
    Eigen::Map<stored const> const view{values.data(), static_cast<Eigen::Index>(rows),
                                        static_cast<Eigen::Index>(columns)};
    if constexpr (std::is_same_v<T, float>) {
      return view;
    } else {
      return Matrix{view.template cast<float>()};
    }
  }

  [[nodiscard]] auto weight(std::size_t u) const {
    return widen<matrix>(layers_[u].weight, layers_[u].inputs, layers_[u].outputs);
  }
  [[nodiscard]] auto bias(std::size_t u) const {
    return widen<row_vector>(layers_[u].bias, 1, layers_[u].outputs);
  }

  /// Row after row, so that the sum doesn't depend on where the matrix lies in memory.
  static row_vector sum_of_rows(matrix const& values) {
    row_vector sum = row_vector::Zero(values.cols());
    for (auto const& row : values.rowwise()) {
      sum += row;
    }
    return sum;
  }

  /// Write `gradient`, rounded to T, into `to`; what was there and the sum are rounded, too.
  template <class Expression>
  static void store(tensor<T>& to, Expression const& gradient, bool accumulate) {
    using stored = Eigen::Matrix<T, Expression::RowsAtCompileTime, Eigen::Dynamic, Eigen::RowMajor>;
    Eigen::Map<stored> view{to.data(), gradient.rows(), gradient.cols()};
    if constexpr (std::is_same_v<T, float>) {
      if (accumulate) {
        view.noalias() += gradient;
      } else {
        view.noalias() = gradient;
      }
    } else {
      matrix const wide = gradient;
      if (accumulate) {
        view = (view.template cast<float>() + wide).template cast<T>();
      } else {
        view = wide.template cast<T>();
      }
    }
  }

  std::vector<layer<T>> layers_;
  std::vector<matrix>
      activations_;  // [0]: the input; [u + 1]: the output of layer u, then its gradient
};

}  // namespace mlp
