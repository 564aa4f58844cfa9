// SPDX-License-Identifier: MIT
#include <doctest/doctest.h>
#include <support/counting_allocator.hpp>
#include <support/engine.hpp>
#include <support/owning_tensor.hpp>
#include <zero/comm/run_threads.hpp>
#include <zero/core/bfloat16.hpp>
#include <zero/optim/adamw.hpp>
#include <zero/train/sharded_model.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

using zero::bfloat16;
using units_type = std::vector<std::vector<zero::any_parameter>>;
using model_type = zero::sharded_model<zero::thread_communicator, zero::adamw>;

constexpr std::chrono::seconds deadline{20};
constexpr zero::thread_options threads{.deadline = deadline};
constexpr int world_sizes[] = {1, 2, 3, 4, 8};

zero::options chosen() {
  zero::options out;
  out.deadline = deadline;
  out.precision = zero::bf16;
  return out;
}

/// Values that say which parameter and which index they belong to.
float value_of(std::size_t id, std::size_t index) {
  return static_cast<float>((index * 2654435761U + id * 40503U) % 65521U) / 256.0F - 100.0F;
}

/// What initialisers were asked for.
struct calls {
  std::mutex mutex;
  std::vector<std::pair<std::size_t, std::size_t>> ranges;  // first, count
};

template <class T>
auto initialiser(std::size_t id, calls* log = nullptr) {
  return [id, log](std::span<T> out, std::size_t first) {
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = static_cast<T>(value_of(id, first + i));
    }
    if (log != nullptr) {
      std::lock_guard const lock{log->mutex};
      log->ranges.emplace_back(first, out.size());
    }
  };
}

/// Uneven, of two types, with a scalar, an empty parameter, a frozen and a tied one.
units_type small_units() {
  units_type units;
  units.push_back({zero::parameter<float>("p0", {37, 5}, initialiser<float>(0)),
                   zero::parameter<bfloat16>("p1", {61}, initialiser<bfloat16>(1))});
  units.push_back({zero::parameter<float>("p2", {}, initialiser<float>(2)),
                   zero::parameter<float>("p3", {0, 8}, initialiser<float>(3))});
  units.push_back({zero::parameter<bfloat16>("p4", {3, 3, 3}, initialiser<bfloat16>(4)),
                   zero::parameter<bfloat16>("p5", {100}, initialiser<bfloat16>(5)).frozen(),
                   zero::tied("p0")});
  units.push_back({zero::parameter<float>("p6", {501}, initialiser<float>(6))});
  return units;
}

std::size_t const small_sizes[] = {185, 61, 1, 0, 27, 100, 501};

/// All parameters, as bytes, read under evaluation leases.
std::vector<std::byte> whole_values(model_type& sharded) {
  std::vector<std::byte> out;
  auto evaluation = sharded.evaluation();
  for (std::size_t u = 0; u < sharded.units(); ++u) {
    auto const lease = evaluation.forward(u);
    for (std::size_t const id : sharded.layout().units()[u].parameters) {
      auto const append = [&](auto elements) {
        auto const bytes = std::as_bytes(elements);
        out.insert(out.end(), bytes.begin(), bytes.end());
      };
      sharded.layout().parameters()[id].spec.value == zero::dtype::float32
          ? append(lease.template parameter<float>(id))
          : append(lease.template parameter<bfloat16>(id));
    }
  }
  return out;
}

/// `unit_count` units of two parameters, which together have n * n + n floats.
units_type square_units(std::size_t unit_count, std::size_t n) {
  units_type units;
  for (std::size_t u = 0; u < unit_count; ++u) {
    units.push_back(
        {zero::parameter<float>("w" + std::to_string(u), {n, n}, initialiser<float>(2 * u)),
         zero::parameter<float>("b" + std::to_string(u), {n}, initialiser<float>(2 * u + 1))});
  }
  return units;
}

}  // namespace

TEST_CASE("a model that is built sharded never takes more than the plan's peak and one unit") {
  if (!counting_allocator::available) {
    return;
  }
  constexpr std::size_t n = 500;
  constexpr long unit_bytes = 4 * (n * n + n);
  constexpr std::size_t unit_count = 6;
  for (zero::accumulation const policy : {zero::accumulation(zero::reduce_per_microbatch{}),
                                          zero::accumulation(zero::local_accumulate{})}) {
    for (zero::stage const at :
         {zero::stage(zero::stage3{.prefetch = 0}), zero::stage(zero::stage3{.prefetch = 1})}) {
      for (int const ranks : {8, 3}) {
        std::atomic<long> planned{0};
        long peak_of_all = 0;
        zero::run_threads(
            ranks,
            [&](zero::thread_communicator& comm) {
              zero::host_stream here;
              units_type const units = square_units(unit_count, n);
              comm.barrier(here);
              long const before = counting_allocator::live_bytes;
              comm.barrier(here);
              if (comm.rank() == 0) {
                counting_allocator::peak_bytes = before;
              }
              auto& mine = counting_allocator::of_thread;
              long const mine_before = mine.live_bytes;
              mine.peak_bytes = mine_before;
              comm.barrier(here);
              model_type sharded{comm, units, at, zero::adamw{}, policy, chosen()};
              long const mine_peak = mine.peak_bytes - mine_before;
              auto const plan = static_cast<long>(sharded.plan().bytes.peak());
              CHECK(sharded.plan().bind_peak_bytes == sharded.plan().bytes.peak());
              planned += plan;
              comm.barrier(here);
              if (comm.rank() == 0) {
                peak_of_all = counting_allocator::peak_bytes - before;
              }
              comm.barrier(here);
              CHECK(mine_peak >= plan);
              CHECK(mine_peak <= plan + unit_bytes);
              if (policy.per_microbatch &&
                  ranks == 8) {  // half of what one that holds all would take
                CHECK(mine_peak < (4 + 4 + 8) / 4 * static_cast<long>(unit_count) * unit_bytes / 2);
              }
              auto evaluation = sharded.evaluation();
              for (std::size_t u = 0; u < unit_count; ++u) {
                auto const lease = evaluation.forward(u);
                std::size_t const w = sharded.find("w" + std::to_string(u));
                auto const values = lease.parameter<float>(w);
                bool right = values.size() == n * n;
                for (std::size_t i = 0; i < values.size(); ++i) {
                  right = right && values[i] == value_of(2 * u, i);
                }
                CHECK(right);
              }
            },
            threads);
        CHECK(peak_of_all >= planned);
        CHECK(peak_of_all <= planned + unit_bytes);  // for all ranks together, books included
      }
    }
  }
}

TEST_CASE(
    "a model starts from the same bits in every stage, built whole or sharded, at every world "
    "size") {
  std::vector<std::byte> expected;
  for (std::size_t id = 0; id < std::size(small_sizes); ++id) {
    for (std::size_t i = 0; i < small_sizes[id]; ++i) {
      float const value = value_of(id, i);
      auto const append = [&](auto const& typed) {
        auto const bytes = std::as_bytes(std::span{&typed, 1});
        expected.insert(expected.end(), bytes.begin(), bytes.end());
      };
      id == 1 || id == 4 || id == 5 ? append(static_cast<bfloat16>(value)) : append(value);
    }
  }
  for (int const ranks : world_sizes) {
    zero::run_threads(
        ranks,
        [&](zero::thread_communicator& comm) {
          for (zero::stage const at :
               {zero::stage(zero::stage0{}), zero::stage(zero::stage1{}),
                zero::stage(zero::stage2{}), zero::stage(zero::stage3{.prefetch = 0}),
                zero::stage(zero::stage3{.prefetch = 2}),
                zero::stage(zero::stage3{.keep_after_forward = true})}) {
            for (std::uint64_t const bucket_bytes : {0U, 300U, 1U << 20U}) {
              for (std::uint64_t const alignment : {0U, 1U}) {
                zero::options options = chosen();
                options.bucket_bytes = bucket_bytes;
                if (alignment != 0) {
                  options.alignment = alignment;
                }
                model_type sharded{
                    comm, small_units(), at, zero::adamw{}, zero::reduce_per_microbatch{}, options};
                CHECK(sharded.sent()[zero::traffic::bind] ==
                      0);  // nothing to send: all ranks make the same
                CHECK(whole_values(sharded) == expected);
                CHECK(whole_values(sharded) == expected);
              }
            }
          }
        },
        threads);
  }
}

TEST_CASE("initialisers make every element once, where it will live") {
  for (int const ranks : world_sizes) {
    for (zero::stage const at : {zero::stage(zero::stage0{}), zero::stage(zero::stage3{})}) {
      constexpr std::size_t n = 1000;
      calls log;
      zero::run_threads(
          ranks,
          [&](zero::thread_communicator& comm) {
            units_type const units{
                {zero::parameter<float>("before", {7}, initialiser<float>(0)),
                 zero::parameter<float>("logged", {n}, initialiser<float>(1, &log))}};
            model_type const sharded{comm,    units, at, zero::adamw{}, zero::local_accumulate{},
                                     chosen()};
          },
          threads);
      std::vector<int> made(n, 0);
      for (auto const& [first, count] : log.ranges) {
        CHECK(count > 0);
        CHECK(first + count <= n);
        for (std::size_t i = first; i < first + count; ++i) {
          ++made[i];
        }
        if (at.shards_parameters()) {
          CHECK(count <=
                (16 + n) / static_cast<std::size_t>(ranks) + 16);  // a slice, of all 16 + n
        }
      }
      int const copies = at.shards_parameters() ? 1 : ranks;
      CHECK(std::all_of(made.begin(), made.end(), [&](int times) { return times == copies; }));
    }
  }
}

TEST_CASE(
    "tensors without storage get it under a lease, and have none outside where parameters are "
    "sharded") {
  zero::run_threads(
      3,
      [&](zero::thread_communicator& comm) {
        test::owning_tensor<float> value, gradient;
        units_type const units{
            {zero::parameter("w", value, gradient, {10, 10}, initialiser<float>(4))}};
        model_type sharded{
            comm, units, zero::stage3{}, zero::adamw{}, zero::reduce_per_microbatch{}, chosen()};
        CHECK(value.view.empty());
        CHECK(gradient.view.empty());
        auto micro = sharded.microbatch(0, 1);
        {
          auto const lease = micro.forward(0);
          CHECK(value.view.size() == 100);
          CHECK(value.view[99] == value_of(4, 99));
          CHECK(gradient.view.empty());
        }
        CHECK(value.view.empty());
        {
          auto const lease = micro.backward(0);
          CHECK(value.view.size() == 100);
          CHECK(gradient.view.size() == 100);
          std::fill(gradient.view.begin(), gradient.view.end(), 0.0F);
        }
        CHECK(value.view.empty());
      },
      threads);
}

TEST_CASE(
    "an initialiser that throws ends the construction with its message, and leaves the tensors "
    "empty") {
  for (zero::stage const at : {zero::stage(zero::stage0{}), zero::stage(zero::stage3{})}) {
    std::vector<test::owning_tensor<float>> values(6);
    std::string message;
    try {
      zero::run_threads(
          3,
          [&](zero::thread_communicator& comm) {
            auto const mine = static_cast<std::size_t>(comm.rank()) * 2;
            std::vector<test::owning_tensor<float>> gradients(2);
            units_type const units{
                {zero::parameter("a", values[mine], gradients[0], {50}, initialiser<float>(0))},
                {zero::parameter("b", values[mine + 1], gradients[1], {50},
                                 [&](std::span<float> /*out*/, std::size_t /*first*/) {
                                   if (comm.rank() == 1) {
                                     throw std::runtime_error{"no values for b"};
                                   }
                                 })}};
            model_type sharded{comm, units, at, zero::adamw{}, zero::local_accumulate{}, chosen()};
            sharded.wait();
          },
          threads);
    } catch (std::exception const& failure) {
      message = failure.what();
    }
    CHECK_MESSAGE(message.find("no values for b") != std::string::npos, message);
    for (auto const& value : values) {
      CHECK(value.view.empty());
    }
  }
}
