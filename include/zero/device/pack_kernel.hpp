// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/config.hpp>
#include <zero/core/dtype.hpp>
#include <zero/device/pack.hpp>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>

/// @file
/// Kernels that compute each element from the same element of their inputs. Such a kernel states
/// what it reads, what it writes and what it does with a pack; who launches it decides how packs
/// get there, and every way gives the same bits.

namespace zero::inline v0::detail {

/// A plain value with
///
///   real         what it computes in: float or double
///   inputs()     a tuple of pointers to the elements that are read
///   outputs()    a tuple of pointers to those that are written; they may be inputs, too
///   operation()  a function of `two_packs<real>` of each input that returns an array of those of
///                each output. This and `active` are called where the kernel runs
///   active()     whether anything is written; inputs may be read all the same
template <class Kernel>
concept pack_kernel = requires(Kernel const& kernel) {
  requires std::floating_point<typename Kernel::real>;
  kernel.inputs();
  kernel.outputs();
  kernel.operation();
  { kernel.active() } -> std::same_as<bool>;
};

/// The elements of `two_packs<Real>`.
template <class Real>
inline constexpr std::size_t width_of = 2 * pack<Real>::size;

/// Compute one pack, the elements from `i` on.
template <class Operation, class Inputs, class Outputs, class Load, class Store>
ZERO_HOST_DEVICE void run_pack(Operation const& function, Inputs const& inputs,
                               Outputs const& outputs, std::size_t i, Load load, Store store) {
  auto const results =
      std::apply([&](auto const*... from) { return function(load(from + i)...); }, inputs);
  [&]<std::size_t... K>(std::index_sequence<K...>) {
    (store(results[K], std::get<K>(outputs) + i), ...);
  }(std::make_index_sequence<std::tuple_size_v<Outputs>>{});
}

/// Compute `count` elements of `outputs` from those of `inputs`, aligned as one element is.
///
/// Flattened: the operation is inlined into the loop, however long the user's is.
template <class Real, class Operation, class Inputs, class Outputs>
#if !defined(__CUDA_ARCH__)
[[gnu::flatten]]
#endif
ZERO_HOST_DEVICE void
run_packs(Operation const& function, Inputs const& inputs, Outputs const& outputs,
          std::size_t first, std::size_t count) {
  // In registers: what is written could be these objects.
  Operation const own_function = function;
  Inputs const own_inputs = inputs;
  Outputs const own_outputs = outputs;
  constexpr std::size_t width = width_of<Real>;
  std::size_t const last = first + count;
  std::size_t const whole = last - count % width;
  for (std::size_t i = first; i < whole; i += width) {
    run_pack(
        own_function, own_inputs, own_outputs, i,
        [](auto const* from) { return load_two<Real>(from); },
        [](two_packs<Real> const& value, auto* to) { store_two(value, to); });
  }
  if (std::size_t const rest = last - whole; rest != 0) {
    run_pack(
        function, inputs, outputs, whole,
        [rest](auto const* from) { return load_some<Real>(from, rest); },
        [rest](two_packs<Real> const& value, auto* to) { store_some(value, to, rest); });
  }
}

/// The same, of a kernel: what its call is.
template <pack_kernel Kernel>
ZERO_HOST_DEVICE void run_kernel(Kernel const& kernel, std::size_t first, std::size_t count) {
  if (kernel.active()) {
    run_packs<typename Kernel::real>(kernel.operation(), kernel.inputs(), kernel.outputs(), first,
                                     count);
  }
}

/// The elements of `two_packs<Real>` as they lie in memory, in words of 16 bytes.
template <class Real, element E>
struct alignas(16) wide_elements {
  static constexpr std::size_t size = width_of<Real>;
  static_assert(size * sizeof(E) % 16 == 0);
  std::uint32_t words[size * sizeof(E) / sizeof(std::uint32_t)];
};

template <class Real, element E>
[[nodiscard]] ZERO_HOST_DEVICE two_packs<Real> load_wide(wide_elements<Real, E> const& from) {
  E lanes[wide_elements<Real, E>::size];
  std::memcpy(lanes, from.words, sizeof lanes);
  return read_lanes<Real>(lanes);
}

/// What a transform of `wide_elements` calls: the inputs of one pack, the values of its outputs. By
/// value: from a reference a GPU's compiler copies byte by byte.
template <pack_kernel Kernel>
struct transform_packs {
  using real = typename Kernel::real;
  Kernel kernel;

  template <class... From>
  [[nodiscard]] ZERO_HOST_DEVICE auto operator()(wide_elements<real, From>... from) const {
    return kernel.operation()(load_wide(from)...);
  }
};

/// Where it puts them: pack `index` of each output.
template <pack_kernel Kernel>
struct put_packs {
  using real = typename Kernel::real;
  Kernel kernel;

  template <class Index, class Results>
  ZERO_HOST_DEVICE void operator()(Index index, Results const& results) const {
    if (!kernel.active()) {
      return;
    }
    auto const outputs = kernel.outputs();
    [&]<std::size_t... K>(std::index_sequence<K...>) {
      (put(results[K], std::get<K>(outputs), static_cast<std::size_t>(index)), ...);
    }(std::make_index_sequence<std::tuple_size_v<decltype(kernel.outputs())>>{});
  }

 private:
  template <class To>
  ZERO_HOST_DEVICE static void put(two_packs<real> const& value, To* to, std::size_t index) {
    To* const first = to + index * width_of<real>;
#if defined(__CUDA_ARCH__)
    store_wide(value, first);
#else
    store_two(value, first);
#endif
  }
};

/// How many of the first n elements a transform takes: whole packs, and none where an array doesn't
/// start at a multiple of 16 bytes.
template <pack_kernel Kernel>
[[nodiscard]] std::size_t elements_in_packs(Kernel const& kernel, std::size_t n) {
  auto const aligned = [](auto const*... first) {
    return ((reinterpret_cast<std::uintptr_t>(first) % 16 == 0) && ...);
  };
  bool const all = std::apply(aligned, kernel.inputs()) && std::apply(aligned, kernel.outputs());
  return all ? n - n % width_of<typename Kernel::real> : 0;
}

}  // namespace zero::inline v0::detail
