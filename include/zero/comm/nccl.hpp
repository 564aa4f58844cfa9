// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/launch.hpp>
#include <zero/comm/nccl_arena.hpp>
#include <zero/comm/nccl_communicator.hpp>
#include <zero/comm/nccl_options.hpp>
#include <zero/comm/nccl_run.hpp>
#include <zero/comm/store.hpp>

/// @file
/// Ranks that are GPUs, over NCCL. It needs NCCL and the CUDA toolkit.
///
/// Under torchrun, mpirun or srun:
///
///     zero::launch const me = zero::launch_from_environment();
///     cudaSetDevice(me.local_rank);
///     zero::nccl comm{zero::open_store(me)};
///
/// In one process, with a thread for each GPU: `run_nccl`.
