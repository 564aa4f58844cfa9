// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/concept.hpp>
#include <zero/comm/metered.hpp>
#include <zero/core/hash.hpp>
#include <zero/device/arena.hpp>
#include <zero/train/agreement.hpp>
#include <zero/train/model_spec.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <string_view>
#include <vector>

/// @file
/// `binding`: the arena of a model, the address of everything in it, and the engine's tensors bound
/// to it.

namespace zero::inline v0::detail {

template <device Device>
class binding {
 public:
  binding(model_spec const& spec, stage at, std::uint64_t rank, memory_resource const& from = {})
      : spec_{&spec}, stage_{at}, rank_{rank},
        arena_{allocate(spec.planned().bytes.arena(), from)} {
    std::byte* const base = spec.map().regions.empty() ? nullptr : take_all();
    base_ = base;
  }
  binding(binding const&) = delete;
  binding& operator=(binding const&) = delete;
  /// Leaves the engine's tensors empty, never dangling; those that weren't taken over keep their
  /// values.
  ~binding() {
    if (!dropped_) {
      unbind(&any_parameter::value);
      unbind(&any_parameter::gradient);
    }
  }

  /// Give the arena back; values are in their tensors' own storage.
  void drop() {
    unbind(&any_parameter::gradient);
    arena_ = {};
    dropped_ = true;
  }

  [[nodiscard]] layout const& of() const noexcept { return spec_->of(); }
  [[nodiscard]] memory_map const& map() const noexcept { return spec_->map(); }
  [[nodiscard]] stage const& at() const noexcept { return stage_; }
  [[nodiscard]] std::uint64_t rank() const noexcept { return rank_; }
  [[nodiscard]] any_parameter const& declared(std::size_t id) const noexcept {
    return spec_->declared()[id];
  }

  /// What was really taken, and what tensors that can't be rebound hold.
  [[nodiscard]] memory_bytes ledger() const {
    memory_bytes out = arena_.ledger();
    for (std::size_t id = 0; id < spec_->declared().size(); ++id) {
      any_parameter const& each = declared(id);
      for (any_tensor const* tensor : {&each.value, &each.gradient}) {
        bool const counts = tensor == &each.value || !each.is_frozen;
        if (*tensor && !tensor->rebindable() && counts) {
          out[category::engine] += tensor->elements().bytes();
        }
      }
    }
    return out;
  }

  /// All of it.
  [[nodiscard]] std::span<std::byte> memory() const noexcept { return {base_, arena_.size()}; }

  /// What the communicator's reductions go through; empty where they need nothing.
  [[nodiscard]] std::span<std::byte> scratch() const noexcept {
    std::uint64_t const offset = map().scratch;
    return offset == memory_map::none
               ? std::span<std::byte>{}
               : std::span{base_ + offset, static_cast<std::size_t>(map().scratch_bytes)};
  }

  [[nodiscard]] std::byte* at_offset(std::uint64_t offset) const noexcept { return base_ + offset; }

  /// This rank's slice of a segment's values; null where they stay in their tensors.
  [[nodiscard]] std::byte* value_shard(std::size_t s) const noexcept {
    memory_map::segment const& where = map().segments[s];
    if (where.values == memory_map::none) {
      return nullptr;
    }
    return base_ + where.values +
           (stage_.shards_parameters() ? 0 : slice_bytes(s, segment(s).value));
  }

  /// Stages 0 to 2: the whole segment's values.
  [[nodiscard]] std::byte* whole_values(std::size_t s) const noexcept {
    return base_ + map().segments[s].values;
  }

  /// local_accumulate: where the engine's gradients of a segment are.
  [[nodiscard]] std::byte* gradients(std::size_t s) const noexcept {
    return base_ + map().segments[s].gradients;
  }

  /// The reduced gradient, whole or this rank's slice.
  [[nodiscard]] std::byte* reduced(std::size_t s) const noexcept {
    return base_ + map().segments[s].reduced;
  }

  /// Stages 0 to 2: a parameter's whole value.
  [[nodiscard]] any_span value(std::size_t id) const {
    layout::parameter const& p = of().parameters()[id];
    if (!map().segments[p.segment].staged_values) {
      return whole(whole_values(p.segment), p, p.spec.value);
    }
    return home(declared(id).value, map().value_homes[id], p.spec.size, p.spec.value);
  }

  /// local_accumulate: where a parameter's gradient is accumulated.
  [[nodiscard]] any_span gradient(std::size_t id) const {
    layout::parameter const& p = of().parameters()[id];
    if (!map().segments[p.segment].staged_gradients) {
      return whole(gradients(p.segment), p, p.spec.gradient);
    }
    return home(declared(id).gradient, map().gradient_homes[id], p.spec.size, p.spec.gradient);
  }

  /// The elements [first, first + count) of a parameter's value, which lie at `offset` of its
  /// segment and in the range that this rank updates.
  [[nodiscard]] any_span value_piece(std::size_t id, std::uint64_t first, std::uint64_t offset,
                                     std::uint64_t count) const {
    layout::parameter const& p = of().parameters()[id];
    if (!stage_.shards_parameters()) {
      return value(id).subspan(first, count);
    }
    std::uint64_t const local = offset - segment(p.segment).cut.offset(rank_);
    return any_span{value_shard(p.segment), segment(p.segment).cut.slice(), p.spec.value}.subspan(
        local, count);
  }

  /// The same elements of its reduced gradient.
  [[nodiscard]] any_span reduced_piece(std::size_t id, std::uint64_t first, std::uint64_t offset,
                                       std::uint64_t count) const {
    layout::parameter const& p = of().parameters()[id];
    if (map().segments[p.segment].reduced == memory_map::none) {
      return gradient(id).subspan(first, count);
    }
    layout::segment const& within = segment(p.segment);
    std::uint64_t const local = offset - (stage_.reduces_whole() ? 0 : within.cut.offset(rank_));
    return any_span{reduced(p.segment), within.cut.padded(), p.spec.reduced}.subspan(local, count);
  }

  /// The same elements of optimizer state `state` (master weights first where there are any).
  [[nodiscard]] std::byte* state_piece(std::size_t s, std::size_t state,
                                       std::uint64_t offset) const noexcept {
    std::uint64_t const local = offset - update_begin(s);
    return base_ + map().segments[s].states[state] +
           local * size_bytes(accumulate_dtype(segment(s).value));
  }

  /// The range of a segment that this rank updates.
  [[nodiscard]] std::uint64_t update_begin(std::size_t s) const noexcept {
    return stage_.replicates_updates() ? 0 : segment(s).cut.offset(rank_);
  }
  [[nodiscard]] std::uint64_t update_end(std::size_t s) const noexcept {
    return stage_.replicates_updates() ? segment(s).cut.padded()
                                       : segment(s).cut.offset(rank_) + segment(s).cut.slice();
  }

  /// Point a tensor at storage, where there is one and it can be.
  static void rebind(any_tensor const& tensor, any_span storage) {
    if (tensor && tensor.rebindable()) {
      tensor.rebind(storage);
    }
  }

  /// Fill the arena from initialisers, and then from existing values, unit by unit, and bind the
  /// tensors to it. What can fail comes first: until all ranks are past it, tensors keep their
  /// storage and their values.
  ///
  /// Collective: every rank calls it.
  /// @throws zero::usage_error  ranks start from different values, and must not; an initialiser
  ///                            threw.
  template <communicator Communicator>
  void take_over(metered<Communicator>& comm, start how, bool binds_gradients) {
    typename Device::stream stream{};
    Device::fill_zero(stream, any_span{base_, arena_.size() / sizeof(float), dtype::float32});
    stream.synchronize();  // initialisers write there at once
    comm.label(traffic::bind);
    if (how == start::require_equal) {
      check_equal(comm, stream);
    }
    throw_together(comm, "sharded_model", initialise(stream));
    if (how == start::broadcast) {
      broadcast_values(comm, stream);
    }
    for (std::size_t id = 0; id < of().parameters().size(); ++id) {
      any_parameter const& each = declared(id);
      if (!each.initialiser) {
        fill(id, stream);
      }
      stream.synchronize();  // a tensor that is rebound may free what was copied
      taken_over_ = id + 1;
      bool const whole = !stage_.shards_parameters();
      rebind(each.value, whole ? value(id) : any_span{nullptr, 0, each.dtype});
      bool const trainable = of().parameters()[id].spec.trainable;
      rebind(each.gradient,
             trainable && binds_gradients ? gradient(id) : any_span{nullptr, 0, each.dtype});
    }
    stream.synchronize();
  }

 private:
  [[nodiscard]] static arena<Device> allocate(std::uint64_t bytes, memory_resource const& from) {
    try {
      return arena<Device>{bytes, from};
    } catch (usage_error const&) {
      throw;
    } catch (error const& failure) {
      throw error{text("expected memory for the plan's ", bytes,
                       " bytes, actual none: ", std::string_view{failure.what()})};
    }
  }

  void unbind(any_tensor any_parameter::*which) const {
    for (std::size_t id = 0; id < taken_over_; ++id) {
      rebind(declared(id).*which, any_span{nullptr, 0, declared(id).dtype});
    }
  }

  std::byte* take_all() {
    std::byte* first = nullptr;
    bool is_first = true;
    for (memory_map::region const& region : map().regions) {
      std::byte* const taken = arena_.take(region.category, region.real_bytes, region.total_bytes);
      first = is_first ? taken : first;
      is_first = false;
    }
    return first;
  }

  [[nodiscard]] layout::segment const& segment(std::size_t s) const noexcept {
    return of().segments()[s];
  }

  [[nodiscard]] std::uint64_t slice_bytes(std::size_t s, dtype type) const noexcept {
    return segment(s).cut.offset(rank_) * size_bytes(type);
  }

  [[nodiscard]] any_span whole(std::byte* base, layout::parameter const& p,
                               dtype type) const noexcept {
    return any_span{base, segment(p.segment).cut.padded(), type}.subspan(p.offset, p.spec.size);
  }

  [[nodiscard]] any_span home(any_tensor const& tensor, std::uint64_t offset, std::uint64_t size,
                              dtype type) const {
    if (tensor && !tensor.rebindable()) {
      return tensor.elements();
    }
    return {offset == memory_map::none ? nullptr : base_ + offset, size, type};
  }

  template <class Communicator>
  void broadcast_values(Communicator& comm, typename Device::stream& stream) const {
    for (any_parameter const& each : spec_->declared()) {
      if (!each.initialiser && each.value.elements().size() != 0) {
        comm.broadcast(each.value.elements(), 0, stream);
      }
    }
    stream.synchronize();
  }

  /// Run the initialisers. Returns what one of them threw, or nothing.
  [[nodiscard]] std::string initialise(typename Device::stream& stream) {
    for (std::size_t id = 0; id < of().parameters().size(); ++id) {
      if (declared(id).initialiser) {
        try {
          fill(id, stream);
        } catch (std::exception const& failure) {
          return text("expected the initialiser of parameter '", declared(id).name,
                      "' to return, actual it threw: ", std::string_view{failure.what()});
        }
      }
    }
    return {};
  }

  /// Write the elements of parameter `id` that this rank holds, and their master weights.
  void fill(std::size_t id, typename Device::stream& stream) {
    layout::parameter const& p = of().parameters()[id];
    layout::segment const& within = segment(p.segment);
    any_parameter const& each = declared(id);
    bool const sharded = stage_.shards_parameters();
    std::uint64_t const begin = sharded ? within.cut.offset(rank_) : 0;
    std::uint64_t const end = sharded ? begin + within.cut.slice() : within.cut.padded();
    of().for_each_piece(
        within, begin, end,
        [&](std::size_t other, std::uint64_t first, std::uint64_t offset, std::uint64_t count) {
          if (other != id) {
            return;
          }
          any_span const place = value_piece(id, first, offset, count);
          if (each.initialiser) {
            write(each, place, first, stream);
          } else if (any_span const from = each.value.elements(); from.data() != place.data()) {
            Device::copy(stream, from.subspan(first, count), place);
          }
        });
    if (p.spec.trainable && has_master(p.spec.value)) {
      of().for_each_piece(
          within, update_begin(p.segment), update_end(p.segment),
          [&](std::size_t other, std::uint64_t first, std::uint64_t offset, std::uint64_t count) {
            if (other == id) {
              Device::convert(stream, value_piece(id, first, offset, count),
                              {state_piece(p.segment, 0, offset), count, dtype::float32});
            }
          });
    }
  }

  /// Elements of a parameter that pass through the host at a time.
  static constexpr std::size_t host_elements = std::size_t{1} << 20U;

  /// Call visit(part, first) for parts of `all` that fit the host's share, in order.
  template <class Visit>
  static void for_each_part(any_span all, Visit visit) {
    std::size_t const most = Device::has_host_memory ? all.size() : host_elements;
    for (std::size_t first = 0; first < all.size(); first += most) {
      visit(all.subspan(first, std::min(most, all.size() - first)), first);
    }
  }

  /// Memory of the host for a part, where it can't touch the device's.
  [[nodiscard]] static std::vector<std::byte> host_copy_of(any_span part) {
    return std::vector<std::byte>(Device::has_host_memory ? 0 : part.bytes());
  }

  /// Run the initialiser for the elements of `place`, the first of which is element `begin`.
  static void write(any_parameter const& each, any_span place, std::uint64_t begin,
                    typename Device::stream& stream) {
    for_each_part(place, [&](any_span part, std::uint64_t first) {
      if constexpr (Device::has_host_memory) {
        each.initialiser(part, begin + first);
      } else {
        std::vector<std::byte> copy = host_copy_of(part);
        any_span const here{copy.data(), part.size(), part.dtype()};
        each.initialiser(here, begin + first);
        Device::upload(stream, here, part);
      }
    });
  }

  /// 64 bits that differ, but for a chance of 2^-64, where the elements do.
  [[nodiscard]] static std::uint64_t hash(any_span elements, typename Device::stream& stream) {
    std::uint64_t sum = 0;
    for_each_part(elements, [&](any_span part, std::size_t /*first*/) {
      std::vector<std::byte> copy = host_copy_of(part);
      auto const* data = static_cast<std::byte const*>(part.data());
      if constexpr (!Device::has_host_memory) {
        Device::download(stream, part, any_span{copy.data(), part.size(), part.dtype()});
        data = copy.data();
      }
      sum = hash_bytes({data, part.bytes()}, sum);
    });
    return sum;
  }

  template <class Communicator>
  void check_equal(Communicator& comm, typename Device::stream& stream) const {
    std::vector<std::uint64_t> mine;
    for (any_parameter const& each : spec_->declared()) {
      mine.push_back(each.initialiser ? 0 : hash(each.value.elements(), stream));
    }
    auto const different = first_difference(comm, [&](std::size_t n) {
      return hash_bytes(std::as_bytes(std::span{mine}.first(std::min(n, mine.size()))));
    });
    if (different) {
      std::vector<std::uint64_t> const all = gathered(comm, mine[*different]);
      auto const other =
          std::find_if(all.begin(), all.end(), [&](std::uint64_t each) { return each != all[0]; });
      throw usage_error{text("sharded_model: expected parameter '", declared(*different).name,
                             "' to start from the values of rank 0, actual others (rank ",
                             other - all.begin(), ")")};
    }
  }

  model_spec const* spec_;
  stage stage_;
  std::uint64_t rank_;
  arena<Device> arena_;
  std::byte* base_ = nullptr;
  std::size_t taken_over_ = 0;  // parameters whose tensors were rebound
  bool dropped_ = false;
};

}  // namespace zero::inline v0::detail
