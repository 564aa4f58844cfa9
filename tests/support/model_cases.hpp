// SPDX-License-Identifier: MIT
#pragma once

#include <support/formula.hpp>
#include <support/owning_tensor.hpp>
#include <zero/core/parameter.hpp>
#include <zero/device/ledger.hpp>
#include <zero/train/options.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <span>
#include <string>
#include <utility>
#include <vector>

/// @file
/// Small models of every kind that layouts must get right, each told twice: to the library, as
/// tensors and declarations, and to formula.hpp, as numbers. And the settings that accounting is
/// tested over.

namespace test {

/// One parameter. `value` is p, `gradient` b.
struct entry {
  std::string name;
  std::uint64_t elements = 0;
  formula::type value = formula::type::f32;
  formula::type gradient = formula::type::f32;
  bool frozen = false;
  bool value_stays = false;
  bool gradient_stays = false;
  bool tied = false;  ///< a use of the parameter of that name in an earlier unit
};

struct model_case {
  std::string name;
  zero::precision precision;
  formula::type reduced = formula::type::f32;  ///< g of 16-bit parameters
  std::vector<std::vector<entry>> units;
};

inline std::vector<model_case> model_cases() {
  using formula::type;
  auto const as = [](type value, type gradient,
                     std::vector<std::vector<std::uint64_t>> const& sizes) {
    std::vector<std::vector<entry>> units;
    for (auto const& unit : sizes) {
      auto& entries = units.emplace_back();
      for (std::uint64_t const n : unit) {
        entries.push_back(
            {"u" + std::to_string(units.size()) + "p" + std::to_string(entries.size()), n, value,
             gradient});
      }
    }
    return units;
  };
  std::vector<std::vector<std::uint64_t>> const uneven{{100}, {7, 0, 1}, {33, 64}, {},
                                                       {1},   {250, 2},  {6}};
  zero::precision const half{.parameters = zero::dtype::float16, .reduced = zero::dtype::float32};
  std::vector<model_case> cases{
      {"fp32", zero::fp32, type::f32, as(type::f32, type::f32, uneven)},
      {"fp32, sizes that divide", zero::fp32, type::f32,
       as(type::f32, type::f32, {{384}, {768}, {384, 384}, {1152}})},
      {"18 bytes", zero::bf16, type::f32, as(type::bf16, type::bf16, uneven)},
      {"18 bytes, fp32 gradients", zero::bf16, type::f32, as(type::bf16, type::f32, uneven)},
      {"16 bytes", zero::bf16_reduced, type::bf16, as(type::bf16, type::bf16, uneven)},
      {"float16", half, type::f32, as(type::f16, type::f16, {{31}, {5, 8}})},
      {"float64", zero::fp32, type::f32, as(type::f64, type::f64, {{31}, {5, 8}})},
      {"nothing but zero-element parameters", zero::fp32, type::f32,
       as(type::f32, type::f32, {{0}, {0, 0}})},
  };
  cases.push_back(
      {"mixed, frozen, tied",
       zero::bf16,
       type::f32,
       {{{"embedding", 90, type::bf16, type::bf16}, {"norm0", 10}},
        {{"w1", 77, type::bf16, type::f32},
         {"norm1", 5},
         {"lora", 40, type::bf16, type::bf16, true}},
        {{"w2", 128, type::bf16, type::bf16}, {"scale", 3, type::f64, type::f64}},
        {{"table", 70, type::f32, type::f32, true}, {"mask", 9, type::bf16, type::bf16, true}},
        {{"embedding", 0, type::bf16, type::bf16, false, false, false, true}, {"bias", 11}}}});
  cases.push_back({"frozen in whole",
                   zero::fp32,
                   type::f32,
                   {{{"a", 20, type::f32, type::f32, true}},
                    {{"b", 20}},
                    {{"c", 31, type::f32, type::f32, true}}}});
  return cases;
}

/// Models of tensors that can't be rebound, for stages that accept them.
inline std::vector<model_case> staying_cases(bool gradients_too) {
  using formula::type;
  auto const stays = [&](std::string name, std::uint64_t n, type value = type::f32,
                         bool frozen = false) {
    return entry{std::move(name), n, value, value, frozen, true, gradients_too && !frozen};
  };
  return {{"all stay",
           zero::fp32,
           type::f32,
           {{stays("a", 100)}, {stays("b", 7), stays("c", 0)}, {stays("d", 33)}}},
          {"all stay, 16 bytes",
           zero::bf16_reduced,
           type::bf16,
           {{stays("a", 100, type::bf16)}, {stays("b", 7, type::bf16)}}},
          {"all stay, 18 bytes",
           zero::bf16,
           type::f32,
           {{stays("a", 100, type::bf16)}, {stays("b", 7, type::bf16)}}},
          {"some stay",
           zero::bf16,
           type::f32,
           {{stays("a", 50),
             {"b", 21},
             stays("frozen", 13, type::f32, true),
             stays("w", 19, type::bf16)},
            {{"c", 40}, {"d", 3, type::bf16, type::bf16}},
            {stays("e", 5), {"a", 0, type::f32, type::f32, false, false, false, true}}}}};
}

/// The tensors of a model, and its declarations in all the forms that there are.
class declared_model {
 public:
  explicit declared_model(model_case const& from) : case_{from} {
    std::size_t form = 0;
    for (auto const& unit : from.units) {
      units_.emplace_back();
      formula_.emplace_back();
      for (entry const& e : unit) {
        e.tied ? add_use(e) : add(e, form++);
      }
    }
  }

  [[nodiscard]] std::vector<std::vector<zero::any_parameter>> const& units() const {
    return units_;
  }
  [[nodiscard]] formula::model const& formula() const { return formula_; }
  [[nodiscard]] model_case const& described() const { return case_; }

  /// What the values and gradients of initialisers and tensors hold before bind is zero; this
  /// writes zero gradients of unit `u` as an engine does.
  template <class Model, class Lease>
  void write_gradients(Model const& model, Lease const& lease, std::size_t u) const {
    for (entry const& e : case_.units[u]) {
      entry const& owner = e.tied ? *owner_of(e.name).second : e;
      if (owner.frozen || owner.gradient_stays) {
        continue;
      }
      std::size_t const id = model.find(owner.name);
      with(owner.gradient, [&]<class T>(T zero) {
        std::span<T> const place = lease.template gradient<T>(id);
        if (!lease.accumulate(id)) {
          std::fill(place.begin(), place.end(), zero);
        }
      });
    }
  }

 private:
  template <class Call>
  static void with(formula::type of, Call call) {
    switch (of) {
      case formula::type::f32: return call(float{});
      case formula::type::f64: return call(double{});
      case formula::type::f16: return call(zero::float16{});
      case formula::type::bf16: return call(zero::bfloat16{});
    }
  }

  [[nodiscard]] std::pair<std::size_t, entry const*> owner_of(std::string const& name) const {
    for (std::size_t u = 0; u < case_.units.size(); ++u) {
      for (entry const& e : case_.units[u]) {
        if (e.name == name && !e.tied) {
          return {u, &e};
        }
      }
    }
    return {0, nullptr};
  }

  template <class Tensor>
  zero::any_tensor keep(Tensor tensor) {
    auto const kept = std::make_shared<Tensor>(std::move(tensor));
    tensors_.push_back(kept);
    return zero::any_tensor{*kept};
  }

  void add_use(entry const& e) {
    units_.back().push_back(zero::tied(e.name));
    formula_.back().uses.push_back(owner_of(e.name).first);
  }

  void add(entry const& e, std::size_t form) {
    formula::type const reduced = formula::width(e.value) == 2 ? case_.reduced : e.value;
    formula::parameter numbers{e.elements, e.value,       e.gradient,       reduced,
                               e.frozen,   e.value_stays, e.gradient_stays, 0};
    zero::any_parameter out;
    out.name = e.name;
    bool const bare = form % 3 == 2 && e.gradient == e.value && !e.value_stays && !e.gradient_stays;
    bool const taken_over = e.value_stays || (form % 3 == 0 && !bare);
    with(e.value, [&]<class T>(T) {
      out.dtype = zero::dtype_of<T>;
      if (e.value_stays) {
        out.value = keep(std::vector<T>(e.elements));
      } else if (!bare) {
        out.value = keep(owning_tensor<T>(taken_over ? e.elements : 0));
        numbers.held_bytes += taken_over ? e.elements * formula::width(e.value) : 0;
      }
      if (!taken_over) {
        out.shape = {static_cast<std::size_t>(e.elements)};
        out.initialiser = [](zero::any_span values, std::size_t) {
          std::span<T> const elements = values.as<T>();
          std::fill(elements.begin(), elements.end(), T{});
        };
      }
    });
    with(e.gradient, [&]<class T>(T) {
      if (e.gradient_stays) {
        out.gradient = keep(std::vector<T>(e.elements));
      } else if (!bare) {
        bool const holds = form % 2 == 0;
        out.gradient = keep(owning_tensor<T>(holds ? e.elements : 0));
        numbers.held_bytes += holds ? e.elements * formula::width(e.gradient) : 0;
      }
    });
    units_.back().push_back(e.frozen ? out.frozen() : out);
    formula_.back().parameters.push_back(numbers);
  }

  model_case case_;
  std::vector<std::shared_ptr<void>> tensors_;
  std::vector<std::vector<zero::any_parameter>> units_;
  formula::model formula_;
};

/// A stage and a policy, told twice.
struct run_case {
  zero::stage stage;
  zero::accumulation policy;
  formula::settings formula;
};

inline std::vector<run_case> run_cases() {
  using zero::gradient_collective;
  std::vector<run_case> const stages{
      {zero::stage0{}, {}, {.stage = 0}},
      {zero::stage1{.gradients = gradient_collective::reduce_scatter}, {}, {.stage = 1}},
      {zero::stage1{.gradients = gradient_collective::all_reduce},
       {},
       {.stage = 1, .all_reduce = true}},
      {zero::stage2{}, {}, {.stage = 2}},
      {zero::stage3{.prefetch = 0}, {}, {.stage = 3}},
      {zero::stage3{.prefetch = 1}, {}, {.stage = 3, .prefetch = 1}},
      {zero::stage3{.prefetch = 1, .keep_last = true},
       {},
       {.stage = 3, .prefetch = 1, .keep_last = true}},
      {zero::stage3{.prefetch = 3, .max_live_units = 2},
       {},
       {.stage = 3, .prefetch = 3, .max_live_units = 2}},
      {zero::stage3{.prefetch = 1, .keep_after_forward = true},
       {},
       {.stage = 3, .prefetch = 1, .keep_after_forward = true}},
  };
  std::vector<run_case> out;
  for (run_case each : stages) {
    each.policy = zero::local_accumulate{};
    out.push_back(each);
    each.policy = zero::reduce_per_microbatch{};
    each.formula.reduces_per_microbatch = true;
    out.push_back(each);
    each.policy = zero::reduce_per_microbatch{.open_buckets = 1};
    each.formula.open_buckets = 1;
    out.push_back(each);
  }
  return out;
}

/// `bucket_bytes` and `alignment`; unset: the default.
struct shape_case {
  std::optional<std::uint64_t> bucket_bytes;
  std::optional<std::uint64_t> alignment;
};

inline std::vector<shape_case> shape_cases() {
  std::vector<shape_case> out;
  std::vector<std::optional<std::uint64_t>> const bytes{std::nullopt, 0, 500,
                                                        std::uint64_t{1} << 40U};
  std::vector<std::optional<std::uint64_t>> const alignments{std::nullopt, 1, 5};
  for (auto const& bucket_bytes : bytes) {
    for (auto const& alignment : alignments) {
      out.push_back({bucket_bytes, alignment});
    }
  }
  return out;
}

/// The defaults, as design.md has them.
inline formula::settings settings_of(run_case const& run, shape_case const& shape,
                                     std::uint64_t ranks) {
  formula::settings out = run.formula;
  std::uint64_t const joins = out.stage == 3 ? 0 : 16 * 1024 * 1024;
  out.bucket_bytes = shape.bucket_bytes.value_or(joins);
  out.alignment = shape.alignment.value_or(0);
  out.ranks = ranks;
  return out;
}

/// The library's bytes in the formula's words.
inline formula::memory in_words(zero::memory_bytes const& bytes, std::uint64_t bind_peak_bytes) {
  using zero::category;
  return {bytes[category::parameters],
          bytes[category::gradients],
          bytes[category::optimizer_state],
          bytes[category::gathered_units],
          bytes[category::gradient_buckets],
          bytes[category::staging],
          bytes[category::engine],
          bytes.padding,
          bind_peak_bytes};
}

/// What a failed comparison was about.
inline std::string title(model_case const& of, run_case const& run,
                         formula::settings const& settings, std::uint64_t rank) {
  auto const number = [](auto value) { return std::to_string(value); };
  return of.name + ", stage " + number(run.formula.stage) +
         (run.formula.all_reduce ? " all-reduce" : "") + " prefetch " +
         number(run.formula.prefetch) + (run.formula.keep_after_forward ? " kept" : "") +
         (run.formula.keep_last ? " last kept" : "") +
         (run.policy.per_microbatch ? ", reduce " + number(run.policy.open_buckets) : ", local") +
         ", bucket_bytes " + number(settings.bucket_bytes) + ", alignment " +
         number(settings.alignment) + ", rank " + number(rank) + " of " + number(settings.ranks);
}

}  // namespace test
