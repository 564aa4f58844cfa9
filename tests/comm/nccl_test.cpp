// SPDX-License-Identifier: MIT
// The NCCL communicator over the fakes of CUDA and NCCL.
#include <zero/comm/nccl.hpp>
#include <zero/core/bfloat16.hpp>
#include <zero/core/float16.hpp>
#include <zero/device/cuda.hpp>

#include <doctest/doctest.h>
#include <fake/cuda.hpp>
#include <fake/nccl.hpp>
#include <support/noise.hpp>
#include <support/same_bits.hpp>
#include <support/thrown.hpp>
#include <support/watchdog.hpp>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

namespace {

using namespace std::chrono_literals;
using test::failure_of;
using test::noise;
using test::same_bits;
using test::thrown;
using zero::combine;
using zero::nccl;
using zero::nccl_mode;
using zero::nccl_options;
using zero::reduction;

constexpr auto soon = 10s;  // for what happens at once, on a busy machine

/// Fakes as at the start, with a device for each of 8 ranks; nothing is left behind.
class fakes {
 public:
  explicit fakes(int devices = 8) {
    fake::reset();
    fake::reset_nccl();
    fake::set_device_count(devices);
    before_ = fake::live();
  }
  fakes(fakes const&) = delete;
  fakes& operator=(fakes const&) = delete;
  ~fakes() {
    auto const after = fake::live();
    CHECK(after.allocations == before_.allocations);
    CHECK(after.pinned == before_.pinned);
    CHECK(after.streams == before_.streams);
    CHECK(after.events == before_.events);
    CHECK(after.graphs == before_.graphs);
    CHECK(after.graph_execs == before_.graph_execs);
    CHECK(fake::live_communicators() == 0);
    CHECK(fake::live_registrations() == 0);
    CHECK(fake::live_windows() == 0);
    CHECK(fake::live_nccl_allocations() == 0);
    CHECK(fake::nccl_misuse().empty());
  }

 private:
  test::watchdog limit_{100s};
  fake::live_counts before_;
};

/// Elements of the device.
template <class T>
class array {
 public:
  array(zero::cuda_stream& stream, std::vector<T> const& values)
      : stream_{stream}, size_{values.size()},
        memory_{zero::cuda::allocate(values.size() * sizeof(T)), release{stream.native()}} {
    put(values);
  }

  [[nodiscard]] std::span<T> span() const { return {static_cast<T*>(memory_.get()), size_}; }
  [[nodiscard]] std::span<T> part(std::size_t first, std::size_t count) const {
    return span().subspan(first, count);
  }
  void put(std::vector<T> const& values) { zero::cuda::upload(stream_, std::span{values}, span()); }
  [[nodiscard]] std::vector<T> get() const {
    std::vector<T> out(size_);
    zero::cuda::download(stream_, span(), std::span{out});
    return out;
  }

 private:
  struct release {
    cudaStream_t stream;
    void operator()(void* memory) const {
      static_cast<void>(cudaStreamSynchronize(stream));
      zero::cuda::deallocate(memory, 0);
    }
  };

  zero::cuda_stream& stream_;
  std::size_t size_;
  std::unique_ptr<void, release> memory_;
};

template <class T>
std::vector<T> converted(std::vector<float> const& values) {
  std::vector<T> out;
  for (float const value : values) {
    out.push_back(static_cast<T>(value));
  }
  return out;
}

/// The definition: in rank order, in the accumulate type, times 1/P, rounded once, then added.
template <class In, class Out>
std::vector<Out> reduced(int ranks, std::size_t count, combine how, reduction what,
                         std::vector<Out> const& before) {
  using accumulate = zero::accumulate_type<In>;
  std::vector<accumulate> sums(count);
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<In> const values = noise<In>(rank, count);
    for (std::size_t i = 0; i < count; ++i) {
      auto const value = static_cast<accumulate>(values[i]);
      sums[i] = rank == 0 ? value : sums[i] + value;
    }
  }
  std::vector<Out> out(count);
  for (std::size_t i = 0; i < count; ++i) {
    accumulate sum = sums[i];
    if (what == reduction::average) {
      sum = sum * static_cast<accumulate>(1.0 / ranks);
    }
    out[i] = static_cast<Out>(sum);
    if (how == combine::add) {
      out[i] =
          static_cast<Out>(static_cast<accumulate>(before[i]) + static_cast<accumulate>(out[i]));
    }
  }
  return out;
}

/// Whether values differ by no more than sums of `ranks` values in a type with `bits` bits may.
template <class T>
bool close(std::vector<T> const& a, std::vector<T> const& b, int bits, int ranks) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    auto const x = static_cast<double>(static_cast<zero::accumulate_type<T>>(a[i]));
    auto const y = static_cast<double>(static_cast<zero::accumulate_type<T>>(b[i]));
    if (!(std::abs(x - y) <= std::ldexp(16.0 * (ranks + 2), -bits))) {  // magnitudes are below 16
      return false;
    }
  }
  return a.size() == b.size();
}

template <class T>
constexpr int bits_of = std::is_same_v<T, double>           ? 53
                        : std::is_same_v<T, float>          ? 24
                        : std::is_same_v<T, zero::bfloat16> ? 8
                                                            : 11;

/// Every reduction of noise, against the definition.
template <class In, class Out>
void check_reductions(nccl& comm, std::size_t slice) {
  int const ranks = comm.size();
  bool const ordered = comm.options().mode == nccl_mode::ordered;
  int const bits = std::min(bits_of<In>, bits_of<Out>);
  auto const rank = static_cast<std::size_t>(comm.rank());
  std::size_t const count = slice * static_cast<std::size_t>(ranks);
  zero::cuda_stream stream;
  auto const agrees = [&](std::vector<Out> const& a, std::vector<Out> const& b) {
    return ordered ? same_bits(a, b) : close(a, b, bits, ranks);
  };
  for (combine const how : {combine::overwrite, combine::add}) {
    for (reduction const what : {reduction::sum, reduction::average}) {
      std::vector<Out> const before = noise<Out>(99, count);
      std::vector<Out> const expected = reduced<In>(ranks, count, how, what, before);
      auto const part = [&](std::vector<Out> const& all) {
        auto const first = all.begin() + static_cast<std::ptrdiff_t>(rank * slice);
        return std::vector<Out>(first, first + static_cast<std::ptrdiff_t>(slice));
      };
      array<In> full{stream, noise<In>(comm.rank(), count)};
      array<Out> shard{stream, part(before)};
      comm.reduce_scatter(full.span(), shard.span(), how, what, stream);
      CHECK(agrees(shard.get(), part(expected)));
      CHECK(same_bits(full.get(), noise<In>(comm.rank(), count)));

      array<Out> result{stream, before};
      comm.all_reduce(full.span(), result.span(), how, what, stream);
      CHECK(agrees(result.get(), expected));

      // A size that doesn't divide.
      if (std::size_t const some = count - count / 3; some != 0) {
        array<In> odd{stream, [&] {
                        auto values = noise<In>(comm.rank(), count);
                        values.resize(some);
                        return values;
                      }()};
        auto wanted = expected;
        auto prior = before;
        wanted.resize(some);
        prior.resize(some);
        array<Out> sum{stream, prior};
        comm.all_reduce(odd.span(), sum.span(), how, what, stream);
        CHECK(agrees(sum.get(), wanted));
      }
      if constexpr (std::is_same_v<In, Out>) {
        if (how == combine::overwrite) {  // in place
          comm.all_reduce(full.span(), full.span(), how, what, stream);
          CHECK(agrees(full.get(), expected));
          full.put(noise<In>(comm.rank(), count));
          comm.reduce_scatter(full.span(), full.part(rank * slice, slice), how, what, stream);
          auto const after = full.get();
          auto others = noise<In>(comm.rank(), count);
          CHECK(agrees(part(after), part(expected)));
          std::copy_n(after.begin() + static_cast<std::ptrdiff_t>(rank * slice), slice,
                      others.begin() + static_cast<std::ptrdiff_t>(rank * slice));
          CHECK(same_bits(after, others));
        }
      }
    }
  }
}

template <class Function>
void run(int ranks, Function const& function, nccl_options const& options = {}) {
  zero::run_nccl(ranks, function, options);
}

/// What each rank's `function(comm)` throws as a communication error.
template <class Function>
std::vector<thrown> failures_of(int ranks, Function const& function,
                                nccl_options const& options = {}) {
  std::vector<thrown> out(static_cast<std::size_t>(ranks));
  run(
      ranks,
      [&](nccl& comm) {
        out[static_cast<std::size_t>(comm.rank())] = failure_of([&] { function(comm); });
      },
      options);
  return out;
}

/// One rank's buffers.
struct buffers {
  zero::cuda_stream stream;
  array<float> full{stream, std::vector<float>(24, 1)};
  array<float> shard{stream, std::vector<float>(24)};
  array<double> doubles{stream, std::vector<double>(24)};

  void reduce_scatter(nccl& comm, std::size_t count = 24, combine how = combine::overwrite,
                      reduction what = reduction::sum) {
    comm.reduce_scatter(full.part(0, count),
                        shard.part(0, count / static_cast<std::size_t>(comm.size())), how, what,
                        stream);
  }
  void all_gather(nccl& comm) {
    comm.all_gather(shard.part(0, 24 / static_cast<std::size_t>(comm.size())), full.span(), stream);
  }
  void all_reduce(nccl& comm) {
    comm.all_reduce(full.span(), shard.span(), combine::overwrite, reduction::sum, stream);
  }
};

/// Wait for what was enqueued, and throw the group's failure.
void finish(nccl& comm, buffers& mine) {
  mine.stream.synchronize();
  for (int i = 0; i < 1000; ++i) {
    comm.raise_if_failed();
    std::this_thread::sleep_for(1ms);
  }
}

constexpr nccl_mode modes[] = {nccl_mode::ordered, nccl_mode::fast};

}  // namespace

TEST_CASE("reductions give the bits of a sum in rank order, or in fast mode its value") {
  for (nccl_mode const mode : modes) {
    for (int const ranks : {1, 2, 3, 4}) {
      fakes const fresh;
      run(ranks,
          [](nccl& comm) {
            for (std::size_t const slice : {0UL, 1UL, 7UL, 1000UL}) {
              check_reductions<float, float>(comm, slice);
              check_reductions<double, double>(comm, slice);
              check_reductions<zero::bfloat16, zero::bfloat16>(comm, slice);
              check_reductions<zero::float16, zero::float16>(comm, slice);
              check_reductions<zero::bfloat16, float>(comm, slice);
              check_reductions<float, zero::float16>(comm, slice);
            }
          },
          {.mode = mode});
    }
  }
}

TEST_CASE("calls larger than the scratch go in parts") {
  for (nccl_mode const mode : modes) {
    fakes const fresh;
    run(3,
        [](nccl& comm) {
          check_reductions<float, float>(comm, 300'001);
          check_reductions<zero::float16, float>(comm, 300'001);
        },
        {.mode = mode, .scratch_bytes = std::size_t{1} << 20U});
  }
}

TEST_CASE("float16 values whose sum is too large average without overflow") {
  for (nccl_mode const mode : modes) {
    fakes const fresh;
    run(4,
        [](nccl& comm) {
          zero::cuda_stream stream;
          array<zero::float16> full{stream, converted<zero::float16>(std::vector<float>(8, 6e4F))};
          array<zero::float16> shard{stream, std::vector<zero::float16>(2)};
          comm.reduce_scatter(full.span(), shard.span(), combine::overwrite, reduction::average,
                              stream);
          for (zero::float16 const value : shard.get()) {
            CHECK(static_cast<float>(value) == static_cast<float>(zero::float16{6e4F}));
          }
        },
        {.mode = mode});
  }
}

TEST_CASE("all_gather, broadcast and a barrier move what they should") {
  for (int const ranks : {1, 2, 3, 4}) {
    fakes const fresh;
    run(ranks, [](nccl& comm) {
      auto const size = static_cast<std::size_t>(comm.size());
      auto const rank = static_cast<std::size_t>(comm.rank());
      zero::cuda_stream stream;
      for (std::size_t const slice : {0UL, 1UL, 33UL}) {
        std::vector<zero::bfloat16> expected;
        for (int other = 0; other < comm.size(); ++other) {
          auto const theirs = noise<zero::bfloat16>(other, slice);
          expected.insert(expected.end(), theirs.begin(), theirs.end());
        }
        array<zero::bfloat16> const shard{stream, noise<zero::bfloat16>(comm.rank(), slice)};
        array<zero::bfloat16> full{stream, std::vector<zero::bfloat16>(slice * size)};
        comm.all_gather(shard.span(), full.span(), stream);
        CHECK(same_bits(full.get(), expected));
        std::vector<zero::bfloat16> own(slice * size);
        std::copy_n(expected.begin() + static_cast<std::ptrdiff_t>(rank * slice), slice,
                    own.begin() + static_cast<std::ptrdiff_t>(rank * slice));
        full.put(own);
        comm.all_gather(full.part(rank * slice, slice), full.span(), stream);
        CHECK(same_bits(full.get(), expected));
        for (int root = 0; root < comm.size(); ++root) {
          array<double> data{stream, noise<double>(comm.rank(), slice)};
          comm.broadcast(data.span(), root, stream);
          comm.barrier(stream);
          CHECK(same_bits(data.get(), noise<double>(root, slice)));
        }
      }
    });
  }
}

TEST_CASE("split groups the ranks of one color, in the order of their keys") {
  fakes const fresh;
  run(4, [](nccl& comm) {
    nccl part = comm.split(comm.rank() % 2, -comm.rank());
    CHECK(part.size() == 2);
    CHECK(part.rank() == 1 - comm.rank() / 2);
    zero::cuda_stream stream;
    array<float> const mine{stream, {static_cast<float>(comm.rank())}};
    array<float> all{stream, std::vector<float>(2)};
    part.all_gather(mine.span(), all.span(), stream);
    CHECK(all.get() == std::vector{static_cast<float>(2 + comm.rank() % 2),
                                   static_cast<float>(comm.rank() % 2)});
    nccl moved = std::move(part);
    moved.barrier(stream);
    stream.synchronize();
  });
}

TEST_CASE("an abort reaches all ranks, and the groups split from this one") {
  fakes const fresh;
  run(3, [](nccl& comm) {
    nccl part = comm.split(0, -comm.rank());
    nccl below = part.split(0, comm.rank());
    if (comm.rank() == 2) {
      part.abort("disk full");  // as rank 0 of the part
    }
    std::byte const mine{};
    std::vector<std::byte> all(3);
    auto const forever = [&](nccl& with) {
      return failure_of([&] {
        for (;;) {
          with.exchange({&mine, 1}, all);
        }
      });
    };
    thrown const here = forever(part);
    CHECK(here.message == "aborted by rank 0: disk full");
    CHECK(here.origin == 0);
    thrown const there = forever(below);
    CHECK(there.message == "the parent communicator failed: aborted by rank 0: disk full");
    CHECK(there.origin == 2);
    comm.exchange({&mine, 1}, all);  // the group that it was split from goes on
    zero::cuda_stream stream;
    comm.barrier(stream);
    stream.synchronize();
  });
}

TEST_CASE("a wrong argument is refused before any communication, and ends the group") {
  fakes const fresh;
  run(3, [](nccl& comm) {
    buffers mine;
    auto const refuses = [&](std::string const& text, auto const& call) {
      nccl part = comm.split(0, comm.rank());
      if (comm.rank() == 1) {
        CHECK(test::message_of([&] { call(part); }) == text);
      }
      std::byte const one{};
      std::vector<std::byte> all(3);
      thrown const later = failure_of([&] {
        for (;;) {
          part.exchange({&one, 1}, all);
        }
      });
      CHECK(later.message == "aborted by rank 1: " + text);
      CHECK(later.origin == 1);
    };
    refuses("reduce_scatter: expected a multiple of 3 elements, actual 23 (rank 1)",
            [&](nccl& part) { mine.reduce_scatter(part, 23); });
    refuses("broadcast: expected a root in [0, 3), actual 3 (rank 1)",
            [&](nccl& part) { part.broadcast(mine.full.span(), 3, mine.stream); });
    refuses("split: expected a color of at least 0, actual -1 (rank 1)",
            [&](nccl& part) { static_cast<void>(part.split(-1, 0)); });
    refuses("set_deadline: expected at least 1 ms, actual 0 ms (rank 1)",
            [&](nccl& part) { part.set_deadline(0ms); });
    refuses("register_memory: expected memory, actual a null pointer (rank 1)",
            [&](nccl& part) { part.register_memory(nullptr, 8); });
    refuses("register_memory: expected at most 8 symmetric bytes, actual 9 (rank 1)",
            [&](nccl& part) { part.register_memory(mine.full.span().data(), 8, 9); });
    refuses(
        "register_memory: expected a window at a multiple of 4096 bytes, actual 256 bytes behind "
        "one (rank 1)",
        [](nccl& part) {
          part.register_memory(reinterpret_cast<void*>(std::uintptr_t{4096 + 256}), 8, 8);
        });
  });
}

TEST_CASE("calls that differ end with the difference, on every rank, in both modes") {
  struct mismatch {
    std::function<void(nccl&, buffers&)> most;
    std::function<void(nccl&, buffers&)> odd;  // of rank 2
    std::string message;
  };
  std::vector<mismatch> const mismatches{
      {[](nccl& comm, buffers& mine) { mine.all_gather(comm); },
       [](nccl& comm, buffers& mine) { comm.barrier(mine.stream); },
       "all_gather #2: expected all_gather as on rank 0, actual barrier (rank 2)"},
      {[](nccl& comm, buffers& mine) { mine.reduce_scatter(comm); },
       [](nccl& comm, buffers& mine) { mine.reduce_scatter(comm, 12); },
       "reduce_scatter #2: expected 24 elements as on rank 0, actual 12 elements (rank 2)"},
      {[](nccl& comm, buffers& mine) { mine.reduce_scatter(comm); },
       [](nccl& comm, buffers& mine) {
         mine.reduce_scatter(comm, 24, combine::overwrite, reduction::average);
       },
       "reduce_scatter #2: expected sum as on rank 0, actual average (rank 2)"},
      {[](nccl& comm, buffers& mine) { comm.broadcast(mine.full.span(), 1, mine.stream); },
       [](nccl& comm, buffers& mine) { comm.broadcast(mine.full.span(), 2, mine.stream); },
       "broadcast #2: expected root 1 as on rank 0, actual root 2 (rank 2)"},
      {[](nccl& comm, buffers& mine) { comm.broadcast(mine.full.span(), 0, mine.stream); },
       [](nccl& comm, buffers& mine) { comm.broadcast(mine.doubles.span(), 0, mine.stream); },
       "broadcast #2: expected float32 as on rank 0, actual float64 (rank 2)"},
  };
  for (nccl_mode const mode : modes) {
    for (mismatch const& wrong : mismatches) {
      fakes const fresh;
      auto const failures = failures_of(3,
                                        [&](nccl& comm) {
                                          buffers mine;
                                          comm.barrier(mine.stream);
                                          (comm.rank() == 2 ? wrong.odd : wrong.most)(comm, mine);
                                          finish(comm, mine);
                                        },
                                        {.mode = mode});
      for (thrown const& here : failures) {
        // The fake of NCCL may notice first.
        bool const said = here.message == wrong.message || here.says(" met nccl");
        CHECK_MESSAGE(said, here.message);
        CHECK(here.after < soon);
      }
    }
  }
}

TEST_CASE("exchanges that differ end with the difference, counted from the user's first") {
  fakes const fresh;
  auto const failures = failures_of(3, [](nccl& comm) {
    std::size_t const bytes = comm.rank() == 2 ? 4 : 8;
    std::vector<std::byte> const mine(bytes);
    std::vector<std::byte> all(3 * bytes);
    comm.exchange(mine, all);
  });
  for (thrown const& here : failures) {
    CHECK(here.message == "exchange #1: expected 8 bytes as on rank 0, actual 4 bytes (rank 2)");
    CHECK(here.origin == 2);
  }
}

TEST_CASE("a rank that throws ends the others, whose work waits for it") {
  fakes const fresh;
  std::atomic<int> ended{0};
  std::string message;
  try {
    run(3, [&](nccl& comm) {
      buffers mine;
      if (comm.rank() == 1) {
        comm.barrier(mine.stream);
        mine.stream.synchronize();
        throw std::runtime_error{"no batch"};
      }
      thrown const here = failure_of([&] {
        comm.barrier(mine.stream);
        mine.all_reduce(comm);
        finish(comm, mine);
      });
      CHECK(here.message == "aborted by rank 1: no batch");
      CHECK(here.origin == 1);
      CHECK(here.after < soon);
      ++ended;
    });
  } catch (std::runtime_error const& caught) {
    message = caught.what();
  }
  CHECK(message == "no batch");
  CHECK(ended == 2);
}

TEST_CASE("a rank that left, or comes too late, is named") {
  {
    fakes const fresh;
    auto const failures = failures_of(3, [](nccl& comm) {
      buffers mine;
      comm.barrier(mine.stream);
      mine.stream.synchronize();
      if (comm.rank() != 2) {
        mine.all_reduce(comm);
        finish(comm, mine);
      }
    });
    for (std::size_t const rank : {0UL, 1UL}) {
      CHECK(failures[rank].says("all_reduce #2: expected 3 ranks, but rank 2 has left (rank "));
      CHECK(failures[rank].origin == 2);
    }
  }
  fakes const fresh;
  auto const failures = failures_of(3, [](nccl& comm) {
    buffers mine;
    comm.barrier(mine.stream);
    mine.stream.synchronize();
    comm.set_deadline(200ms);
    if (comm.rank() == 2) {
      std::this_thread::sleep_for(1s);
    }
    mine.all_reduce(comm);
    finish(comm, mine);
  });
  for (thrown const& here : failures) {
    CHECK(
        here.says("all_reduce #2: expected 3 ranks within 200 ms of the first, actual 2, "
                  "missing rank 2 (rank "));
    CHECK(here.origin == 2);
  }
}

TEST_CASE("a call that all ranks make, but whose stream doesn't come to it, misses the deadline") {
  fakes const fresh;
  auto const failures = failures_of(2, [](nccl& comm) {
    buffers mine;
    comm.barrier(mine.stream);
    mine.stream.synchronize();
    std::byte const one{};
    std::vector<std::byte> all(2);
    comm.exchange({&one, 1}, all);
    comm.set_deadline(200ms);
    if (comm.rank() == 1) {
      fake::delay(mine.stream.native(), 2s);
    }
    mine.all_gather(comm);
    finish(comm, mine);
  });
  for (thrown const& here : failures) {
    CHECK(here.says("all_gather #2: expected its end within 200 ms, actual none (rank "));
  }
}

TEST_CASE("without comparisons, calls that differ end with NCCL's error, or at the deadline") {
  fakes const fresh;
  auto const failures =
      failures_of(2,
                  [](nccl& comm) {
                    buffers mine;
                    comm.set_deadline(500ms);
                    if (comm.rank() == 0) {
                      mine.all_gather(comm);
                    } else {
                      mine.reduce_scatter(comm);  // ordered: it sends and receives
                    }
                    finish(comm, mine);
                  },
                  {.compare_calls = false});
  for (thrown const& here : failures) {
    CHECK(here.says(" #1: expected its end within 500 ms, actual none (rank "));
  }
}

TEST_CASE("an asynchronous error of one rank reaches all") {
  fakes const fresh;
  auto const failures = failures_of(3, [](nccl& comm) {
    buffers mine;
    comm.barrier(mine.stream);
    mine.stream.synchronize();
    if (comm.rank() == 1) {
      fake::fail_communicator(1, ncclRemoteError);
    } else {
      mine.all_reduce(comm);
    }
    finish(comm, mine);
  });
  for (thrown const& here : failures) {
    CHECK(here.message ==
          "ncclCommGetAsyncError: expected success, actual remote process exited or there was a "
          "network error: told to fail (rank 1)");
    CHECK(here.origin == 1);
    CHECK(here.after < soon);
  }
}

TEST_CASE("two ranks on one GPU are refused on every rank") {
  fakes const fresh{1};
  std::atomic<int> called{0};
  thrown const here = failure_of([&] { zero::run_nccl(2, [&](nccl&) { ++called; }, {}, {0, 0}); });
  CHECK(here.says("Duplicate GPU detected"));
  CHECK(called == 0);
}

TEST_CASE("a device that isn't there is one rank's error, and no rank waits for it") {
  fakes const fresh{2};
  CHECK(test::message_of<zero::error>([] { run(3, [](nccl&) {}); }) ==
        "cudaSetDevice: expected success, actual cudaErrorInvalidDevice: invalid device ordinal "
        "(rank 2)");
}

TEST_CASE("an id of another world ends with NCCL's error") {
  fakes const fresh;
  ncclUniqueId id{};
  CHECK(ncclGetUniqueId(&id) == ncclSuccess);
  ncclComm_t stranger = nullptr;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  CHECK(ncclCommInitRankConfig(&stranger, 3, id, 2, &config) == ncclInProgress);
  thrown const here = failure_of([&] { run(2, [](nccl&) {}, {.deadline = 5s, .id = id}); });
  CHECK(here.says("ncclCommInitRankConfig: expected success, actual invalid usage"));
  CHECK(here.says("mismatch in rank count from procs 3 : 2"));
  CHECK(ncclCommAbort(stranger) == ncclSuccess);
}

TEST_CASE("options that are wrong, or differ, are refused on every rank") {
  fakes const fresh;
  CHECK(test::message_of([&] { run(2, [](nccl&) {}, {.scratch_bytes = 100}); })
            .find("nccl: expected scratch_bytes of at least 1048576, a multiple of 256, actual "
                  "100 (rank ") == 0);
  auto const clients = zero::detail::memory_store::create(2);
  std::vector<std::string> errors(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      static_cast<void>(cudaSetDevice(rank));
      errors[static_cast<std::size_t>(rank)] = test::message_of([&] {
        nccl const comm{clients[static_cast<std::size_t>(rank)], nccl_options{.mode = modes[rank]}};
      });
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (std::string const& error : errors) {
    CHECK(error == "nccl: expected mode ordered as on rank 0, actual fast (rank 1)");
  }
}

TEST_CASE("memory is registered; NCCL's own scratch as a window, too, where NCCL has them") {
  for (int const version : {NCCL_VERSION_CODE, NCCL_VERSION(2, 27, 0), NCCL_VERSION(2, 26, 0)}) {
    fakes const fresh;
    fake::set_nccl_version(version);
    std::size_t const windows = version != NCCL_VERSION(2, 26, 0) ? 2 : 0;
    run(2,
        [&](nccl& comm) {
          zero::cuda_stream stream;
          std::byte const mine{};
          std::vector<std::byte> all(2);
          // At a multiple of 4096 bytes on one rank only.
          array<float> const data{
              stream, std::vector<float>(comm.rank() == 0 ? std::size_t{4096} : std::size_t{4000})};
          comm.register_memory(data.span().data(), std::size_t{16000});
          comm.exchange({&mine, 1}, all);
          CHECK(fake::live_registrations() == 2);
          CHECK(fake::live_windows() == 0);
          comm.exchange({&mine, 1}, all);
          check_reductions<float, float>(comm, 100);  // takes scratch, which is registered, too
          comm.exchange({&mine, 1}, all);
          CHECK(fake::live_registrations() == 4);
          CHECK(fake::live_windows() == windows);
          comm.exchange({&mine, 1}, all);
          comm.end_registrations();
          comm.exchange({&mine, 1}, all);
          CHECK(fake::live_registrations() == 2);
          comm.exchange({&mine, 1}, all);
        },
        {.nccl_memory = true});
  }
}

/// Memory of NCCL's, registered with `comm`: its first half as a window, too.
class window_memory {
 public:
  static constexpr std::size_t size = 4096;  // elements

  explicit window_memory(nccl& comm) : comm_{comm} {
    CHECK(ncclMemAlloc(&memory_, size * sizeof(float)) == ncclSuccess);
    comm.register_memory(memory_, size * sizeof(float), size / 2 * sizeof(float));
  }
  window_memory(window_memory const&) = delete;
  window_memory& operator=(window_memory const&) = delete;
  ~window_memory() {
    comm_.end_registrations();
    static_cast<void>(ncclMemFree(memory_));
  }

  [[nodiscard]] std::span<float> part(std::size_t first, std::size_t count) const {
    return std::span{static_cast<float*>(memory_), size}.subspan(first, count);
  }

 private:
  nccl& comm_;
  void* memory_ = nullptr;
};

TEST_CASE("a part of registered memory is a symmetric window, where NCCL has them") {
  struct machine {
    int version;
    bool refuses;
    std::size_t windows;
  };
  for (machine const& on :
       {machine{NCCL_VERSION_CODE, false, 2}, machine{NCCL_VERSION_CODE, true, 0},
        machine{NCCL_VERSION(2, 27, 0), false, 0}, machine{NCCL_VERSION(2, 26, 0), false, 0}}) {
    fakes const fresh;
    fake::set_nccl_version(on.version);
    fake::refuse_windows(on.refuses);
    run(2,
        [&](nccl& comm) {
          zero::cuda_stream stream;
          std::byte const mine{};
          std::vector<std::byte> all(2);
          window_memory const memory{comm};
          comm.exchange({&mine, 1}, all);
          CHECK(fake::live_registrations() == 2);
          CHECK(fake::live_windows() == on.windows);
          comm.exchange({&mine, 1}, all);
          std::vector<float> values(1000, static_cast<float>(comm.rank() + 1));
          zero::cuda::upload(stream, std::span{values}, memory.part(0, 1000));
          std::size_t const slice = 500 * static_cast<std::size_t>(comm.rank());
          // Each in place: what this rank alone reads or writes is at an offset of its own.
          comm.reduce_scatter(memory.part(0, 1000), memory.part(slice, 500), combine::overwrite,
                              reduction::sum, stream);
          comm.all_gather(memory.part(slice, 500), memory.part(0, 1000), stream);
          comm.all_reduce(memory.part(0, 1000), memory.part(0, 1000), combine::overwrite,
                          reduction::average, stream);
          comm.broadcast(memory.part(0, 1000), 1, stream);
          zero::cuda::download(stream, memory.part(0, 1000), std::span{values});
          CHECK(values == std::vector<float>(1000, 3));
        },
        {.mode = nccl_mode::fast});
  }
}

/// `call(comm, memory, mine)` in fast mode, whose buffers rank 2 has at another place.
template <class Call>
void fails_by_place(std::string const& name, Call const& call) {
  fakes const fresh;
  auto const failures = failures_of(3,
                                    [&](nccl& comm) {
                                      buffers mine;
                                      window_memory const memory{comm};
                                      call(comm, memory, mine);
                                      finish(comm, mine);
                                    },
                                    {.mode = nccl_mode::fast});
  for (thrown const& here : failures) {
    CHECK(here.message == name +
                              " #1: expected the place in the symmetric window as on rank 0, "
                              "actual another (rank 2)");
    CHECK(here.after < soon);
  }
  fake::reset_nccl();  // which may have noticed, too
}

TEST_CASE("a collective whose ranks use other places of a symmetric window fails on every rank") {
  using collective = std::function<void(nccl&, std::span<float>, buffers&)>;
  std::vector<std::pair<std::string, collective>> const calls{
      {"reduce_scatter",
       [](nccl& comm, std::span<float> data, buffers& mine) {
         comm.reduce_scatter(data, mine.shard.part(0, 8), combine::overwrite, reduction::sum,
                             mine.stream);
       }},
      {"all_gather",
       [](nccl& comm, std::span<float> data, buffers& mine) {
         comm.all_gather(mine.shard.part(0, 8), data, mine.stream);
       }},
      {"all_reduce",
       [](nccl& comm, std::span<float> data, buffers& mine) {
         comm.all_reduce(data, mine.full.span(), combine::overwrite, reduction::sum, mine.stream);
       }},
      {"all_reduce",
       [](nccl& comm, std::span<float> data, buffers& mine) {
         comm.all_reduce(mine.full.span(), data, combine::overwrite, reduction::sum, mine.stream);
       }},
      {"broadcast", [](nccl& comm, std::span<float> data,
                       buffers& mine) { comm.broadcast(data, 1, mine.stream); }},
  };
  for (auto const& each : calls) {
    for (std::size_t const other : {std::size_t{256}, window_memory::size / 2}) {  // out of it, too
      fails_by_place(each.first, [&](nccl& comm, window_memory const& memory, buffers& mine) {
        each.second(comm, memory.part(comm.rank() == 2 ? other : 0, 24), mine);
      });
    }
  }
  // What only this rank reads or writes is in the window on each, or on none.
  fails_by_place("all_gather", [](nccl& comm, window_memory const& memory, buffers& mine) {
    comm.all_gather(comm.rank() == 2 ? memory.part(0, 8) : mine.shard.part(0, 8), mine.full.span(),
                    mine.stream);
  });
  fails_by_place("reduce_scatter", [](nccl& comm, window_memory const& memory, buffers& mine) {
    comm.reduce_scatter(mine.full.span(),
                        comm.rank() == 2 ? memory.part(0, 8) : mine.shard.part(0, 8),
                        combine::overwrite, reduction::sum, mine.stream);
  });
}

TEST_CASE("reductions in ordered mode, which send and receive, use any place of a window") {
  fakes const fresh;
  run(3, [](nccl& comm) {
    buffers mine;
    window_memory const memory{comm};
    std::span<float> const data = memory.part(comm.rank() == 2 ? 256 : 0, 24);
    zero::cuda::fill_zero(mine.stream, data);
    comm.all_reduce(mine.full.span(), data, combine::overwrite, reduction::sum, mine.stream);
    std::vector<float> sums(24);
    zero::cuda::download(mine.stream, data, std::span{sums});
    CHECK(sums == std::vector<float>(24, 3));
  });
}

TEST_CASE("ranks may use other parts of registered memory in a collective") {
  for (nccl_mode const mode : modes) {
    fakes const fresh;
    run(2,
        [](nccl& comm) {
          zero::cuda_stream stream;
          auto const release = [](void* memory) { static_cast<void>(ncclMemFree(memory)); };
          constexpr std::size_t size = 4096;
          void* memory = nullptr;
          CHECK(ncclMemAlloc(&memory, size * sizeof(float)) == ncclSuccess);
          std::unique_ptr<void, decltype(release)> const owner{memory, release};
          comm.register_memory(memory, size * sizeof(float));
          std::span<float> const all{static_cast<float*>(memory), size};
          std::span<float> const part = all.subspan(comm.rank() == 0 ? 0 : 2048, 1000);
          std::vector<float> out(1000, 2);
          zero::cuda::upload(stream, std::span{out}, part);
          comm.all_reduce(part, part, combine::overwrite, reduction::sum, stream);
          comm.all_gather(part.first(1), part.subspan(10, 2), stream);
          zero::cuda::download(stream, part, std::span{out});
          CHECK(out == std::vector<float>(1000, 4));
          comm.end_registrations();
        },
        {.mode = mode, .nccl_memory = true});
  }
}

TEST_CASE("registrations and memory of NCCL's end when the stream has run this rank's calls") {
  for (nccl_mode const mode : modes) {
    fakes const fresh;
    run(3,
        [](nccl& comm) {
          zero::cuda_stream stream;
          array<float> const data{stream, std::vector<float>(300, 1)};
          array<float> const sums{stream, std::vector<float>(300, 10)};
          comm.register_memory(data.span().data(), data.span().size_bytes());
          fake::delay(stream.native(), 20ms);
          {
            nccl part = comm.split(0, comm.rank());  // its own memory ends with it
            part.all_reduce(data.span(), sums.span(), combine::add, reduction::sum, stream);
          }
          comm.all_reduce(data.span(), data.span(), combine::overwrite, reduction::sum, stream);
          comm.end_registrations();
          fake::delay(stream.native(), 0ms);
          CHECK(sums.get() == std::vector<float>(300, 13));
          CHECK(data.get() == std::vector<float>(300, 3));
        },
        {.mode = mode, .nccl_memory = true});
  }
}

TEST_CASE("a registration whose call no peer makes ends at the deadline, and fails the group") {
  fakes const fresh;
  auto const failures =
      failures_of(2,
                  [](nccl& comm) {
                    buffers mine;
                    comm.set_deadline(300ms);
                    comm.register_memory(mine.full.span().data(), mine.full.span().size_bytes());
                    if (comm.rank() == 0) {
                      mine.all_reduce(comm);
                      comm.end_registrations();
                      comm.raise_if_failed();
                    } else {
                      finish(comm, mine);
                    }
                  },
                  {.nccl_memory = true});
  for (thrown const& here : failures) {
    CHECK(here.says("all_reduce #1: "));
    CHECK(here.after < soon);
  }
}

TEST_CASE("collectives are captured into a graph, and meet again at each replay") {
  for (nccl_mode const mode : modes) {
    fakes const fresh;
    run(3,
        [](nccl& comm) {
          zero::cuda_stream stream;
          array<float> data{stream, std::vector<float>(6)};
          comm.all_reduce(data.span(), data.span(), combine::overwrite, reduction::sum, stream);
          data.put(std::vector<float>(6, static_cast<float>(comm.rank() + 1)));
          stream.synchronize();
          cudaGraph_t graph = nullptr;
          cudaGraphExec_t exec = nullptr;
          CHECK(cudaStreamBeginCapture(stream.native(), cudaStreamCaptureModeThreadLocal) ==
                cudaSuccess);
          comm.all_reduce(data.span(), data.span(), combine::overwrite, reduction::sum, stream);
          std::this_thread::sleep_for(50ms);  // the watchdog looks meanwhile
          CHECK(cudaStreamEndCapture(stream.native(), &graph) == cudaSuccess);
          CHECK(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
          for (int replay = 0; replay < 3; ++replay) {
            CHECK(cudaGraphLaunch(exec, stream.native()) == cudaSuccess);
          }
          CHECK(data.get() == std::vector<float>(6, 6 * 3 * 3));
          CHECK(cudaGraphExecDestroy(exec) == cudaSuccess);
          CHECK(cudaGraphDestroy(graph) == cudaSuccess);
        },
        {.mode = mode});
  }
}

namespace {

/// A graph of an all_reduce, once it was enqueued.
class captured {
 public:
  captured(nccl& comm, buffers& mine) {
    mine.all_reduce(comm);  // takes memory
    mine.stream.synchronize();
    cudaGraph_t graph = nullptr;
    CHECK(cudaStreamBeginCapture(mine.stream.native(), cudaStreamCaptureModeThreadLocal) ==
          cudaSuccess);
    mine.all_reduce(comm);
    CHECK(cudaStreamEndCapture(mine.stream.native(), &graph) == cudaSuccess);
    CHECK(cudaGraphInstantiate(&exec_, graph, 0) == cudaSuccess);
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);
  }
  captured(captured const&) = delete;
  captured& operator=(captured const&) = delete;
  ~captured() { CHECK(cudaGraphExecDestroy(exec_) == cudaSuccess); }

 private:
  cudaGraphExec_t exec_ = nullptr;
};

void wait_for_no_communicator() {
  while (fake::live_communicators() != 0) {
    std::this_thread::sleep_for(1ms);
  }
}

}  // namespace

TEST_CASE("a communicator that ends long before its peers' fails nobody") {
  fakes const fresh;
  run(3, [](nccl& comm) {
    buffers mine;
    nccl part = comm.split(0, comm.rank());
    part.barrier(mine.stream);
    mine.stream.synchronize();
    part.set_deadline(200ms);  // of the end, too
    if (comm.rank() != 0) {
      std::this_thread::sleep_for(1s);
      part.raise_if_failed();
    }
    auto const begin = std::chrono::steady_clock::now();
    { nccl const ends = std::move(part); }
    CHECK(std::chrono::steady_clock::now() - begin < soon);
    std::byte const one{};
    std::vector<std::byte> all(3);
    comm.exchange({&one, 1}, all);
    comm.raise_if_failed();
  });
}

TEST_CASE("a graph that outlives its communicator delays its end, and fails nobody") {
  fakes const fresh;
  run(2, [](nccl& comm) {
    buffers mine;
    nccl part = comm.split(0, comm.rank());
    part.set_deadline(200ms);  // of the end, too
    auto graph = std::make_unique<captured>(part, mine);
    if (comm.rank() == 0) {
      graph.reset();
    }
    auto const begin = std::chrono::steady_clock::now();
    { nccl const ends = std::move(part); }
    CHECK(std::chrono::steady_clock::now() - begin < soon);
    graph.reset();
    std::byte const one{};
    std::vector<std::byte> all(2);
    comm.exchange({&one, 1}, all);
    comm.raise_if_failed();
  });
  wait_for_no_communicator();
}

TEST_CASE("after a failure, calls throw at once although NCCL waits for a graph") {
  fakes const fresh;
  auto const failures = failures_of(2, [](nccl& comm) {
    buffers mine;
    captured const graph{comm, mine};
    std::byte const one{};
    std::vector<std::byte> all(2);
    comm.exchange({&one, 1}, all);  // both have captured
    if (comm.rank() == 1) {
      comm.abort("a fault");
    }
    while (test::what_throws([&] { comm.raise_if_failed(); }).message.empty()) {
      std::this_thread::sleep_for(1ms);
    }
    std::this_thread::sleep_for(50ms);  // the watchdog is in ncclCommAbort
    mine.all_gather(comm);
  });
  for (thrown const& here : failures) {
    CHECK(here.message == "aborted by rank 1: a fault");
    CHECK(here.after < soon);
  }
  wait_for_no_communicator();
}

TEST_CASE("in a capture, what would take memory first is refused") {
  struct call {
    char const* message;
    std::function<void(nccl&, array<float>&, zero::cuda_stream&)> make;
  };
  for (call const &each :
       {call{"all_reduce: expected memory for it before a capture, actual none; call it once "
             "before, or use_scratch (rank 1)",
             [](nccl& comm, array<float>& data, zero::cuda_stream& on) {
               comm.all_reduce(data.span(), data.span(), combine::overwrite, reduction::sum, on);
             }},
        call{"barrier: expected memory for it before a capture, actual none; call it once before "
             "(rank 1)",
             [](nccl& comm, array<float>&, zero::cuda_stream& on) { comm.barrier(on); }}}) {
    fakes const fresh;
    auto const failures = failures_of(2, [&](nccl& comm) {
      zero::cuda_stream stream;
      array<float> data{stream, std::vector<float>(6)};
      if (comm.rank() == 1) {
        cudaGraph_t graph = nullptr;
        CHECK(cudaStreamBeginCapture(stream.native(), cudaStreamCaptureModeThreadLocal) ==
              cudaSuccess);
        CHECK(test::message_of([&] { each.make(comm, data, stream); }) == each.message);
        CHECK(cudaStreamEndCapture(stream.native(), &graph) == cudaSuccess);
        CHECK(cudaGraphDestroy(graph) == cudaSuccess);
      }
      buffers mine;
      finish(comm, mine);
    });
    for (thrown const& here : failures) {
      CHECK(here.message == std::string{"aborted by rank 1: "} + each.message);
    }
  }
}

namespace {

/// Bytes of the current device that are allocated.
std::size_t used_bytes() {
  std::size_t free = 0;
  std::size_t total = 0;
  CHECK(cudaMemGetInfo(&free, &total) == cudaSuccess);
  return total - free;
}

}  // namespace

TEST_CASE("memory is taken by the first call that needs it, and not where it is lent") {
  constexpr std::size_t most = std::size_t{1} << 20U;
  for (nccl_mode const mode : modes) {
    fakes const fresh;
    run(3,
        [&](nccl& comm) {
          CHECK(used_bytes() == 0);
          nccl part = comm.split(0, comm.rank());
          {
            buffers mine;
            std::size_t const before = used_bytes();
            part.all_gather(mine.shard.part(0, 8), mine.full.span(), mine.stream);
            part.broadcast(mine.full.span(), 0, mine.stream);
            CHECK(used_bytes() == before);
            part.barrier(mine.stream);
            CHECK(used_bytes() == before + 256);
            part.barrier(mine.stream);
            mine.reduce_scatter(part, 24, combine::add);
            CHECK(used_bytes() == before + 256 + most);
            mine.reduce_scatter(part, 24, combine::add);
            mine.all_reduce(part);
            CHECK(used_bytes() == before + 256 + most);

            array<float> lent{mine.stream, std::vector<float>(3 * 64)};
            comm.use_scratch(std::as_writable_bytes(lent.span()));
            std::size_t const with_lent = used_bytes();
            check_reductions<float, float>(comm, 300);  // 1200 bytes a slice: in parts of 256
            check_reductions<zero::float16, float>(comm, 300);
            check_reductions<double, double>(comm, 300);
            CHECK(used_bytes() == with_lent);
            mine.stream.synchronize();
            comm.end_scratch();
            mine.reduce_scatter(comm, 24, combine::add);
            CHECK(used_bytes() == with_lent + most);
            mine.stream.synchronize();
          }
        },
        {.mode = mode, .scratch_bytes = most});
  }
}

TEST_CASE("too little memory for NCCL's says how much there is, as the device's own") {
  fakes const fresh;
  fake::set_memory(std::size_t{1} << 20U);
  zero::memory_resource const arena = zero::nccl_memory();
  std::string const message = test::message_of<zero::error>(
      [&] { static_cast<void>(arena.allocate(std::size_t{2} << 20U, arena.context)); });
  CHECK(
      message.starts_with("ncclMemAlloc: expected memory for 2097152 bytes, actual 1048576 free "
                          "of 1048576: unhandled cuda error"));
}

TEST_CASE("what is lent must be aligned, and as large as a part of every slot") {
  for (nccl_mode const mode : modes) {
    for (bool const small : {false, true}) {
      fakes const fresh;
      std::size_t const least = mode == nccl_mode::ordered ? 512 : 768;  // 2 slots, or 3
      auto const failures = failures_of(
          3,
          [&](nccl& comm) {
            zero::cuda_stream stream;
            array<float> const memory{stream, std::vector<float>(512)};
            auto const bytes = std::as_writable_bytes(memory.span());
            comm.use_scratch(bytes.first(least));
            if (comm.rank() == 1) {
              CHECK(test::message_of([&] {
                      comm.use_scratch(small ? bytes.first(least - 1) : bytes.subspan(4, least));
                    }) == "use_scratch: expected at least " + std::to_string(least) +
                              " bytes at a multiple of 256, actual " +
                              (small ? std::to_string(least - 1) + " bytes"
                                     : std::to_string(least) + " bytes at another address") +
                              " (rank 1)");
            }
            buffers mine;
            finish(comm, mine);
          },
          {.mode = mode});
      for (thrown const& here : failures) {
        CHECK(here.says("aborted by rank 1: use_scratch: expected at least "));
      }
    }
  }
}

TEST_CASE("scratch for one part is a slot for each other rank, in fast mode for each rank") {
  using zero::dtype;
  using zero::reduction_shape;
  auto const bytes = [](nccl_mode mode, std::uint64_t ranks, reduction_shape const& of,
                        std::size_t most = std::size_t{16} << 20U) {
    return nccl_options{.mode = mode, .scratch_bytes = most}.scratch_for(of, ranks);
  };
  // 100 floats are 400 bytes: two times 256. 100 of 16 bits are 200, in one.
  reduction_shape const floats{.slice = 100};
  reduction_shape const halves{.slice = 100, .input = dtype::float16, .output = dtype::float16};
  reduction_shape const mixed{.slice = 100, .input = dtype::bfloat16, .output = dtype::float32};
  reduction_shape const added{.slice = 100, .how = combine::add};
  CHECK(bytes(nccl_mode::ordered, 1, floats) == 0);
  CHECK(bytes(nccl_mode::ordered, 2, floats) == 512);
  CHECK(bytes(nccl_mode::ordered, 4, floats) == 3 * 512);
  CHECK(bytes(nccl_mode::ordered, 4, halves) == 3 * 256);
  CHECK(bytes(nccl_mode::ordered, 4, mixed) == 3 * 256);
  CHECK(bytes(nccl_mode::ordered, 4, added) == 3 * 512);
  CHECK(bytes(nccl_mode::fast, 1, added) == 0);
  CHECK(bytes(nccl_mode::fast, 4, floats) == 0);
  CHECK(bytes(nccl_mode::fast, 4, added) == 4 * 512);
  CHECK(bytes(nccl_mode::fast, 4, mixed) == 4 * 256);
  CHECK(bytes(nccl_mode::fast, 4, halves) == 4 * 512);  // float32 on the wire
  CHECK(bytes(nccl_mode::ordered, 4, {.slice = 1U << 20U}, 1U << 20U) == 1U << 20U);
  CHECK(bytes(nccl_mode::ordered, 4, {.slice = 0}) == 0);
}

TEST_CASE("calls in a second stream are refused while the first is busy") {
  fakes const fresh;
  failures_of(1, [](nccl& comm) {
    zero::cuda_stream first;
    zero::cuda_stream second;
    fake::delay(first.native(), 300ms);
    comm.barrier(first);
    CHECK(test::message_of([&] { comm.barrier(second); }) ==
          "barrier: expected the stream of this rank's unfinished calls, actual another, which "
          "needs a communicator of its own (split) (rank 0)");
  });
}

TEST_CASE("ranks of several processes' stores make a communicator, and a lost one ends it") {
  fakes const fresh;
  std::atomic<int> port{0};
  std::vector<thrown> failures(2);
  auto const rank = [&](int me) {
    static_cast<void>(cudaSetDevice(me));
    while (me != 0 && port == 0) {
      std::this_thread::sleep_for(1ms);
    }
    zero::store job{me, 2, {"127.0.0.1", port}, {.job = "x", .deadline = 20s}};
    port = job.address().port;
    nccl comm{job, {}};
    check_reductions<float, float>(comm, 10);
    if (me == 0) {
      buffers mine;
      failures[0] = failure_of([&] {
        mine.all_reduce(comm);
        finish(comm, mine);
      });
    }
  };
  std::thread peer{[&] { rank(1); }};
  rank(0);
  peer.join();
  CHECK(failures[0].says("expected 2 ranks, but rank 1 has left (rank 0)"));
}

namespace {

/// Ranks split, reduce, gather, and learn from each other that all is done. Returns how many did.
int work_together(int ranks, nccl_mode mode, std::string& error) {
  std::atomic<int> done{0};
  try {
    run(ranks,
        [&](nccl& comm) {
          buffers mine;
          nccl part = comm.split(0, -comm.rank());
          comm.register_memory(mine.full.span().data(), mine.full.span().size_bytes());
          mine.reduce_scatter(part);
          mine.reduce_scatter(comm, 24, combine::add, reduction::average);
          mine.all_gather(comm);
          mine.stream.synchronize();
          std::byte const one{};
          std::vector<std::byte> all(static_cast<std::size_t>(ranks));
          part.exchange({&one, 1}, all);
          comm.exchange({&one, 1}, all);
          ++done;
        },
        {.mode = mode, .scratch_bytes = std::size_t{1} << 20U, .nccl_memory = true});
  } catch (std::exception const& caught) {
    error = caught.what();
  }
  return done;
}

}  // namespace

TEST_CASE(
    "each call of CUDA and NCCL fails once: all ranks get an error or none, and nothing stays") {
  constexpr int ranks = 2;
  constexpr std::uint64_t most = 6;  // of each function
  for (nccl_mode const mode : modes) {
    std::map<std::string, std::uint64_t> counts;
    {
      fakes const fresh;
      std::string error;
      CHECK(work_together(ranks, mode, error) == ranks);
      CHECK(error.empty());
      counts = fake::call_counts();
    }
    CHECK(counts.contains("ncclAllGather"));
    for (auto const& [function, count] : counts) {
      std::string const& name = function;
      for (std::uint64_t n = 1; n <= std::min(count, most); ++n) {
        fakes const fresh;
        fake::fail_call(n, n % 2 == 0 ? cudaErrorMemoryAllocation : cudaErrorUnknown,
                        [name](char const* called) { return name == called; });
        std::string error;
        int const done = work_together(ranks, mode, error);
        CHECK_MESSAGE((done == 0 || done == ranks), name, " #", n, ": ", done);
        CHECK_MESSAGE((done == ranks || error.find("expected") != std::string::npos), name, " #", n,
                      ": ", error);
      }
    }
  }
}
