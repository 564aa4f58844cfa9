// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/any_span.hpp>
#include <zero/core/error.hpp>
#include <zero/device/pack.hpp>
#include <zero/device/pack_kernel.hpp>
#include <zero/optim/concept.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>

/// @file
/// `fused_update`: scale the gradient, update the states and the parameter, round the parameter to
/// its own type, in one pass over the elements.

namespace zero::inline v0 {

/// What one update reads and writes: ranges of one size, aligned as their elements are.
template <elementwise_optimizer Optimizer>
struct update_piece {
  any_span parameter;
  /// In the accumulate type; null where the parameter's own type is that.
  void* master = nullptr;
  /// Reduced.
  const_any_span gradient;
  /// In the accumulate type, in the order of `Optimizer::states`.
  std::array<void*, state_count<Optimizer>> states{};
};

namespace detail {

/// What the updates of one step share, but for the gradient's multiplier.
template <class Optimizer, class Value>
using update_constants = decltype(std::declval<Optimizer const&>().template at<Value>(1));

/// What one update reads and writes.
template <class Optimizer, class Parameter, class Gradient>
struct update_streams {
  using real = accumulate_type<Parameter>;
  static constexpr bool has_master = sizeof(Parameter) == 2;

  Parameter* parameter;
  real* master;
  Gradient const* gradient;
  std::array<real*, state_count<Optimizer>> states;

  /// gradient, master or parameter, states
  [[nodiscard]] ZERO_HOST_DEVICE auto inputs() const {
    return std::apply(
        [this](auto const*... state) {
          if constexpr (has_master) {
            return std::tuple{gradient, static_cast<real const*>(master), state...};
          } else {
            return std::tuple{gradient, static_cast<Parameter const*>(parameter), state...};
          }
        },
        states);
  }
  /// states, master, parameter
  [[nodiscard]] ZERO_HOST_DEVICE auto outputs() const {
    return std::apply(
        [this](auto*... state) {
          if constexpr (has_master) {
            return std::tuple{state..., master, parameter};
          } else {
            return std::tuple{state..., parameter};
          }
        },
        states);
  }
};

/// What an update does with the elements of a pack.
template <class Optimizer, class Parameter>
struct update_operation {
  using real = accumulate_type<Parameter>;
  using value = pack<real>;

  value multiplier;
  update_constants<Optimizer, value> constants;

  template <class... State>
  ZERO_HOST_DEVICE auto operator()(two_packs<real> const& gradient, two_packs<real> parameter,
                                   State const&... state) const {
    std::array<value, sizeof...(State)> low{state[0]...};
    std::array<value, sizeof...(State)> high{state[1]...};
    Optimizer::update(constants, parameter[0], multiplier * gradient[0], low);
    Optimizer::update(constants, parameter[1], multiplier * gradient[1], high);
    constexpr std::size_t states = sizeof...(State);
    constexpr bool has_master = sizeof(Parameter) == 2;
    std::array<two_packs<real>, states + 1 + (has_master ? 1 : 0)> out;
    for (std::size_t k = states; k-- > 0;) {
      out[k] = {low[k], high[k]};
    }
    out.back() = parameter;
    out[states] = parameter;
    return out;
  }
};

template <class Parameter, class Gradient, class Optimizer>
void typed_update(Optimizer const& optimizer, std::int64_t step, double multiplier,
                  update_piece<Optimizer> const& piece) {
  using function = update_operation<Optimizer, Parameter>;
  using real = typename function::real;
  using value = typename function::value;
  update_streams<Optimizer, Parameter, Gradient> streams{
      static_cast<Parameter*>(piece.parameter.data()),
      static_cast<real*>(piece.master),
      static_cast<Gradient const*>(piece.gradient.data()),
      {}};
  for (std::size_t k = state_count<Optimizer>; k-- > 0;) {
    streams.states[k] = static_cast<real*>(piece.states[k]);
  }
  run_packs<real>(function{value(multiplier), optimizer.template at<value>(step)}, streams.inputs(),
                  streams.outputs(), 0, piece.parameter.size());
}

/// Whether `fused_update` takes this pair of types.
[[nodiscard]] constexpr bool updates_with(dtype parameter, dtype gradient) noexcept {
  return gradient == parameter || (size_bytes(parameter) == 2 && gradient == dtype::float32);
}

inline void check_piece(std::int64_t step, const_any_span parameter, void const* master,
                        const_any_span gradient) {
  if (step < 1) {
    throw usage_error{text("fused_update: expected a step of at least 1, actual ", step)};
  }
  if (!updates_with(parameter.dtype(), gradient.dtype())) {
    throw usage_error{text("fused_update: expected a gradient of ", name(parameter.dtype()),
                           size_bytes(parameter.dtype()) == 2 ? " or float32" : "", ", actual ",
                           name(gradient.dtype()))};
  }
  if (gradient.size() != parameter.size()) {
    throw usage_error{text("fused_update: expected a gradient of ", parameter.size(),
                           " elements, actual ", gradient.size())};
  }
  bool const has_master = size_bytes(parameter.dtype()) == 2;
  if (!parameter.empty() && (master != nullptr) != has_master) {
    throw usage_error{text("fused_update: expected ", has_master ? "a" : "no", " master for ",
                           name(parameter.dtype()), ", actual ", has_master ? "none" : "one")};
  }
}

}  // namespace detail

/// Update number `step` (the first one is 1) of a piece, with `multiplier` times the gradient. The
/// multiplier is 1/M, the loss scale and the clip factor in one, rounded once to the accumulate
/// type; the new value of a master is rounded once to the parameter's type.
///
/// Types:    the gradient has the parameter's type, or is float32 where that has 16 bits.
/// Ordering: runs in the caller. An element gets the same bits however the pieces are cut.
/// @throws zero::usage_error  a step below 1, types that aren't such a pair, another number of
///                            gradients than parameters, a master missing or not needed, a state
///                            missing. Nothing was changed.
template <elementwise_optimizer Optimizer>
void fused_update(Optimizer const& optimizer, std::int64_t step, double multiplier,
                  update_piece<Optimizer> const& piece) {
  detail::check_piece(step, piece.parameter, piece.master, piece.gradient);
  for (std::size_t k = state_count<Optimizer>; k-- > 0;) {
    if (piece.states[k] == nullptr && !piece.parameter.empty()) {
      throw usage_error{
          detail::text("fused_update: expected a state ", Optimizer::states[k], ", actual none")};
    }
  }
  visit(piece.parameter.dtype(), [&]<class Parameter>(std::type_identity<Parameter>) {
    if constexpr (sizeof(Parameter) == 2) {
      if (piece.gradient.dtype() == dtype::float32) {
        detail::typed_update<Parameter, float>(optimizer, step, multiplier, piece);
        return;
      }
    }
    detail::typed_update<Parameter, Parameter>(optimizer, step, multiplier, piece);
  });
}

}  // namespace zero::inline v0
