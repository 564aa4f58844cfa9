// SPDX-License-Identifier: MIT
#include <zero/comm/loopback.hpp>

#include <comm/conformance.hpp>
#include <support/on_device.hpp>

#include <array>

namespace {

struct world {
  static constexpr std::array sizes{1, 2, 3, 4, 8};

  template <class Function>
  static void run(int ranks, Function const& function) {
    zero::run_loopback(ranks, [&](zero::loopback& comm) {
      test::on_device<zero::loopback> host{comm.split(0, comm.rank())};
      function(host);
    });
  }
};

}  // namespace

TEST_CASE_TEMPLATE_INVOKE(communicator_conformance, world);
