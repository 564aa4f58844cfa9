// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/concept.hpp>
#include <zero/comm/traffic.hpp>
#include <zero/core/any_span.hpp>
#include <zero/core/error.hpp>
#include <zero/core/partition.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

/// @file
/// `metered`: any communicator, and the bytes that its calls make leave this rank.

namespace zero::inline v0 {

/// A communicator that counts the payload bytes that must leave this rank, as the collective needs
/// them and not as an algorithm sends them, when a call was accepted.
///
/// Units:    bytes, for P ranks: reduce_scatter (P - 1) shards of full's dtype; all_gather (P - 1)
///           shards; all_reduce the other ranks' slices of full, and (P - 1) times this rank's of
///           the result; broadcast (P - 1) spans on the root; exchange (P - 1) times `mine`; the
///           votes of split and barriers nothing.
/// Ordering: as the communicator's; `sent` may be called from any thread.
template <communicator Communicator>
class metered {
 public:
  using device = typename Communicator::device;
  using stream = communicator_stream<Communicator>;

  explicit metered(Communicator communicator)
      : inner_{std::move(communicator)}, sent_{std::make_unique<counters>()} {}

  [[nodiscard]] int rank() const noexcept { return inner_.rank(); }
  [[nodiscard]] int size() const noexcept { return inner_.size(); }
  void set_deadline(std::chrono::milliseconds deadline) { inner_.set_deadline(deadline); }

  /// The wrapped communicator, whose calls aren't counted.
  [[nodiscard]] Communicator& inner() noexcept { return inner_; }
  [[nodiscard]] Communicator const& inner() const noexcept { return inner_; }

  /// What the payload of later calls is for; `parameters` until it is said. An exchange is
  /// `control`.
  void label(traffic what) noexcept { label_ = what; }

  /// The bytes sent since construction.
  [[nodiscard]] traffic_bytes sent() const noexcept {
    traffic_bytes out;
    for (std::size_t i = 0; i < traffic_count; ++i) {
      out[static_cast<traffic>(i)] = (*sent_)[i].load();
    }
    return out;
  }

  /// Count `bytes` that were counted as `from` as `to` instead.
  /// @throws zero::usage_error  fewer bytes were counted as `from`.
  void move(traffic from, traffic to, std::uint64_t bytes) {
    if (counter(from).load() < bytes) {
      throw usage_error{detail::text("metered: expected at least ", bytes, " bytes of ", name(from),
                                     ", actual ", counter(from).load(), " (rank ", rank(), ")")};
    }
    counter(from) -= bytes;
    counter(to) += bytes;
  }

  void reduce_scatter(const_any_span full, any_span shard, combine how, reduction what,
                      stream& on) {
    inner_.reduce_scatter(full, shard, how, what, on);
    count(label_, peers() * shard.size() * size_bytes(full.dtype()));
  }

  void all_gather(const_any_span shard, any_span full, stream& on) {
    inner_.all_gather(shard, full, on);
    count(label_, peers() * shard.bytes());
  }

  void all_reduce(const_any_span full, any_span result, combine how, reduction what, stream& on) {
    inner_.all_reduce(full, result, how, what, on);
    std::uint64_t const mine =
        partition{full.size(), peers() + 1}.size(static_cast<std::uint64_t>(rank()));
    count(label_, (full.size() - mine) * size_bytes(full.dtype()) +
                      peers() * mine * size_bytes(result.dtype()));
  }

  void broadcast(any_span data, int root, stream& on) {
    inner_.broadcast(data, root, on);
    count(label_, rank() == root ? peers() * data.bytes() : 0);
  }

  void barrier(stream& on) { inner_.barrier(on); }

  void exchange(std::span<std::byte const> mine, std::span<std::byte> all) {
    inner_.exchange(mine, all);
    count(traffic::control, peers() * mine.size());
  }

  /// A part with a meter of its own, which starts at zero.
  [[nodiscard]] metered split(int color, int key) {
    metered part{inner_.split(color, key)};
    part.label(label_);
    return part;
  }

  void abort(std::string_view reason) noexcept { inner_.abort(reason); }

 private:
  using counters = std::array<std::atomic<std::uint64_t>, traffic_count>;

  [[nodiscard]] std::uint64_t peers() const noexcept {
    return static_cast<std::uint64_t>(size() - 1);
  }
  [[nodiscard]] std::atomic<std::uint64_t>& counter(traffic what) noexcept {
    return (*sent_)[static_cast<std::size_t>(what)];
  }
  void count(traffic what, std::uint64_t bytes) noexcept { counter(what) += bytes; }

  Communicator inner_;
  traffic label_ = traffic::parameters;
  std::unique_ptr<counters> sent_;  // atomic: exchanges may come from work in a stream
};

}  // namespace zero::inline v0
