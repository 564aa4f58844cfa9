// SPDX-License-Identifier: MIT
#include <zero/device/host.hpp>
#include <zero/optim/sgd.hpp>
#include <zero/train/control.hpp>
#include <zero/train/step_kernels.hpp>

#include <doctest/doctest.h>
#include <support/by_grain.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

using namespace zero::detail;
using zero::dtype;
using zero::largest_value;
using zero::norm_sum;

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double quiet_nan = std::numeric_limits<double>::quiet_NaN();

/// Run a kernel over [0, 1), as `Device::launch` does.
template <class Kernel>
void once(Kernel const& kernel) {
  kernel(0, 1);
}

/// What ranks have told each other: a header and flags each, at some distance.
class conversation {
 public:
  explicit conversation(std::vector<step_header> const& headers, std::size_t flags = 0)
      : bytes_{(sizeof(step_header) + flags + 15) / 16 * 16}, ranks_{headers.size()},
        all_(bytes_ * headers.size()) {
    for (std::size_t rank = 0; rank < headers.size(); ++rank) {
      std::memcpy(all_.data() + rank * bytes_, &headers[rank], sizeof(step_header));
    }
  }
  void set_flag(std::size_t rank, std::size_t id) {
    all_[rank * bytes_ + sizeof(step_header) + id] = std::byte{1};
  }
  [[nodiscard]] step_messages view() const {
    return {all_.data(), bytes_, static_cast<std::uint32_t>(ranks_)};
  }

 private:
  std::size_t bytes_;
  std::size_t ranks_;
  std::vector<std::byte> all_;
};

constexpr step_header header(std::uint64_t microbatches = 1, std::uint64_t announced = 1,
                             std::uint64_t order = 5, std::uint64_t optimizer = 6,
                             double magnitude = 0) {
  return {{microbatches, announced, order}, optimizer, magnitude};
}

/// What rank 0's `combine_headers` finds.
step_state combined(std::vector<step_header> const& headers, std::size_t here = 0) {
  conversation const all{headers};
  step_state state{};
  state.mine = headers[here];
  once(combine_headers{&state, all.view()});
  return state;
}

}  // namespace

TEST_CASE("a step begins with nothing of the last one, but for a fault") {
  step_state state;
  std::memset(static_cast<void*>(&state), 0xff, sizeof state);
  state.report.fault = step_fault::none;
  norm_sum sum{77};
  once(begin_step{&state, &sum, header(3, 4, 5, 6)});
  CHECK(state.mine.over.microbatches == 3);
  CHECK(state.mine.over.announced == 4);
  CHECK(state.mine.over.order == 5);
  CHECK(state.mine.optimizer == 6);
  CHECK(state.report.norm == 0);
  CHECK(state.report.skipped == 0);
  CHECK(state.report.updating == 0);
  CHECK(state.report.fault == step_fault::none);
  CHECK(state.largest.value == 0);
  CHECK(sum == norm_sum{});
  state.report.fault = step_fault::order;
  state.report.rank = 2;
  state.report.expected = 7;
  state.report.actual = 8;
  once(begin_step{&state, &sum, header(3, 4, 5, 6)});
  CHECK(state.report.fault == step_fault::order);
  CHECK(state.report.rank == 2);
  CHECK(state.report.expected == 7);
  CHECK(state.report.actual == 8);
}

TEST_CASE("flags are written one a byte, up to 768 of them, and none behind the last") {
  for (std::uint32_t const size : {0U, 1U, 63U, 64U, 65U, 127U, 768U}) {
    std::vector<std::uint8_t> flags(size + 1, 9);
    write_flags kernel{flags.data(), size, {}};
    for (std::uint32_t i = 0; i < size; ++i) {
      kernel.bits[i / 64] |= std::uint64_t{i % 3 == 0 || i % 64 == 63 ? 1U : 0U} << (i % 64);
    }
    once(kernel);
    for (std::uint32_t i = 0; i < size; ++i) {
      CHECK(flags[i] == (i % 3 == 0 || i % 64 == 63 ? 1 : 0));
    }
    CHECK(flags[size] == 9);
  }
}

TEST_CASE("the largest magnitude of pieces is that of all, and a NaN is infinite") {
  for (std::size_t const n : {1U, 7U, 8U, 9U, 40U}) {
    for (std::size_t place = 0; place < n; ++place) {
      std::vector<zero::bfloat16> gradient(n, zero::bfloat16{-0.5F});
      auto const found = [&] {
        return test::sum_by_grain<largest_value>(find_magnitude{gradient.data(), dtype::bfloat16},
                                                 n)
            .value;
      };
      CHECK(found() == 0.5);
      gradient[place] = zero::bfloat16{-3.0F};
      CHECK(found() == 3.0);
      gradient[place] = zero::bfloat16{static_cast<float>(quiet_nan)};
      CHECK(found() == infinity);
    }
  }
}

TEST_CASE("a message is the header with the magnitude that was found, at any address") {
  step_state state{};
  state.mine = header(1, 2, 3, 4, 99);
  state.largest.value = 2.5;
  std::array<std::byte, sizeof(step_header) + 2> message{};
  once(write_message{&state, message.data() + 1});
  step_header const told = step_messages{message.data() + 1, 64, 1}.header(0);
  CHECK(told.over.order == 3);
  CHECK(told.optimizer == 4);
  CHECK(told.magnitude == 2.5);
  CHECK(state.mine.magnitude == 2.5);
  CHECK(message.front() == std::byte{0});
  CHECK(message.back() == std::byte{0});
}

TEST_CASE(
    "ranks that agree take the largest magnitude of all, and average over the micro-batches") {
  for (std::size_t const ranks : {1U, 2U, 3U, 4U, 8U}) {
    for (std::size_t largest = 0; largest < ranks; ++largest) {
      std::vector<step_header> headers(ranks, header(4, 4));
      headers[largest].magnitude = 8;
      for (std::size_t here = 0; here < ranks; ++here) {
        step_state const state = combined(headers, here);
        CHECK(state.report.fault == step_fault::none);
        CHECK(state.mine.magnitude == 8);
        CHECK(state.multiplier == 0.25);
      }
    }
  }
}

TEST_CASE("of several differences the first rank's first one is reported") {
  auto const fault_of = [](std::vector<step_header> const& headers, std::size_t here = 0) {
    return combined(headers, here).report;
  };
  step_header const mine = header(1, 2, 3, 4);
  auto report = fault_of({mine, header(5, 6, 7, 8)});
  CHECK(report.fault == step_fault::microbatches);
  CHECK(report.rank == 1);
  CHECK(report.expected == 1);
  CHECK(report.actual == 5);

  report = fault_of({mine, header(1, 6, 7, 8)});
  CHECK(report.fault == step_fault::announced);
  CHECK(report.expected == 2);
  CHECK(report.actual == 6);

  report = fault_of({mine, header(1, 2, 7, 8)});
  CHECK(report.fault == step_fault::order);
  report = fault_of({mine, header(1, 2, 3, 8)});
  CHECK(report.fault == step_fault::optimizer);
  CHECK(report.expected == 4);
  CHECK(report.actual == 8);

  report = fault_of({mine, mine, header(1, 2, 3, 8), header(9, 2, 3, 4)});
  CHECK(report.fault == step_fault::optimizer);
  CHECK(report.rank == 2);
  report = fault_of({header(9, 2, 3, 4), header(1, 2, 3, 8), mine}, 2);  // as the last rank sees it
  CHECK(report.fault == step_fault::microbatches);
  CHECK(report.rank == 0);
}

TEST_CASE("the norm is of all ranks' sums, over the micro-batches, and clips what is longer") {
  // Elements 3 and -4 on two ranks, summed over two micro-batches: a mean of norm 2.5.
  std::array<float, 9> first{};
  std::array<float, 1> const second{-4};
  first[8] = 3;
  step_state state{};
  state.mine = header(2, 2, 0, 0, 4);
  state.multiplier = 0.5;
  std::array<norm_sum, 2> const sums{
      test::sum_by_grain<norm_sum>(sum_squares{&state, first.data(), dtype::float32}, 9),
      test::sum_by_grain<norm_sum>(sum_squares{&state, second.data(), dtype::float32}, 1)};
  auto const clipped = [&](double largest) {
    step_state out = state;
    once(clip_gradient{&out, sums.data(), 2, largest});
    CHECK(out.report.norm == 2.5);
    CHECK(out.report.skipped == 0);
    return out.multiplier;
  };
  CHECK(clipped(infinity) == 0.5);
  CHECK(clipped(2.5) == 0.5);
  CHECK(clipped(1.25) == 0.25);

  state.mine.magnitude = 0;
  std::array<norm_sum, 1> const nothing{};
  once(clip_gradient{&state, nothing.data(), 1, 1.0});
  CHECK(state.report.norm == 0);
  CHECK(state.multiplier == 0.5);
}

TEST_CASE("a norm that isn't finite skips the step and is reported; a fault reports no update") {
  step_state state{};
  state.mine = header(1, 1, 0, 0, infinity);
  state.multiplier = 1;
  std::array<norm_sum, 1> const sums{};
  once(clip_gradient{&state, sums.data(), 1, 1.0});
  CHECK(state.report.norm == infinity);
  CHECK(state.report.skipped == 1);
  CHECK(state.multiplier == 1);
  CHECK_FALSE(may_update(state));

  step_state other{};
  CHECK(may_update(other));
  once(mark_updating{&other, 1});
  CHECK(other.report.updating == 1);
  other.report.fault = step_fault::order;
  CHECK_FALSE(may_update(other));
  once(mark_updating{&other, 0});
  CHECK(other.report.updating == 1);
}

TEST_CASE(
    "a parameter with a gradient on any rank gets a count and constants, the others nothing") {
  using map = control_map<zero::host, zero::plain_sgd>;
  using constants_float = map::constants<float>;
  using constants_double = map::constants<double>;
  constexpr std::size_t parameters = 5;
  conversation all{{header(), header(), header()}, parameters};
  all.set_flag(0, 1);
  all.set_flag(2, 1);
  all.set_flag(2, 3);
  all.set_flag(1, 4);
  zero::plain_sgd const optimizer{.learning_rate = 0.1, .weight_decay = 0.25};
  for (bool const runs : {true, false}) {
    step_state state{};
    state.report.skipped = runs ? 0 : 1;
    alignas(16) std::array<std::byte, parameters * 48> constants{};
    std::array<std::int64_t, parameters> steps{10, 20, 30, 40, 50};
    std::array<std::uint8_t, parameters> had{7, 7, 7, 7, 7};
    std::array<std::uint8_t, parameters> types{};
    types[3] = static_cast<std::uint8_t>(dtype::float64);
    count_updates<map, zero::plain_sgd> const kernel{&state,           &optimizer,  all.view(),
                                                     constants.data(), 48,          steps.data(),
                                                     had.data(),       types.data()};
    kernel(1, 3);  // all but the first and the last
    kernel(4, 1);
    if (!runs) {
      CHECK(had == std::array<std::uint8_t, parameters>{7, 0, 0, 0, 0});
      CHECK(steps == std::array<std::int64_t, parameters>{10, 20, 30, 40, 50});
      CHECK(std::ranges::all_of(constants, [](std::byte each) { return each == std::byte{0}; }));
      continue;
    }
    CHECK(had == std::array<std::uint8_t, parameters>{7, 1, 0, 1, 1});
    CHECK(steps == std::array<std::int64_t, parameters>{10, 21, 30, 41, 51});
    constants_float single;
    constants_double wide;
    std::memcpy(static_cast<void*>(&single), constants.data() + 48, sizeof single);
    std::memcpy(static_cast<void*>(&wide), constants.data() + std::size_t{3} * 48, sizeof wide);
    CHECK(single.learning_rate[3] == 0.1F);
    CHECK(single.weight_decay[0] == 0.25F);
    CHECK(wide.learning_rate[1] == 0.1);
    CHECK(std::all_of(constants.begin() + 96, constants.begin() + 144,
                      [](std::byte each) { return each == std::byte{0}; }));
  }
}

TEST_CASE(
    "an update by pieces is the formula's, for a parameter and its master, or doesn't happen") {
  using kernel = update_elements<zero::sgd, zero::bfloat16, float>;
  for (std::size_t const n : {1U, 7U, 8U, 9U, 29U}) {
    for (std::uint8_t const had : {std::uint8_t{0}, std::uint8_t{1}}) {
      // p = 1 + i, b = 2, g = 4 i / 4: b = b / 2 + g and p -= b / 4, exactly.
      step_state state{};
      state.multiplier = 0.25;
      auto const constants = zero::sgd{.learning_rate = 0.25, .momentum = 0.5}.at<pack<float>>(1);
      std::vector<zero::bfloat16> parameter(n + 1, zero::bfloat16{-7.0F});
      std::vector<float> master(n + 1, -7.0F);
      std::vector<float> momentum(n + 1, 2.0F);
      std::vector<float> gradient(n + 1);
      for (std::size_t i = 0; i < n; ++i) {
        master[i] = 1 + static_cast<float>(i);
        gradient[i] = 4 * static_cast<float>(i);
      }
      kernel update{};
      update.state = &state;
      update.had = &had;
      update.constants = &constants;
      update.parameter = parameter.data();
      update.master = master.data();
      update.gradient = gradient.data();
      update.states = {momentum.data()};
      test::by_grain(update, n);
      for (std::size_t i = 0; i < n; ++i) {
        auto const x = static_cast<float>(i);
        float const b = had == 0 ? 2 : 1 + x;
        float const p = had == 0 ? 1 + x : 1 + x - b / 4;
        CHECK(momentum[i] == b);
        CHECK(master[i] == p);
        CHECK(static_cast<float>(parameter[i]) == (had == 0 ? -7 : p));
      }
      CHECK(master[n] == -7);
      CHECK(momentum[n] == 2);
      CHECK(static_cast<float>(parameter[n]) == -7);
    }
  }
}
