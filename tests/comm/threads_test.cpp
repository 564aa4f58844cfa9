// SPDX-License-Identifier: MIT
#include <zero/comm/run_threads.hpp>
#include <zero/comm/threads.hpp>

#include <comm/conformance.hpp>

#include <array>

namespace {

struct world {
  static constexpr std::array sizes{1, 2, 3, 4, 8};

  template <class Function>
  static void run(int ranks, Function const& function) {
    zero::run_threads(ranks, function);
  }
};

}  // namespace

TEST_CASE_TEMPLATE_INVOKE(communicator_conformance, world);
