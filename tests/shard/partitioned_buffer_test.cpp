// SPDX-License-Identifier: MIT
#include <zero/comm/run_threads.hpp>
#include <zero/shard/partitioned_buffer.hpp>

#include <doctest/doctest.h>
#include <support/thrown.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

using zero::partition;
using zero::partitioned_buffer;

namespace {

constexpr int world_sizes[] = {1, 2, 3, 4, 8};

/// The host, whose allocations are counted.
struct counted : zero::host {
  static inline std::atomic<long> live_bytes{0};
  static void* allocate(std::size_t bytes) {
    live_bytes += static_cast<long>(bytes);
    return zero::host::allocate(bytes);
  }
  static void deallocate(void* memory, std::size_t bytes) noexcept {
    live_bytes -= memory == nullptr ? 0 : static_cast<long>(bytes);
    zero::host::deallocate(memory, bytes);
  }
};

}  // namespace

TEST_CASE("a rank stores its slice only, and gathers the others") {
  for (int const ranks : world_sizes) {
    for (std::uint64_t const elements : {0U, 1U, 6U, 7U, 33U, 1000U}) {
      for (std::uint64_t const alignment : {1U, 16U}) {
        zero::run_threads(ranks, [&](zero::thread_communicator& comm) {
          partition const cut{elements, static_cast<std::uint64_t>(ranks), alignment};
          auto const rank = static_cast<std::uint64_t>(comm.rank());
          partitioned_buffer<float> buffer{cut, rank};
          CHECK(buffer.shard().size() == cut.slice());
          CHECK(buffer.whole().empty());
          // Each real element is its index in the whole.
          std::iota(buffer.shard().begin(),
                    buffer.shard().begin() + static_cast<std::ptrdiff_t>(cut.size(rank)),
                    static_cast<float>(cut.offset(rank)));
          zero::host_stream stream;
          std::span<float> const whole = buffer.gather(comm, stream);
          stream.synchronize();
          CHECK(whole.size() == cut.padded());
          for (std::uint64_t i = 0; i < whole.size(); ++i) {
            CHECK(whole[i] == (i < elements ? static_cast<float>(i) : 0.0F));
          }
          buffer.release();
          CHECK(buffer.whole().empty());
        });
      }
    }
  }
}

TEST_CASE("gathering again shows the shards as they are now") {
  zero::run_threads(2, [](zero::thread_communicator& comm) {
    partitioned_buffer<double> buffer{partition{2, 2}, static_cast<std::uint64_t>(comm.rank())};
    zero::host_stream stream;
    for (double const value : {1.0, 2.0}) {
      buffer.shard()[0] = value * (comm.rank() + 1);
      buffer.gather(comm, stream);
      stream.synchronize();
      CHECK(buffer.whole()[0] == value);
      CHECK(buffer.whole()[1] == 2 * value);
      comm.barrier(stream);  // nobody overwrites a shard that a peer still reads
    }
  });
}

TEST_CASE("memory is the slice, and the whole while it is gathered") {
  zero::run_threads(1, [](zero::thread_communicator& comm) {
    {
      partitioned_buffer<float, counted> buffer{partition{10, 1, 16}, 0};
      CHECK(counted::live_bytes == 64);
      zero::host_stream stream;
      buffer.gather(comm, stream);
      CHECK(counted::live_bytes == 128);
      buffer.gather(comm, stream);
      CHECK(counted::live_bytes == 128);
      buffer.release();
      CHECK(counted::live_bytes == 64);
      buffer.release();
      buffer.gather(comm, stream);
    }
    CHECK(counted::live_bytes == 0);
  });
}

TEST_CASE("a buffer moves, and a moved-from one holds nothing") {
  {
    partitioned_buffer<float, counted> first{partition{4, 2}, 0};
    first.shard()[1] = 5;
    float const* const address = first.shard().data();
    partitioned_buffer<float, counted> second{std::move(first)};
    CHECK(second.shard().data() == address);
    partitioned_buffer<float, counted> third{partition{100, 2}, 1};
    third = std::move(second);
    CHECK(third.shard().data() == address);
    CHECK(third.shard()[1] == 5);
    CHECK(third.cut() == partition{4, 2});
    CHECK(third.rank() == 0);
  }
  CHECK(counted::live_bytes == 0);
}

TEST_CASE("a rank outside the cut is refused") {
  CHECK(test::message_of([] {
          partitioned_buffer<float> const buffer{partition{4, 2}, 2};
        }) == "partitioned_buffer: expected a rank below 2, actual 2");
}
