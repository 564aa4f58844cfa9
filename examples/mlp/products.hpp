// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>

/// @file
/// The three matrix products of a layer, which every device leaves to a library of its own.

namespace mlp {

/// Of a layer that maps `inputs` numbers to `outputs`, for `rows` samples.
struct product_shape {
  std::size_t rows;
  std::size_t inputs;
  std::size_t outputs;
};

/// T is the type of weights and their gradients; all else is float, and so are the sums. Matrices
/// are stored row after row. A specialization is made from the stream that it works on, and has
///
///   forward(shape, input, weight, output)
///       output = input * weight
///   weight_gradient(shape, input, output_gradient, gradient, accumulate)
///       gradient = inputᵀ * output_gradient, or that much more
///   input_gradient(shape, output_gradient, weight, gradient)
///       gradient = output_gradient * weightᵀ
template <class T, class Device>
class products;

}  // namespace mlp
