// SPDX-License-Identifier: MIT
// The fake of NCCL does what NCCL does, as far as the library's tests rely on it.
#include <zero/core/bfloat16.hpp>

#include <doctest/doctest.h>
#include <fake/cuda.hpp>
#include <fake/cuda_support.hpp>
#include <fake/nccl.hpp>
#include <support/watchdog.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <string>
#include <thread>
#include <vector>

namespace {

using namespace std::chrono_literals;
using cuda_test::make_device;
using cuda_test::make_stream;
using cuda_test::ok;

/// Two communicators of this thread, each with a device, a stream and memory.
struct two_ranks {
  two_ranks() {
    fake::reset();
    fake::reset_nccl();
    fake::set_device_count(2);
    ncclUniqueId id{};
    REQUIRE(ncclGetUniqueId(&id) == ncclSuccess);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    for (int rank = 0; rank < 2; ++rank) {
      ok(cudaSetDevice(rank));
      REQUIRE(ncclCommInitRankConfig(&comm[rank], 2, id, rank, &config) == ncclInProgress);
      stream[rank] = make_stream();
      data[rank] = make_device<float>(16);
    }
    settle();
  }
  two_ranks(two_ranks const&) = delete;
  two_ranks& operator=(two_ranks const&) = delete;
  ~two_ranks() {
    for (int rank = 0; rank < 2; ++rank) {
      if (comm[rank] != nullptr) {
        CHECK(ncclCommDestroy(comm[rank]) == ncclSuccess);
      }
      CHECK(cudaStreamDestroy(stream[rank]) == cudaSuccess);
      CHECK(cudaFree(data[rank]) == cudaSuccess);
    }
    ok(cudaSetDevice(0));
    CHECK(fake::live_communicators() == 0);
  }

  void settle() const {
    for (ncclComm_t const each : comm) {
      ncclResult_t now = ncclInProgress;
      while (each != nullptr && now == ncclInProgress) {
        REQUIRE(ncclCommGetAsyncError(each, &now) == ncclSuccess);
      }
    }
  }

  template <class Function>
  void each(Function const& function) {
    for (int rank = 0; rank < 2; ++rank) {
      ok(cudaSetDevice(rank));
      function(rank);
    }
  }

  void fill(std::vector<float> const& first, std::vector<float> const& second) {
    each([&](int rank) {
      std::vector<float> const& from = rank == 0 ? first : second;
      ok(cudaMemcpyAsync(data[rank], from.data(), from.size() * sizeof(float),
                         cudaMemcpyHostToDevice, stream[rank]));
    });
  }
  [[nodiscard]] std::vector<float> get(int rank, std::size_t count) const {
    std::vector<float> out(count);
    ok(cudaSetDevice(rank));
    ok(cudaMemcpyAsync(out.data(), data[rank], count * sizeof(float), cudaMemcpyDeviceToHost,
                       stream[rank]));
    ok(cudaStreamSynchronize(stream[rank]));
    return out;
  }
  [[nodiscard]] ncclResult_t async(int rank) const {
    ncclResult_t now = ncclSuccess;
    CHECK(ncclCommGetAsyncError(comm[rank], &now) == ncclSuccess);
    return now;
  }
  void abort(int rank) {
    CHECK(ncclCommAbort(comm[rank]) == ncclSuccess);
    comm[rank] = nullptr;
  }

  test::watchdog limit{60s};
  ncclComm_t comm[2] = {};
  cudaStream_t stream[2] = {};
  float* data[2] = {};
};

}  // namespace

TEST_CASE("a call that doesn't block is in progress first, and another is refused until it ends") {
  two_ranks ranks;
  ranks.fill({1, 2}, {10, 20});
  ranks.each([&](int rank) {
    CHECK(ncclAllReduce(ranks.data[rank], ranks.data[rank], 2, ncclFloat32, ncclSum,
                        ranks.comm[rank], ranks.stream[rank]) == ncclInProgress);
    CHECK(ncclAllReduce(ranks.data[rank], ranks.data[rank], 2, ncclFloat32, ncclSum,
                        ranks.comm[rank], ranks.stream[rank]) == ncclInvalidArgument);
  });
  ranks.settle();
  CHECK(ranks.get(0, 2) == std::vector<float>{11, 22});
  CHECK(ranks.get(1, 2) == std::vector<float>{11, 22});
}

TEST_CASE("grouped sends and receives swap memory, whoever comes first") {
  two_ranks ranks;
  ranks.fill({1, 2, 0, 0}, {3, 4, 0, 0});
  ranks.each([&](int rank) {
    CHECK(ncclGroupStart() == ncclSuccess);
    CHECK(ncclSend(ranks.data[rank], 2, ncclFloat32, 1 - rank, ranks.comm[rank],
                   ranks.stream[rank]) == ncclSuccess);
    CHECK(ncclRecv(ranks.data[rank] + 2, 2, ncclFloat32, 1 - rank, ranks.comm[rank],
                   ranks.stream[rank]) == ncclSuccess);
    CHECK(ncclGroupEnd() == ncclInProgress);
  });
  CHECK(ranks.get(0, 4) == std::vector<float>{1, 2, 3, 4});
  CHECK(ranks.get(1, 4) == std::vector<float>{3, 4, 1, 2});
}

TEST_CASE("an error in a group is the group's, and nothing of it runs") {
  two_ranks ranks;
  ok(cudaSetDevice(0));
  CHECK(ncclGroupStart() == ncclSuccess);
  CHECK(ncclSend(ranks.data[0], 2, ncclFloat32, 1, ranks.comm[0], ranks.stream[0]) == ncclSuccess);
  CHECK(ncclRecv(ranks.data[0], 2, ncclFloat32, 7, ranks.comm[0], ranks.stream[0]) ==
        ncclInvalidArgument);
  CHECK(ncclGroupEnd() == ncclInvalidArgument);
  CHECK(cudaStreamSynchronize(ranks.stream[0]) == cudaSuccess);
}

TEST_CASE("calls that differ give all ranks an error, and only an abort lets each go on") {
  two_ranks ranks;
  ranks.each([&](int rank) {
    CHECK(ncclAllReduce(ranks.data[rank], ranks.data[rank], 2, ncclFloat32,
                        rank == 0 ? ncclSum : ncclMax, ranks.comm[rank],
                        ranks.stream[rank]) == ncclInProgress);
  });
  while (ranks.async(0) != ncclInvalidUsage || ranks.async(1) != ncclInvalidUsage) {
    std::this_thread::sleep_for(1ms);
  }
  CHECK(fake::nccl_difference() ==
        "ncclAllReduce(count 2, type 7, op 0, root 0) of rank 0 met ncclAllReduce(count 2, type 7, "
        "op 2, root 0) of rank 1");
  ok(cudaSetDevice(0));
  CHECK(cudaStreamQuery(ranks.stream[0]) == cudaErrorNotReady);
  ranks.abort(0);
  CHECK(cudaStreamSynchronize(ranks.stream[0]) == cudaSuccess);
  ok(cudaSetDevice(1));
  CHECK(cudaStreamQuery(ranks.stream[1]) == cudaErrorNotReady);
  ranks.abort(1);
  CHECK(cudaStreamSynchronize(ranks.stream[1]) == cudaSuccess);
}

TEST_CASE("an abort from another thread ends a wait, and a peer that comes later waits") {
  two_ranks ranks;
  ok(cudaSetDevice(0));
  CHECK(ncclBroadcast(ranks.data[0], ranks.data[0], 2, ncclFloat32, 0, ranks.comm[0],
                      ranks.stream[0]) == ncclInProgress);
  std::thread other{[&] {
    std::this_thread::sleep_for(20ms);
    ranks.abort(0);
  }};
  CHECK(cudaStreamSynchronize(ranks.stream[0]) == cudaSuccess);
  other.join();
  ok(cudaSetDevice(1));
  CHECK(ncclBroadcast(ranks.data[1], ranks.data[1], 2, ncclFloat32, 0, ranks.comm[1],
                      ranks.stream[1]) == ncclInProgress);
  std::this_thread::sleep_for(20ms);
  CHECK(cudaStreamQuery(ranks.stream[1]) == cudaErrorNotReady);
  ranks.abort(1);
  CHECK(cudaStreamSynchronize(ranks.stream[1]) == cudaSuccess);
}

TEST_CASE("each hop of a ring rounds to the type on the wire") {
  two_ranks ranks;
  // 256 + 1 is no bfloat16: it rounds to 256, where three ranks' exact sum would be 258.
  zero::bfloat16 const one{1.0F};
  zero::bfloat16 const large{256.0F};
  ranks.each([&](int rank) {
    ok(cudaMemcpyAsync(ranks.data[rank], rank == 0 ? &one : &large, 2, cudaMemcpyHostToDevice,
                       ranks.stream[rank]));
    CHECK(ncclAllReduce(ranks.data[rank], ranks.data[rank], 1, ncclBfloat16, ncclSum,
                        ranks.comm[rank], ranks.stream[rank]) == ncclInProgress);
  });
  zero::bfloat16 out;
  ok(cudaSetDevice(0));
  ok(cudaMemcpyAsync(&out, ranks.data[0], 2, cudaMemcpyDeviceToHost, ranks.stream[0]));
  ok(cudaStreamSynchronize(ranks.stream[0]));
  CHECK(static_cast<float>(out) == 256.0F);
}

TEST_CASE("two ranks on a device are refused, unless they may") {
  for (bool const may : {false, true}) {
    test::watchdog const limit{60s};
    fake::reset();
    fake::reset_nccl();
    fake::allow_shared_device(may);
    ncclUniqueId id{};
    CHECK(ncclGetUniqueId(&id) == ncclSuccess);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t comm[2] = {};
    for (int rank = 0; rank < 2; ++rank) {
      CHECK(ncclCommInitRankConfig(&comm[rank], 2, id, rank, &config) == ncclInProgress);
    }
    for (ncclComm_t const each : comm) {
      ncclResult_t now = ncclInProgress;
      while (now == ncclInProgress) {
        CHECK(ncclCommGetAsyncError(each, &now) == ncclSuccess);
      }
      CHECK(now == (may ? ncclSuccess : ncclInvalidUsage));
      CHECK(ncclCommAbort(each) == ncclSuccess);
    }
  }
}

TEST_CASE("a call is told to fail, and does nothing") {
  two_ranks ranks;
  ok(cudaSetDevice(0));
  fake::fail_call(1, cudaErrorMemoryAllocation);
  CHECK(ncclAllReduce(ranks.data[0], ranks.data[0], 2, ncclFloat32, ncclSum, ranks.comm[0],
                      ranks.stream[0]) == ncclUnhandledCudaError);
  fake::fail_call(1, cudaErrorUnknown);
  CHECK(ncclAllReduce(ranks.data[0], ranks.data[0], 2, ncclFloat32, ncclSum, ranks.comm[0],
                      ranks.stream[0]) == ncclSystemError);
  CHECK(std::string{ncclGetLastError(ranks.comm[0])} == "told to fail: ncclAllReduce");
  CHECK(cudaStreamSynchronize(ranks.stream[0]) == cudaSuccess);
}

TEST_CASE("a registration that ends during a call is reported") {
  two_ranks ranks;
  void* handle[2] = {};
  ranks.each([&](int rank) {
    CHECK(ncclCommRegister(ranks.comm[rank], ranks.data[rank], 64, &handle[rank]) == ncclSuccess);
  });
  ok(cudaSetDevice(1));
  CHECK(ncclCommDeregister(ranks.comm[1], handle[1]) == ncclSuccess);
  CHECK(fake::nccl_misuse().empty());
  ranks.each([&](int rank) {
    CHECK(ncclAllReduce(ranks.data[rank], ranks.data[rank], 2, ncclFloat32, ncclSum,
                        ranks.comm[rank], ranks.stream[rank]) == ncclInProgress);
    if (rank == 0) {
      CHECK(ncclCommDeregister(ranks.comm[0], handle[0]) == ncclSuccess);
    }
  });
  CHECK(fake::nccl_misuse() == "ncclCommDeregister during a call of rank 0");
  ranks.settle();
}

TEST_CASE("a window is of memory of NCCL's, and a symmetric one has each rank's offset") {
  for (int const flags : {NCCL_WIN_DEFAULT, NCCL_WIN_COLL_SYMMETRIC}) {
    two_ranks ranks;
    void* memory[2] = {};
    ncclWindow_t window[2] = {};
    ranks.each([&](int rank) {
      CHECK(ncclCommWindowRegister(ranks.comm[rank], ranks.data[rank], 64, &window[rank], flags) !=
            ncclSuccess);
      CHECK(ncclMemAlloc(&memory[rank], 4096) == ncclSuccess);
      CHECK(ncclCommWindowRegister(ranks.comm[rank], memory[rank], 4096, &window[rank], flags) ==
            ncclSuccess);
    });
    auto const reduce = [&](std::size_t first, std::size_t second) {
      ranks.each([&](int rank) {
        auto* const at = static_cast<float*>(memory[rank]) + (rank == 0 ? first : second);
        CHECK(ncclAllReduce(at, at, 2, ncclFloat32, ncclSum, ranks.comm[rank],
                            ranks.stream[rank]) == ncclInProgress);
      });
      ranks.settle();
      ranks.each([&](int rank) { ok(cudaStreamSynchronize(ranks.stream[rank])); });
    };
    reduce(64, 64);
    CHECK(fake::nccl_misuse().empty());
    reduce(64, 128);
    CHECK(fake::nccl_misuse().empty() == (flags == NCCL_WIN_DEFAULT));
    ranks.each([&](int rank) {
      CHECK(ncclCommWindowDeregister(ranks.comm[rank], window[rank]) == ncclSuccess);
      CHECK(ncclMemFree(memory[rank]) == ncclSuccess);
    });
  }
}

TEST_CASE("a communicator ends when the graphs with its calls have") {
  two_ranks ranks;
  cudaGraph_t graph[2] = {};
  cudaGraphExec_t exec[2] = {};
  ranks.each([&](int rank) {
    ok(cudaStreamBeginCapture(ranks.stream[rank], cudaStreamCaptureModeThreadLocal));
    CHECK(ncclAllReduce(ranks.data[rank], ranks.data[rank], 2, ncclFloat32, ncclSum,
                        ranks.comm[rank], ranks.stream[rank]) == ncclInProgress);
    ok(cudaStreamEndCapture(ranks.stream[rank], &graph[rank]));
    ok(cudaGraphInstantiate(&exec[rank], graph[rank], 0));
    ok(cudaGraphDestroy(graph[rank]));
  });
  ranks.settle();
  CHECK(ncclCommFinalize(ranks.comm[0]) == ncclInProgress);
  std::this_thread::sleep_for(20ms);
  CHECK(ranks.async(0) == ncclInProgress);
  std::atomic<bool> aborted{false};
  std::thread other{[&] {
    ranks.abort(1);
    aborted = true;
  }};
  std::this_thread::sleep_for(20ms);
  CHECK(!aborted);
  ok(cudaGraphExecDestroy(exec[0]));
  while (ranks.async(0) != ncclSuccess) {
  }
  ok(cudaGraphExecDestroy(exec[1]));
  other.join();
}

TEST_CASE("memory of NCCL's is freed at once, whatever its device still does") {
  two_ranks ranks;
  ok(cudaSetDevice(0));
  void* memory = nullptr;
  CHECK(ncclMemAlloc(&memory, 4096) == ncclSuccess);
  fake::delay(ranks.stream[0], 200ms);
  ok(fake::enqueue(ranks.stream[0], [] {}));
  CHECK(ncclMemFree(memory) == ncclSuccess);
  CHECK(cudaStreamQuery(ranks.stream[0]) == cudaErrorNotReady);
  CHECK(fake::live_nccl_allocations() == 0);
  ok(cudaStreamSynchronize(ranks.stream[0]));
}

TEST_CASE("a rank is split off with the others of its color") {
  two_ranks ranks;
  ncclComm_t part[2] = {};
  std::thread other{[&] {
    ok(cudaSetDevice(1));
    CHECK(ncclCommSplit(ranks.comm[1], 0, -1, &part[1], nullptr) == ncclInProgress);
  }};
  ok(cudaSetDevice(0));
  CHECK(ncclCommSplit(ranks.comm[0], 0, 0, &part[0], nullptr) == ncclInProgress);
  other.join();
  for (int rank = 0; rank < 2; ++rank) {
    ncclResult_t now = ncclInProgress;
    while (now == ncclInProgress) {
      CHECK(ncclCommGetAsyncError(part[rank], &now) == ncclSuccess);
    }
    int place = -1;
    int count = -1;
    int device = -1;
    CHECK(ncclCommUserRank(part[rank], &place) == ncclSuccess);
    CHECK(ncclCommCount(part[rank], &count) == ncclSuccess);
    CHECK(ncclCommCuDevice(part[rank], &device) == ncclSuccess);
    CHECK(place == 1 - rank);
    CHECK(count == 2);
    CHECK(device == rank);
    CHECK(ncclCommDestroy(part[rank]) == ncclSuccess);
  }
}
