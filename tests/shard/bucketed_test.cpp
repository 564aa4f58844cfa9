// SPDX-License-Identifier: MIT
#include <support/recording_communicator.hpp>
#include <zero/comm/run_threads.hpp>
#include <zero/shard/bucketed.hpp>

#include <doctest/doctest.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

using zero::any_span;
using zero::combine;
using zero::dtype;
using zero::layout;

namespace {

constexpr int world_sizes[] = {1, 2, 3, 4, 8};

using communicator = test::recording_communicator<zero::thread_communicator>;
using lines = std::vector<std::string>;

/// Two units that are joined: fp32 of 5, bf16 of 3 and frozen fp32 of 4 elements; fp32 of 2 and
/// none. The third has a bucket of its own.
layout joined_layout(int ranks, std::uint64_t alignment) {
  auto const make = [](std::string name, std::uint64_t size, dtype type, bool trainable) {
    return zero::parameter_spec{.name = std::move(name),
                                .size = size,
                                .value = type,
                                .gradient = type,
                                .reduced = dtype::float32,
                                .trainable = trainable};
  };
  return layout{{{{make("a", 5, dtype::float32, true), make("b", 3, dtype::bfloat16, true),
                   make("c", 4, dtype::float32, false)},
                  {}},
                 {{make("d", 2, dtype::float32, true), make("e", 0, dtype::float32, true)}, {}},
                 {{make("f", 100, dtype::float32, true)}, {}}},
                static_cast<std::uint64_t>(ranks),
                {.bucket_bytes = 60, .alignment = alignment}};
}

/// Memory for each segment of a layout: whole in one type, a slice in another.
struct memory {
  explicit memory(layout const& of) {
    for (layout::segment const& segment : of.segments()) {
      whole.emplace_back(segment.cut.padded() * 8);
      slice.emplace_back(segment.cut.slice() * 8);
    }
  }
  std::vector<std::vector<std::byte>> whole;
  std::vector<std::vector<std::byte>> slice;

  auto full() {
    return [this](std::size_t s) { return whole[s].data(); };
  }
  auto shard() {
    return [this](std::size_t s) { return slice[s].data(); };
  }
};

double read(any_span span, std::size_t i) {
  switch (span.dtype()) {
    case dtype::bfloat16: return static_cast<float>(span.as<zero::bfloat16>()[i]);
    case dtype::float16: return static_cast<float>(span.as<zero::float16>()[i]);
    default: return span.as<float>()[i];
  }
}

void write(any_span span, std::size_t i, double value) {
  switch (span.dtype()) {
    case dtype::bfloat16:
      span.as<zero::bfloat16>()[i] = zero::bfloat16{static_cast<float>(value)};
      break;
    case dtype::float16:
      span.as<zero::float16>()[i] = zero::float16{static_cast<float>(value)};
      break;
    default: span.as<float>()[i] = static_cast<float>(value); break;
  }
}

}  // namespace

TEST_CASE("a bucket's gradients are averaged, one collective for each trainable segment") {
  for (int const ranks : world_sizes) {
    for (std::uint64_t const alignment : {1U, 16U}) {
      zero::run_threads(ranks, [&](zero::thread_communicator& threads) {
        test::journal log;
        communicator comm{threads.split(0, threads.rank()), log};
        layout const of = joined_layout(ranks, alignment);
        CHECK(of.buckets().size() == 2);
        memory gradients{of};
        zero::host_stream stream;
        // Place i of each segment holds 8 (i % 3 + 1) (rank + 1), a bf16: the average is 4 (i % 3 +
        // 1) (P + 1).
        for (std::size_t s = 0; s < of.segments().size(); ++s) {
          layout::segment const& segment = of.segments()[s];
          for (std::size_t i = 0; i < segment.cut.padded(); ++i) {
            write({gradients.whole[s].data(), segment.cut.padded(), segment.gradient}, i,
                  8.0 * static_cast<double>(i % 3 + 1) * (comm.rank() + 1));
          }
        }
        reduce_scatter_bucket(comm, of, 0, gradients.full(), gradients.shard(), combine::overwrite,
                              stream);
        CHECK(log.calls.size() ==
              2);  // fp32 and bf16; nothing for the frozen one, the other bucket
        for (int const twice : {1, 2}) {
          for (std::size_t const s : of.buckets()[0].segments) {
            layout::segment const& segment = of.segments()[s];
            std::size_t const first = segment.cut.offset(static_cast<std::uint64_t>(comm.rank()));
            any_span const slice{gradients.slice[s].data(), segment.cut.slice(), dtype::float32};
            for (std::size_t i = 0; i < slice.size(); ++i) {
              double const average = 4.0 * static_cast<double>((first + i) % 3 + 1) * (ranks + 1);
              CHECK(read(slice, i) == (segment.trainable ? twice * average : 0));
            }
          }
          if (twice == 1) {
            reduce_scatter_bucket(comm, of, 0, gradients.full(), gradients.shard(), combine::add,
                                  stream);
          }
        }
      });
    }
  }
}

TEST_CASE("an all-reduce of a bucket has the bits of its reduce-scatter and an all-gather") {
  for (int const ranks : world_sizes) {
    zero::run_threads(ranks, [&](zero::thread_communicator& comm) {
      layout const of = joined_layout(ranks, 1);
      memory a{of};
      memory b{of};
      memory gathered{of};
      zero::host_stream stream;
      for (std::size_t s = 0; s < of.segments().size(); ++s) {
        layout::segment const& segment = of.segments()[s];
        for (std::size_t i = 0; i < segment.cut.padded(); ++i) {
          write({a.whole[s].data(), segment.cut.padded(), segment.gradient}, i,
                1.0 / (3.0 + static_cast<double>(i) + 7.0 * comm.rank()));
        }
      }
      for (std::size_t bucket = 0; bucket < of.buckets().size(); ++bucket) {
        reduce_scatter_bucket(comm, of, bucket, a.full(), a.shard(), combine::overwrite, stream);
        all_reduce_bucket(comm, of, bucket, a.full(), b.full(), combine::overwrite, stream);
        for (std::size_t const s : of.buckets()[bucket].segments) {
          layout::segment const& segment = of.segments()[s];
          if (segment.trainable) {
            comm.all_gather({a.slice[s].data(), segment.cut.slice(), dtype::float32},
                            {gathered.whole[s].data(), segment.cut.padded(), dtype::float32},
                            stream);
          }
        }
      }
      for (std::size_t s = 0; s < of.segments().size(); ++s) {
        CHECK(gathered.whole[s] == b.whole[s]);
      }
    });
  }
}

TEST_CASE("a bucket's parameters are gathered, all of them or the trainable ones") {
  for (int const ranks : world_sizes) {
    for (zero::segments const which : {zero::segments::all, zero::segments::trainable}) {
      zero::run_threads(ranks, [&](zero::thread_communicator& threads) {
        test::journal log;
        communicator comm{threads.split(0, threads.rank()), log};
        layout const of = joined_layout(ranks, 1);
        memory values{of};
        zero::host_stream stream;
        for (std::size_t s = 0; s < of.segments().size(); ++s) {
          layout::segment const& segment = of.segments()[s];
          std::size_t const first = segment.cut.offset(static_cast<std::uint64_t>(comm.rank()));
          for (std::size_t i = 0; i < segment.cut.slice(); ++i) {
            write({values.slice[s].data(), segment.cut.slice(), segment.value}, i,
                  static_cast<double>(first + i + 1));
          }
        }
        all_gather_bucket(comm, of, 0, values.shard(), values.full(), which, stream);
        CHECK(log.calls.size() == (which == zero::segments::all ? 3 : 2));
        for (std::size_t const s : of.buckets()[0].segments) {
          layout::segment const& segment = of.segments()[s];
          for (std::size_t i = 0; i < segment.cut.padded(); ++i) {
            bool const moved = segment.trainable || which == zero::segments::all;
            CHECK(read({values.whole[s].data(), segment.cut.padded(), segment.value}, i) ==
                  (moved ? static_cast<double>(i + 1) : 0));
          }
        }
      });
    }
  }
}

TEST_CASE("a float32 keeps its value beside both 16-bit types in a bucket, in either order") {
  // DeepSpeed#8072, #8113
  for (bool const narrow_first : {true, false}) {
    zero::run_threads(2, [&](zero::thread_communicator& comm) {
      zero::parameter_spec const b{.name = "b", .size = 6, .value = dtype::bfloat16};
      zero::parameter_spec const h{.name = "h", .size = 7, .value = dtype::float16};
      zero::parameter_spec const f{.name = "f", .size = 5};
      using list = std::vector<zero::parameter_spec>;
      layout const of{{{narrow_first ? list{b, h, f} : list{f, h, b}, {}}}, 2, {}};
      CHECK(of.segments().size() == 3);
      float const exact = 1.0F + std::bit_cast<float>(0x35800000U);  // 1 + 2^-20
      memory values{of};
      for (std::size_t s = 0; s < 3; ++s) {
        layout::segment const& segment = of.segments()[s];
        for (std::size_t i = 0; i < segment.cut.slice(); ++i) {
          write({values.slice[s].data(), segment.cut.slice(), segment.value}, i,
                segment.value == dtype::float16 ? 1 + 0x1p-10 : exact);
        }
      }
      zero::host_stream stream;
      all_gather_bucket(comm, of, 0, values.shard(), values.full(), zero::segments::all, stream);
      layout::parameter const& wide = of.parameters()[of.find("f")];
      layout::parameter const& narrow = of.parameters()[of.find("b")];
      layout::parameter const& half = of.parameters()[of.find("h")];
      for (std::size_t i = 0; i < 5; ++i) {
        CHECK(read({values.whole[wide.segment].data(), 64, dtype::float32}, wide.offset + i) ==
              exact);
        CHECK(read({values.whole[narrow.segment].data(), 64, dtype::bfloat16}, narrow.offset + i) ==
              1);
        CHECK(read({values.whole[half.segment].data(), 64, dtype::float16}, half.offset + i) ==
              1 + 0x1p-10);
      }
    });
  }
}

TEST_CASE("a bucket without elements makes no collective") {
  zero::run_threads(2, [](zero::thread_communicator& threads) {
    test::journal log;
    communicator comm{threads.split(0, threads.rank()), log};
    layout const of{{{{{.name = "a"}}, {}}, {{}, {}}}, 2, {}};
    memory none{of};
    zero::host_stream stream;
    for (std::size_t bucket = 0; bucket < of.buckets().size(); ++bucket) {
      reduce_scatter_bucket(comm, of, bucket, none.full(), none.shard(), combine::overwrite,
                            stream);
      all_reduce_bucket(comm, of, bucket, none.full(), none.full(), combine::overwrite, stream);
      all_gather_bucket(comm, of, bucket, none.shard(), none.full(), zero::segments::all, stream);
    }
    CHECK(log.lines == lines{});
  });
}

namespace {

/// The host, whose copies are counted.
struct counted : zero::host {
  static inline int copies = 0;
  static void copy(zero::host_stream& stream, zero::const_any_span from, any_span to) {
    ++copies;
    zero::host::copy(stream, from, to);
  }
};

}  // namespace

TEST_CASE(
    "packing copies what lies elsewhere, and nothing for a tensor that is bound into its bucket") {
  layout const of = joined_layout(2, 16);
  memory values{of};
  zero::host_stream stream;
  std::vector<float> a{1, 2, 3, 4, 5};
  std::vector<zero::bfloat16> b(3, zero::bfloat16{6.0F});
  layout::parameter const& d = of.parameters()[3];
  any_span const bound = any_span{values.whole[d.segment].data(),
                                  of.segments()[d.segment].cut.padded(), dtype::float32}
                             .subspan(d.offset, 2);
  write(bound, 0, 7);
  write(bound, 1, 8);
  auto const tensor = [&](std::size_t id) -> any_span {
    switch (id) {
      case 0: return std::span{a};
      case 1: return std::span{b};
      case 3: return bound;
      default: return {nullptr, 0, dtype::float32};  // c has no tensor, e no elements
    }
  };
  counted::copies = 0;
  zero::pack_bucket<counted>(of, 0, tensor, values.full(), stream);
  CHECK(counted::copies == 2);
  any_span const wide{values.whole[of.parameters()[0].segment].data(), 48, dtype::float32};
  for (std::size_t i = 0; i < 5; ++i) {
    CHECK(read(wide, i) == static_cast<double>(i + 1));
    write(wide, i, static_cast<double>(10 * i));
  }
  CHECK(read(wide, d.offset) == 7);
  CHECK(read(wide, d.offset + 1) == 8);

  zero::unpack_bucket<counted>(of, 0, tensor, values.full(), stream);
  CHECK(counted::copies == 4);
  CHECK(a == std::vector<float>{0, 10, 20, 30, 40});
  CHECK(static_cast<float>(b[2]) == 6);
}
