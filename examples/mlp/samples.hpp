// SPDX-License-Identifier: MIT
#pragma once

#include "digits.hpp"
#include "tensor.hpp"

#include <zero/core/any_span.hpp>

#include <cstddef>
#include <span>
#include <vector>

/// @file
/// Digits in the memory of a device, in the order in which they are seen.

namespace mlp {

template <class Device>
class samples {
 public:
  /// Those of `from` at `order`. Waits for the stream.
  void load(typename Device::stream& stream, std::vector<digit> const& from,
            std::span<std::size_t const> order) {
    std::vector<float> pixels;
    std::vector<float> labels;
    for (std::size_t const index : order) {
      pixels.insert(pixels.end(), from[index].pixels.begin(), from[index].pixels.end());
      labels.push_back(static_cast<float>(from[index].label));
    }
    upload(stream, pixels, pixels_);
    upload(stream, labels, labels_);
  }

  /// Rows of `pixel_count` each, from row `first` on.
  [[nodiscard]] float* pixels(std::size_t first) { return pixels_.data() + first * pixel_count; }
  /// Whole numbers.
  [[nodiscard]] float const* labels(std::size_t first) const { return labels_.data() + first; }

 private:
  static void upload(typename Device::stream& stream, std::vector<float> const& from,
                     tensor<float, Device>& to) {
    to.grow(from.size());
    Device::upload(stream, std::span{from}, std::span{to.data(), from.size()});
  }

  tensor<float, Device> pixels_;
  tensor<float, Device> labels_;
};

}  // namespace mlp
