// SPDX-License-Identifier: MIT
// What every communicator must do, of NCCL's in ordered mode, over the fakes or on GPUs.
#include <zero/comm/nccl.hpp>

#include <comm/conformance.hpp>
#include <support/gpus.hpp>
#include <support/on_device.hpp>
#if defined(ZERO_FAKE_CUDA)
#include <fake/nccl.hpp>
#endif

#include <cstddef>
#include <vector>

namespace {

struct world {
  static inline std::vector<int> const sizes = test::ranks_with_gpus({1, 2, 3, 4, 8});

  template <class Function>
  static void run(int ranks, Function const& function) {
    zero::run_nccl(ranks,
                   [&](zero::nccl& comm) {
                     test::on_device<zero::nccl> host{comm.split(0, comm.rank())};
                     function(host);
                   },
                   {.mode = zero::nccl_mode::ordered, .scratch_bytes = std::size_t{1} << 20U});
#if defined(ZERO_FAKE_CUDA)
    CHECK(fake::live_communicators() == 0);
#endif
  }
};

}  // namespace

TEST_CASE_TEMPLATE_INVOKE(communicator_conformance, world);
