// SPDX-License-Identifier: MIT
#pragma once

#include <nccl.h>

#include <cstddef>
#include <string>

/// @file
/// Control of the fake NCCL, which a test links instead of libnccl, together with the fake CUDA.
///
/// Ranks are threads of one process. A collective meets on the streams' threads, whose memory it
/// orders as NCCL does: what a peer's stream did before comes before what is read of it. Sums are a
/// ring's: each hop is rounded to the type on the wire. Calls that differ over ranks stay where
/// they are, as with NCCL, but give all ranks an asynchronous error.
///
/// ncclCommFinalize stays in progress until all ranks have come to their end and while a graph with
/// the communicator's calls lives; for that ncclCommAbort and ncclCommDestroy wait, as NCCL.
///
/// ncclMemFree waits for nothing, as where NCCL maps memory itself.
///
/// `fake::fail_call` of the fake CUDA fails calls of NCCL, too: cudaErrorMemoryAllocation becomes
/// ncclUnhandledCudaError, another error ncclSystemError.
///
/// What it doesn't do: an abort of one rank leaves its peers waiting; a rank whose process died
/// isn't noticed; a window needn't be registered by all ranks.

namespace fake {

/// Settings, and what differed, as at the start of the program. Communicators stay.
void reset_nccl();

/// Whether ranks may share a device, which NCCL refuses (at first, as NCCL).
void allow_shared_device(bool allow);

/// Let no memory become a window on this machine, or again: ncclCommWindowRegister gives none.
void refuse_windows(bool refuse);

/// What ncclGetVersion tells (NCCL_VERSION_CODE at first). Before 2.28 a window is of the whole
/// allocation.
void set_nccl_version(int version);

/// Each communicator of rank `rank` that lives now has the asynchronous error `error`.
void fail_communicator(int rank, ncclResult_t error);
void fail_communicator(ncclComm_t comm, ncclResult_t error);

/// How the calls of a collective differed first; empty if none has.
std::string nccl_difference();

/// What was done that NCCL doesn't allow and doesn't notice; empty if nothing was: a registration
/// that ended while a call of its communicator was in flight; offsets in symmetric windows that
/// differ between ranks in a collective (but for the slices of one in place).
std::string nccl_misuse();

/// What was created and not destroyed.
std::size_t live_communicators();
std::size_t live_registrations();
std::size_t live_windows();
std::size_t live_nccl_allocations();

}  // namespace fake
