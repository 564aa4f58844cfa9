// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/concept.hpp>
#include <zero/core/any_span.hpp>
#include <zero/core/bfloat16.hpp>
#include <zero/core/error.hpp>
#include <zero/core/float16.hpp>
#include <zero/device/host_stream.hpp>

#include <doctest/doctest.h>
#include <support/noise.hpp>
#include <support/same_bits.hpp>
#include <support/thrown.hpp>
#include <support/watchdog.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

/// @file
/// What every communicator on the host must do. A test of one defines a world and instantiates the
/// suite:
///
///     struct world {
///       static constexpr std::array sizes{1, 2, 3, 4, 8};
///       template <class Function>  // function(comm) on each of `ranks` ranks
///       static void run(int ranks, Function const& function);
///     };
///     TEST_CASE_TEMPLATE_INVOKE(communicator_conformance, world);

namespace test {

using zero::combine;
using zero::reduction;

/// Call `function(comm, stream)` on every rank of every size, with an inline and a threaded stream.
template <class World, class Function>
void on_all_ranks(Function const& function) {
  for (int const ranks : World::sizes) {
    for (bool const threaded : {false, true}) {
      watchdog const limit;
      World::run(ranks, [&](auto& comm) {
        zero::host_stream stream{threaded};
        function(comm, stream);
        stream.synchronize();
      });
    }
  }
}

template <class Communicator>
std::size_t ranks_of(Communicator const& comm) {
  return static_cast<std::size_t>(comm.size());
}

/// Rank r's element i: small integers, whose sums over ranks are exact in every type.
template <class T = float>
std::vector<T> numbers(int rank, std::size_t count) {
  std::vector<T> out(count);
  for (std::size_t i = 0; i < count; ++i) {
    out[i] = static_cast<T>(static_cast<float>((rank + 1) * static_cast<int>(i % 5)));
  }
  return out;
}

/// The sum over `ranks` ranks of `numbers`' elements [first, first + count): 1 + ... + P times i %
/// 5.
template <class T = float>
std::vector<T> sums(int ranks, std::size_t first, std::size_t count) {
  std::vector<T> out(count);
  for (std::size_t i = 0; i < count; ++i) {
    out[i] = static_cast<T>(
        static_cast<float>(ranks * (ranks + 1) / 2 * static_cast<int>((first + i) % 5)));
  }
  return out;
}

/// What one rank's reduce-scatter must give: the definition, element by element.
template <class In, class Out>
Out reduced(std::vector<std::vector<In>> const& inputs, std::size_t i, reduction what) {
  using accumulate = zero::accumulate_type<In>;
  auto sum = static_cast<accumulate>(inputs[0][i]);
  for (std::size_t rank = 1; rank < inputs.size(); ++rank) {
    sum = sum + static_cast<accumulate>(inputs[rank][i]);
  }
  if (what == reduction::average) {
    sum = sum * static_cast<accumulate>(1.0 / static_cast<double>(inputs.size()));
  }
  return static_cast<Out>(sum);
}

/// reduce_scatter, all_gather and all_reduce of noise: each against the definition, and against
/// each other, also for sizes that don't divide.
template <class In, class Out, class Communicator>
void check_reductions(Communicator& comm, zero::host_stream& stream, reduction what) {
  std::size_t const ranks = ranks_of(comm);
  auto const rank = static_cast<std::size_t>(comm.rank());
  for (std::size_t const count : {0UL, 1UL, 3UL, 8UL, 61UL, 1003UL, 5000UL}) {
    std::size_t const slice = (count + ranks - 1) / ranks;
    std::vector<std::vector<In>> inputs;
    for (std::size_t r = 0; r < ranks; ++r) {
      inputs.push_back(noise<In>(static_cast<int>(r), count));
      inputs.back().resize(slice * ranks, In{});  // padding, for reduce_scatter
    }
    std::vector<In> const& mine = inputs[rank];
    std::vector<Out> expected(count);
    for (std::size_t i = 0; i < count; ++i) {
      expected[i] = reduced<In, Out>(inputs, i, what);
    }

    std::vector<Out> gathered(slice * ranks);
    std::span<Out> const shard = std::span{gathered}.subspan(rank * slice, slice);
    comm.reduce_scatter(std::span{mine}, shard, combine::overwrite, what, stream);
    comm.all_gather(shard, std::span{gathered}, stream);
    std::vector<Out> result(count);
    comm.all_reduce(std::span{mine}.first(count), std::span{result}, combine::overwrite, what,
                    stream);
    stream.synchronize();
    gathered.resize(count);
    CHECK(same_bits(gathered, expected));
    CHECK(same_bits(result, expected));
  }
}

}  // namespace test

TEST_CASE_TEMPLATE_DEFINE("a communicator", World, communicator_conformance) {
  using test::combine;
  using test::on_all_ranks;
  using test::ranks_of;
  using test::reduction;

  SUBCASE("reduce_scatter gives every rank the sum of its slice") {
    on_all_ranks<World>([](auto& comm, zero::host_stream& stream) {
      for (std::size_t const slice : {0UL, 1UL, 7UL, 1000UL}) {
        auto const full = test::numbers(comm.rank(), slice * ranks_of(comm));
        std::vector<float> shard(slice, -1);
        comm.reduce_scatter(std::span{full}, std::span{shard}, combine::overwrite, reduction::sum,
                            stream);
        stream.synchronize();
        auto const first = static_cast<std::size_t>(comm.rank()) * slice;
        CHECK(shard == test::sums(comm.size(), first, slice));
        CHECK(full == test::numbers(comm.rank(), slice * ranks_of(comm)));
      }
    });
  }

  SUBCASE("reduce_scatter in place writes this rank's slice and nothing else") {
    on_all_ranks<World>([](auto& comm, zero::host_stream& stream) {
      for (std::size_t const slice : {0UL, 1UL, 7UL, 1000UL}) {
        std::vector<float> full = test::numbers(comm.rank(), slice * ranks_of(comm));
        std::vector<float> expected = full;
        auto const first = static_cast<std::size_t>(comm.rank()) * slice;
        std::ranges::copy(test::sums(comm.size(), first, slice),
                          expected.begin() + static_cast<std::ptrdiff_t>(first));
        std::span<float> const shard = std::span{full}.subspan(first, slice);
        comm.reduce_scatter(std::span{full}, shard, combine::overwrite, reduction::sum, stream);
        stream.synchronize();
        CHECK(full == expected);
      }
    });
  }

  SUBCASE("reduce_scatter adds to the shard, also in place") {
    on_all_ranks<World>([](auto& comm, zero::host_stream& stream) {
      std::size_t const slice = 9;
      auto const first = static_cast<std::size_t>(comm.rank()) * slice;
      std::vector<float> full = test::numbers(comm.rank(), slice * ranks_of(comm));
      std::vector<float> shard(slice, 100);
      comm.reduce_scatter(std::span{full}, std::span{shard}, combine::add, reduction::sum, stream);
      stream.synchronize();
      std::vector<float> const sum = test::sums(comm.size(), first, slice);
      for (std::size_t i = 0; i < slice; ++i) {
        CHECK(shard[i] == 100 + sum[i]);
      }
      std::span<float> const place = std::span{full}.subspan(first, slice);
      std::vector<float> const before(place.begin(), place.end());
      comm.reduce_scatter(std::span{full}, place, combine::add, reduction::sum, stream);
      stream.synchronize();
      for (std::size_t i = 0; i < slice; ++i) {
        CHECK(place[i] == before[i] + sum[i]);
      }
    });
  }

  SUBCASE("all_gather collects the shards in rank order, in place or not") {
    on_all_ranks<World>([](auto& comm, zero::host_stream& stream) {
      for (std::size_t const slice : {0UL, 1UL, 7UL, 1000UL}) {
        std::vector<float> expected;
        for (int rank = 0; rank < comm.size(); ++rank) {
          auto const part = test::numbers(rank, slice);
          expected.insert(expected.end(), part.begin(), part.end());
        }
        std::vector<float> const shard = test::numbers(comm.rank(), slice);
        std::vector<float> full(expected.size(), -1);
        comm.all_gather(std::span{shard}, std::span{full}, stream);
        stream.synchronize();
        CHECK(full == expected);

        std::ranges::fill(full, -1.0F);
        auto const place =
            std::span{full}.subspan(static_cast<std::size_t>(comm.rank()) * slice, slice);
        std::ranges::copy(shard, place.begin());
        comm.all_gather(place, std::span{full}, stream);
        stream.synchronize();
        CHECK(full == expected);
      }
    });
  }

  SUBCASE("all_reduce sums spans of any size, in place or not") {
    on_all_ranks<World>([](auto& comm, zero::host_stream& stream) {
      for (std::size_t const count : {0UL, 1UL, 2UL, 5UL, 8UL, 997UL}) {
        std::vector<float> full = test::numbers(comm.rank(), count);
        std::vector<float> result(count, -1);
        comm.all_reduce(std::span{full}, std::span{result}, combine::overwrite, reduction::sum,
                        stream);
        stream.synchronize();
        CHECK(result == test::sums(comm.size(), 0, count));
        comm.all_reduce(std::span{full}, std::span{full}, combine::overwrite, reduction::sum,
                        stream);
        stream.synchronize();
        CHECK(full == test::sums(comm.size(), 0, count));
      }
    });
  }

  SUBCASE("all_reduce adds to a result that is the same on every rank") {
    on_all_ranks<World>([](auto& comm, zero::host_stream& stream) {
      std::vector<float> const full = test::numbers(comm.rank(), 11);
      std::vector<float> result(11, 0.5F);
      comm.all_reduce(std::span{full}, std::span{result}, combine::add, reduction::sum, stream);
      comm.all_reduce(std::span{full}, std::span{result}, combine::add, reduction::sum, stream);
      stream.synchronize();
      std::vector<float> const sum = test::sums(comm.size(), 0, 11);
      for (std::size_t i = 0; i < sum.size(); ++i) {
        CHECK(result[i] == 0.5F + 2 * sum[i]);
      }
    });
  }

  SUBCASE("every reduction has the bits of its definition, and all_reduce those of its two parts") {
    on_all_ranks<World>([](auto& comm, zero::host_stream& stream) {
      for (reduction const what : {reduction::sum, reduction::average}) {
        test::check_reductions<float, float>(comm, stream, what);
        test::check_reductions<double, double>(comm, stream, what);
        test::check_reductions<zero::bfloat16, zero::bfloat16>(comm, stream, what);
        test::check_reductions<zero::float16, zero::float16>(comm, stream, what);
        test::check_reductions<zero::bfloat16, float>(comm, stream, what);
        test::check_reductions<zero::float16, float>(comm, stream, what);
        test::check_reductions<float, zero::bfloat16>(comm, stream, what);
        test::check_reductions<float, zero::float16>(comm, stream, what);
      }
    });
  }

  SUBCASE("an average is divided in the accumulate type, before the one rounding") {
    on_all_ranks<World>([](auto& comm, zero::host_stream& stream) {
      // The sum of four times 20000 is past float16's largest value, a quarter of 2^-24 below its
      // smallest.
      for (float const value : {20000.0F, 0x1p-24F}) {
        std::vector<zero::float16> const full(ranks_of(comm), zero::float16{value});
        std::vector<zero::float16> shard(1);
        comm.reduce_scatter(std::span{full}, std::span{shard}, combine::overwrite,
                            reduction::average, stream);
        std::vector<zero::float16> result(full.size());
        comm.all_reduce(std::span{full}, std::span{result}, combine::overwrite, reduction::average,
                        stream);
        stream.synchronize();
        if (std::has_single_bit(ranks_of(comm))) {  // 1/P is exact
          CHECK(static_cast<float>(shard[0]) == value);
          CHECK(static_cast<float>(result.back()) == value);
        }
      }
    });
  }

  SUBCASE("a reduction into a wider type loses nothing, and rounds once into a narrower one") {
    on_all_ranks<World>([](auto& comm, zero::host_stream& stream) {
      if (comm.size() != 2) {
        return;
      }
      // 1 + 2^-8 is exact in float, and halfway between two bfloat16 values: the even one is 1.
      std::vector<zero::bfloat16> const full(2, zero::bfloat16{comm.rank() == 0 ? 1.0F : 0x1p-8F});
      std::vector<float> wide(1);
      std::vector<zero::bfloat16> narrow(1);
      comm.reduce_scatter(std::span{full}, std::span{wide}, combine::overwrite, reduction::sum,
                          stream);
      comm.reduce_scatter(std::span{full}, std::span{narrow}, combine::overwrite, reduction::sum,
                          stream);
      stream.synchronize();
      CHECK(wide[0] == 1.00390625F);
      CHECK(static_cast<float>(narrow[0]) == 1.0F);
    });
  }

  SUBCASE("sums are in rank order") {
    on_all_ranks<World>([](auto& comm, zero::host_stream& stream) {
      // 2^24 + 1 rounds to 2^24, as often as it is added. The ones first would give 2^24 + P - 1.
      std::vector<float> const full(ranks_of(comm), comm.rank() == 0 ? 0x1p24F : 1.0F);
      std::vector<float> shard(1);
      comm.reduce_scatter(std::span{full}, std::span{shard}, combine::overwrite, reduction::sum,
                          stream);
      stream.synchronize();
      CHECK(shard[0] == 0x1p24F);
    });
  }

  SUBCASE("infinities and NaNs arrive") {
    on_all_ranks<World>([](auto& comm, zero::host_stream& stream) {
      bool const last = comm.rank() == comm.size() - 1;
      std::vector<float> full(2 * ranks_of(comm), 1);
      for (std::size_t i = 0; last && i < full.size(); ++i) {
        full[i] = i % 2 == 0 ? std::numeric_limits<float>::infinity()
                             : std::numeric_limits<float>::quiet_NaN();
      }
      std::vector<float> shard(2);
      comm.reduce_scatter(std::span{full}, std::span{shard}, combine::overwrite, reduction::sum,
                          stream);
      stream.synchronize();
      CHECK(std::isinf(shard[0]));
      CHECK(std::isnan(shard[1]));
    });
  }

  SUBCASE("broadcast copies the root's elements, bit for bit") {
    on_all_ranks<World>([](auto& comm, zero::host_stream& stream) {
      for (int root = 0; root < comm.size(); ++root) {
        std::vector<zero::bfloat16> data = test::noise<zero::bfloat16>(comm.rank(), 33);
        comm.broadcast(std::span{data}, root, stream);
        stream.synchronize();
        CHECK(test::same_bits(data, test::noise<zero::bfloat16>(root, 33)));
      }
      comm.broadcast(zero::any_span{}, 0, stream);
    });
  }

  SUBCASE("one element on every rank, and one element in all") {
    on_all_ranks<World>([](auto& comm, zero::host_stream& stream) {
      float const mine = static_cast<float>(comm.rank()) + 1;
      auto const total = static_cast<float>(comm.size() * (comm.size() + 1) / 2);
      float sum = 0;
      comm.all_reduce(std::span{&mine, 1}, std::span{&sum, 1}, combine::overwrite, reduction::sum,
                      stream);
      std::vector<float> all(ranks_of(comm));
      comm.all_gather(std::span{&mine, 1}, std::span{all}, stream);
      stream.synchronize();
      CHECK(sum == total);
      CHECK(std::accumulate(all.begin(), all.end(), 0.0F) == total);
      CHECK(all.back() == static_cast<float>(comm.size()));
    });
  }

  SUBCASE("buffers can be used again as soon as the stream has run the call") {
    on_all_ranks<World>([](auto& comm, zero::host_stream& stream) {
      std::size_t const slice = 513;
      std::vector<float> full(slice * ranks_of(comm));
      std::vector<float> shard(slice);
      for (int round = 0; round < 50; ++round) {
        std::ranges::fill(full, static_cast<float>(round + comm.rank()));
        comm.reduce_scatter(std::span{full}, std::span{shard}, combine::overwrite, reduction::sum,
                            stream);
        stream.synchronize();
        auto const expected =
            static_cast<float>(comm.size() * round + comm.size() * (comm.size() - 1) / 2);
        CHECK(std::ranges::all_of(shard, [&](float x) { return x == expected; }));
        std::ranges::fill(shard, static_cast<float>(comm.rank() - round));
        comm.all_gather(std::span{shard}, std::span{full}, stream);
        stream.synchronize();
        CHECK(full.front() == static_cast<float>(-round));
        CHECK(full.back() == static_cast<float>(comm.size() - 1 - round));
      }
    });
  }

  SUBCASE("exchange collects bytes in rank order, in place or not, while the stream is busy") {
    on_all_ranks<World>([](auto& comm, zero::host_stream& stream) {
      std::vector<float> data(1000, 1);
      comm.broadcast(std::span{data}, 0, stream);
      for (std::size_t const count : {0UL, 1UL, 24UL}) {
        std::vector<std::byte> const mine(count, static_cast<std::byte>(comm.rank()));
        std::vector<std::byte> all(count * ranks_of(comm), std::byte{99});
        comm.exchange(mine, all);
        for (std::size_t i = 0; i < all.size(); ++i) {
          CHECK(all[i] == static_cast<std::byte>(i / count));
        }
        std::ranges::fill(all, std::byte{99});
        auto const place =
            std::span{all}.subspan(count * static_cast<std::size_t>(comm.rank()), count);
        std::ranges::copy(mine, place.begin());
        comm.exchange(place, all);
        CHECK((count == 0 || all.back() == static_cast<std::byte>(comm.size() - 1)));
      }
      stream.synchronize();
    });
  }

  SUBCASE("a barrier orders what the ranks do before and after it") {
    for (int const ranks : World::sizes) {
      std::atomic<int> before{0};
      World::run(ranks, [&](auto& comm) {
        zero::host_stream stream;
        for (int round = 1; round <= 20; ++round) {
          ++before;
          comm.barrier(stream);
          CHECK(before >= round * comm.size());
          comm.barrier(stream);
        }
      });
    }
  }

  SUBCASE("split groups the ranks of one color, in the order of their keys") {
    on_all_ranks<World>([](auto& comm, zero::host_stream& stream) {
      // Odd and even ranks, last one first.
      auto part = comm.split(comm.rank() % 2, -comm.rank());
      int const size = comm.rank() % 2 == 0 ? (comm.size() + 1) / 2 : comm.size() / 2;
      CHECK(part.size() == size);
      CHECK(part.rank() == size - 1 - comm.rank() / 2);
      float const mine = static_cast<float>(comm.rank());
      std::vector<float> all(ranks_of(part));
      part.all_gather(std::span{&mine, 1}, std::span{all}, stream);
      stream.synchronize();
      for (std::size_t i = 0; i < all.size(); ++i) {
        auto const place = static_cast<int>(i);
        CHECK(all[i] == static_cast<float>(2 * (size - 1 - place) + comm.rank() % 2));
      }
    });
  }

  SUBCASE("a handle moves") {
    on_all_ranks<World>([](auto& comm, zero::host_stream& stream) {
      auto first = comm.split(0, comm.rank());
      auto second = std::move(first);
      CHECK(second.rank() == comm.rank());
      first = comm.split(0, -comm.rank());
      CHECK(first.rank() == comm.size() - 1 - comm.rank());
      second.barrier(stream);
      first = std::move(second);
      first.barrier(stream);
      stream.synchronize();
    });
  }

  SUBCASE("a wrong argument is refused before any communication, and ends the group") {
    for (int const ranks : World::sizes) {
      test::watchdog const limit;
      World::run(ranks, [](auto& comm) {
        zero::host_stream stream;
        auto const size = ranks_of(comm);
        auto const rank = static_cast<std::size_t>(comm.rank());
        std::vector<float> a(4 * size + 1);
        std::vector<float> b(4);
        std::vector<double> d(4 * size);
        std::vector<std::byte> bytes(3 * size + 1);
        auto const full = std::span{a}.first(4 * size);
        zero::any_span const nowhere{nullptr, 4, zero::dtype::float32};
        constexpr auto set = combine::overwrite;
        constexpr auto sum = reduction::sum;

        // One rank after the other makes a mistake, in a group made for it.
        std::size_t culprit = size - 1;
        auto const refuses = [&](std::string const& expected, auto const& call) {
          auto part = comm.split(0, comm.rank());
          std::string const text = expected + " (rank " + std::to_string(culprit) + ")";
          if (rank == culprit) {
            CHECK(test::message_of([&] { call(part); }) == text);
          }
          test::thrown const later = test::failure_of([&] { part.barrier(stream); });
          CHECK(later.message == "aborted by rank " + std::to_string(culprit) + ": " + text);
          CHECK(later.origin == static_cast<int>(culprit));
          culprit = (culprit + 1) % size;
        };
        std::string const p = std::to_string(comm.size());

        if (size > 1) {
          refuses("reduce_scatter: expected a multiple of " + p + " elements, actual " +
                      std::to_string(4 * size + 1),
                  [&](auto& part) {
                    part.reduce_scatter(std::span{a}, std::span{b}, set, sum, stream);
                  });
        }
        refuses("reduce_scatter: expected a shard of 4 elements, actual 3", [&](auto& part) {
          part.reduce_scatter(full, std::span{b}.first(3), set, sum, stream);
        });
        refuses("reduce_scatter: expected a result of float32 or of 16 bits, actual float64",
                [&](auto& part) {
                  part.reduce_scatter(full, std::span{d}.first(4), set, sum, stream);
                });
        refuses("all_reduce: expected a result of float64, actual float32",
                [&](auto& part) { part.all_reduce(std::span{d}, full, set, sum, stream); });
        refuses(
            "reduce_scatter: expected spans apart, or a shard that is the rank's slice of full, "
            "actual an overlap at byte " +
                std::to_string(16 * culprit + 4),
            [&](auto& part) {
              part.reduce_scatter(full, std::span{a}.subspan(4 * rank + 1, 4), set, sum, stream);
            });
        refuses("all_gather: expected a shard of 4 elements, actual 3",
                [&](auto& part) { part.all_gather(std::span{b}.first(3), full, stream); });
        refuses("all_gather: expected float64 in full, as in the shard, actual float32",
                [&](auto& part) { part.all_gather(std::span{d}.first(4), full, stream); });
        refuses("all_reduce: expected 3 elements in the result, actual 4", [&](auto& part) {
          part.all_reduce(full.first(3), std::span{b}, set, sum, stream);
        });
        refuses(
            "all_reduce: expected spans apart, or (without add) the same, actual an overlap at "
            "byte 0",
            [&](auto& part) { part.all_reduce(full, full, combine::add, sum, stream); });
        refuses("all_gather: expected memory for 16 bytes, actual a null pointer",
                [&](auto& part) { part.all_gather(nowhere, full, stream); });
        refuses("broadcast: expected a root in [0, " + p + "), actual " + p,
                [&](auto& part) { part.broadcast(std::span{b}, comm.size(), stream); });
        refuses("broadcast: expected a root in [0, " + p + "), actual -1",
                [&](auto& part) { part.broadcast(std::span{b}, -1, stream); });
        refuses("exchange: expected 3 bytes for each of " + p + " ranks, actual " +
                    std::to_string(3 * size + 1),
                [&](auto& part) { part.exchange(std::span{bytes}.first(3), bytes); });
        refuses("split: expected a color of at least 0, actual -1",
                [&](auto& part) { static_cast<void>(part.split(-1, 0)); });
        refuses("set_deadline: expected at least 1 ms, actual 0 ms",
                [&](auto& part) { part.set_deadline(std::chrono::milliseconds{0}); });
      });
    }
  }

  SUBCASE("an abort reaches all ranks' later calls, and the groups split from this one") {
    on_all_ranks<World>([](auto& comm, zero::host_stream& stream) {
      auto part = comm.split(0, -comm.rank());
      auto below = part.split(0, comm.rank());
      comm.barrier(stream);
      stream.synchronize();
      if (comm.rank() == comm.size() - 1) {
        part.abort("disk full");  // as rank 0 of the part
      }
      std::byte mine{};
      std::vector<std::byte> all(ranks_of(comm));
      test::thrown const here = test::failure_of([&] {
        for (;;) {
          part.exchange({&mine, 1}, all);
        }
      });
      CHECK(here.message == "aborted by rank 0: disk full");
      CHECK(here.origin == 0);
      test::thrown const there = test::failure_of([&] {
        for (;;) {
          below.exchange({&mine, 1}, all);
        }
      });
      CHECK(there.message == "the parent communicator failed: aborted by rank 0: disk full");
      CHECK(there.origin == comm.size() - 1);
      zero::host_stream fresh;
      CHECK(test::failure_of([&] { part.barrier(fresh); }).message == here.message);
      CHECK(test::failure_of([&] { static_cast<void>(part.split(0, 0)); }).message == here.message);
      part.abort("a later reason");
      CHECK(test::failure_of([&] { part.barrier(fresh); }).message == here.message);
      comm.barrier(stream);  // the group that it was split from goes on
    });
  }
}
