// SPDX-License-Identifier: MIT
#include "report.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <string_view>
#include <utility>

namespace mlp {
namespace {

std::string_view name(accumulate policy) {
  return policy == accumulate::local ? "local" : "reduce";
}

std::string_view name(optimizer kind) {
  return kind == optimizer::sgd ? "sgd" : kind == optimizer::adam ? "adam" : "adamw";
}

std::string_view name(device on) { return on == device::host ? "host" : "cuda"; }

std::string_view name(communicator kind) {
  return kind == communicator::threads    ? "threads"
         : kind == communicator::loopback ? "loopback"
                                          : "nccl";
}

std::string_view precision(settings const& settings) { return settings.bf16 ? "bf16" : "fp32"; }

std::string hex(std::uint64_t checksum) { return fmt::format("{:016x}", checksum); }

/// 1234567 as 1,234,567.
std::string grouped(std::uint64_t number) {
  std::string text = fmt::to_string(number);
  for (auto at = static_cast<std::ptrdiff_t>(text.size()) - 3; at > 0; at -= 3) {
    text.insert(static_cast<std::size_t>(at), 1, ',');
  }
  return text;
}

/// The lines of a table: a label of two parts, then a cell for every stage.
class lines {
 public:
  explicit lines(std::vector<result> const& results) : results_{results} {}

  template <class Cell>
  void add(std::string_view label, std::string_view part, Cell cell) {
    text_ += fmt::format("{:<19}{:<9}", label, part);
    for (result const& each : results_) {
      text_ += fmt::format("{:>18}", cell(each));
    }
    text_ += '\n';
  }
  void add(std::string_view heading) { text_ += fmt::format("{}\n", heading); }
  void rule() { text_ += std::string(28 + 18 * results_.size(), '-') + '\n'; }

  [[nodiscard]] std::string const& text() const { return text_; }

 private:
  std::vector<result> const& results_;
  std::string text_;
};

using counts_of = std::pair<std::string_view, byte_counts outcome::*>;
constexpr std::array<counts_of, 3> sources{{{"planned", &outcome::planned},
                                            {"allocated", &outcome::allocated},
                                            {"formula", &outcome::formula}}};

/// A category's three lines.
void add_category(lines& to, std::size_t index) {
  auto const category = byte_counts{}.named()[index].first;
  for (auto const& [source, counts] : sources) {
    to.add(source == sources.front().first ? fmt::format("  {}", category) : "", source,
           [&, counts = counts](result const& r) {
             return grouped((r.of_rank0.*counts).named()[index].second);
           });
  }
}

}  // namespace

progress_bar::progress_bar(int stage) : stage_{stage}, terminal_{isatty(STDERR_FILENO) != 0} {}

progress_bar::~progress_bar() {
  if (terminal_) {
    std::fputs("\r\x1b[K", stderr);  // leave nothing behind
  }
}

void progress_bar::show(std::size_t step, std::size_t steps, double loss) {
  std::size_t const percent = 100 * step / steps;
  if (terminal_ && percent != drawn_) {
    drawn_ = percent;
    fmt::print(stderr, "\rstage {} [{:<50}] {:>3} %  loss {:.4f}", stage_,
               std::string(percent / 2, '#'), percent, loss);
    std::fflush(stderr);
  }
}

std::string disagreement(int stage, std::vector<outcome> const& ranks) {
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    outcome const& of = ranks[rank];
    if (of.planned != of.formula || of.allocated != of.planned) {
      return fmt::format(
          "stage {}: expected equal bytes, actual planned {}, allocated {}, formula {} (rank {})",
          stage, of.planned.peak(), of.allocated.peak(), of.formula.peak(), rank);
    }
    if (of.sent_bytes_per_step != of.formula_sent_bytes_per_step) {
      return fmt::format("stage {}: expected {} bytes sent per step, actual {} (rank {})", stage,
                         of.formula_sent_bytes_per_step, of.sent_bytes_per_step, rank);
    }
    if (of.parameter_checksum != ranks[0].parameter_checksum) {
      return fmt::format("stage {}: expected parameters {}, actual {} (rank {})", stage,
                         hex(ranks[0].parameter_checksum), hex(of.parameter_checksum), rank);
    }
  }
  return {};
}

std::string table(settings const& settings, std::vector<result> const& results) {
  lines out{results};
  std::string const where =
      settings.device == device::host
          ? std::string{}
          : fmt::format(" on {} ({})", name(settings.device), name(settings.communicator));
  out.add(fmt::format(
      "{} ranks{}, {} parameters in {}, {} steps of {}, {} micro-batch(es) a step\n",
      settings.ranks, where, grouped(results.front().of_rank0.parameters), precision(settings),
      results.front().of_rank0.steps, name(settings.optimizer), settings.microbatches));
  out.add("", "", [](result const& r) { return fmt::format("stage {}", r.stage); });
  out.rule();
  out.add("policy", "", [&](result const& r) { return name(settings.policy(r.stage)); });
  out.add("test accuracy", "",
          [](result const& r) { return fmt::format("{:.2f} %", 100 * r.of_rank0.test_accuracy); });
  out.add("parameter checksum", "",
          [](result const& r) { return hex(r.of_rank0.parameter_checksum); });
  out.add("bytes per rank");
  auto const categories = byte_counts{}.named();
  for (std::size_t index = 0; index < categories.size(); ++index) {
    add_category(out, index);
  }
  out.add("bytes sent per rank and step");
  out.add("", "metered", [](result const& r) { return grouped(r.of_rank0.sent_bytes_per_step); });
  out.add("", "formula",
          [](result const& r) { return grouped(r.of_rank0.formula_sent_bytes_per_step); });
  out.add("seconds per step", "",
          [](result const& r) { return fmt::format("{:.6f}", r.of_rank0.seconds_per_step); });
  return out.text();
}

std::string json(settings const& settings, std::vector<result> const& results) {
  auto const bytes = [](byte_counts const& counts) {
    nlohmann::ordered_json out;
    for (auto const& [category, count] : counts.named()) {
      out[std::string{category}] = count;
    }
    return out;
  };
  auto out = nlohmann::ordered_json::array();
  for (auto const& [stage, of] : results) {
    out.push_back({{"stage", stage},
                   {"ranks", settings.ranks},
                   {"device", name(settings.device)},
                   {"communicator", name(settings.communicator)},
                   {"policy", name(settings.policy(stage))},
                   {"parameters", of.parameters},
                   {"test_accuracy", of.test_accuracy},
                   {"parameter_checksum", hex(of.parameter_checksum)},
                   {"planned_bytes", bytes(of.planned)},
                   {"allocated_bytes", bytes(of.allocated)},
                   {"formula_bytes", bytes(of.formula)},
                   {"bind_peak_bytes", of.bind_peak_bytes},
                   {"sent_bytes_per_step", of.sent_bytes_per_step},
                   {"formula_sent_bytes_per_step", of.formula_sent_bytes_per_step},
                   {"seconds_per_step", of.seconds_per_step},
                   {"steps", of.steps},
                   {"loss", of.loss},
                   {"microbatches", settings.microbatches},
                   {"precision", precision(settings)},
                   {"optimizer", name(settings.optimizer)},
                   {"learning_rate", settings.rate()},
                   {"clip", settings.clip},
                   {"stage1", settings.stage1_all_reduce ? "all-reduce" : "reduce-scatter"},
                   {"prefetch", settings.prefetch},
                   {"keep_after_forward", settings.keep_after_forward},
                   {"bucket_bytes", settings.bucket_bytes},
                   {"overlap", settings.overlap ? "on" : "off"},
                   {"hidden", settings.hidden},
                   {"batch", settings.batch},
                   {"epochs", settings.epochs},
                   {"seed", settings.seed}});
  }
  return out.dump(2) + '\n';
}

}  // namespace mlp
