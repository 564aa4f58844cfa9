// SPDX-License-Identifier: MIT
// One wait for an event less, and ThreadSanitizer reports a race: so the tests over the fake of the
// CUDA runtime find a wait that is missing.
#include <zero/comm/solo.hpp>
#include <zero/device/cuda.hpp>
#include <zero/optim/adamw.hpp>

#include <doctest/doctest.h>
#include <fake/child.hpp>
#include <fake/cuda.hpp>
#include <support/device_engine.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

TEST_CASE("child: a step without one of its waits" * doctest::skip()) {
  if (char const* const dropped = std::getenv("DROPPED_WAIT"); dropped != nullptr) {
    zero::basic_solo<zero::cuda> comm;
    zero::cuda_stream stream;
    test::device_engine<zero::cuda, float> engine{stream};
    zero::sharded_model model{comm,
                              engine.units(),
                              zero::stage3{},
                              zero::adamw{},
                              zero::reduce_per_microbatch{},
                              {.stream = stream.native()}};
    engine.step(model, {}, 0, 0);
    fake::drop_wait(std::strtoull(dropped, nullptr, 10));
    engine.step(model, {}, 0, 1);
    stream.synchronize();
  }
}

TEST_CASE("a step whose waits all wait has no race, and without one of them it has") {
#if FAKE_HAS_TSAN
  auto const races = [](std::uint64_t dropped) {
    fake::child const ran{"child: a step without one of its waits",
                          "DROPPED_WAIT=" + std::to_string(dropped)};
    return ran.output.find("data race") != std::string::npos;
  };
  CHECK_FALSE(races(0));
  // A step has 49 waits, for gathers, gradients, slots and the update. Most repeat what others say:
  // the engine here reads no parameters in forward, and one stream does all communication.
  int found = 0;
  for (std::uint64_t n = 1; n <= 49; ++n) {
    found += races(n) ? 1 : 0;
  }
  CHECK(found >= 6);
#else
  MESSAGE("skipped: this build has no ThreadSanitizer");
#endif
}
