// SPDX-License-Identifier: MIT
// What every communicator must do, of NCCL's in ordered mode, over the fakes.
#include <zero/comm/nccl.hpp>

#include <comm/conformance.hpp>
#include <fake/cuda.hpp>
#include <fake/nccl.hpp>
#include <support/on_device.hpp>

#include <array>
#include <cstddef>

namespace {

struct world {
  static constexpr std::array sizes{1, 2, 3, 4, 8};

  template <class Function>
  static void run(int ranks, Function const& function) {
    fake::set_device_count(8);
    zero::run_nccl(ranks,
                   [&](zero::nccl& comm) {
                     test::on_device<zero::nccl> host{comm.split(0, comm.rank())};
                     function(host);
                   },
                   {.mode = zero::nccl_mode::ordered, .scratch_bytes = std::size_t{1} << 20U});
    CHECK(fake::live_communicators() == 0);
  }
};

}  // namespace

TEST_CASE_TEMPLATE_INVOKE(communicator_conformance, world);
