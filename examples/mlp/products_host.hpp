// SPDX-License-Identifier: MIT
#pragma once

#include "products.hpp"

#include <zero/device/host.hpp>

#include <Eigen/Core>

#include <type_traits>

/// @file
/// The products on the host, by Eigen.

namespace mlp {

/// T is float or Eigen::bfloat16.
template <class T>
class products<T, zero::host> {
 public:
  explicit products(zero::host_stream& /*runs in the caller*/) {}

  void forward(product_shape of, float const* input, T const* weight, float* output) const {
    view(output, of.rows, of.outputs).noalias() =
        view(input, of.rows, of.inputs) * widen(weight, of.inputs, of.outputs);
  }

  void weight_gradient(product_shape of, float const* input, float const* output_gradient,
                       T* gradient, bool accumulate) const {
    store(view(input, of.rows, of.inputs).transpose() * view(output_gradient, of.rows, of.outputs),
          gradient, accumulate);
  }

  void input_gradient(product_shape of, float const* output_gradient, T const* weight,
                      float* gradient) const {
    view(gradient, of.rows, of.inputs).noalias() = view(output_gradient, of.rows, of.outputs) *
                                                   widen(weight, of.inputs, of.outputs).transpose();
  }

 private:
  template <class Element>
  using matrix_of = Eigen::Matrix<Element, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  using matrix = matrix_of<float>;

  /// What the engine allocates is aligned, the storage that it is given needn't be.
  static auto view(float const* data, std::size_t rows, std::size_t columns) {
    return Eigen::Map<matrix const, Eigen::AlignedMax>{data, static_cast<Eigen::Index>(rows),
                                                       static_cast<Eigen::Index>(columns)};
  }
  static auto view(float* data, std::size_t rows, std::size_t columns) {
    return Eigen::Map<matrix, Eigen::AlignedMax>{data, static_cast<Eigen::Index>(rows),
                                                 static_cast<Eigen::Index>(columns)};
  }

  /// A view of floats, a widened copy of anything narrower.
  static auto widen(T const* values, std::size_t rows, std::size_t columns) {
    Eigen::Map<matrix_of<T> const> const view{values, static_cast<Eigen::Index>(rows),
                                              static_cast<Eigen::Index>(columns)};
    if constexpr (std::is_same_v<T, float>) {
      return view;
    } else {
      return matrix{view.template cast<float>()};
    }
  }

  /// Write `gradient`, rounded to T, into `to`; what was there and the sum are rounded, too.
  template <class Expression>
  static void store(Expression const& gradient, T* to, bool accumulate) {
    Eigen::Map<matrix_of<T>> view{to, gradient.rows(), gradient.cols()};
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
};

}  // namespace mlp
