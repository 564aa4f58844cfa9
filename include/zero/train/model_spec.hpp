// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/scratch.hpp>
#include <zero/core/hash.hpp>
#include <zero/core/parameter.hpp>
#include <zero/device/concept.hpp>
#include <zero/optim/concept.hpp>
#include <zero/shard/bucketed.hpp>
#include <zero/shard/layout.hpp>
#include <zero/train/agreement.hpp>
#include <zero/train/control.hpp>
#include <zero/train/distinct_tensors.hpp>
#include <zero/train/memory_map.hpp>
#include <zero/train/options.hpp>
#include <zero/train/plan.hpp>

#include <algorithm>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// @file
/// `model_spec`: what one rank knows of a model before it allocates or communicates: the declared
/// parameters, their layout, the memory map, the plan, and a text that must be the same on every
/// rank.

namespace zero::inline v0 {

/// A list of lists of parameters: one list per unit.
template <class Units>
concept unit_list = requires(Units const& units) {
  { *std::begin(*std::begin(units)) } -> std::convertible_to<any_parameter const&>;
  std::end(*std::begin(units));
};

namespace detail {

class model_spec {
 public:
  /// `scratch(shape)` gives the bytes that a reduction goes through beside its spans.
  /// @throws zero::usage_error  a parameter that the stage, the precision or the device can't
  ///                            serve, with its name and the cure; a bad option.
  template <device Device, unit_list Units, elementwise_optimizer Optimizer, class Scratch>
  model_spec(std::type_identity<Device> on, Units const& units, stage at,
             Optimizer const& optimizer, accumulation policy, options const& chosen,
             std::uint64_t ranks, std::uint64_t rank, Scratch const& scratch)
      : specs_{declare(on, units, at, policy, chosen)},
        layout_{specs_, ranks,
                layout_options{.bucket_bytes = chosen.bucket_bytes_in(at),
                               .alignment = chosen.alignment.value_or(0),
                               .alignment_bytes = Device::alignment_bytes}},
        map_{layout_, map_options<Device, Optimizer>(at, policy, ranks, rank, scratch)},
        plan_{make_plan(layout_, map_, at, policy, bound_bytes())} {
    optimizer.validate();
    text_ = text(at, policy, chosen) + text(optimizer);
  }

  model_spec(model_spec const&) = delete;
  model_spec& operator=(model_spec const&) = delete;

  [[nodiscard]] std::vector<any_parameter> const& declared() const noexcept { return declared_; }
  [[nodiscard]] layout const& of() const noexcept { return layout_; }
  [[nodiscard]] memory_map const& map() const noexcept { return map_; }
  [[nodiscard]] zero::plan const& planned() const noexcept { return plan_; }
  /// One line per fact that ranks must agree on.
  [[nodiscard]] std::string const& agreement() const noexcept { return text_; }

 private:
  template <class Device, class Units>
  std::vector<unit_spec> declare(std::type_identity<Device> /*on*/, Units const& units,
                                 stage const& at, accumulation const& policy,
                                 options const& chosen) {
    chosen.validate(at, policy);
    std::vector<unit_spec> specs;
    for (auto const& unit : units) {
      unit_spec& of = specs.emplace_back();
      for (any_parameter const& declared : unit) {
        if (declared.is_tied) {
          of.tied.push_back(declared.name);
          continue;
        }
        if (!declared.value && !declared.initialiser) {
          throw usage_error{
              detail::text("parameter '", declared.name,
                           "': expected a value tensor or an initialiser, actual neither")};
        }
        check_tensor<Device>(declared, declared.value, "value", at.shards_parameters());
        if (!declared.is_frozen) {
          check_tensor<Device>(declared, declared.gradient, "gradient",
                               at.placed.gradients == placement::sharded);
        }
        of.parameters.push_back(describe(declared, chosen.precision));
        declared_.push_back(declared);
      }
    }
    check_distinct(declared_);
    return specs;
  }

  /// Bytes of a tensor that can't be rebound, and of a frozen parameter's gradient nothing.
  [[nodiscard]] static std::uint64_t stays(any_tensor const& tensor) {
    return tensor && !tensor.rebindable() ? tensor.elements().bytes() : 0;
  }

  /// What the largest reduction of a segment goes through.
  template <class Scratch>
  [[nodiscard]] std::uint64_t scratch_bytes(accumulation const& policy,
                                            Scratch const& scratch) const {
    std::uint64_t most = 0;
    for (layout::segment const& each : layout_.segments()) {
      if (each.trainable && each.cut.slice() != 0) {
        most = std::max<std::uint64_t>(
            most, scratch(reduction_shape{
                      .slice = each.cut.slice(),
                      .input = each.gradient,
                      .output = each.reduced,
                      .how = policy.per_microbatch ? combine::add : combine::overwrite}));
      }
    }
    return most;
  }

  template <class Device, class Optimizer, class Scratch>
  [[nodiscard]] memory_map_options map_options(stage const& at, accumulation const& policy,
                                               std::uint64_t ranks, std::uint64_t rank,
                                               Scratch const& scratch) const {
    memory_map_options out{
        .stage = at,
        .policy = policy,
        .rank = rank,
        .states = state_count<Optimizer>,
        .value_stays = {},
        .gradient_stays = {},
        .alignment_bytes = Device::alignment_bytes,
        .control_bytes = control_map<Device, Optimizer>{declared_.size(), ranks}.bytes,
        .scratch_bytes = scratch_bytes(policy, scratch)};
    for (any_parameter const& each : declared_) {
      out.value_stays.push_back(stays(each.value));
      out.gradient_stays.push_back(each.is_frozen ? 0 : stays(each.gradient));
    }
    return out;
  }

  /// What tensors hold until they are rebound.
  [[nodiscard]] std::uint64_t bound_bytes() const {
    std::uint64_t bytes = 0;
    for (any_parameter const& each : declared_) {
      for (any_tensor const* tensor : {&each.value, &each.gradient}) {
        bytes += *tensor && tensor->rebindable() ? tensor->elements().bytes() : 0;
      }
    }
    return bytes;
  }

  template <class Device>
  void check_tensor(any_parameter const& declared, any_tensor const& tensor, std::string_view what,
                    bool sharded) const {
    if (!tensor) {
      return;
    }
    if (!tensor.on<Device>()) {
      throw usage_error{detail::text("parameter '", declared.name, "': expected its ", what, " on ",
                                     Device::name, ", actual on another device")};
    }
    if (sharded && !tensor.rebindable()) {
      throw usage_error{detail::text(
          "parameter '", declared.name, "': this stage shards its ", what,
          ", expected a tensor that can give up its storage, actual one that can't; ",
          "add rebind to its ", "zero::tensor_traits, or declare it without that tensor")};
    }
    if (!tensor.rebindable() && tensor.elements().size() != size_of(declared)) {
      throw usage_error{detail::text("parameter '", declared.name, "': expected a ", what, " of ",
                                     size_of(declared), " elements, actual ",
                                     tensor.elements().size())};
    }
  }

  [[nodiscard]] static std::size_t size_of(any_parameter const& declared) {
    return declared.initialiser ? element_count(declared.name, declared.shape)
                                : declared.value.elements().size();
  }

  [[nodiscard]] parameter_spec describe(any_parameter const& declared,
                                        precision const& chosen) const {
    if (!chosen.accepts(declared.dtype)) {
      throw usage_error{detail::text(
          "parameter '", declared.name, "': expected ", zero::name(chosen.parameters),
          " or wider, as the precision says, ", "actual ", zero::name(declared.dtype))};
    }
    parameter_spec out{.name = declared.name,
                       .size = size_of(declared),
                       .value = declared.dtype,
                       .gradient = declared.dtype,
                       .reduced = chosen.reduced_of(declared.dtype),
                       .trainable = !declared.is_frozen};
    if (declared.gradient && out.trainable) {
      out.gradient = declared.gradient.dtype();
      std::size_t const actual = declared.gradient.elements().size();
      if (actual != 0 && actual != out.size) {
        throw usage_error{detail::text("parameter '", declared.name, "': expected a gradient of ",
                                       out.size, " elements, actual ", actual)};
      }
      if (out.gradient != out.value && !(out.gradient == dtype::float32 && has_master(out.value))) {
        throw usage_error{detail::text(
            "parameter '", declared.name, "': expected a gradient of ", zero::name(out.value),
            has_master(out.value) ? " or float32" : "", ", actual ", zero::name(out.gradient))};
      }
    }
    return out;
  }

  [[nodiscard]] std::string text(stage const& at, accumulation const& policy,
                                 options const& chosen) const {
    std::string out = detail::text(
        "stage ", at.number(), " gradients ", static_cast<int>(at.gradients), " prefetch ",
        at.prefetch, " keep_after_forward ", static_cast<int>(at.keep_after_forward), " keep_last ",
        static_cast<int>(at.keep_last), " max_live_units ", at.max_live_units, " overlap ",
        static_cast<int>(at.shards_parameters() && chosen.overlap), "\npolicy per_microbatch ",
        static_cast<int>(policy.per_microbatch), " open_buckets ", policy.open_buckets,
        "\noptions clip_norm ", chosen.clip_norm.value_or(0), " (bits ",
        std::bit_cast<std::uint64_t>(chosen.clip_norm.value_or(0)), ") bucket_bytes ",
        chosen.bucket_bytes_in(at), " alignment ", chosen.alignment.value_or(0), " start ",
        static_cast<int>(chosen.start), registration(chosen.memory), "\nunits ", specs_.size(),
        "\nparameters ", declared_.size(), "\n");
    std::size_t id = 0;
    for (std::size_t u = 0; u < specs_.size(); ++u) {
      for (parameter_spec const& spec : specs_[u].parameters) {
        out += detail::text("unit ", u, ": parameter '", spec.name, "' ", zero::name(spec.value),
                            " [");
        any_parameter const& declared = declared_[id++];
        if (declared.initialiser) {
          for (std::size_t i = 0; i < declared.shape.size(); ++i) {
            out += detail::text(i == 0 ? "" : ", ", declared.shape[i]);
          }
        } else {
          out += detail::text(spec.size);
        }
        out +=
            detail::text(declared.initialiser ? "] from an initialiser, gradient " : "], gradient ",
                         zero::name(spec.gradient), " reduced to ", zero::name(spec.reduced),
                         spec.trainable ? "\n" : ", frozen\n");
      }
      for (std::string const& name : specs_[u].tied) {
        out += detail::text("unit ", u, ": tied '", name, "'\n");
      }
    }
    return out;
  }

  /// Where all ranks use the same offsets, the sizes of all parts.
  [[nodiscard]] std::string registration(memory_resource const& memory) const {
    if (memory.registration != memory_registration::window) {
      return detail::text(" registration ", static_cast<int>(memory.registration));
    }
    std::uint64_t sizes = 0;
    for (memory_map::region const& each : map_.regions) {
      sizes = hash_next(sizes, each.total_bytes);
    }
    return detail::text(" registration as a window of ", map_.symmetric_bytes,
                        " bytes, sizes with fingerprint ", sizes);
  }

  template <class Optimizer>
  [[nodiscard]] static std::string text(Optimizer const& optimizer) {
    std::string out = "optimizer with states";
    for (std::string_view const name : Optimizer::states) {
      out += detail::text(" ", name);
    }
    return out + detail::text(", hyperparameters with fingerprint ", fingerprint(optimizer), "\n");
  }

  std::vector<any_parameter> declared_;  // filled by declare: before specs_
  std::vector<unit_spec> specs_;
  layout layout_;
  memory_map map_;
  zero::plan plan_;
  std::string text_;
};

}  // namespace detail
}  // namespace zero::inline v0
