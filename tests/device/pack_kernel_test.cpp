// SPDX-License-Identifier: MIT
#include <doctest/doctest.h>

#include <zero/device/pack_kernel.hpp>

#include <array>
#include <cstddef>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <vector>

using zero::bfloat16;
using zero::detail::elements_in_packs;
using zero::detail::pack_kernel;
using zero::detail::put_packs;
using zero::detail::transform_packs;
using zero::detail::two_packs;
using zero::detail::wide_elements;

namespace {

/// to = 2 from + to, and the same as bfloat16.
template <class Real, class From, class Copy>
struct double_and_add {
  using real = Real;

  From const* from;
  Real* to;
  Copy* copy;
  bool on = true;

  struct function {
    auto operator()(two_packs<Real> const& a, two_packs<Real> const& b) const {
      two_packs<Real> const sum{Real{2} * a[0] + b[0], Real{2} * a[1] + b[1]};
      return std::array<two_packs<Real>, 2>{sum, sum};
    }
  };
  [[nodiscard]] auto inputs() const { return std::tuple{from, static_cast<Real const*>(to)}; }
  [[nodiscard]] auto outputs() const { return std::tuple{to, copy}; }
  [[nodiscard]] bool active() const { return on; }
  [[nodiscard]] function operation() const { return {}; }
};
using mixed = double_and_add<float, bfloat16, bfloat16>;

struct without_active : mixed {
  void active() const;
};
struct of_integers : mixed {
  using real = int;
};
static_assert(pack_kernel<mixed>);
static_assert(pack_kernel<double_and_add<double, double, double>>);
static_assert(!pack_kernel<without_active>);
static_assert(!pack_kernel<of_integers>);

static_assert(sizeof(wide_elements<float, bfloat16>) == 16);
static_assert(sizeof(wide_elements<float, float>) == 32);
static_assert(sizeof(wide_elements<double, double>) == 32);
static_assert(alignof(wide_elements<float, float>) == 16);

/// from[i] = i, to[i] = 100, the copy 0, with space before and behind.
struct arrays {
  static constexpr std::size_t size = 64;
  alignas(16) std::array<bfloat16, size> from;
  alignas(16) std::array<float, size> to;
  alignas(16) std::array<bfloat16, size> copy;

  arrays() {
    for (std::size_t i = 0; i < size; ++i) {
      from[i] = bfloat16(static_cast<float>(i));
      to[i] = 100;
      copy[i] = bfloat16(0.0F);
    }
  }
  mixed kernel() { return {from.data(), to.data(), copy.data()}; }

  /// Whether the elements [first, last) are 2 i + 100, and no other one has changed.
  [[nodiscard]] bool done(std::size_t first, std::size_t last) const {
    bool good = true;
    for (std::size_t i = 0; i < size; ++i) {
      bool const inside = i >= first && i < last;
      auto const sum = static_cast<float>(2 * i + 100);  // up to 226: exact in bfloat16
      good = good && to[i] == (inside ? sum : 100.0F) &&
             static_cast<float>(copy[i]) == (inside ? sum : 0.0F);
    }
    return good;
  }
};

/// What a GPU does with the first packs.
template <class Kernel>
void transform(Kernel const& kernel, std::size_t packs) {
  for (std::size_t i = 0; i < packs; ++i) {
    auto const read = [i](auto const* from) {
      using from_type = std::remove_cvref_t<decltype(*from)>;
      wide_elements<typename Kernel::real, from_type> out;
      std::memcpy(&out, from + i * out.size, sizeof out);
      return out;
    };
    put_packs<Kernel>{kernel}(
        i, std::apply(
               [&](auto const*... from) { return transform_packs<Kernel>{kernel}(read(from)...); },
               kernel.inputs()));
  }
}

}  // namespace

TEST_CASE("a range of any length and start is computed, and nothing else") {
  for (std::size_t first = 0; first < 10; ++first) {
    for (std::size_t count = 0; count + first < 40; ++count) {
      arrays all;
      zero::detail::run_kernel(all.kernel(), first, count);
      CHECK(all.done(first, first + count));
    }
  }
}

TEST_CASE("a transform of packs computes them, and nothing else") {
  for (std::size_t packs = 0; packs <= 8; ++packs) {
    arrays all;
    transform(all.kernel(), packs);
    CHECK(all.done(0, 8 * packs));
  }
}

TEST_CASE("an inactive kernel writes nothing, in packs and in ranges") {
  arrays all;
  mixed kernel = all.kernel();
  kernel.on = false;
  transform(kernel, 8);
  zero::detail::run_kernel(kernel, 0, arrays::size);
  CHECK(all.done(0, 0));
}

TEST_CASE("a transform takes whole packs") {
  arrays all;
  struct expected {
    std::size_t n, of_floats, of_doubles;
  };
  for (auto const& [n, of_floats, of_doubles] :
       {expected{0, 0, 0}, expected{1, 0, 0}, expected{3, 0, 0}, expected{4, 0, 4},
        expected{7, 0, 4}, expected{8, 8, 8}, expected{9, 8, 8}, expected{12, 8, 12},
        expected{15, 8, 12}, expected{16, 16, 16}, expected{1003, 1000, 1000},
        expected{1007, 1000, 1004}}) {
    CHECK(elements_in_packs(all.kernel(), n) == of_floats);
    std::vector<double> doubles(4);
    double_and_add<double, double, double> const wider{doubles.data(), doubles.data(),
                                                       doubles.data()};
    CHECK(elements_in_packs(wider, n) == of_doubles);
  }
}

TEST_CASE("a transform takes nothing where an array doesn't start at a multiple of 16 bytes") {
  arrays all;
  for (std::size_t shift = 1; shift < 8; ++shift) {
    mixed kernel = all.kernel();
    kernel.from += shift;
    CHECK(elements_in_packs(kernel, 40) == 0);
    kernel = all.kernel();
    kernel.copy += shift;
    CHECK(elements_in_packs(kernel, 40) == 0);
    kernel = all.kernel();
    kernel.to += shift;
    CHECK(elements_in_packs(kernel, 40) == (shift == 4 ? 40 : 0));
  }
  mixed kernel = all.kernel();
  kernel.from += 8;
  kernel.to += 4;
  kernel.copy += 16;
  CHECK(elements_in_packs(kernel, 40) == 40);
}
