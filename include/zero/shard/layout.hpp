// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/dtype.hpp>
#include <zero/core/error.hpp>
#include <zero/core/partition.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

/// @file
/// `layout`: where every parameter lies. Consecutive small units are joined into buckets; a
/// bucket's parameters of one dtype and one trainability are packed into a segment, and each
/// segment is cut into P equal slices. Parameters, gradients and optimizer state share the cut.
/// Arithmetic only: nothing is allocated for elements, and every rank computes the same layout.

namespace zero::inline v0 {

/// What the layout needs to know of a parameter.
struct parameter_spec {
  std::string name;
  std::uint64_t size = 0;                 ///< elements
  zero::dtype value = dtype::float32;     ///< p
  zero::dtype gradient = dtype::float32;  ///< b: as the engine writes it, and on the wire
  zero::dtype reduced = dtype::float32;   ///< g: the reduced gradient
  bool trainable = true;
};

/// The parameters that the user leases together.
struct unit_spec {
  std::vector<parameter_spec> parameters;
  std::vector<std::string> tied;  ///< uses of parameters that other units declare
};

struct layout_options {
  std::uint64_t bucket_bytes =
      0;  ///< join consecutive units while their unpadded parameter bytes fit
  std::uint64_t alignment =
      0;  ///< elements; 0: alignment_bytes of the narrowest type in the bucket
  std::uint64_t alignment_bytes = 64;
};

class layout {
 public:
  static constexpr std::size_t none = std::numeric_limits<std::size_t>::max();

  struct parameter {
    parameter_spec spec;
    std::size_t unit;
    std::size_t bucket;
    std::size_t segment;
    std::uint64_t offset;  ///< elements from the start of its segment
  };

  struct segment {
    std::size_t bucket;
    zero::dtype value;
    zero::dtype gradient;
    zero::dtype reduced;
    bool trainable;
    partition cut;       ///< of the packed length, gaps between parameters included
    std::uint64_t real;  ///< elements that belong to parameters
    std::vector<std::size_t> parameters;  ///< in declaration order
  };

  struct bucket {
    std::vector<std::size_t> units;  ///< that declare its parameters, consecutive
    std::vector<std::size_t>
        users;  ///< units whose lease includes it: its own, and uses of tied ones
    std::vector<std::size_t> segments;
    bool tied = false;
    bool trainable = false;  ///< has a trainable segment
  };

  struct unit {
    std::vector<std::size_t> parameters;  ///< that it declares
    std::vector<std::size_t> tied;        ///< parameters of other units that it uses
    std::vector<std::size_t> buckets;     ///< that its lease includes: its own first
  };

  /// @throws zero::usage_error  no ranks; two parameters of one name; a tied name that nothing
  ///                            declares, or that the unit itself declares; 2^56 elements or more,
  ///                            padded ones included.
  layout(std::vector<unit_spec> const& specs, std::uint64_t ranks, layout_options const& options)
      : ranks_{ranks} {
    if (ranks == 0) {
      throw usage_error{"layout: expected at least 1 rank, actual 0"};
    }
    add_parameters(specs);
    resolve_ties(specs);
    join_units(options.bucket_bytes);
    pack(options);
  }

  [[nodiscard]] std::uint64_t ranks() const noexcept { return ranks_; }
  [[nodiscard]] std::vector<parameter> const& parameters() const noexcept { return parameters_; }
  [[nodiscard]] std::vector<segment> const& segments() const noexcept { return segments_; }
  [[nodiscard]] std::vector<bucket> const& buckets() const noexcept { return buckets_; }
  [[nodiscard]] std::vector<unit> const& units() const noexcept { return units_; }

  /// The index of the parameter `name`, or `none`.
  [[nodiscard]] std::size_t find(std::string_view name) const noexcept {
    for (std::size_t id = 0; id < parameters_.size(); ++id) {
      if (parameters_[id].spec.name == name) {
        return id;
      }
    }
    return none;
  }

  /// Call `visit(id)` for each parameter that unit `u` uses: its own, then the tied ones.
  template <class Visit>
  void for_each_used(std::size_t u, Visit visit) const {
    for (auto const* list : {&units_[u].parameters, &units_[u].tied}) {
      for (std::size_t const id : *list) {
        visit(id);
      }
    }
  }

  /// The same for those that aren't frozen.
  template <class Visit>
  void for_each_trainable(std::size_t u, Visit visit) const {
    for_each_used(u, [&](std::size_t id) {
      if (parameters_[id].spec.trainable) {
        visit(id);
      }
    });
  }

  /// Call `visit(id)` for each parameter whose gradient is reduced with bucket `b`.
  template <class Visit>
  void for_each_gradient(std::size_t b, Visit visit) const {
    for (std::size_t const s : buckets_[b].segments) {
      if (segments_[s].trainable) {
        for (std::size_t const id : segments_[s].parameters) {
          visit(id);
        }
      }
    }
  }

  /// Call `visit(id, first, offset, count)` for each parameter that overlaps [begin, end) of a
  /// segment, in order: elements [first, first + count) of parameter id lie at `offset` of the
  /// segment.
  template <class Visit>
  void for_each_piece(segment const& within, std::uint64_t begin, std::uint64_t end,
                      Visit visit) const {
    for (std::size_t const id : within.parameters) {
      parameter const& p = parameters_[id];
      std::uint64_t const first = std::max(begin, p.offset);
      std::uint64_t const last = std::min(end, p.offset + p.spec.size);
      if (first < last) {
        visit(id, first - p.offset, first, last - first);
      }
    }
  }

  /// How many real elements slice `rank` of a segment holds.
  [[nodiscard]] std::uint64_t real_in_slice(segment const& within, std::uint64_t rank) const {
    std::uint64_t count = 0;
    std::uint64_t const begin = within.cut.offset(rank);
    for_each_piece(within, begin, begin + within.cut.slice(),
                   [&](std::size_t, std::uint64_t, std::uint64_t, std::uint64_t n) { count += n; });
    return count;
  }

 private:
  void add_parameters(std::vector<unit_spec> const& specs) {
    std::uint64_t total = 0;
    units_.resize(specs.size());
    for (std::size_t u = 0; u < specs.size(); ++u) {
      for (parameter_spec const& spec : specs[u].parameters) {
        if (spec.size >= limit - total) {
          throw usage_error{detail::text("layout: expected fewer than 2^56 elements, actual ",
                                         spec.size, " in '", spec.name, "' after ", total)};
        }
        total += spec.size;
        if (find(spec.name) != none) {
          throw usage_error{detail::text("layout: expected one parameter named '", spec.name,
                                         "', actual two (a second use is declared with tied)")};
        }
        units_[u].parameters.push_back(parameters_.size());
        parameters_.push_back({spec, u, none, none, 0});
      }
    }
  }

  void resolve_ties(std::vector<unit_spec> const& specs) {
    for (std::size_t u = 0; u < specs.size(); ++u) {
      for (std::string const& name : specs[u].tied) {
        std::size_t const id = find(name);
        if (id == none) {
          throw usage_error{detail::text("layout: expected a parameter named '", name,
                                         "' in another unit for unit ", u, " to tie, actual none")};
        }
        if (parameters_[id].unit == u) {
          throw usage_error{detail::text("layout: expected unit ", u,
                                         " to tie another unit's parameter, actual '", name,
                                         "', which it declares itself")};
        }
        if (std::find(units_[u].tied.begin(), units_[u].tied.end(), id) == units_[u].tied.end()) {
          units_[u].tied.push_back(id);
        }
      }
    }
  }

  [[nodiscard]] std::uint64_t value_bytes(unit const& of) const {
    std::uint64_t bytes = 0;
    for (std::size_t const id : of.parameters) {
      bytes += parameters_[id].spec.size * size_bytes(parameters_[id].spec.value);
    }
    return bytes;
  }

  void join_units(std::uint64_t bucket_bytes) {
    std::vector<bool> owns_tied(units_.size(), false);
    for (unit const& u : units_) {
      for (std::size_t const id : u.tied) {
        owns_tied[parameters_[id].unit] = true;
      }
    }
    std::uint64_t filled = 0;
    bool open = false;
    for (std::size_t u = 0; u < units_.size(); ++u) {
      std::uint64_t const bytes = value_bytes(units_[u]);
      bool const fits = filled <= bucket_bytes && bytes <= bucket_bytes - filled;
      if (!(open && bucket_bytes != 0 && fits && !owns_tied[u])) {
        buckets_.emplace_back();
        filled = 0;
      }
      filled += bytes;
      open = !owns_tied[u];
      std::size_t const index = buckets_.size() - 1;
      bucket& b = buckets_.back();
      b.units.push_back(u);
      b.users.push_back(u);
      b.tied = b.tied || owns_tied[u];
      units_[u].buckets.push_back(index);
      for (std::size_t const id : units_[u].parameters) {
        parameters_[id].bucket = index;
      }
    }
    for (std::size_t u = 0; u < units_.size(); ++u) {
      for (std::size_t const id : units_[u].tied) {
        std::size_t const owner = parameters_[id].bucket;
        std::vector<std::size_t>& mine = units_[u].buckets;
        if (std::find(mine.begin(), mine.end(), owner) == mine.end()) {
          mine.push_back(owner);
          buckets_[owner].users.push_back(u);
        }
      }
    }
  }

  void pack(layout_options const& options) {
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      std::uint64_t narrowest = sizeof(double);
      for (std::size_t const u : buckets_[b].units) {
        for (std::size_t const id : units_[u].parameters) {
          parameter_spec const& spec = parameters_[id].spec;
          narrowest = std::min<std::uint64_t>(narrowest, size_bytes(spec.value));
          if (spec.trainable) {
            narrowest = std::min<std::uint64_t>(
                narrowest, std::min(size_bytes(spec.gradient), size_bytes(spec.reduced)));
          }
        }
      }
      std::uint64_t const alignment =
          options.alignment != 0 ? options.alignment
                                 : std::max<std::uint64_t>(1, options.alignment_bytes / narrowest);
      pack_bucket(b, alignment);
    }
  }

  void pack_bucket(std::size_t b, std::uint64_t alignment) {
    std::vector<std::uint64_t> length;  // of each of the bucket's segments
    for (std::size_t const u : buckets_[b].units) {
      for (std::size_t const id : units_[u].parameters) {
        parameter& p = parameters_[id];
        std::size_t const local = segment_of(b, p.spec);
        if (local == length.size()) {
          length.push_back(0);
        }
        p.segment = buckets_[b].segments[local];
        p.offset = round_up(length[local], alignment);
        length[local] = p.offset + p.spec.size;
        segments_[p.segment].real += p.spec.size;
        segments_[p.segment].parameters.push_back(id);
      }
    }
    for (std::size_t local = 0; local < length.size(); ++local) {
      segment& s = segments_[buckets_[b].segments[local]];
      s.cut = partition{length[local], ranks_, alignment};
      if (s.cut.padded() >= limit) {
        throw usage_error{
            detail::text("layout: expected fewer than 2^56 elements in a segment, actual ",
                         s.cut.padded(), " with an alignment of ", alignment)};
      }
      buckets_[b].trainable = buckets_[b].trainable || s.trainable;
    }
  }

  /// The bucket's segment for a parameter, made where there is none: its place in bucket::segments.
  std::size_t segment_of(std::size_t b, parameter_spec const& spec) {
    std::vector<std::size_t>& mine = buckets_[b].segments;
    for (std::size_t local = 0; local < mine.size(); ++local) {
      segment const& s = segments_[mine[local]];
      bool const same_gradient = s.gradient == spec.gradient && s.reduced == spec.reduced;
      if (s.value == spec.value && s.trainable == spec.trainable &&
          (same_gradient || !spec.trainable)) {
        return local;
      }
    }
    mine.push_back(segments_.size());
    segments_.push_back({b, spec.value, spec.gradient, spec.reduced, spec.trainable, {}, 0, {}});
    return mine.size() - 1;
  }

  static constexpr std::uint64_t limit = std::uint64_t{1}
                                         << 56U;  // so that no count of bytes overflows

  std::uint64_t ranks_;
  std::vector<parameter> parameters_;
  std::vector<segment> segments_;
  std::vector<bucket> buckets_;
  std::vector<unit> units_;
};

}  // namespace zero::inline v0
