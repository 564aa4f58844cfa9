// SPDX-License-Identifier: MIT
#include "settings.hpp"

#include "digits.hpp"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <charconv>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>

namespace mlp {
namespace {

/// The whole of `text` as a number.
template <class Number>
std::optional<Number> parse(std::string const& text) {
  Number value{};
  char const* const end = text.data() + text.size();
  auto const [stop, status] = std::from_chars(text.data(), end, value);
  return status == std::errc{} && stop == end ? std::optional{value} : std::nullopt;
}

/// Refuse what isn't a number from `least` to `most`, NaN included.
template <class Number>
CLI::Validator from(Number least, Number most, std::string const& range) {
  std::string const kind = std::is_integral_v<Number> ? "an integer" : "a number";
  auto const check = [=](std::string& text) {
    auto const value = parse<Number>(text);
    bool const good = value && *value >= least && *value <= most;
    return good ? std::string{} : fmt::format("expected {} {}, actual {}", kind, range, text);
  };
  return CLI::Validator{check, ""};
}

template <class Number>
CLI::Validator from(Number least, Number most) {
  return from(least, most, fmt::format("from {} to {}", least, most));
}

template <class Number>
CLI::Validator at_least(Number least) {
  return from(least, std::numeric_limits<Number>::max(), fmt::format("of at least {}", least));
}

template <class Value>
using choices = std::vector<std::pair<std::string, Value>>;

/// Replace one of the names by its value.
template <class Value>
CLI::Validator one_of(choices<Value> const& values) {
  std::string names;
  for (auto const& [name, value] : values) {
    names += names.empty() ? name : "|" + name;
  }
  auto const check = [=](std::string& text) {
    for (auto const& [name, value] : values) {
      if (text == name) {
        text = fmt::to_string(static_cast<int>(value));
        return std::string{};
      }
    }
    return fmt::format("expected {}, actual {}", names, text);
  };
  return CLI::Validator{check, ""};
}

/// The same for a flag whose names stand for no (0) and yes (1).
CLI::Validator one_of(std::string const& no, std::string const& yes) {
  return one_of<int>({{no, 0}, {yes, 1}});
}

choices<communicator> const communicators{{"threads", communicator::threads},
                                          {"loopback", communicator::loopback},
                                          {"nccl", communicator::nccl}};

/// The one that was asked for, or the device's first.
/// @throws CLI::ValidationError  the device has no such communicator.
communicator communicator_of(device on, std::optional<communicator> asked) {
  bool const host = on == device::host;
  communicator const out = asked.value_or(host ? communicator::threads : communicator::loopback);
  if (host != (out == communicator::threads)) {
    throw CLI::ValidationError{
        "--communicator",
        fmt::format("expected {}, actual {}",
                    host ? "threads with --device host" : "loopback|nccl with --device cuda",
                    communicators[static_cast<std::size_t>(out)].first)};
  }
  return out;
}

}  // namespace

command_line read_command_line(int argc, char const* const* argv) {
  command_line out;
  settings& to = out.settings;
  to.data = default_digits();
  CLI::App app{
      "Train a multi-layer perceptron on handwritten digits with ZeRO stages 0, 1, 2 and 3, one "
      "after\n"
      "another, on ranks that are threads; then say what each has cost and learnt.",
      "mlp"};
  app.get_formatter()->column_width(40);
  auto const add = [&app](std::string const& flag, auto& value, CLI::Validator const& allowed,
                          std::string const& type, std::string const& text) {
    return app.add_option(flag, value, text)->transform(allowed)->type_name(type);
  };
  auto const count = [&](std::string const& flag, auto& value, std::size_t least,
                         std::string const& text) {
    return add(flag, value, from<std::size_t>(least, 1'000'000), "N", text)->capture_default_str();
  };

  add("--stage", to.stages, from(0, 3), "N", "train this stage only (default: 0, 1, 2, 3)")
      ->expected(1);
  add("--ranks", to.ranks, from(1, 1024), "N", "how many threads share the work")
      ->capture_default_str();
  add("--device", to.device, one_of<device>({{"host", device::host}, {"cuda", device::cuda}}),
      "host|cuda", "where ranks compute (default: host)");
  std::optional<communicator> asked;
  add("--communicator", asked, one_of(communicators), "threads|loopback|nccl",
      "threads: on the host; loopback: ranks share a GPU;\n"
      "nccl: a GPU for each rank (default: what comes first)");
  count("--microbatches", to.microbatches, 1, "forwards and backwards per step");
  add("--accumulate", to.accumulate,
      one_of<accumulate>({{"local", accumulate::local}, {"reduce", accumulate::reduce}}),
      "local|reduce",
      "reduce gradients once a step, or after every micro-batch\n"
      "(default: local in stages 0 and 1, reduce in 2 and 3)");
  add("--stage1", to.stage1_all_reduce, one_of("reduce-scatter", "all-reduce"),
      "reduce-scatter|all-reduce", "how stage 1 reduces (default: reduce-scatter)");
  count("--prefetch", to.prefetch, 0, "how many buckets ahead stage 3 gathers");
  app.add_flag("--keep-after-forward", to.keep_after_forward,
               "stage 3 keeps for backward what forward has gathered");
  add("--bucket-bytes", to.bucket_bytes, at_least<std::uint64_t>(0), "N",
      "join consecutive layers while their parameters fit;\n"
      "0: every layer is a bucket of its own")
      ->capture_default_str();
  add("--overlap", to.overlap, one_of("off", "on"), "off|on",
      "communicate while computing (default: on)");

  add("--precision", to.bf16, one_of("fp32", "bf16"), "fp32|bf16",
      "bf16 keeps fp32 master weights (default: fp32)");
  add("--optimizer", to.optimizer,
      one_of<optimizer>(
          {{"sgd", optimizer::sgd}, {"adam", optimizer::adam}, {"adamw", optimizer::adamw}}),
      "sgd|adam|adamw", "(default: adamw)");
  add("--learning-rate", to.learning_rate, from(0.0, 1e30, "of at least 0"), "X",
      "(default: 0.001; sgd: 0.03)");
  add("--clip", to.clip, from(0.0, 1e30, "of at least 0"), "X",
      "largest norm of the gradient; 0: no limit")
      ->capture_default_str();
  add("--hidden", to.hidden, from<std::size_t>(1, 1'000'000), "N,N",
      "widths of the hidden layers (default: 192, six times)")
      ->delimiter(',');
  count("--batch", to.batch, 1, "samples per step, over all ranks and micro-batches");
  count("--epochs", to.epochs, 1, "how often every sample is seen");
  add("--seed", to.seed, at_least<std::uint64_t>(0), "N",
      "of initial parameters and the order of samples")
      ->capture_default_str();

  app.add_option("--data", to.data, "CSV: 64 pixels from 0 to 16 and a label from 0 to 9, a line")
      ->type_name("FILE");
  app.add_option("--json", to.json, "write the results there, too")->type_name("FILE");

  try {
    app.parse(argc, argv);
    to.communicator = communicator_of(to.device, asked);
  } catch (CLI::CallForHelp const&) {
    fmt::print("{}", app.help());
    out.exit_status = 0;
  } catch (CLI::ParseError const& error) {
    fmt::print(stderr, "mlp: {}\n", error.what());
    out.exit_status = 2;
  }
  return out;
}

}  // namespace mlp
