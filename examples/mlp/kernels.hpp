// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/config.hpp>

#include <cmath>
#include <cstddef>

/// @file
/// The network's elementwise work, as functions of a range of indices: a loop on the host, a thread
/// for each index on a GPU. Matrices are stored row after row.

namespace mlp {

/// output[r][c] += bias[c], and then ReLU, or not. An index is an element.
template <class T>
struct add_bias {
  T const* bias;
  float* output;
  std::size_t columns;
  bool relu;

  ZERO_HOST_DEVICE void operator()(std::size_t first, std::size_t count) const {
    std::size_t const last = first + count;
    for (std::size_t i = first; i < last;) {
      std::size_t const row = i - i % columns;
      std::size_t const end = last - row < columns ? last : row + columns;
      for (; i < end; ++i) {
        float const value = output[i] + static_cast<float>(bias[i - row]);
        output[i] = relu && value < 0.0F ? 0.0F : value;
      }
    }
  }
};

/// gradient[i] = 0 where ReLU's output[i] is, and the result replaces that output. An index is an
/// element.
struct mask_gradient {
  float const* gradient;
  float* output;

  ZERO_HOST_DEVICE void operator()(std::size_t first, std::size_t count) const {
    for (std::size_t i = first; i < first + count; ++i) {
      output[i] = output[i] > 0.0F ? gradient[i] : 0.0F;
    }
  }
};

/// sum[c] = the sum over r of from[r][c], added to what was there or not; what is stored is rounded
/// to T. An index is a column; its rows come in order.
template <class T>
struct sum_rows {
  float const* from;
  T* sum;
  std::size_t rows;
  std::size_t columns;
  bool accumulate;

  ZERO_HOST_DEVICE void operator()(std::size_t first, std::size_t count) const {
    for (std::size_t c = first; c < first + count; ++c) {
      float total = 0;
      for (std::size_t r = 0; r < rows; ++r) {
        total += from[r * columns + c];
      }
      sum[c] = static_cast<T>(accumulate ? static_cast<float>(sum[c]) + total : total);
    }
  }
};

/// Replace each row of `logits` by the gradient of `scale` times its loss, and write the loss. An
/// index is a row, whose label is a whole number.
struct softmax_cross_entropy {
  float* logits;
  float const* labels;
  double* losses;
  std::size_t classes;
  float scale;

  ZERO_HOST_DEVICE void operator()(std::size_t first, std::size_t count) const {
    for (std::size_t r = first; r < first + count; ++r) {
      float* const row = logits + r * classes;
      float largest = row[0];
      for (std::size_t c = 1; c < classes; ++c) {
        largest = largest < row[c] ? row[c] : largest;
      }
      float total = 0;
      for (std::size_t c = 0; c < classes; ++c) {
        row[c] = std::exp(row[c] - largest);
        total += row[c];
      }
      auto const right = static_cast<std::size_t>(labels[r]);
      losses[r] = -std::log(static_cast<double>(row[right] / total));
      for (std::size_t c = 0; c < classes; ++c) {
        float const target = c == right ? 1.0F : 0.0F;
        row[c] = (row[c] / total - target) * scale;
      }
    }
  }
};

}  // namespace mlp
