// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

/// @file
/// What the command line says.

namespace mlp {

enum class accumulate { local, reduce };
enum class optimizer { sgd, adam, adamw };
enum class device { host, cuda };
enum class communicator { threads, loopback, nccl };

struct settings {
  std::vector<int> stages{0, 1, 2, 3};
  int ranks = 4;
  mlp::device device = mlp::device::host;
  mlp::communicator communicator = mlp::communicator::threads;
  std::size_t microbatches = 1;
  std::optional<mlp::accumulate>
      accumulate;  ///< not set: local in stages 0 and 1, reduce in 2 and 3
  bool bf16 = false;
  mlp::optimizer optimizer = mlp::optimizer::adamw;
  std::optional<double> learning_rate;  ///< not set: what suits the optimizer
  double clip = 0;                      ///< 0: no clipping
  std::size_t prefetch = 1;
  bool keep_after_forward = false;
  bool stage1_all_reduce = false;
  std::uint64_t bucket_bytes = 0;
  std::vector<std::size_t> hidden{192, 192, 192, 192, 192, 192};
  std::size_t batch = 64;
  std::size_t epochs = 20;
  std::uint64_t seed = 1;
  bool overlap = true;
  std::filesystem::path data;
  std::filesystem::path json;  ///< empty: none

  [[nodiscard]] mlp::accumulate policy(int stage) const {
    return accumulate.value_or(stage < 2 ? mlp::accumulate::local : mlp::accumulate::reduce);
  }
  [[nodiscard]] double rate() const {
    return learning_rate.value_or(optimizer == mlp::optimizer::sgd ? 0.03 : 0.001);
  }
};

/// What became of reading the command line: settings, or the exit status of a program that is done.
struct command_line {
  mlp::settings settings;
  std::optional<int> exit_status;
};

/// Prints help to standard output (status 0), or one line that names the flag, expected and actual
/// to standard error (status 2).
[[nodiscard]] command_line read_command_line(int argc, char const* const* argv);

}  // namespace mlp
