// SPDX-License-Identifier: MIT
#pragma once

#include <doctest/doctest.h>
#include <support/same_bits.hpp>

#include <zero/core/dtype.hpp>
#include <zero/optim/fused_update.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <vector>

/// @file
/// What holds for every optimizer, a user's own included: the same bits however a shard is cut, the
/// rounding of the parameter, the multiplier. Use: `check(optimizer)` in a test case.

namespace optimizer_conformance {

/// A shard of `size` elements between guards, at an address aligned as one element is.
template <class Optimizer, class Parameter, class Gradient>
class shard {
 public:
  using real = zero::accumulate_type<Parameter>;
  static constexpr std::size_t states = zero::state_count<Optimizer>;
  static constexpr std::size_t guard = 9;

  shard(std::size_t size, unsigned seed) : size_{size} {
    std::mt19937 random{seed};
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < size + 2 * guard; ++i) {
      parameter_.push_back(Parameter(normal(random)));
      master_.push_back(static_cast<real>(static_cast<float>(parameter_.back())));
      gradient_.push_back(Gradient(normal(random) * std::ldexp(1.0F, -static_cast<int>(i % 7))));
      for (auto& state : state_) {  // could be an average of squares
        state.push_back(static_cast<real>(std::abs(normal(random))));
      }
    }
  }

  zero::update_piece<Optimizer> piece(std::size_t first, std::size_t count) {
    std::size_t const at = guard + first;
    zero::update_piece<Optimizer> out{
        .parameter = std::span{parameter_}.subspan(at, count),
        .master = sizeof(Parameter) == 2 ? master_.data() + at : nullptr,
        .gradient = std::span{gradient_}.subspan(at, count)};
    for (std::size_t k = 0; k < states; ++k) {
      out.states[k] = state_[k].data() + at;
    }
    return out;
  }

  std::vector<Parameter>& parameter() { return parameter_; }
  std::vector<Gradient>& gradient() { return gradient_; }
  std::vector<real>& master() { return master_; }
  [[nodiscard]] std::size_t size() const { return size_; }

  friend bool operator==(shard const& a, shard const& b) {
    bool equal =
        test::same_bits(a.parameter_, b.parameter_) && test::same_bits(a.master_, b.master_);
    for (std::size_t k = 0; k < states; ++k) {
      equal = equal && test::same_bits(a.state_[k], b.state_[k]);
    }
    return equal;
  }

  /// What lies around the shard, with its own elements set to zero.
  [[nodiscard]] shard outside() const {
    shard out = *this;
    auto const clear = [&](auto& values) {
      using value = typename std::remove_reference_t<decltype(values)>::value_type;
      std::fill_n(values.begin() + guard, size_, value{});
    };
    clear(out.parameter_);
    clear(out.master_);
    for (auto& state : out.state_) {
      clear(state);
    }
    return out;
  }

 private:
  std::size_t size_;
  std::vector<Parameter> parameter_;
  std::vector<real> master_;
  std::vector<Gradient> gradient_;
  std::array<std::vector<real>, states> state_;
};

/// Random cuts and single elements give the bits that one piece gives; nothing beyond them changes.
template <class Parameter, class Gradient, class Optimizer>
void check_cuts(Optimizer const& optimizer) {
  std::mt19937 random{7};
  for (unsigned const size :
       {0U, 1U, 2U, 3U, 4U, 5U, 7U, 8U, 9U, 15U, 16U, 17U, 31U, 64U, 100U, 1001U}) {
    shard<Optimizer, Parameter, Gradient> const start{size, size};
    auto whole = start;
    auto cut = start;
    auto single = start;
    for (std::int64_t step = 1; step <= 3; ++step) {
      zero::fused_update(optimizer, step, 0.37, whole.piece(0, size));
      for (std::size_t first = 0; first < size;) {
        std::size_t const count =
            std::min(size - first, std::uniform_int_distribution<std::size_t>{0, 40}(random));
        zero::fused_update(optimizer, step, 0.37, cut.piece(first, count));
        first += count;
      }
      for (std::size_t i = 0; i < size; ++i) {
        zero::fused_update(optimizer, step, 0.37, single.piece(i, 1));
      }
    }
    CAPTURE(size);
    CHECK(cut == whole);
    CHECK(single == whole);
    CHECK(whole.outside() == start.outside());
    CHECK((size == 0 || !(whole == start)));
  }
}

/// The parameter is the master rounded; the gradient is only read.
template <class Parameter, class Gradient, class Optimizer>
void check_master(Optimizer const& optimizer) {
  shard<Optimizer, Parameter, Gradient> data{101, 3};
  auto const gradient = data.gradient();
  auto wide = data;
  for (std::int64_t step = 1; step <= 3; ++step) {
    zero::fused_update(optimizer, step, 1.0, data.piece(0, data.size()));
  }
  CHECK(std::memcmp(gradient.data(), data.gradient().data(), gradient.size() * sizeof(Gradient)) ==
        0);
  bool rounded = true;
  for (std::size_t i = 0; i < data.master().size(); ++i) {
    rounded = rounded && data.parameter()[i].bits() == Parameter(data.master()[i]).bits();
  }
  CHECK(rounded);

  // The same update of float parameters gives that master.
  shard<Optimizer, float, float> reference{101, 3};
  for (std::size_t i = 0; i < data.master().size(); ++i) {
    reference.parameter()[i] = static_cast<float>(wide.parameter()[i]);
    reference.gradient()[i] = static_cast<float>(wide.gradient()[i]);
  }
  for (std::int64_t step = 1; step <= 3; ++step) {
    zero::fused_update(optimizer, step, 1.0, reference.piece(0, reference.size()));
  }
  CHECK(std::memcmp(reference.parameter().data(), data.master().data(),
                    data.master().size() * sizeof(float)) == 0);
}

/// A power of two in the multiplier is one in the gradient.
template <class Optimizer>
void check_multiplier(Optimizer const& optimizer) {
  shard<Optimizer, float, float> multiplied{50, 5};
  auto scaled = multiplied;
  for (float& g : scaled.gradient()) {
    g *= 0.25F;
  }
  zero::fused_update(optimizer, 1, 0.25, multiplied.piece(0, 50));
  zero::fused_update(optimizer, 1, 1.0, scaled.piece(0, 50));
  CHECK(multiplied == scaled);
}

template <class Optimizer>
void check(Optimizer const& optimizer) {
  static_assert(zero::elementwise_optimizer<Optimizer>);
  CHECK_NOTHROW(optimizer.validate());
  check_cuts<float, float>(optimizer);
  check_cuts<double, double>(optimizer);
  check_cuts<zero::bfloat16, float>(optimizer);
  check_cuts<zero::bfloat16, zero::bfloat16>(optimizer);
  check_cuts<zero::float16, float>(optimizer);
  check_cuts<zero::float16, zero::float16>(optimizer);
  check_master<zero::bfloat16, float>(optimizer);
  check_master<zero::bfloat16, zero::bfloat16>(optimizer);
  check_master<zero::float16, float>(optimizer);
  check_master<zero::float16, zero::float16>(optimizer);
  check_multiplier(optimizer);
}

}  // namespace optimizer_conformance
