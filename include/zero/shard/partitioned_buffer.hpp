// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/dtype.hpp>
#include <zero/core/partition.hpp>
#include <zero/device/concept.hpp>
#include <zero/device/host.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

/// @file
/// `partitioned_buffer`: n elements of which this rank stores one slice, or, made whole, all
/// slices.

namespace zero::inline v0 {

/// Shapes: shard() [cut().slice()], of which the first cut().size(rank) are real; whole()
///         [cut().padded()].
/// Units:  elements. Memory is zeroed when it is taken, so padding is zero until someone writes it.
template <element T, device Device = host>
class partitioned_buffer {
 public:
  /// @throws zero::usage_error  a rank outside the cut.
  partitioned_buffer(partition cut, std::uint64_t rank) : cut_{cut}, rank_{rank} {
    if (rank >= cut.parts()) {
      throw usage_error{detail::text("partitioned_buffer: expected a rank below ", cut.parts(),
                                     ", actual ", rank)};
    }
    shard_ = take(cut.slice());
  }

  partitioned_buffer(partitioned_buffer&& other) noexcept
      : cut_{other.cut_}, rank_{other.rank_}, shard_{std::exchange(other.shard_, nullptr)},
        whole_{std::exchange(other.whole_, nullptr)} {}
  partitioned_buffer& operator=(partitioned_buffer&& other) noexcept {
    std::swap(cut_, other.cut_);
    std::swap(rank_, other.rank_);
    std::swap(shard_, other.shard_);
    std::swap(whole_, other.whole_);
    return *this;
  }
  ~partitioned_buffer() {
    release();
    Device::deallocate(shard_, cut_.slice() * sizeof(T));
  }

  [[nodiscard]] partition const& cut() const noexcept { return cut_; }
  [[nodiscard]] std::uint64_t rank() const noexcept { return rank_; }
  [[nodiscard]] std::span<T> shard() noexcept { return {shard_, cut_.slice()}; }
  [[nodiscard]] std::span<T const> shard() const noexcept { return {shard_, cut_.slice()}; }
  /// The whole buffer, empty until `gather`.
  [[nodiscard]] std::span<T> whole() noexcept {
    return {whole_, whole_ == nullptr ? 0 : cut_.padded()};
  }

  /// Make the buffer whole on this rank.
  ///
  /// Ordering:   enqueued on `stream`; whole() is valid once the stream has run it.
  /// Collective: every rank calls it, in the same order.
  template <class Communicator>
  std::span<T> gather(Communicator& comm, typename Device::stream& stream) {
    if (whole_ == nullptr) {
      whole_ = take(cut_.padded());
    }
    comm.all_gather(std::span<T const>{shard()}, whole(), stream);
    return whole();
  }

  /// Give the whole buffer's memory back; the shard stays.
  void release() noexcept {
    Device::deallocate(whole_, cut_.padded() * sizeof(T));
    whole_ = nullptr;
  }

 private:
  static T* take(std::uint64_t elements) {
    auto* const data = static_cast<T*>(Device::allocate(elements * sizeof(T)));
    typename Device::stream stream{};
    Device::fill_zero(stream, std::span<T>{data, elements});
    stream.synchronize();
    return data;
  }

  partition cut_;
  std::uint64_t rank_;
  T* shard_ = nullptr;
  T* whole_ = nullptr;
};

}  // namespace zero::inline v0
