// SPDX-License-Identifier: MIT
// When ranks of a group of threads may free and reuse their memory, and that calls take none.
#include <zero/comm/threads.hpp>

#include <doctest/doctest.h>
#include <comm/ranks.hpp>
#include <support/counting_allocator.hpp>
#include <support/thrown.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using namespace std::chrono_literals;
using test::run_ranks;
using zero::combine;
using zero::reduction;
using zero::thread_communicator;

/// Memory that is poisoned, and then freed, as soon as it ends: whoever still reads it gets a wrong
/// sum or a report of a sanitizer.
class doomed {
 public:
  doomed(std::size_t size, float value) : data_(size, value) {}
  doomed(doomed const&) = delete;
  doomed& operator=(doomed const&) = delete;
  ~doomed() { std::ranges::fill(data_, std::numeric_limits<float>::quiet_NaN()); }

  [[nodiscard]] std::span<float> span() { return data_; }

 private:
  std::vector<float> data_;
};

bool all_are(std::span<float const> values, float expected) {
  return std::ranges::all_of(values, [&](float value) { return value == expected; });
}

std::size_t size_of(thread_communicator const& comm) {
  return static_cast<std::size_t>(comm.size());
}

constexpr std::size_t slice = 20'000;  // long enough that ranks copy at the same time

/// Each kind of call, once, from memory that ends right after it. `check` looks at the results.
template <class Check>
void call_and_free(thread_communicator& comm, int kind, zero::host_stream& stream,
                   Check const& check) {
  std::size_t const count = slice * size_of(comm);
  auto const one = static_cast<float>(comm.rank() + 1);
  auto const total = static_cast<float>(comm.size() * (comm.size() + 1) / 2);
  auto const place = [&](std::span<float> full) {
    return full.subspan(slice * static_cast<std::size_t>(comm.rank()), slice);
  };
  switch (kind % 4) {
    case 0: {
      doomed full{count, one};
      comm.reduce_scatter(full.span(), place(full.span()), combine::overwrite, reduction::sum,
                          stream);
      stream.synchronize();
      check(all_are(place(full.span()), total));
      break;
    }
    case 1: {
      doomed full{count, 0};
      doomed shard{slice, one};
      comm.all_gather(shard.span(), full.span(), stream);
      stream.synchronize();
      check(full.span().front() == 1 && full.span().back() == static_cast<float>(comm.size()));
      break;
    }
    case 2: {
      doomed full{count, one};
      comm.all_reduce(full.span(), full.span(), combine::overwrite, reduction::sum, stream);
      stream.synchronize();
      check(all_are(full.span(), total));
      break;
    }
    default: {
      doomed full{count, one};
      comm.broadcast(full.span(), comm.size() - 1, stream);
      stream.synchronize();
      check(all_are(full.span(), static_cast<float>(comm.size())));
    }
  }
}

}  // namespace

TEST_CASE("a rank that ends right after its last collective, or reuses its memory, harms nobody") {
  for (int const ranks : {2, 3, 4, 8}) {
    for (bool const threaded : {false, true}) {
      for (int kind = 0; kind < 4; ++kind) {
        run_ranks(ranks, [&](thread_communicator& comm) {
          zero::host_stream stream{threaded};
          for (int round = 0; round < 3; ++round) {
            call_and_free(comm, kind + round, stream, [](bool right) { CHECK(right); });
          }
        });
      }
    }
  }
}

TEST_CASE("ranks that unwind while peers copy free nothing that is being read") {
  using microseconds = std::chrono::microseconds;
  std::atomic<int> completed{0};
  std::atomic<int> failed{0};
  for (int round = 0; round < 60; ++round) {
    int const ranks = round % 2 == 0 ? 2 : 4;
    run_ranks(ranks, [&](thread_communicator& comm) {
      std::jthread killer;
      zero::host_stream stream{round % 3 == 0};
      stream.enqueue([] {});
      comm.exchange({}, {});
      if (comm.rank() == 0) {
        killer = std::jthread{[&comm, round] {
          std::this_thread::sleep_for(microseconds{37 * round});
          comm.abort("in the middle");
        }};
      }
      auto const here = test::failure_of([&] {
        for (int kind = 0; kind < 1000; ++kind) {
          call_and_free(comm, kind, stream, [](bool right) { CHECK(right); });
          ++completed;
        }
      });
      CHECK(here.message == "aborted by rank 0: in the middle");
      ++failed;
    });
  }
  CHECK(failed == 30 * 2 + 30 * 4);
}

TEST_CASE("a root that gives up waits for those that copy its memory") {
  // The root has nothing to copy, so an abort finds it waiting while the others copy.
  for (int round = 0; round < 40; ++round) {
    run_ranks(3, [&](thread_communicator& comm) {
      zero::host_stream stream;
      std::vector<float> copied(1'000'000, 1);
      std::jthread killer;
      comm.barrier(stream);
      if (comm.rank() == 1) {
        killer = std::jthread{[&comm, round] {
          std::this_thread::sleep_for(std::chrono::microseconds{20 * round});
          comm.abort("in the middle");
        }};
      }
      static_cast<void>(test::failure_of([&] {
        doomed own{comm.rank() == 0 ? copied.size() : 0, 1};
        comm.broadcast(comm.rank() == 0 ? own.span() : std::span{copied}, 0, stream);
      }));
      CHECK(all_are(copied, 1));  // nobody has read what was poisoned
    });
  }
}

TEST_CASE("a rank that throws while its peers copy unwinds without harm") {
  for (int round = 0; round < 40; ++round) {
    CHECK_THROWS_WITH(run_ranks(3,
                                [&](thread_communicator& comm) {
                                  zero::host_stream stream;
                                  for (int kind = 0;; ++kind) {
                                    doomed own{slice, 1};
                                    call_and_free(comm, kind, stream,
                                                  [](bool right) { CHECK(right); });
                                    if (comm.rank() == round % 3 && kind == round % 4) {
                                      throw std::runtime_error{"unwind"};
                                    }
                                  }
                                }),
                      "unwind");
  }
}

TEST_CASE("two communicators work at once, each in a stream of its own") {
  for (int const ranks : {2, 3, 8}) {
    run_ranks(ranks, [&](thread_communicator& comm) {
      auto other = comm.split(0, -comm.rank());
      zero::host_stream first{true};
      zero::host_stream second{true};
      auto const one = static_cast<float>(comm.rank() + 1);
      auto const total = static_cast<float>(comm.size() * (comm.size() + 1) / 2);
      std::vector<float> const ones(100 * size_of(comm), one);
      std::vector<float> sums(100);
      std::vector<float> all(size_of(comm));
      for (int round = 0; round < 100; ++round) {
        auto const reduce = [&] {
          comm.reduce_scatter(std::span{ones}, std::span{sums}, combine::add, reduction::sum,
                              first);
        };
        auto const gather = [&] {
          other.all_gather(std::span{ones}.first(1), std::span{all}, second);
        };
        if ((round + comm.rank()) % 2 == 0) {  // every rank in another order
          reduce();
          gather();
        } else {
          gather();
          reduce();
        }
      }
      first.synchronize();
      second.synchronize();
      CHECK(all_are(sums, 100 * total));
      CHECK(all.front() == static_cast<float>(comm.size()));  // ranks are reversed
      CHECK(all.back() == 1);
    });
  }
}

TEST_CASE("a part, and the communicator that it is of, may end before the streams do") {
  run_ranks(3, [](thread_communicator& comm) {
    std::vector<float> const ones(3000, 1);
    std::vector<float> sums(3000);
    zero::host_stream stream{true};
    {
      auto part = comm.split(0, comm.rank());
      auto below = part.split(0, comm.rank());
      below.all_reduce(std::span{ones}, std::span{sums}, combine::overwrite, reduction::sum,
                       stream);
    }
    stream.synchronize();
    CHECK(all_are(sums, 3));
  });
}

TEST_CASE("groups that nobody uses any more are freed") {
  if (!counting_allocator::available) {
    return;
  }
  long after_few = 0;
  long after_many = 0;
  run_ranks(2, [&](thread_communicator& comm) {
    zero::host_stream stream;
    for (int round = 0; round < 100; ++round) {
      {
        auto part = comm.split(0, comm.rank());
        auto below = part.split(0, comm.rank());
        below.barrier(stream);
      }
      comm.barrier(stream);
      if (comm.rank() == 0) {
        (round < 10 ? after_few : after_many) = counting_allocator::live_bytes;
      }
      comm.barrier(stream);
    }
  });
  CHECK(after_many <= after_few);
}

TEST_CASE("no call allocates, whether it runs in the caller or in a stream's thread") {
  if (!counting_allocator::available) {
    return;
  }
  for (int const ranks : {1, 2, 4, 8}) {
    for (bool const threaded : {false, true}) {
      std::atomic<long> before{0};
      std::atomic<long> after{0};
      run_ranks(ranks, [&](thread_communicator& comm) {
        zero::host_stream stream{threaded};
        std::vector<float> full(12 * size_of(comm), 1);
        std::vector<zero::bfloat16> half(full.size());
        std::vector<float> shard(12);
        std::vector<std::byte> const own_bytes(8);
        std::vector<std::byte> all(8 * size_of(comm));
        auto const every_call = [&] {
          comm.reduce_scatter(std::span{full}, std::span{shard}, combine::overwrite,
                              reduction::average, stream);
          comm.all_gather(std::span{shard}, std::span{full}, stream);
          comm.all_reduce(std::span{full}.first(7), std::span{half}.first(7), combine::overwrite,
                          reduction::sum, stream);
          comm.all_reduce(std::span{half}, std::span{full}, combine::add, reduction::sum, stream);
          comm.broadcast(std::span{full}, 0, stream);
          comm.barrier(stream);
          stream.synchronize();
          comm.exchange(own_bytes, all);
        };
        every_call();
        if (comm.rank() == 0) {
          before = counting_allocator::allocations.load();
        }
        comm.exchange(own_bytes, all);
        for (int round = 0; round < 50; ++round) {
          every_call();
        }
        comm.exchange(own_bytes, all);
        if (comm.rank() == 0) {
          after = counting_allocator::allocations.load();
        }
        comm.exchange(own_bytes, all);
      });
      CHECK(after - before == 0);
    }
  }
}
