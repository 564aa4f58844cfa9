// SPDX-License-Identifier: MIT
#include <zero/comm/store.hpp>
#include <zero/core/error.hpp>

#include <doctest/doctest.h>
#include <support/thrown.hpp>
#include <support/watchdog.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <future>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using namespace std::chrono_literals;
using test::failure_of;
using test::thrown;
using zero::store;
using zero::store_address;
using zero::store_options;

constexpr auto soon = 5s;  // for what happens at once, on a busy machine

store_options quick(std::string job = "test") {
  return {.job = std::move(job), .deadline = 20s, .linger = 5s};
}

/// Call `function(store&)` on each rank, in a thread of its own, over a server on a free port.
template <class Function>
std::vector<thrown> run_stores(int ranks, Function const& function,
                               store_options const& options = quick()) {
  test::watchdog const limit;
  std::vector<thrown> out(static_cast<std::size_t>(ranks));
  std::promise<int> port;
  std::shared_future<int> const served = port.get_future().share();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      out[static_cast<std::size_t>(rank)] = failure_of([&] {
        store mine{rank, ranks, {"127.0.0.1", rank == 0 ? 0 : served.get()}, options};
        if (rank == 0) {
          port.set_value(mine.address().port);
        }
        function(mine);
      });
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return out;
}

std::vector<int> collect(store& mine, int value) {
  std::vector<int> all(static_cast<std::size_t>(mine.size()));
  mine.exchange(std::as_bytes(std::span{&value, 1}), std::as_writable_bytes(std::span{all}));
  return all;
}

}  // namespace

TEST_CASE("ranks exchange bytes in rank order, often, and none and many") {
  for (int const ranks : {1, 2, 3, 4, 8}) {
    auto const failures = run_stores(ranks, [](store& mine) {
      for (int round = 0; round < 50; ++round) {
        std::vector<int> const all = collect(mine, 1000 * round + mine.rank());
        for (std::size_t rank = 0; rank < all.size(); ++rank) {
          CHECK(all[rank] == 1000 * round + static_cast<int>(rank));
        }
      }
      mine.exchange({}, {});
      std::vector<std::byte> const many(1'000'001, static_cast<std::byte>(mine.rank()));
      std::vector<std::byte> all(many.size() * static_cast<std::size_t>(mine.size()));
      mine.exchange(many, all);
      CHECK(all.back() == static_cast<std::byte>(mine.size() - 1));
      CHECK(all.front() == std::byte{0});
    });
    for (thrown const& each : failures) {
      CHECK(each.kind == test::kind::nothing);
    }
  }
}

TEST_CASE("ranks that exchange different sizes all learn which") {
  auto const failures = run_stores(3, [](store& mine) {
    collect(mine, 0);
    std::size_t const bytes = mine.rank() == 2 ? 4 : 8;
    std::vector<std::byte> const some(bytes);
    std::vector<std::byte> all(3 * bytes);
    mine.exchange(some, all);
  });
  for (thrown const& each : failures) {
    CHECK(each.message == "exchange #2: expected 8 bytes as on rank 0, actual 4 bytes (rank 2)");
    CHECK(each.origin == 2);
    CHECK(each.after < soon);
  }
}

TEST_CASE("a wrong size is refused, and the peers learn of it") {
  auto const failures = run_stores(2, [](store& mine) {
    std::vector<std::byte> all(3);
    if (mine.rank() == 1) {
      CHECK(test::message_of([&] { mine.exchange({}, all); }) ==
            "exchange: expected 0 bytes for each of 2 ranks, actual 3 (rank 1)");
    }
    collect(mine, 0);
  });
  for (thrown const& each : failures) {
    CHECK(each.message ==
          "aborted by rank 1: exchange: expected 0 bytes for each of 2 ranks, actual 3 (rank 1)");
    CHECK(each.origin == 1);
  }
}

TEST_CASE("an abort wakes the ranks that wait, and counts for later calls") {
  auto const failures = run_stores(4, [](store& mine) {
    collect(mine, 0);
    if (mine.rank() == 3) {
      std::this_thread::sleep_for(20ms);
      mine.abort("disk full");
      mine.abort("a later reason");
    }
    CHECK(failure_of([&] { collect(mine, 1); }).message == "aborted by rank 3: disk full");
    collect(mine, 2);
  });
  for (thrown const& each : failures) {
    CHECK(each.message == "aborted by rank 3: disk full");
    CHECK(each.origin == 3);
    CHECK(each.after < soon);
  }
}

TEST_CASE("a rank that is late is named, by all") {
  auto options = quick();
  options.deadline = 200ms;
  auto const failures = run_stores(
      3,
      [](store& mine) {
        if (mine.rank() == 1) {
          std::this_thread::sleep_for(1s);
        }
        collect(mine, 0);
      },
      options);
  CHECK(
      failures[0].says("exchange #1: expected 3 ranks within 200 ms of the first, actual 2, "
                       "missing rank 1 (rank "));
  for (thrown const& each : failures) {
    CHECK(each.message == failures[0].message);
    CHECK(each.origin == 1);
  }
}

TEST_CASE("a rank that has left is named, and those that finish don't wait for it") {
  auto const failures = run_stores(3, [](store& mine) {
    collect(mine, 0);
    if (mine.rank() != 2) {
      collect(mine, 1);
    }
  });
  for (std::size_t const rank : {0UL, 1UL}) {
    CHECK(failures[rank].says("exchange #2: expected 3 ranks, but rank 2 has left (rank "));
    CHECK(failures[rank].origin == 2);
    CHECK(failures[rank].after < soon);
  }
  CHECK(failures[2].kind == test::kind::nothing);
}

namespace {

/// A connection that speaks for itself.
class raw_connection {
 public:
  explicit raw_connection(int port) : fd_{::socket(AF_INET, SOCK_STREAM, 0)} {
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<std::uint16_t>(port));
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ = ::connect(fd_.get(), reinterpret_cast<sockaddr*>(&to), sizeof to) == 0;
  }
  void say(std::string const& bytes) const {
    CHECK(zero::detail::send_all(fd_.get(), bytes, zero::detail::steady::now() + 5s).empty());
  }
  /// The text of a refusal.
  [[nodiscard]] std::string refusal() const {
    zero::detail::frame_reader in;
    std::string message;
    std::string why;
    bool wrong = false;
    auto state = zero::detail::frame_reader::state::open;
    while (!in.next(message, wrong) && state == zero::detail::frame_reader::state::open) {
      static_cast<void>(
          zero::detail::wait_for_socket(fd_.get(), POLLIN, zero::detail::steady::now() + 5s));
      state = in.read(fd_.get(), why);
    }
    zero::detail::control_message answer;
    static_cast<void>(in.next(message, wrong));
    return zero::detail::decode(message, answer) ? answer.body : "no answer";
  }
  [[nodiscard]] bool connected() const { return connected_; }

 private:
  zero::detail::unique_fd fd_;
  bool connected_ = false;
};

}  // namespace

TEST_CASE("a rank whose process dies is named at once") {
  test::watchdog const limit;
  store zero{0, 2, {"127.0.0.1", 0}, quick()};
  {
    raw_connection const peer{zero.address().port};
    zero::detail::control_message hello;
    zero::detail::put(hello.body, zero::detail::greeting{.size = 2, .rank = 1});
    hello.body += "test";
    peer.say(zero::detail::frame(zero::detail::encode(hello)));
    CHECK(peer.refusal().empty());  // a welcome
  }
  thrown const here = failure_of([&] { collect(zero, 0); });
  CHECK(here.message == "lost rank 1: its connection was closed");
  CHECK(here.origin == 1);
  CHECK(here.after < soon);
}

TEST_CASE("bytes that no rank sends are refused, and harm nobody") {
  test::watchdog const limit;
  std::string const refusal =
      "store: expected a rank of this library, actual bytes of something else";
  store zero{0, 2, {"127.0.0.1", 0}, quick()};
  for (std::string const& bytes :
       {std::string{"GET / HTTP/1.1\r\n\r\n"}, std::string(64, '\0'),
        zero::detail::frame("0123456789012345678901234567890123456789")}) {
    raw_connection const stranger{zero.address().port};
    CHECK(stranger.connected());
    stranger.say(bytes);
    CHECK(stranger.refusal() == refusal);
  }
  std::thread peer{[&] {
    store one{1, 2, {"127.0.0.1", zero.address().port}, quick()};
    CHECK(collect(one, 7) == std::vector{6, 7});
  }};
  CHECK(collect(zero, 6) == std::vector{6, 7});
  peer.join();
}

TEST_CASE("a rank of another job, world size, or a second one of a number is refused") {
  test::watchdog const limit;
  store zero{0, 2, {"127.0.0.1", 0}, quick()};
  store_address const there{"127.0.0.1", zero.address().port};
  CHECK(failure_of([&] {
          store{1, 2, there, quick("other")};
        }).message == "store: expected job \"test\" as on rank 0, actual \"other\" (rank 1)");
  CHECK(failure_of([&] {
          store{1, 3, there, quick()};
        }).message == "store: expected a world of 2 ranks as on rank 0, actual 3 (rank 1)");
  store one{1, 2, there, quick()};
  CHECK(failure_of([&] {
          store{1, 2, there, quick()};
        }).message == "store: expected one connection of each rank, actual another (rank 1)");
}

TEST_CASE("without a rank 0, the deadline says where it was looked for") {
  test::watchdog const limit;
  auto options = quick();
  options.deadline = 100ms;
  int port = 0;
  {
    store const ended{0, 1, {"127.0.0.1", 0}, quick()};
    port = ended.address().port;
  }
  thrown const here = failure_of([&] { store{1, 2, {"127.0.0.1", port}, options}; });
  CHECK(here.message == "store: expected a connection within 100 ms from 127.0.0.1 port " +
                            std::to_string(port) + ", actual Connection refused (rank 1)");
  CHECK(here.after < soon);
}

TEST_CASE("wrong arguments are refused") {
  using test::message_of;
  store_address const any{"127.0.0.1", 0};
  CHECK(message_of([&] {
          store{0, 0, any};
        }) == "store: expected at least 1 rank, actual 0 (rank 0)");
  CHECK(message_of([&] {
          store{2, 2, any};
        }) == "store: expected a rank in [0, 2), actual 2 (rank 2)");
  CHECK(message_of([&] {
          store{1, 2, any};
        }) == "store: expected a port in [1, 65535], actual 0 (rank 1)");
  CHECK(message_of([&] {
          store{0, 2, any, {.job = {}, .deadline = 0ms}};
        }) == "store: expected a deadline of at least 1 ms, actual 0 ms (rank 0)");
  store const first{0, 1, any, quick()};
  CHECK(message_of<zero::error>([&] {
          store const second{0, 1, first.address(), quick()};
        }) == "store: expected to listen on 127.0.0.1 port " +
                  std::to_string(first.address().port) +
                  ", actual Address already in use (rank 0)");
}
