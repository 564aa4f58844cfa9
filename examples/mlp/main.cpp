// SPDX-License-Identifier: MIT
#include "report.hpp"
#include "settings.hpp"
#include "train.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <ios>
#include <stdexcept>
#include <string>
#include <vector>

// Train the same model on the same digits in ZeRO stages 0, 1, 2 and 3 on 4 ranks. What a rank
// holds between two steps, for Adam in fp32 (Ψ parameters; p, g: parameters and gradients; m, v:
// Adam's state):
//
//            p      g      m, v    bytes
//   stage 0  whole  whole  whole   16 Ψ
//   stage 1  whole  whole  shard    8 Ψ + 8 Ψ/4
//   stage 2  whole  shard  shard    4 Ψ + 12 Ψ/4
//   stage 3  shard  shard  shard        16 Ψ/4
//
// In reading order: tensor.hpp, network.hpp (an engine whose work goes to any of zero's devices),
// tensor_traits.hpp (its introduction to zero), train_rank.hpp (the training loop), train_host.cpp
// and train_cuda.cpp (who runs it), formula.hpp (what all that must cost).

namespace {

/// The file is replaced at the end; that it can be is found out before hours of training.
void check_writable(std::filesystem::path const& file) {
  if (!std::ofstream{file, std::ios::app}) {
    throw std::runtime_error{
        fmt::format("--json: expected a file that can be written, actual {}: {}", file.string(),
                    std::strerror(errno))};
  }
}

void write(std::filesystem::path const& file, std::string const& text) {
  std::ofstream out{file};
  out << text;
  out.close();
  if (!out) {
    throw std::runtime_error{fmt::format("--json: {} could not be written", file.string())};
  }
}

int run(mlp::settings const& settings) {
  if (!settings.json.empty()) {
    check_writable(settings.json);
  }
  std::vector<mlp::result> results;
  std::string disagreement;
  for (int const stage : settings.stages) {
    mlp::progress_bar bar{stage};
    auto const ranks = mlp::train(
        settings, stage,
        [&](std::size_t step, std::size_t steps, double loss) { bar.show(step, steps, loss); });
    results.push_back({stage, ranks.front()});
    if (disagreement.empty()) {
      disagreement = mlp::disagreement(stage, ranks);
    }
  }
  fmt::print("{}", mlp::table(settings, results));
  if (!settings.json.empty()) {
    write(settings.json, mlp::json(settings, results));
  }
  if (!disagreement.empty()) {
    throw std::runtime_error{disagreement};
  }
  fmt::print("\nOn every rank, planned = allocated = formula, and metered = formula.\n");
  if (std::fflush(stdout) != 0) {
    throw std::runtime_error{fmt::format("standard output: {}", std::strerror(errno))};
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    auto const command_line = mlp::read_command_line(argc, argv);
    return command_line.exit_status ? *command_line.exit_status : run(command_line.settings);
  } catch (std::exception const& error) {
    fmt::print(stderr, "mlp: {}\n", error.what());
    return 1;
  }
}
