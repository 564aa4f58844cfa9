// SPDX-License-Identifier: MIT
#include <support/recording_communicator.hpp>
#include <zero/comm/metered.hpp>
#include <zero/comm/run_threads.hpp>
#include <zero/shard/residency.hpp>

#include <doctest/doctest.h>
#include <support/thrown.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

using zero::layout;
using zero::pass;
using zero::traffic;

namespace {

constexpr int world_sizes[] = {1, 2, 3, 4, 8};

using communicator = test::recording_communicator<zero::thread_communicator>;
using lines = std::vector<std::string>;

/// Units of one fp32 parameter each.
std::vector<zero::unit_spec> units_of(std::vector<std::uint64_t> const& sizes) {
  std::vector<zero::unit_spec> units;
  for (std::uint64_t const size : sizes) {
    units.push_back({{{.name = std::to_string(units.size()), .size = size}}, {}});
  }
  return units;
}

/// A rank's residency, its memory, and a journal in which `gather b` is the gather of bucket b.
class bench {
 public:
  bench(zero::thread_communicator& threads, std::vector<zero::unit_spec> const& units,
        std::uint64_t bucket_bytes, zero::residency_options options)
      : of{units,
           static_cast<std::uint64_t>(threads.size()),
           {.bucket_bytes = bucket_bytes, .alignment = 1}},
        comm{communicator{threads.split(0, threads.rank()), log}}, shards_(of.segments().size()),
        slots_(options.slots), resident{of, comm, stream, stream, options, memory()} {
    log.describe = [this](test::call const& made) {
      for (std::size_t s = 0; s < shards_.size(); ++s) {
        if (made.from.data() == shards_[s].data()) {
          return "gather " + std::to_string(of.segments()[s].bucket);
        }
      }
      return std::string{"unknown"};
    };
  }

  /// What element `i` of parameter `id` is now.
  [[nodiscard]] float expected(std::size_t id, std::size_t i) const {
    return static_cast<float>(1000 * id + i) + 0.25F * static_cast<float>(version_);
  }

  /// Change every rank's shards.
  void change() {
    ++version_;
    for (std::size_t s = 0; s < shards_.size(); ++s) {
      layout::segment const& segment = of.segments()[s];
      std::uint64_t const begin = segment.cut.offset(static_cast<std::uint64_t>(comm.rank()));
      of.for_each_piece(
          segment, begin, begin + segment.cut.slice(),
          [&](std::size_t id, std::uint64_t first, std::uint64_t offset, std::uint64_t count) {
            for (std::uint64_t i = 0; i < count; ++i) {
              shards_[s][offset - begin + i] = expected(id, first + i);
            }
          });
    }
  }

  /// Open a unit's buckets, and compute with its parameters.
  void open(std::size_t unit) {
    for (std::size_t const b : of.units()[unit].buckets) {
      resident.open(b);
    }
    compute(unit);
  }

  void compute(std::size_t unit) {
    log.note("compute " + std::to_string(unit));
    of.for_each_used(unit, [&](std::size_t id) {
      auto const* const values = reinterpret_cast<float const*>(address(id));
      bool right = true;
      for (std::size_t i = 0; i < of.parameters()[id].spec.size; ++i) {
        right = right && values[i] == expected(id, i);
      }
      CHECK(right);
    });
  }

  void close(std::size_t unit) {
    for (std::size_t const b : of.units()[unit].buckets) {
      resident.close(b, unit);
    }
  }

  void use(std::size_t unit) {
    open(unit);
    close(unit);
  }

  void run(pass kind, std::vector<std::size_t> const& order) {
    resident.begin(kind);
    for (std::size_t const unit : order) {
      use(unit);
    }
    resident.end();
  }

  void recompute(std::size_t unit) {
    std::size_t const b = of.units()[unit].buckets.front();
    resident.open_for_recomputation(b);
    compute(unit);
    resident.close_recomputation(b);
  }

  [[nodiscard]] std::byte const* address(std::size_t id) const {
    layout::parameter const& p = of.parameters()[id];
    return resident.address(p.segment) + p.offset * sizeof(float);
  }

  /// Bytes that a rank sends for one gather of every bucket in `buckets`.
  [[nodiscard]] std::uint64_t bytes(std::vector<std::size_t> const& buckets) const {
    std::uint64_t sum = 0;
    for (std::size_t const b : buckets) {
      std::uint64_t elements = 0;
      for (std::size_t const unit : of.buckets()[b].units) {
        for (std::size_t const id : of.units()[unit].parameters) {
          elements += of.parameters()[id].spec.size;
        }
      }
      std::uint64_t const ranks = of.ranks();
      sum += (ranks - 1) * ((elements + ranks - 1) / ranks) * sizeof(float);
    }
    return sum;
  }

  lines taken() { return std::exchange(log.lines, {}); }

  layout of;
  test::journal log;
  zero::metered<communicator> comm;
  zero::host_stream stream;

 private:
  zero::residency_memory memory() {
    zero::residency_memory out;
    std::uint64_t largest = 0;
    out.segment_offsets.resize(shards_.size());
    for (layout::bucket const& bucket : of.buckets()) {
      std::uint64_t bytes = 0;
      for (std::size_t const s : bucket.segments) {
        out.segment_offsets[s] = bytes;
        bytes += of.segments()[s].cut.padded() * sizeof(float);
        shards_[s].resize(of.segments()[s].cut.slice());
      }
      largest = std::max(largest, bytes);
    }
    for (std::vector<float>& shard : shards_) {
      out.shards.push_back(reinterpret_cast<std::byte*>(shard.data()));
    }
    for (std::vector<float>& slot : slots_) {
      slot.resize(largest / sizeof(float));
      out.slots.push_back(reinterpret_cast<std::byte*>(slot.data()));
    }
    change();
    return out;
  }

  std::vector<std::vector<float>> shards_;
  std::vector<std::vector<float>> slots_;
  int version_ = 0;

 public:
  zero::residency<communicator> resident;
};

/// Run `body(bench&)` on ranks whose units are not joined.
template <class Body>
void on_ranks(int ranks, std::vector<std::uint64_t> const& sizes, zero::residency_options options,
              Body body) {
  zero::run_threads(ranks, [&](zero::thread_communicator& comm) {
    bench b{comm, units_of(sizes), 0, options};
    body(b);
  });
}

std::vector<std::size_t> backward_of(std::vector<std::size_t> order) {
  std::ranges::reverse(order);
  return order;
}

}  // namespace

TEST_CASE("without prefetch a bucket is gathered when it is opened, into the one slot") {
  on_ranks(2, {5, 4, 7}, {.slots = 1}, [](bench& b) {
    b.run(pass::forward, {0, 1, 2});
    CHECK(b.taken() ==
          lines{"gather 0", "compute 0", "gather 1", "compute 1", "gather 2", "compute 2"});
    b.run(pass::backward, {2, 1, 0});
    CHECK(b.taken() ==
          lines{"gather 2", "compute 2", "gather 1", "compute 1", "gather 0", "compute 0"});
    CHECK(b.resident.counts().high_water == 1);
    CHECK(b.resident.counts().occupied == 0);
    CHECK(b.resident.counts().gathers == 6);
    CHECK(b.resident.counts().releases == 6);
  });
}

TEST_CASE("the gather of the next bucket is enqueued before compute, in both directions") {
  on_ranks(2, {5, 4, 7, 3}, {.slots = 2, .prefetch = 1}, [](bench& b) {
    b.run(pass::forward, {0, 1, 2, 3});
    CHECK(b.taken() == lines{"gather 0", "gather 1", "compute 0", "gather 2", "compute 1",
                             "gather 3", "compute 2", "compute 3"});
    b.run(pass::backward, {3, 2, 1, 0});
    CHECK(b.taken() == lines{"gather 3", "gather 2", "compute 3", "gather 1", "compute 2",
                             "gather 0", "compute 1", "compute 0"});
    CHECK(b.resident.counts().high_water == 2);
    CHECK(b.comm.sent()[traffic::parameters] == 2 * b.bytes({0, 1, 2, 3}));
    CHECK(b.comm.sent().total() == b.comm.sent()[traffic::parameters]);
  });
}

TEST_CASE("with a prefetch depth of 2 two buckets are under way before compute") {
  on_ranks(1, {5, 4, 7, 3}, {.slots = 3, .prefetch = 2}, [](bench& b) {
    b.run(pass::forward, {0, 1, 2, 3});
    CHECK(b.taken() == lines{"gather 0", "gather 1", "gather 2", "compute 0", "gather 3",
                             "compute 1", "compute 2", "compute 3"});
    CHECK(b.resident.counts().high_water == 3);
  });
}

TEST_CASE("prefetch never crosses the end of a pass") {
  on_ranks(2, {5, 4, 7}, {.slots = 3, .prefetch = 9}, [](bench& b) {
    b.resident.begin(pass::forward);
    for (std::size_t const unit : {0U, 1U, 2U}) {
      b.use(unit);
    }
    CHECK(b.taken() ==
          lines{"gather 0", "gather 1", "gather 2", "compute 0", "compute 1", "compute 2"});
    CHECK(b.resident.counts().occupied ==
          0);  // the last one, which backward needs first, is gathered again
    b.resident.begin(pass::backward);
    CHECK(b.taken() == lines{});
    b.use(2);
    CHECK(b.taken() == lines{"gather 2", "gather 1", "gather 0", "compute 2"});
  });
}

TEST_CASE("a bucket is gathered once a pass, however many units it joins") {
  zero::run_threads(2, [](zero::thread_communicator& comm) {
    bench b{comm, units_of({4, 4, 4, 4, 4, 4}), 40, {.slots = 2, .prefetch = 1}};
    CHECK(b.of.buckets().size() == 3);
    b.run(pass::forward, {0, 1, 2, 3, 4, 5});
    CHECK(b.taken() == lines{"gather 0", "gather 1", "compute 0", "compute 1", "gather 2",
                             "compute 2", "compute 3", "compute 4", "compute 5"});
    b.run(pass::backward, {5, 4, 3, 2, 1, 0});
    CHECK(b.resident.counts().gathers == 6);
    CHECK(b.comm.sent()[traffic::parameters] == 6 * 16);
  });
}

TEST_CASE("a joined bucket is released when each of its units was used and none is open") {
  zero::run_threads(1, [](zero::thread_communicator& comm) {
    bench b{comm, units_of({4, 4}), 40, {.slots = 1}};
    b.resident.begin(pass::forward);
    b.use(1);
    CHECK(b.resident.resident(0));
    b.open(0);
    b.open(1);
    b.close(0);
    CHECK(b.resident.resident(0));
    b.close(1);
    CHECK_FALSE(b.resident.resident(0));
    CHECK(b.resident.counts().gathers == 1);
  });
}

TEST_CASE("what was released is gathered again, though its slot still holds it") {
  on_ranks(2, {5}, {.slots = 1}, [](bench& b) {
    b.run(pass::forward, {0});
    b.change();
    b.run(pass::backward, {0});  // compute checks that it reads the changed values
    CHECK(b.taken() == lines{"gather 0", "compute 0", "gather 0", "compute 0"});
  });
}

TEST_CASE("a unit used twice in a pass is gathered twice, and the second time is metered by name") {
  on_ranks(3, {5, 4}, {.slots = 2, .prefetch = 1}, [](bench& b) {
    b.run(pass::forward, {0, 1, 0});
    CHECK(b.taken() ==
          lines{"gather 0", "gather 1", "compute 0", "compute 1", "gather 0", "compute 0"});
    CHECK(b.comm.sent()[traffic::parameters] == b.bytes({0, 1}));
    CHECK(b.comm.sent()[traffic::mispredicted] == b.bytes({0}));
  });
}

TEST_CASE("a unit opened twice at once is gathered once") {
  on_ranks(2, {5, 4}, {.slots = 1}, [](bench& b) {
    b.resident.begin(pass::forward);
    b.open(0);
    b.open(0);
    b.close(0);
    CHECK(b.resident.resident(0));
    b.compute(0);
    b.close(0);
    CHECK_FALSE(b.resident.resident(0));
    CHECK(b.resident.counts().gathers == 1);
  });
}

TEST_CASE("a new order is followed at once, and predicted from the next pass on") {
  // Megatron-LM#950, #4563
  on_ranks(2, {5, 4, 7}, {.slots = 2, .prefetch = 1}, [](bench& b) {
    b.run(pass::forward, {0, 2, 1});
    CHECK(b.taken() ==
          lines{"gather 0", "gather 1", "compute 0", "gather 2", "compute 2", "compute 1"});
    b.run(pass::backward, {1, 2, 0});
    CHECK(b.taken() ==
          lines{"gather 1", "gather 2", "compute 1", "gather 0", "compute 2", "compute 0"});
    b.change();
    b.run(pass::forward, {0, 2, 1});
    CHECK(b.taken() ==
          lines{"gather 0", "gather 2", "compute 0", "gather 1", "compute 2", "compute 1"});
    CHECK(b.comm.sent()[traffic::mispredicted] == 0);  // what was gathered early was used later
    CHECK(b.comm.sent()[traffic::parameters] == 3 * b.bytes({0, 1, 2}));
  });
}

TEST_CASE("a gather whose use never came is metered by name") {
  on_ranks(2, {5, 4, 7}, {.slots = 2, .prefetch = 1}, [](bench& b) {
    b.run(pass::forward, {0, 2});
    CHECK(b.taken() == lines{"gather 0", "gather 1", "compute 0", "gather 2", "compute 2"});
    CHECK(b.comm.sent()[traffic::mispredicted] == b.bytes({1}));
    CHECK(b.comm.sent()[traffic::parameters] == b.bytes({0, 2}));
    CHECK(b.resident.counts().occupied == 0);
    // What was used comes first in the next prediction.
    b.taken();
    b.run(pass::forward, {0, 2});
    CHECK(b.taken() == lines{"gather 0", "gather 2", "compute 0", "gather 1", "compute 2"});
  });
}

TEST_CASE("a bucket that is needed now takes the slot of the gather that is needed last") {
  on_ranks(2, {5, 4, 7, 3}, {.slots = 3, .prefetch = 2}, [](bench& b) {
    b.resident.begin(pass::forward);
    b.open(0);  // 1 and 2 are ahead: every slot is taken
    b.open(3);  // in the place of 2
    CHECK(b.taken() ==
          lines{"gather 0", "gather 1", "gather 2", "compute 0", "gather 3", "compute 3"});
    CHECK(b.resident.resident(1));
    CHECK_FALSE(b.resident.resident(2));
    CHECK(b.comm.sent()[traffic::mispredicted] == b.bytes({2}));
    b.close(0);
    b.close(3);
    b.use(1);
    b.use(2);
    b.resident.end();
    CHECK(b.comm.sent()[traffic::parameters] == b.bytes({0, 1, 2, 3}));
    CHECK(b.comm.sent()[traffic::mispredicted] == b.bytes({2}));
  });
}

TEST_CASE("buckets of which a part was used make way, and come back for the rest") {
  for (std::size_t const prefetch : {0U, 1U}) {
    zero::run_threads(2, [&](zero::thread_communicator& comm) {
      bench b{
          comm, units_of({4, 4, 4, 4, 4, 4}), 40, {.slots = 1 + prefetch, .prefetch = prefetch}};
      CHECK(b.of.buckets().size() == 3);
      for (int const step : {1, 2}) {
        b.run(pass::forward, {0, 2, 4, 1, 3, 5});
        b.run(pass::backward, {5, 3, 1, 4, 2, 0});
        b.change();
        CHECK(b.resident.counts().high_water <= 1 + prefetch);
        CHECK(b.comm.sent()[traffic::parameters] ==
              static_cast<std::uint64_t>(step) * 2 * b.bytes({0, 1, 2}));
      }
      CHECK(b.comm.sent()[traffic::mispredicted] > 0);
      CHECK(b.resident.counts().gathers * 16 == b.comm.sent().total());
      CHECK(b.resident.counts().occupied == 0);
    });
  }
}

TEST_CASE("parameters kept after forward are gathered once, and released as backward goes") {
  on_ranks(2, {5, 4, 7}, {.slots = 3, .prefetch = 1, .keep_after_forward = true}, [](bench& b) {
    b.resident.begin(pass::forward);
    for (std::size_t const unit : {0U, 1U, 2U}) {
      b.use(unit);
    }
    CHECK(b.resident.counts().occupied == 3);
    b.resident.begin(pass::backward);
    CHECK(b.taken() ==
          lines{"gather 0", "gather 1", "compute 0", "gather 2", "compute 1", "compute 2"});
    for (std::size_t const unit : {2U, 1U, 0U}) {
      b.use(unit);
      CHECK(b.resident.counts().occupied == unit);
    }
    b.resident.end();
    CHECK(b.taken() == lines{"compute 2", "compute 1", "compute 0"});
    CHECK(b.comm.sent()[traffic::parameters] == b.bytes({0, 1, 2}));
    CHECK(b.comm.sent()[traffic::mispredicted] == 0);
  });
}

TEST_CASE("a last bucket that stays after forward is gathered once, in no more slots") {
  on_ranks(2, {5, 4, 7}, {.slots = 2, .prefetch = 1, .keep_last = true}, [](bench& b) {
    for (std::uint64_t step = 1; step <= 2; ++step) {
      b.run(pass::forward, {0, 1, 2});
      CHECK(b.resident.counts().occupied == 1);
      b.run(pass::backward, {2, 1, 0});
      CHECK(b.taken() == lines{"gather 0", "gather 1", "compute 0", "gather 2", "compute 1",
                               "compute 2", "gather 1", "compute 2", "gather 0", "compute 1",
                               "compute 0"});
      CHECK(b.comm.sent()[traffic::parameters] == step * (b.bytes({0, 1, 2}) + b.bytes({0, 1})));
    }
    CHECK(b.comm.sent()[traffic::mispredicted] == 0);
    CHECK(b.resident.counts().occupied == 0);
    CHECK(b.resident.counts().high_water == 2);

    b.run(pass::evaluation, {0, 1, 2});  // nothing comes after it
    CHECK(b.resident.counts().occupied == 0);
  });
}

TEST_CASE("a bucket that was predicted to be the last makes room when it isn't") {
  on_ranks(2, {5, 4, 7}, {.slots = 1, .keep_last = true}, [](bench& b) {
    b.run(pass::forward, {2, 0, 1});  // the first order is that of the units: 2 stays, and goes
    CHECK(b.resident.counts().occupied == 0);
    b.run(pass::backward, {1, 0, 2});
    CHECK(b.comm.sent()[traffic::parameters] == 2 * b.bytes({0, 1, 2}));
    b.run(pass::forward, {2, 0, 1});
    CHECK(b.resident.counts().occupied == 1);
    b.run(pass::backward, {1, 0, 2});
    CHECK(b.comm.sent()[traffic::parameters] == 4 * b.bytes({0, 1, 2}) - b.bytes({1}));
    CHECK(b.comm.sent()[traffic::mispredicted] == 0);
  });
}

TEST_CASE("a kept bucket that backward leaves out was no misprediction") {
  on_ranks(2, {5, 4, 7}, {.slots = 3, .keep_after_forward = true}, [](bench& b) {
    b.run(pass::forward, {0, 1, 2});
    b.run(pass::backward, {2});
    CHECK(b.resident.counts().occupied == 0);
    CHECK(b.comm.sent()[traffic::parameters] == b.bytes({0, 1, 2}));
    CHECK(b.comm.sent()[traffic::mispredicted] == 0);
  });
}

TEST_CASE("kept parameters without a backward are given back by release_all, and are stale then") {
  on_ranks(2, {5, 4}, {.slots = 2, .keep_after_forward = true}, [](bench& b) {
    b.run(pass::forward, {0, 1});
    CHECK(b.resident.counts().occupied == 2);
    b.resident.release_all();
    CHECK(b.resident.counts().occupied == 0);
    b.change();
    b.run(pass::forward, {0, 1});
    CHECK(b.comm.sent()[traffic::parameters] == 2 * b.bytes({0, 1}));
    CHECK(b.comm.sent()[traffic::mispredicted] == 0);
  });
}

TEST_CASE("more open buckets than slots are an error that lists them") {
  on_ranks(1, {5, 4, 7}, {.slots = 2, .prefetch = 1}, [](bench& b) {
    b.resident.begin(pass::forward);
    b.open(2);
    b.open(0);
    std::string const message = test::message_of([&] { b.open(1); });
    CHECK(message.find("gather of bucket 1: expected a free slot of 2") != message.npos);
    CHECK(message.find("buckets 2, 0") != message.npos);
    CHECK(message.find("(rank 0)") != message.npos);
  });
}

TEST_CASE("in unit order a unit has one address, its bucket modulo the slots") {
  for (std::size_t const prefetch : {0U, 1U, 2U}) {
    on_ranks(2, {5, 4, 7, 3, 6}, {.slots = 1 + prefetch, .prefetch = prefetch}, [&](bench& b) {
      std::vector<std::byte const*> addresses(5, nullptr);
      for (pass const kind : {pass::forward, pass::backward, pass::forward, pass::evaluation}) {
        b.resident.begin(kind);
        std::vector<std::size_t> const forward{0, 1, 2, 3, 4};
        for (std::size_t const unit : kind == pass::backward ? backward_of(forward) : forward) {
          b.open(unit);
          CHECK((addresses[unit] == nullptr || addresses[unit] == b.address(unit)));
          addresses[unit] = b.address(unit);
          b.close(unit);
        }
        b.resident.end();
      }
      for (std::size_t unit = 0; unit + 1 + prefetch < 5; ++unit) {
        CHECK(addresses[unit] == addresses[unit + 1 + prefetch]);
      }
    });
  }
}

TEST_CASE("where its slot is open a bucket is gathered into any free one") {
  on_ranks(1, {5, 4, 7}, {.slots = 2}, [](bench& b) {
    b.resident.begin(pass::forward);
    b.open(0);
    b.open(2);  // 2 modulo 2 is 0's slot
    CHECK(b.address(0) != b.address(2));
    b.compute(0);
    b.compute(2);
  });
}

TEST_CASE("a recomputation is metered by name, and is not backward's use") {
  on_ranks(2, {5, 4, 7}, {.slots = 1}, [](bench& b) {
    b.run(pass::forward, {0, 1, 2});
    b.taken();
    b.resident.begin(pass::backward);
    for (std::size_t const unit : {2U, 1U, 0U}) {
      b.recompute(unit);
      CHECK_FALSE(b.resident.resident(unit));
      b.use(unit);
    }
    b.resident.end();
    CHECK(b.taken() == lines{"gather 2", "compute 2", "gather 2", "compute 2", "gather 1",
                             "compute 1", "gather 1", "compute 1", "gather 0", "compute 0",
                             "gather 0", "compute 0"});
    CHECK(b.comm.sent()[traffic::recomputation] == b.bytes({0, 1, 2}));
    CHECK(b.comm.sent()[traffic::parameters] == 2 * b.bytes({0, 1, 2}));
    CHECK(b.comm.sent()[traffic::mispredicted] == 0);
    CHECK(b.resident.counts().gathers == b.resident.counts().releases);
  });
}

TEST_CASE("a recomputation inside the backward lease, or of what is prefetched, gathers nothing") {
  on_ranks(2, {5, 4}, {.slots = 2, .prefetch = 1}, [](bench& b) {
    b.resident.begin(pass::backward);
    b.open(1);  // 0 is ahead
    b.recompute(1);
    b.compute(1);
    b.close(1);
    b.recompute(0);
    CHECK(b.resident.resident(0));
    b.use(0);
    b.resident.end();
    CHECK(b.taken() == lines{"gather 1", "gather 0", "compute 1", "compute 1", "compute 1",
                             "compute 0", "compute 0"});
    CHECK(b.comm.sent()[traffic::recomputation] == 0);
    CHECK(b.comm.sent()[traffic::mispredicted] == 0);
    CHECK(b.resident.counts().occupied == 0);
  });
}

TEST_CASE("evaluation is metered by name, always releases, and teaches no order") {
  on_ranks(2, {5, 4, 7}, {.slots = 3, .prefetch = 1, .keep_after_forward = true}, [](bench& b) {
    b.run(pass::evaluation, {2, 0, 1});
    CHECK(b.resident.counts().occupied == 0);
    CHECK(b.comm.sent()[traffic::evaluation] == b.bytes({0, 1, 2}));
    CHECK(b.comm.sent()[traffic::parameters] == 0);
    b.taken();
    b.run(pass::forward, {0, 1, 2});
    CHECK(b.taken() ==
          lines{"gather 0", "gather 1", "compute 0", "gather 2", "compute 1", "compute 2"});
  });
}

TEST_CASE("a tied unit's bucket stays whole from its first to its last use in a pass") {
  zero::run_threads(2, [](zero::thread_communicator& comm) {
    std::vector<zero::unit_spec> units = units_of({5, 4, 7, 3});
    units[3].tied = {"0"};
    bench b{comm, units, 0, {.slots = 3, .prefetch = 1}};
    b.resident.begin(pass::forward);
    for (std::size_t const unit : {0U, 1U, 2U}) {
      b.use(unit);
      CHECK(b.resident.resident(0));
    }
    b.use(3);
    CHECK_FALSE(b.resident.resident(0));
    CHECK(b.taken() == lines{"gather 0", "gather 1", "compute 0", "gather 2", "compute 1",
                             "gather 3", "compute 2", "compute 3"});
    b.run(pass::backward, {3, 2, 1, 0});
    CHECK(b.taken() == lines{"gather 3", "gather 2", "gather 0", "compute 3", "gather 1",
                             "compute 2", "compute 1", "compute 0"});
    CHECK(b.comm.sent()[traffic::parameters] == 2 * b.bytes({0, 1, 2, 3}));
    CHECK(b.comm.sent()[traffic::mispredicted] == 0);
    CHECK(b.resident.counts().high_water == 3);
  });
}

TEST_CASE("frozen parameters, and buckets without elements, are gathered like others") {
  zero::run_threads(2, [](zero::thread_communicator& comm) {
    std::vector<zero::unit_spec> units = units_of({5, 0, 7});
    units[2].parameters[0].trainable = false;
    units.push_back({{}, {}});
    bench b{comm, units, 0, {.slots = 2, .prefetch = 1}};
    b.run(pass::forward, {0, 1, 2, 3});
    b.run(pass::backward, {3, 2, 1, 0});
    CHECK(b.resident.counts().gathers == 8);
    CHECK(b.comm.sent()[traffic::parameters] == 2 * b.bytes({0, 2}));
  });
}

TEST_CASE("compute sees the right values in any order, with any joins, slots and depth") {
  for (int const ranks : world_sizes) {
    for (std::size_t const prefetch : {0U, 1U, 3U, 20U}) {
      for (std::uint64_t const bucket_bytes : {0U, 60U, 10'000U}) {
        zero::run_threads(ranks, [&](zero::thread_communicator& comm) {
          std::vector<zero::unit_spec> units = units_of({5, 1, 0, 12, 7, 7, 3, 40, 2, 9});
          units[7].tied = {"1"};
          std::uint64_t state = prefetch + bucket_bytes;  // the same on every rank
          auto const random = [&state](std::size_t below) {
            state = state * 6364136223846793005U + 1442695040888963407U;
            return static_cast<std::size_t>(state >> 33U) % below;
          };
          bench b{comm, units, bucket_bytes, {.slots = 2 + prefetch, .prefetch = prefetch}};
          for (int round = 0; round < 12; ++round) {
            std::vector<std::size_t> order(units.size());
            std::iota(order.begin(), order.end(), std::size_t{0});
            for (std::size_t swaps = random(4); swaps > 0; --swaps) {
              std::swap(order[random(order.size())], order[random(order.size())]);
            }
            order.resize(order.size() - random(3));
            order.push_back(random(units.size()));
            b.run(pass::forward, order);
            b.run(pass::backward, backward_of(order));
            CHECK(b.resident.counts().occupied == 0);
            b.change();
          }
          CHECK(b.resident.counts().high_water <= 2 + prefetch);
          CHECK(b.resident.counts().gathers == b.resident.counts().releases);
        });
      }
    }
  }
}
