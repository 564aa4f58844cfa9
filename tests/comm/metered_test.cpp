// SPDX-License-Identifier: MIT
#include <zero/comm/metered.hpp>
#include <zero/comm/run_threads.hpp>
#include <zero/comm/threads.hpp>

#include <comm/conformance.hpp>
#include <support/thrown.hpp>
#include <support/watchdog.hpp>

#include <array>
#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

namespace {

using zero::combine;
using zero::metered;
using zero::reduction;
using zero::thread_communicator;
using zero::traffic;

struct world {
  static constexpr std::array sizes{1, 2, 3, 4, 8};

  template <class Function>
  static void run(int ranks, Function const& function) {
    zero::run_threads(ranks, [&](thread_communicator& comm) {
      metered<thread_communicator> meter{comm.split(0, comm.rank())};
      function(meter);
    });
  }
};

}  // namespace

TEST_CASE_TEMPLATE_INVOKE(communicator_conformance, world);

TEST_CASE("bytes are counted by what they are for") {
  test::watchdog const limit;
  world::run(4, [](metered<thread_communicator>& comm) {
    zero::host_stream stream;
    std::vector<float> full(20);
    std::vector<float> shard(5);
    std::vector<zero::bfloat16> halves(20);
    std::vector<std::byte> const own_bytes(6);
    std::vector<std::byte> all(24);
    comm.barrier(stream);
    CHECK(comm.sent() == zero::traffic_bytes{});

    comm.label(traffic::gradients);
    comm.reduce_scatter(std::span{full}, std::span{shard}, combine::overwrite, reduction::sum,
                        stream);
    CHECK(comm.sent()[traffic::gradients] == 3 * 5 * 4);
    comm.reduce_scatter(std::span{halves}, std::span{shard}, combine::add, reduction::sum, stream);
    CHECK(comm.sent()[traffic::gradients] == 3 * 5 * 4 + 3 * 5 * 2);

    comm.label(traffic::parameters);
    comm.all_gather(std::span{shard}, std::span{full}, stream);
    CHECK(comm.sent()[traffic::parameters] == 3 * 5 * 4);

    comm.label(traffic::evaluation);
    // 10 elements over 4 ranks are slices of 3, 3, 3 and 1.
    std::uint64_t const mine = comm.rank() == 3 ? 1 : 3;
    comm.all_reduce(std::span{halves}.first(10), std::span{full}.first(10), combine::overwrite,
                    reduction::sum, stream);
    CHECK(comm.sent()[traffic::evaluation] == (10 - mine) * 2 + 3 * mine * 4);

    comm.label(traffic::bind);
    comm.broadcast(std::span{full}, 2, stream);
    CHECK(comm.sent()[traffic::bind] == (comm.rank() == 2 ? 3 * 20 * 4 : 0));

    comm.exchange(own_bytes, all);
    CHECK(comm.sent()[traffic::control] == 3 * 6);
    CHECK(comm.sent()[traffic::recomputation] == 0);
    CHECK(comm.sent()[traffic::mispredicted] == 0);

    comm.move(traffic::parameters, traffic::mispredicted, 20);
    CHECK(comm.sent()[traffic::parameters] == 40);
    CHECK(comm.sent()[traffic::mispredicted] == 20);
    CHECK(test::message_of([&] { comm.move(traffic::mispredicted, traffic::parameters, 21); }) ==
          "metered: expected at least 21 bytes of mispredicted, actual 20 (rank " +
              std::to_string(comm.rank()) + ")");

    auto part = comm.split(comm.rank() / 2, 0);
    CHECK(part.sent() == zero::traffic_bytes{});
    part.all_gather(std::span{shard}.first(1), std::span{full}.first(2), stream);
    CHECK(part.sent()[traffic::bind] == 4);  // the label came with it
    CHECK(comm.sent()[traffic::bind] == (comm.rank() == 2 ? 240 : 0));
  });
}

TEST_CASE("what is sent is what peers read from each other's memory") {
  for (int const ranks : world::sizes) {
    test::watchdog const limit;
    std::atomic<std::uint64_t> sent{0};
    std::atomic<std::uint64_t> read{0};
    world::run(ranks, [&](metered<thread_communicator>& comm) {
      zero::host_stream stream{true};
      auto const size = static_cast<std::size_t>(ranks);
      std::vector<float> full(7 * size);
      std::vector<float> shard(7);
      std::vector<zero::bfloat16> halves(7 * size);
      std::vector<std::byte> const one_byte(1);
      std::vector<std::byte> all(size);
      for (std::size_t const count : {std::size_t{0}, std::size_t{1}, size, 7 * size - 1}) {
        comm.all_reduce(std::span{halves}.first(count), std::span{full}.first(count),
                        combine::overwrite, reduction::sum, stream);
      }
      // Even calls: the same on every rank.
      std::uint64_t const uneven = comm.sent().total();
      stream.synchronize();
      std::uint64_t const uneven_read = comm.inner().peer_bytes_read();
      comm.reduce_scatter(std::span{halves}, std::span{shard}, combine::add, reduction::average,
                          stream);
      comm.all_gather(std::span{shard}, std::span{full}, stream);
      stream.synchronize();
      CHECK(comm.inner().peer_bytes_read() - uneven_read == comm.sent().total() - uneven);
      CHECK(comm.sent().total() - uneven == (size - 1) * 7 * (2 + 4));
      comm.broadcast(std::span{halves}, ranks - 1, stream);
      stream.synchronize();
      comm.exchange(one_byte, all);
      sent += comm.sent().total() - comm.sent()[traffic::control];
      read += comm.inner().peer_bytes_read();
    });
    CHECK(sent == read);
  }
}

TEST_CASE("a call that is refused is not counted") {
  test::watchdog const limit;
  world::run(1, [](metered<thread_communicator>& comm) {
    zero::host_stream stream;
    std::vector<float> full(4);
    CHECK_THROWS_AS(comm.broadcast(std::span{full}, 7, stream), zero::usage_error);
    CHECK(comm.sent().total() == 0);
  });
}

TEST_CASE("kinds of traffic have names, and add up") {
  zero::traffic_bytes bytes;
  std::uint64_t expected = 0;
  for (std::size_t i = 0; i < zero::traffic_count; ++i) {
    bytes[static_cast<traffic>(i)] = 1ULL << i;
    expected += 1ULL << i;
    CHECK(zero::name(static_cast<traffic>(i)) != "unknown");
  }
  CHECK(bytes.total() == expected);
  CHECK(zero::name(static_cast<traffic>(zero::traffic_count)) == "unknown");
  CHECK(zero::name(traffic::mispredicted) == "mispredicted");
}
