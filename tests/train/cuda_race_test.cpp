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
    engine.step(model, {.reads = true}, 0, 0);
    fake::drop_wait(std::strtoull(dropped, nullptr, 10));
    engine.step(model, {.reads = true}, 0, 1);
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
  // A step has 49 waits: 24 in each of two micro-batches, and the update's. Found in each are, in
  // forward, those of the engine for a unit's gather and of a gather for what was read in its slot,
  // and in backward those of a reduction for the gradients. The others mostly repeat these, as one
  // stream does all communication.
  for (std::uint64_t const n : {3U, 4U, 5U, 6U, 7U, 8U, 9U, 11U, 13U, 17U, 21U, 24U}) {
    CHECK_MESSAGE(races(n), "wait ", n);
    CHECK_MESSAGE(races(n + 24), "wait 24 + ", n);
  }
#else
  MESSAGE("skipped: this build has no ThreadSanitizer");
#endif
}
