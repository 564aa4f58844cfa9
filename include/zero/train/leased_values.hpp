// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/concept.hpp>
#include <zero/comm/metered.hpp>
#include <zero/core/any_span.hpp>
#include <zero/core/any_tensor.hpp>
#include <zero/shard/residency.hpp>
#include <zero/train/binding.hpp>
#include <zero/train/lease.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

/// @file
/// `leased_values`: where a leased unit's parameters are whole, and the tensors that are bound
/// there: for the model's life in stages 0 to 2, in gather slots while leased in stage 3.

namespace zero::inline v0::detail {

template <communicator Communicator>
class leased_values {
  using device = typename Communicator::device;
  using stream = typename device::stream;

 public:
  /// All of them outlive it. Gathers run on `communication`; `engine` is who reads.
  leased_values(binding<device>& bound, metered<Communicator>& comm, stream& communication,
                stream& engine)
      : bound_{&bound}, leases_(bound.of().parameters().size(), 0) {
    if (!bound.at().shards_parameters()) {
      return;
    }
    residency_memory memory;
    for (std::size_t s = 0; s < bound.of().segments().size(); ++s) {
      memory.shards.push_back(bound.value_shard(s));
      memory.segment_offsets.push_back(bound.map().segments[s].gather_offset);
    }
    for (std::uint64_t const slot : bound.map().gather_slots) {
      memory.slots.push_back(bound.at_offset(slot));
    }
    residency_options const chosen{.slots = memory.slots.size(),
                                   .prefetch = bound.at().prefetch,
                                   .keep_after_forward = bound.at().keep_after_forward,
                                   .keep_last = bound.at().keep_last};
    residency_.emplace(bound.of(), comm, communication, engine, chosen, std::move(memory));
  }

  /// Whether opening a unit gathers it.
  [[nodiscard]] bool sharded() const noexcept { return residency_.has_value(); }

  void begin(pass next) {
    if (residency_) {
      residency_->begin(next);
    }
  }

  /// The pass ends: nothing stays gathered.
  void release_all() noexcept {
    if (residency_) {
      residency_->release_all();
    }
  }

  /// Make a unit whole for a lease, on the engine's stream, and bind its tensors.
  void open(std::size_t unit, lease_kind kind) {
    if (!residency_) {
      return;
    }
    for (std::size_t const b : bound_->of().units()[unit].buckets) {
      if (kind == lease_kind::recomputation) {
        residency_->open_for_recomputation(b);
      } else {
        residency_->open(b);
      }
    }
    bound_->of().for_each_used(unit, [&](std::size_t id) {
      if (++leases_[id] == 1) {
        bound_->rebind(bound_->declared(id).value, whole(id));
      }
    });
  }

  void close(std::size_t unit, lease_kind kind) noexcept {
    if (!residency_) {
      return;
    }
    bound_->of().for_each_used(unit, [&](std::size_t id) {
      if (--leases_[id] == 0) {
        bound_->rebind(bound_->declared(id).value,
                       {nullptr, 0, bound_->of().parameters()[id].spec.value});
      }
    });
    for (std::size_t const b : bound_->of().units()[unit].buckets) {
      if (kind == lease_kind::recomputation) {
        residency_->close_recomputation(b);
      } else {
        residency_->close(b, unit);
      }
    }
  }

  /// A parameter's whole value; in stage 3 it must be open.
  [[nodiscard]] any_span whole(std::size_t id) const {
    if (!residency_) {
      return bound_->value(id);
    }
    layout::parameter const& p = bound_->of().parameters()[id];
    return any_span{residency_->address(p.segment), bound_->of().segments()[p.segment].cut.padded(),
                    p.spec.value}
        .subspan(p.offset, p.spec.size);
  }

  /// Copy the parameters that a unit declares into storage of their tensors' own.
  ///
  /// Ordering: waits for the copies.
  void give_back(std::size_t unit, stream& on) {
    layout::unit const& u = bound_->of().units()[unit];
    if (residency_) {
      residency_->open(u.buckets.front());
    }
    for (std::size_t const id : u.parameters) {
      any_tensor const& tensor = bound_->declared(id).value;
      if (tensor && tensor.rebindable()) {
        tensor.allocate(bound_->of().parameters()[id].spec.size);
        device::copy(on, whole(id), tensor.elements());
      }
    }
    on.synchronize();
    if (residency_) {
      residency_->close(u.buckets.front(), unit);
    }
  }

  /// A hash of what was gathered so far, in order.
  [[nodiscard]] std::uint64_t order() const noexcept {
    return residency_ ? residency_->order() : 0;
  }
  [[nodiscard]] residency_counts counts() const noexcept {
    return residency_ ? residency_->counts() : residency_counts{};
  }

 private:
  binding<device>* bound_;
  std::optional<residency<Communicator>> residency_;
  std::vector<std::size_t> leases_;  // that bind each parameter's tensor
};

}  // namespace zero::inline v0::detail
