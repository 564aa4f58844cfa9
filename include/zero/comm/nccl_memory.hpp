// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/nccl_arena.hpp>
#include <zero/comm/nccl_handle.hpp>
#include <zero/device/cuda.hpp>

#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

/// @file
/// Memory of a communicator's own, and registrations with NCCL. Nothing here is for users.

namespace zero::inline v0::detail {

/// Memory of the current device for as long as this lives.
class nccl_block {
 public:
  /// @throws zero::error  there is not that much.
  nccl_block(std::size_t bytes, bool by_nccl)
      : bytes_{bytes}, by_nccl_{by_nccl},
        memory_{by_nccl ? nccl_allocate(bytes) : cuda::allocate(bytes)} {}
  nccl_block(nccl_block const&) = delete;
  nccl_block& operator=(nccl_block const&) = delete;
  ~nccl_block() {
    if (memory_ == nullptr) {
      return;
    }
    if (by_nccl_) {
      nccl_deallocate(memory_, bytes_);
    } else {
      cuda::deallocate(memory_, bytes_);
    }
  }

  [[nodiscard]] std::span<std::byte> span() const noexcept {
    return {static_cast<std::byte*>(memory_), bytes_};
  }

  /// Leave it allocated: something may still use it.
  void abandon() noexcept { memory_ = nullptr; }

 private:
  std::size_t bytes_;
  bool by_nccl_;
  void* memory_;
};

/// Memory that is registered with a communicator. It ends the registration, before the memory ends.
class nccl_registration {
 public:
  /// With `window`, a symmetric one: all ranks register as much memory of `ncclMemAlloc`, and give
  /// a collective the same offset in it. It is none where NCCL can't on this machine.
  nccl_registration(nccl_handle& handle, void* memory, std::size_t bytes, bool window)
      : handle_{&handle}, memory_{static_cast<std::byte*>(memory), bytes} {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
    if (window) {
      handle.call("ncclCommWindowRegister", [&](ncclComm_t comm) {
        return ncclCommWindowRegister(comm, memory, bytes, &window_, NCCL_WIN_COLL_SYMMETRIC);
      });
      return;
    }
#else
    static_cast<void>(window);
#endif
    handle.call("ncclCommRegister",
                [&](ncclComm_t comm) { return ncclCommRegister(comm, memory, bytes, &buffer_); });
  }
  nccl_registration(nccl_registration&& other) noexcept
      : handle_{std::exchange(other.handle_, nullptr)}, memory_{other.memory_},
        buffer_{other.buffer_}
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
        ,
        window_{other.window_}
#endif
  {
  }
  nccl_registration& operator=(nccl_registration&&) = delete;
  ~nccl_registration() {
    if (handle_ != nullptr) {
      handle_->quietly([this](ncclComm_t comm) {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
        if (window_ != nullptr) {
          static_cast<void>(ncclCommWindowDeregister(comm, window_));
        }
#endif
        if (buffer_ != nullptr) {
          static_cast<void>(ncclCommDeregister(comm, buffer_));
        }
      });
    }
  }

  /// Whether this is a symmetric window.
  [[nodiscard]] bool is_window() const noexcept {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
    return window_ != nullptr;
#else
    return false;
#endif
  }

  /// 1 + the offset in this symmetric window, 0 elsewhere.
  [[nodiscard]] std::uint64_t place([[maybe_unused]] void const* memory) const noexcept {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
    auto const offset =
        reinterpret_cast<std::uintptr_t>(memory) - reinterpret_cast<std::uintptr_t>(memory_.data());
    if (window_ != nullptr && offset < memory_.size()) {
      return offset + 1;
    }
#endif
    return 0;
  }

  /// Whether this NCCL, of compile time and of run time, has windows: of a part of an allocation,
  /// or only of all of it, which is what 2.27 makes of any part.
  [[nodiscard]] static bool has_windows([[maybe_unused]] int version,
                                        [[maybe_unused]] bool of_a_part) noexcept {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
    return version >= (of_a_part ? NCCL_VERSION(2, 28, 0) : NCCL_VERSION(2, 27, 0));
#else
    return false;
#endif
  }

 private:
  nccl_handle* handle_;
  std::span<std::byte> memory_;
  void* buffer_ = nullptr;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
  ncclWindow_t window_ = nullptr;
#endif
};

}  // namespace zero::inline v0::detail
