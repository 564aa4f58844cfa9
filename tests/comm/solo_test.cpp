// SPDX-License-Identifier: MIT
#include <zero/comm/solo.hpp>

#include <comm/conformance.hpp>

#include <array>

namespace {

struct world {
  static constexpr std::array sizes{1};

  template <class Function>
  static void run(int, Function const& function) {
    zero::solo comm;
    function(comm);
  }
};

}  // namespace

TEST_CASE_TEMPLATE_INVOKE(communicator_conformance, world);
