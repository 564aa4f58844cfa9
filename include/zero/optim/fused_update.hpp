// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/any_span.hpp>
#include <zero/core/error.hpp>
#include <zero/device/pack.hpp>
#include <zero/optim/concept.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
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

/// The update of one step for one combination of types.
template <class Optimizer, class Parameter, class Gradient>
struct update_kernel {
  using real = accumulate_type<Parameter>;
  using value = pack<real>;
  static constexpr std::size_t state_size = state_count<Optimizer>;
  static constexpr bool has_master = sizeof(Parameter) == 2;

  Parameter* parameter;
  real* master;
  Gradient const* gradient;
  std::array<real*, state_size> states;
  value multiplier;
  decltype(std::declval<Optimizer const&>().template at<value>(1)) constants;

  /// Flattened: the update is inlined into the loop, however long the user's is.
#if !defined(__CUDA_ARCH__)
  [[gnu::flatten]]
#endif
  ZERO_HOST_DEVICE void
  run(std::size_t size) const {
    update_kernel const self = *this;  // in registers: what is written could be this object
    constexpr std::size_t width = 2 * value::size;
    std::size_t const whole = size - size % width;
    for (std::size_t i = 0; i < whole; i += width) {
      self.update(
          i, [](auto const* from) { return load_two<real>(from); },
          [](two_packs<real> const& v, auto* to) { store_two(v, to); });
    }
    if (std::size_t const rest = size - whole; rest != 0) {
      self.update(
          whole, [rest](auto const* from) { return load_some<real>(from, rest); },
          [rest](two_packs<real> const& v, auto* to) { store_some(v, to, rest); });
    }
  }

 private:
  template <class Load, class Store>
  ZERO_HOST_DEVICE void update(std::size_t i, Load load, Store store) const {
    two_packs<real> const g = load(gradient + i);
    two_packs<real> p;
    if constexpr (has_master) {
      p = load(master + i);
    } else {
      p = load(parameter + i);
    }
    std::array<two_packs<real>, state_size> s;
    for (std::size_t k = state_size; k-- > 0;) {
      s[k] = load(states[k] + i);
    }
    auto const update_half = [&](std::size_t part) {
      std::array<value, state_size> state;
      for (std::size_t k = state_size; k-- > 0;) {
        state[k] = s[k][part];
      }
      Optimizer::update(constants, p[part], multiplier * g[part], state);
      for (std::size_t k = state_size; k-- > 0;) {
        s[k][part] = state[k];
      }
    };
    update_half(0);
    update_half(1);
    for (std::size_t k = state_size; k-- > 0;) {
      store(s[k], states[k] + i);
    }
    if constexpr (has_master) {
      store(p, master + i);
    }
    store(p, parameter + i);
  }
};

template <class Parameter, class Gradient, class Optimizer>
void typed_update(Optimizer const& optimizer, std::int64_t step, double multiplier,
                  update_piece<Optimizer> const& piece) {
  using kernel = update_kernel<Optimizer, Parameter, Gradient>;
  using real = typename kernel::real;
  using value = typename kernel::value;
  kernel update{static_cast<Parameter*>(piece.parameter.data()),
                static_cast<real*>(piece.master),
                static_cast<Gradient const*>(piece.gradient.data()),
                {},
                value(multiplier),
                optimizer.template at<value>(step)};
  for (std::size_t k = state_count<Optimizer>; k-- > 0;) {
    update.states[k] = static_cast<real*>(piece.states[k]);
  }
  update.run(piece.parameter.size());
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
