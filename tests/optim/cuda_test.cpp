// SPDX-License-Identifier: MIT
// Updates on the CUDA device have the host's bits, whichever way their elements go.
#include <zero/device/cuda.hpp>
#include <zero/optim/adamw.hpp>
#include <zero/optim/fused_update.hpp>
#include <zero/optim/sgd.hpp>
#include <zero/train/step_kernels.hpp>

#include <doctest/doctest.h>
#if defined(ZERO_FAKE_CUDA)
#include <fake/cuda.hpp>
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace {

constexpr double multiplier = 0.5;
constexpr std::int64_t count_of_steps = 3;

/// The host's elements and a copy on the device.
template <class T>
class both {
 public:
  both(zero::cuda_stream& stream, std::size_t n, unsigned seed) : stream_{&stream}, here_(n) {
    for (T& each : here_) {
      seed = seed * 1664525U + 1013904223U;
      each = static_cast<T>(static_cast<float>(seed >> 8U & 0xffffU) / 65536.0F);  // in [0, 1)
    }
    there_ = static_cast<T*>(zero::cuda::allocate(n * sizeof(T)));
    zero::cuda::upload(stream, std::span{here_}, std::span{there_, n});
  }
  both(both const&) = delete;
  both& operator=(both const&) = delete;
  ~both() { zero::cuda::deallocate(there_, here_.size() * sizeof(T)); }

  [[nodiscard]] T* here(std::size_t at) { return here_.data() + at; }
  [[nodiscard]] T* there(std::size_t at) const { return there_ + at; }
  [[nodiscard]] bool same() const {
    std::vector<T> read(here_.size());
    zero::cuda::download(*stream_, std::span{there_, read.size()}, std::span{read});
    return std::memcmp(read.data(), here_.data(), read.size() * sizeof(T)) == 0;
  }

 private:
  zero::cuda_stream* stream_;
  std::vector<T> here_;
  T* there_ = nullptr;
};

/// The bytes of a value, in the device's memory.
template <class T>
class one {
 public:
  one(zero::cuda_stream& stream, T const& value)
      : words_((sizeof(T) + 3) / 4),
        memory_{static_cast<float*>(zero::cuda::allocate(words_.size() * 4))} {
    std::memcpy(words_.data(), &value, sizeof value);
    zero::cuda::upload(stream, std::span{words_}, std::span{memory_, words_.size()});
  }
  one(one const&) = delete;
  one& operator=(one const&) = delete;
  ~one() { zero::cuda::deallocate(memory_, words_.size() * 4); }

  [[nodiscard]] T* get() const { return reinterpret_cast<T*>(memory_); }

 private:
  std::vector<float> words_;
  float* memory_;
};

/// Update the elements [first, first + n) in both places; the others are there to be left alone.
/// Returns whether both are the same, all over.
template <class Parameter, class Gradient, class Optimizer>
bool update_both(zero::cuda_stream& stream, Optimizer const& optimizer, std::size_t first,
                 std::size_t n, bool had) {
  using kernel = zero::detail::update_elements<Optimizer, Parameter, Gradient>;
  using real = typename kernel::real;
  std::size_t const size = first + n + 9;
  both<Parameter> parameter{stream, size, 1};
  both<Gradient> gradient{stream, size, 2};
  both<real> master{stream, size, 3};
  both<real> state0{stream, size, 4};
  both<real> state1{stream, size, 5};
  zero::detail::step_state step{};
  step.multiplier = multiplier;
  one<zero::detail::step_state> const control{stream, step};
  one<std::uint8_t> const flag{stream, static_cast<std::uint8_t>(had ? 1 : 0)};
  one const constants{stream, optimizer.template at<typename kernel::value>(count_of_steps)};

  kernel update{};
  zero::update_piece<Optimizer> piece{};
  piece.parameter = std::span{parameter.here(first), n};
  piece.gradient = std::span{gradient.here(first), n};
  update.parameter = parameter.there(first);
  update.gradient = gradient.there(first);
  if constexpr (kernel::has_master) {
    piece.master = master.here(first);
    update.master = master.there(first);
  }
  if constexpr (zero::state_count<Optimizer> > 0) {
    piece.states[0] = state0.here(first);
    update.states[0] = state0.there(first);
  }
  if constexpr (zero::state_count<Optimizer> > 1) {
    piece.states[1] = state1.here(first);
    update.states[1] = state1.there(first);
  }
  update.state = control.get();
  update.had = flag.get();
  update.constants = constants.get();
  zero::cuda::launch(stream, n, update);
  if (had) {
    zero::fused_update(optimizer, count_of_steps, multiplier, piece);
  }
  return parameter.same() && gradient.same() && master.same() && state0.same() && state1.same();
}

template <class Optimizer>
void check(Optimizer const& optimizer) {
  zero::cuda_stream stream;
  for (std::size_t const first : {0U, 1U, 4U, 8U}) {
    for (std::size_t const n : {0U, 1U, 3U, 4U, 7U, 8U, 9U, 16U, 1003U, 70000U}) {
      for (bool const had : {true, false}) {
        CAPTURE(first);
        CAPTURE(n);
        CAPTURE(had);
        CHECK(update_both<float, float>(stream, optimizer, first, n, had));
        CHECK(update_both<double, double>(stream, optimizer, first, n, had));
        CHECK(update_both<zero::bfloat16, zero::bfloat16>(stream, optimizer, first, n, had));
        CHECK(update_both<zero::bfloat16, float>(stream, optimizer, first, n, had));
        CHECK(update_both<zero::float16, zero::float16>(stream, optimizer, first, n, had));
        CHECK(update_both<zero::float16, float>(stream, optimizer, first, n, had));
      }
    }
  }
}

}  // namespace

TEST_CASE("AdamW has the host's bits at every alignment and size") { check(zero::adamw{}); }

TEST_CASE("SGD has the host's bits at every alignment and size") {
  check(zero::sgd{.learning_rate = 0.1, .momentum = 0.9});
  check(zero::plain_sgd{.learning_rate = 0.1});
}

#if defined(ZERO_FAKE_CUDA)
TEST_CASE("whole packs are one launch, a rest is another, and what isn't aligned is one") {
  zero::cuda_stream stream;
  struct expected {
    std::size_t first, n;
    std::uint64_t launches;
  };
  for (auto const& [first, n, launches] :
       {expected{0, 0, 0}, expected{0, 7, 1}, expected{0, 8, 1}, expected{0, 1000, 1},
        expected{0, 1003, 2}, expected{8, 1000, 1}, expected{1, 1000, 1}, expected{4, 1003, 1}}) {
    fake::reset_counts();
    CHECK(update_both<zero::bfloat16, float>(stream, zero::adamw{}, first, n, true));
    CHECK(fake::call_counts()["zeroFakeLaunch"] == launches);
  }
}
#endif
