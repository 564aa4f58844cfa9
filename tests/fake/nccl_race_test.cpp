// SPDX-License-Identifier: MIT
// A collective orders a peer's earlier work before what it reads, and nothing else: without a wait
// before or after it, ThreadSanitizer reports a race.
#include <zero/comm/nccl.hpp>
#include <zero/device/cuda.hpp>

#include <doctest/doctest.h>
#include <fake/child.hpp>
#include <fake/cuda.hpp>
#include <support/watchdog.hpp>

#include <cstddef>
#include <cstdlib>
#include <span>
#include <string>

namespace {

struct fill {
  float* data;

  void operator()(std::size_t first, std::size_t count) const {
    for (std::size_t i = first; i < first + count; ++i) {
      data[i] = 1;
    }
  }
};

}  // namespace

TEST_CASE("child: gradients and their reduction without one of the waits" * doctest::skip()) {
  if (char const* const without = std::getenv("WITHOUT_WAIT"); without != nullptr) {
    std::string const dropped = without;
    test::watchdog const limit;
    fake::set_device_count(2);
    zero::run_nccl(2, [&](zero::nccl& comm) {
      constexpr std::size_t bytes = 4096;
      zero::cuda_stream compute;
      zero::cuda_stream communicate;
      zero::cuda_event event;
      auto* const data = static_cast<float*>(zero::cuda::allocate(bytes));
      std::span const all{data, bytes / sizeof(float)};
      for (int step = 0; step < 20; ++step) {
        zero::cuda::launch(compute, all.size(), fill{data});
        if (dropped != "before") {
          compute.record(event);
          communicate.wait(event);
        }
        comm.all_reduce(all, all, zero::combine::overwrite, zero::reduction::sum, communicate);
        if (dropped != "after") {
          communicate.record(event);
          compute.wait(event);
        }
      }
      communicate.synchronize();
      compute.synchronize();
      zero::cuda::deallocate(data, bytes);
    });
  }
}

TEST_CASE("a collective that waits, and is waited for, has no race, and one that doesn't has") {
#if FAKE_HAS_TSAN
  auto const races = [](std::string const& without) {
    fake::child const ran{"child: gradients and their reduction without one of the waits",
                          "WITHOUT_WAIT=" + without};
    return ran.output.find("data race") != std::string::npos;
  };
  CHECK_FALSE(races("none"));
  CHECK(races("before"));
  CHECK(races("after"));
#else
  MESSAGE("skipped: this build has no ThreadSanitizer");
#endif
}
