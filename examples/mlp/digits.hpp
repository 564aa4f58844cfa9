// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <cstddef>
#include <filesystem>
#include <vector>

/// @file
/// The handwritten digits of examples/data/digits.csv.

namespace mlp {

inline constexpr std::size_t pixel_count = 64;
inline constexpr std::size_t class_count = 10;

/// One image of 8 x 8 pixels, each 0 (white) to 1 (black), and the digit that it shows.
struct digit {
  std::array<float, pixel_count> pixels;
  std::size_t label;
};

/// The lines whose 0-based index modulo 5 is 4 are the test set.
struct digits {
  std::vector<digit> train;
  std::vector<digit> test;
};

/// @throws std::runtime_error  the file can't be read, or isn't 65 integers a line, 64 from 0 to 16
///                             and one from 0 to 9; names file, line, expected, actual and `rank`.
[[nodiscard]] digits read_digits(std::filesystem::path const& file, int rank);

/// digits.csv of the source tree that the running program was built in, also where that has moved.
[[nodiscard]] std::filesystem::path default_digits();

}  // namespace mlp
