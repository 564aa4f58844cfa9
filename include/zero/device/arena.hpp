// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/error.hpp>
#include <zero/core/partition.hpp>
#include <zero/device/concept.hpp>
#include <zero/device/ledger.hpp>
#include <zero/device/memory_resource.hpp>

#include <cstddef>
#include <cstdint>
#include <utility>

/// @file
/// `arena`: one allocation, handed out from its start to its end, with a ledger of what each part
/// is for. Nothing is given back before the whole.

namespace zero::inline v0 {

/// Ordering: a value that only moves; addresses stay the same in a move. It doesn't wait for work
///           that uses its memory.
template <device Device>
class arena {
 public:
  arena() = default;

  /// Allocates `bytes` bytes, with indeterminate contents.
  /// @throws zero::error        there is not that much memory.
  /// @throws zero::usage_error  `from` gave memory at another alignment, or has one function only.
  explicit arena(std::size_t bytes, memory_resource const& from = {}) : from_{from}, size_{bytes} {
    if ((from.allocate == nullptr) != (from.deallocate == nullptr)) {
      throw usage_error{"memory_resource: expected both functions or none, actual one"};
    }
    if (from.allocate == nullptr || bytes == 0) {
      memory_ = static_cast<std::byte*>(Device::allocate(bytes));
      return;
    }
    memory_ = static_cast<std::byte*>(from.allocate(bytes, from.context));
    auto const address = reinterpret_cast<std::uintptr_t>(memory_);
    if (memory_ == nullptr || address % Device::alignment_bytes != 0) {
      from.deallocate(memory_, bytes, from.context);
      throw usage_error{detail::text("memory_resource: expected memory at a multiple of ",
                                     Device::alignment_bytes, " bytes, actual ",
                                     memory_ == nullptr ? "none" : "at another address")};
    }
  }

  arena(arena&& other) noexcept
      : from_{other.from_}, memory_{std::exchange(other.memory_, nullptr)},
        size_{std::exchange(other.size_, 0)}, used_{std::exchange(other.used_, 0)},
        ledger_{std::exchange(other.ledger_, {})} {}
  arena& operator=(arena&& other) noexcept {
    arena moved{std::move(other)};
    std::swap(from_, moved.from_);
    std::swap(memory_, moved.memory_);
    std::swap(size_, moved.size_);
    std::swap(used_, moved.used_);
    std::swap(ledger_, moved.ledger_);
    return *this;
  }
  ~arena() {
    if (memory_ == nullptr) {
      return;
    }
    if (from_.deallocate != nullptr) {
      from_.deallocate(memory_, size_, from_.context);
    } else {
      Device::deallocate(memory_, size_);
    }
  }

  /// How many bytes of an arena `take` uses for a range of `total_bytes`.
  [[nodiscard]] static constexpr std::uint64_t taken_bytes(std::uint64_t total_bytes) {
    return round_up(total_bytes, Device::alignment_bytes);
  }

  /// The next `total_bytes` bytes, of which `real_bytes` are counted as `kind` and the others as
  /// padding. The start is a multiple of `Device::alignment_bytes`; what that leaves unused after
  /// the range is padding too. A range of no bytes has no address of its own.
  /// @throws zero::usage_error  the arena is too small, or more bytes are real than there are.
  [[nodiscard]] std::byte* take(category kind, std::uint64_t real_bytes,
                                std::uint64_t total_bytes) {
    if (real_bytes > total_bytes) {
      throw usage_error{detail::text("arena::take: expected at most ", total_bytes,
                                     " real bytes of ", name(kind), ", actual ", real_bytes)};
    }
    std::uint64_t const taken = taken_bytes(total_bytes);
    if (taken > size_ - used_) {
      throw usage_error{detail::text("arena::take: expected at most ", size_ - used_, " bytes of ",
                                     name(kind), ", actual ", taken)};
    }
    std::byte* const start = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += static_cast<std::size_t>(taken);
    ledger_[kind] += real_bytes;
    ledger_.padding += taken - real_bytes;
    return start;
  }

  /// What was taken; its `arena()` equals `size()` once everything is.
  [[nodiscard]] memory_bytes const& ledger() const noexcept { return ledger_; }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }

 private:
  memory_resource from_;
  std::byte* memory_ = nullptr;
  std::size_t size_ = 0;
  std::size_t used_ = 0;
  memory_bytes ledger_;
};

}  // namespace zero::inline v0
