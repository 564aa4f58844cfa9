// SPDX-License-Identifier: MIT
// What happens to the other ranks when one of a group of threads does what it shouldn't.
#include <zero/comm/threads.hpp>

#include <doctest/doctest.h>
#include <comm/ranks.hpp>
#include <support/thrown.hpp>
#include <support/watchdog.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using namespace std::chrono_literals;
using test::failure_of;
using test::run_ranks;
using test::thrown;
using zero::combine;
using zero::reduction;
using zero::thread_communicator;

constexpr auto soon = 5s;  // for what happens at once, on a busy machine

/// One rank's buffers, and the calls that the tests make with them.
struct buffers {
  std::vector<float> full = std::vector<float>(24, 1);
  std::vector<float> shard = std::vector<float>(24);
  std::vector<double> doubles = std::vector<double>(24);
  std::vector<zero::bfloat16> halves = std::vector<zero::bfloat16>(24);
  zero::host_stream stream;

  void reduce_scatter(thread_communicator& comm, std::size_t count = 24,
                      combine how = combine::overwrite, reduction what = reduction::sum) {
    comm.reduce_scatter(std::span{full}.first(count),
                        std::span{shard}.first(count / static_cast<std::size_t>(comm.size())), how,
                        what, stream);
  }
  void all_gather(thread_communicator& comm) {
    comm.all_gather(std::span{shard}.first(24 / static_cast<std::size_t>(comm.size())),
                    std::span{full}, stream);
  }
  void all_reduce(thread_communicator& comm) {
    comm.all_reduce(std::span{full}, std::span{shard}, combine::overwrite, reduction::sum, stream);
  }
  void broadcast(thread_communicator& comm, int root = 0) {
    comm.broadcast(std::span{full}, root, stream);
  }
  static void exchange(thread_communicator& comm, std::size_t bytes = 8) {
    std::vector<std::byte> const mine(bytes);
    std::vector<std::byte> all(bytes * static_cast<std::size_t>(comm.size()));
    comm.exchange(mine, all);
  }
};

using call = std::function<void(thread_communicator&, buffers&)>;

/// Every blocking call of a communicator.
struct named_call {
  std::string name;
  call make;
};
std::vector<named_call> const& every_call() {
  static std::vector<named_call> const calls{
      {"reduce_scatter", [](auto& comm, auto& mine) { mine.reduce_scatter(comm); }},
      {"all_gather", [](auto& comm, auto& mine) { mine.all_gather(comm); }},
      {"all_reduce", [](auto& comm, auto& mine) { mine.all_reduce(comm); }},
      {"broadcast", [](auto& comm, auto& mine) { mine.broadcast(comm); }},
      {"barrier", [](auto& comm, auto& mine) { comm.barrier(mine.stream); }},
      {"exchange", [](auto& comm, auto&) { buffers::exchange(comm); }},
      {"split", [](auto& comm, auto&) { static_cast<void>(comm.split(0, 0)); }},
  };
  return calls;
}

/// What each rank's `function(comm)` throws as a communication error.
template <class Function>
std::vector<thrown> failures_of(int ranks, Function const& function,
                                zero::thread_options options = {}) {
  std::vector<thrown> out(static_cast<std::size_t>(ranks));
  run_ranks(
      ranks,
      [&](thread_communicator& comm) {
        out[static_cast<std::size_t>(comm.rank())] = failure_of([&] { function(comm); });
      },
      options);
  return out;
}

/// Let the other ranks come to their call; a test is right without it, and then tests less.
void let_peers_block() { std::this_thread::sleep_for(20ms); }

}  // namespace

TEST_CASE("ranks that call different things all learn which rank, call, expected and actual") {
  struct mismatch {
    call most;
    call odd;  // of the last rank
    std::string message;
  };
  std::vector<mismatch> const mismatches{
      {[](auto& comm, auto& mine) { mine.all_gather(comm); },
       [](auto& comm, auto& mine) { comm.barrier(mine.stream); },
       "all_gather #2: expected all_gather as on rank 0, actual barrier (rank 2)"},
      {[](auto& comm, auto& mine) { mine.reduce_scatter(comm, 24); },
       [](auto& comm, auto& mine) { mine.reduce_scatter(comm, 12); },
       "reduce_scatter #2: expected 24 elements as on rank 0, actual 12 elements (rank 2)"},
      {[](auto& comm, auto& mine) { mine.reduce_scatter(comm); },
       [](auto& comm, auto& mine) { mine.reduce_scatter(comm, 24, combine::add); },
       "reduce_scatter #2: expected overwrite as on rank 0, actual add (rank 2)"},
      {[](auto& comm, auto& mine) { mine.reduce_scatter(comm); },
       [](auto& comm, auto& mine) {
         mine.reduce_scatter(comm, 24, combine::overwrite, reduction::average);
       },
       "reduce_scatter #2: expected sum as on rank 0, actual average (rank 2)"},
      {[](auto& comm, auto& mine) { mine.broadcast(comm, 1); },
       [](auto& comm, auto& mine) { mine.broadcast(comm, 2); },
       "broadcast #2: expected root 1 as on rank 0, actual root 2 (rank 2)"},
      {[](auto& comm, auto& mine) { mine.broadcast(comm); },
       [](auto& comm, auto& mine) { comm.broadcast(std::span{mine.doubles}, 0, mine.stream); },
       "broadcast #2: expected float32 as on rank 0, actual float64 (rank 2)"},
      {[](auto& comm, auto& mine) { mine.all_reduce(comm); },
       [](auto& comm, auto& mine) {
         comm.all_reduce(std::span{mine.full}, std::span{mine.halves}, combine::overwrite,
                         reduction::sum, mine.stream);
       },
       "all_reduce #2: expected float32 results as on rank 0, actual bfloat16 results (rank 2)"},
      {[](auto& comm, auto&) { buffers::exchange(comm, 8); },
       [](auto& comm, auto&) { buffers::exchange(comm, 4); },
       "exchange #1: expected 8 bytes as on rank 0, actual 4 bytes (rank 2)"},
      {[](auto& comm, auto&) { buffers::exchange(comm, 8); },
       [](auto& comm, auto&) { static_cast<void>(comm.split(0, 0)); },
       "exchange #1: expected exchange as on rank 0, actual split (rank 2)"},
  };
  for (mismatch const& wrong : mismatches) {
    auto const failures = failures_of(3, [&](thread_communicator& comm) {
      buffers mine;
      comm.barrier(mine.stream);
      (comm.rank() == 2 ? wrong.odd : wrong.most)(comm, mine);
    });
    for (thrown const& here : failures) {
      CHECK(here.message == wrong.message);
      CHECK(here.origin == 2);
      CHECK(here.after < soon);
    }
  }
}

TEST_CASE("the rank that differs from most is the one that is named") {
  for (int const odd : {0, 1, 3}) {
    auto const failures = failures_of(4, [&](thread_communicator& comm) {
      buffers mine;
      mine.broadcast(comm, comm.rank() == odd ? 2 : 1);
    });
    std::string const rank = std::to_string(odd);
    for (thrown const& here : failures) {
      CHECK(here.says(", actual root 2 (rank " + rank + ")"));
      CHECK(here.origin == odd);
    }
  }
}

TEST_CASE("ranks whose memory overlaps learn it before any of it is written") {
  std::vector<float> shared(10, 1);
  std::vector<float> own(10, 2);
  auto const failures = failures_of(2, [&](thread_communicator& comm) {
    zero::host_stream stream;
    // Rank 1 writes its result into rank 0's input.
    bool const first = comm.rank() == 0;
    comm.all_reduce(std::span{first ? shared : own}.first(5),
                    std::span{first ? own : shared}.subspan(first ? 5 : 4, 5), combine::overwrite,
                    reduction::sum, stream);
  });
  for (thrown const& here : failures) {
    CHECK(here.says("all_reduce #1: expected memory of its own for every rank"));
  }
  CHECK(shared == std::vector<float>(10, 1));
}

TEST_CASE("a rank that never arrives is named at the deadline, on every other rank") {
  for (named_call const& blocking : every_call()) {
    std::atomic<int> failed{0};
    auto const failures =
        failures_of(4,
                    [&](thread_communicator& comm) {
                      if (comm.rank() != 2) {
                        buffers mine;
                        thrown const here = failure_of([&] { blocking.make(comm, mine); });
                        ++failed;
                        throw zero::communication_error{here.message, here.origin};
                      }
                      while (failed != 3) {
                        std::this_thread::sleep_for(1ms);
                      }
                    },
                    {.deadline = 200ms});
    CHECK(failures[2].kind == test::kind::nothing);
    for (std::size_t const rank : {0UL, 1UL, 3UL}) {
      CHECK(failures[rank].says(
          blocking.name +
          " #1: expected 4 ranks within 200 ms of the first, actual 3, missing rank 2 (rank "));
      CHECK(failures[rank].message == failures[0].message);
      CHECK(failures[rank].origin == 2);
      CHECK(failures[rank].after >= 150ms);
      CHECK(failures[rank].after < soon);
    }
  }
}

TEST_CASE("several missing ranks are all named, with where they wait instead") {
  std::atomic<bool> done{false};
  auto const failures = failures_of(4, [&](thread_communicator& comm) {
    zero::host_stream stream;
    if (comm.rank() == 1) {
      buffers::exchange(comm);
    } else if (comm.rank() == 3) {
      comm.set_deadline(200ms);
      let_peers_block();
      thrown const here = failure_of([&] { comm.barrier(stream); });
      done = true;
      throw zero::communication_error{here.message, here.origin};
    } else {
      while (!done) {
        std::this_thread::sleep_for(1ms);
      }
    }
  });
  CHECK(
      failures[3].message ==
      "barrier #1: expected 4 ranks within 200 ms of the first, actual 1, missing rank 0, missing "
      "rank 1 (which waits in control call #1), missing rank 2 (rank 3)");
  CHECK(failures[3].origin == -1);
  CHECK(failures[1].message == failures[3].message);
}

TEST_CASE("the deadline runs from the first arrival, whoever's it is") {
  std::atomic<int> failed{0};
  auto const failures = failures_of(3, [&](thread_communicator& comm) {
    if (comm.rank() == 2) {
      while (failed != 2) {
        std::this_thread::sleep_for(1ms);
      }
      return;
    }
    zero::host_stream stream;
    if (comm.rank() == 1) {
      comm.set_deadline(1500ms);
      std::this_thread::sleep_for(1200ms);  // rank 0, which has 10 minutes, is there already
    }
    thrown const here = failure_of([&] { comm.barrier(stream); });
    CHECK(here.after < (comm.rank() == 1 ? 1000ms : 5000ms));
    ++failed;
    throw zero::communication_error{here.message, here.origin};
  });
  CHECK(failures[1].says("within 1500 ms of the first, actual 2, missing rank 2"));
  CHECK(failures[0].message == failures[1].message);
}

TEST_CASE("a rank that lags, but not past the deadline, is waited for") {
  run_ranks(3,
            [&](thread_communicator& comm) {
              buffers mine;
              for (int round = 0; round < 3; ++round) {
                if (comm.rank() == round) {
                  std::this_thread::sleep_for(100ms);  // past what the others spin and yield for
                }
                mine.all_reduce(comm);
                CHECK(mine.shard[0] == 3);
              }
            },
            {.deadline = 60s});
}

TEST_CASE("a deadline as long as can be said is no deadline") {
  run_ranks(2,
            [&](thread_communicator& comm) {
              zero::host_stream stream;
              std::this_thread::sleep_for(comm.rank() * 50ms);
              comm.barrier(stream);
            },
            {.deadline = std::chrono::milliseconds::max()});
}

TEST_CASE("a rank that leaves gives those that wait for it an error at once") {
  for (named_call const& blocking : every_call()) {
    auto const failures = failures_of(3, [&](thread_communicator& comm) {
      buffers mine;
      comm.barrier(mine.stream);
      if (comm.rank() == 1) {
        let_peers_block();
        return;
      }
      blocking.make(comm, mine);
    });
    CHECK(failures[1].kind == test::kind::nothing);
    for (std::size_t const rank : {0UL, 2UL}) {
      CHECK(failures[rank].says(blocking.name + " #"));
      CHECK(failures[rank].says(": expected 3 ranks, but rank 1 has left (rank "));
      CHECK(failures[rank].origin == 1);
      CHECK(failures[rank].after < soon);
    }
  }
}

TEST_CASE("a rank that leaves with calls in its stream still takes part in them") {
  test::watchdog const limit;
  auto comms = thread_communicator::create(2);
  std::vector<float> sum(2);
  {
    std::array<zero::host_stream, 2> streams{zero::host_stream{true}, zero::host_stream{true}};
    std::atomic<bool> go{false};
    streams[0].enqueue([&go] {
      while (!go) {
        std::this_thread::yield();
      }
    });
    std::vector<float> const ones(2, 1);
    std::array<float, 2> result0{};
    std::array<float, 2> result1{};
    comms[0].all_reduce(std::span{ones}, std::span{result0}, combine::overwrite, reduction::sum,
                        streams[0]);
    comms.erase(comms.begin());
    comms[0].all_reduce(std::span{ones}, std::span{result1}, combine::overwrite, reduction::sum,
                        streams[1]);
    go = true;
    streams[1].synchronize();
    streams[0].synchronize();
    CHECK(result0[1] == 2);
    CHECK(result1[0] == 2);
    CHECK(failure_of([&] {
            comms[0].barrier(streams[1]);
            streams[1].synchronize();
          }).message == "barrier #2: expected 2 ranks, but rank 0 has left (rank 1)");
  }
}

TEST_CASE("a rank whose stream fails gives its peers an error, even if it never looks") {
  auto const failures = failures_of(3, [&](thread_communicator& comm) {
    buffers mine;
    if (comm.rank() == 2) {
      zero::host_stream stream{true};
      stream.enqueue([] { throw std::runtime_error{"bad kernel"}; });
      comm.all_reduce(std::span{mine.full}, std::span{mine.shard}, combine::overwrite,
                      reduction::sum, stream);
      return;
    }
    mine.all_reduce(comm);
  });
  CHECK(failures[2].kind == test::kind::nothing);
  for (std::size_t const rank : {0UL, 1UL}) {
    CHECK(failures[rank].message ==
          "all_reduce: not run, since the stream failed before it: bad kernel (rank 2)");
    CHECK(failures[rank].origin == 2);
    CHECK(failures[rank].after < soon);
  }
}

TEST_CASE("an abort wakes ranks that are blocked, and later calls throw at once") {
  for (named_call const& blocking : every_call()) {
    for (bool const asleep : {false, true}) {
      auto const failures = failures_of(4, [&](thread_communicator& comm) {
        buffers mine;
        comm.barrier(mine.stream);
        if (comm.rank() == 1) {
          if (asleep) {
            let_peers_block();
          }
          comm.abort("disk full");
        }
        thrown const first = failure_of([&] { blocking.make(comm, mine); });
        for (named_call const& later : every_call()) {
          thrown const again = failure_of([&] { later.make(comm, mine); });
          CHECK(again.message == first.message);
          CHECK(again.origin == 1);
          CHECK(again.after < soon);
        }
        throw zero::communication_error{first.message, first.origin};
      });
      for (thrown const& here : failures) {
        CHECK(here.message == "aborted by rank 1: disk full");
        CHECK(here.origin == 1);
        CHECK(here.after < soon);
      }
    }
  }
}

TEST_CASE("an abort comes from another thread, too, and fails what is in a threaded stream") {
  auto const failures = failures_of(3, [&](thread_communicator& comm) {
    buffers mine;
    zero::host_stream stream{true};
    if (comm.rank() != 2) {
      comm.all_reduce(std::span{mine.full}, std::span{mine.shard}, combine::overwrite,
                      reduction::sum, stream);
      comm.barrier(stream);
    } else {
      std::thread{[&] {
        let_peers_block();
        comm.abort("stop button");
      }}.join();
    }
    stream.synchronize();
    comm.barrier(stream);
  });
  for (thrown const& here : failures) {
    CHECK(here.message == "aborted by rank 2: stop button");
  }
}

TEST_CASE("a failed local check releases the peers with its message") {
  std::vector<std::string> own(3);
  auto const failures = failures_of(3, [&](thread_communicator& comm) {
    buffers mine;
    if (comm.rank() == 1) {
      own[1] = test::message_of([&] { mine.reduce_scatter(comm, 23); });
    }
    mine.reduce_scatter(comm);
  });
  std::string const message =
      "reduce_scatter: expected a multiple of 3 elements, actual 23 (rank 1)";
  CHECK(own[1] == message);
  for (thrown const& here : failures) {
    CHECK(here.message == "aborted by rank 1: " + message);
    CHECK(here.origin == 1);
  }
}

TEST_CASE("a parent's abort releases ranks that are blocked in parts, and in parts of parts") {
  for (int const depth : {1, 2}) {
    auto const failures = failures_of(5, [&](thread_communicator& comm) {
      buffers mine;
      auto part = comm.split(0, -comm.rank());  // rank r is rank 4 - r
      if (depth == 2) {
        part = part.split(part.rank() == 4 ? 1 : 0, part.rank());
      }
      if (comm.rank() == 0) {
        let_peers_block();
        comm.abort("disk full");
        static_cast<void>(part);
        throw zero::communication_error{"left", 0};
      }
      if (comm.rank() == 1) {  // waits in the parent, which fails too
        comm.barrier(mine.stream);
      }
      part.barrier(mine.stream);
    });
    for (std::size_t const rank : {2UL, 3UL, 4UL}) {
      CHECK(failures[rank].message ==
            "the parent communicator failed: aborted by rank 0: disk full");
      // Rank 0 is rank 4 of the part, and not in the other ranks' part of it.
      CHECK(failures[rank].origin == (depth == 1 ? 4 : -1));
      CHECK(failures[rank].after < soon);
    }
    CHECK(failures[1].message == "aborted by rank 0: disk full");
  }
}

TEST_CASE("a part is born failed if its parent has failed, and its failure spares the parent") {
  run_ranks(2, [&](thread_communicator& comm) {
    zero::host_stream stream;
    auto part = comm.split(0, comm.rank());
    CHECK(failure_of([&] {
            if (comm.rank() == 0) {
              part.abort("only this part");
            }
            part.barrier(stream);
          }).message == "aborted by rank 0: only this part");
    comm.barrier(stream);
    auto next = comm.split(0, comm.rank());
    next.barrier(stream);
  });
}

TEST_CASE("a part inherits the deadline") {
  std::atomic<bool> done{false};
  auto const failures = failures_of(2, [&](thread_communicator& comm) {
    zero::host_stream stream;
    comm.set_deadline(200ms);
    auto part = comm.split(0, comm.rank()).split(0, comm.rank());
    if (comm.rank() == 0) {
      thrown const here = failure_of([&] { part.barrier(stream); });
      done = true;
      throw zero::communication_error{here.message, here.origin};
    }
    while (!done) {
      std::this_thread::sleep_for(1ms);
    }
  });
  CHECK(failures[0].says("barrier #1: expected 2 ranks within 200 ms of the first"));
  CHECK(failures[0].after < soon);
}

TEST_CASE("a second stream is refused while the first has calls to make") {
  auto const failures = failures_of(2, [&](thread_communicator& comm) {
    std::atomic<bool> go{false};
    zero::host_stream first{true};
    zero::host_stream second;
    struct open_at_end {  // the peer's error may end this rank while its stream still waits
      std::atomic<bool>& go;
      ~open_at_end() { go = true; }
    } const at_end{go};
    comm.barrier(first);
    first.synchronize();
    comm.barrier(second);  // one after the other is right
    first.enqueue([&go] {
      while (!go) {
        std::this_thread::yield();
      }
    });
    comm.barrier(first);
    if (comm.rank() == 0) {
      CHECK(test::message_of([&] { comm.barrier(second); }) ==
            "barrier: expected the stream of this rank's 1 unfinished calls, actual another, which "
            "needs a communicator of its own (split) (rank 0)");
    }
    go = true;
    first.synchronize();
    comm.barrier(first);
    first.synchronize();
  });
  CHECK(failures[0].says("aborted by rank 0: barrier: expected the stream of"));
  CHECK(failures[1].message == failures[0].message);
}

TEST_CASE("a rank's control calls come one at a time") {
  auto const failures = failures_of(2, [&](thread_communicator& comm) {
    if (comm.rank() == 0) {
      std::jthread const other{
          [&] { static_cast<void>(failure_of([&] { buffers::exchange(comm); })); }};
      let_peers_block();
      CHECK(test::message_of([&] { buffers::exchange(comm); }) ==
            "exchange: expected one control call at a time, actual another is under way in this "
            "rank (rank 0)");
    } else {
      buffers mine;
      comm.barrier(mine.stream);
    }
  });
  CHECK(failures[1].says("aborted by rank 0: exchange: expected one control call"));
}

TEST_CASE("ranks that die in their second bucket give the others errors, in every communicator") {
  // Two communicators, a deadline of 3 s, and a rank that throws between its calls.
  for (bool const threaded : {false, true}) {
    std::array<thrown, 2> first;
    std::array<thrown, 2> second;
    CHECK_THROWS_WITH(
        run_ranks(3,
                  [&](thread_communicator& comm) {
                    auto other = comm.split(0, comm.rank());
                    buffers mine;
                    zero::host_stream stream{threaded};
                    auto const reduce = [&](thread_communicator& with) {
                      with.reduce_scatter(std::span{mine.full}, std::span{mine.shard}.first(8),
                                          combine::overwrite, reduction::sum, stream);
                      stream.synchronize();
                    };
                    reduce(comm);
                    if (comm.rank() == 2) {
                      throw std::runtime_error{"bucket 2 is on fire"};
                    }
                    auto const rank = static_cast<std::size_t>(comm.rank());
                    first[rank] = failure_of([&] { reduce(comm.rank() == 0 ? comm : other); });
                    second[rank] = failure_of([&] {
                      zero::host_stream fresh;
                      other.barrier(fresh);
                    });
                  },
                  {.deadline = 3s}),
        "bucket 2 is on fire");
    for (std::size_t const rank : {0UL, 1UL}) {
      CHECK(first[rank].kind != test::kind::nothing);
      CHECK(first[rank].after < 3s);
      CHECK(second[rank].kind != test::kind::nothing);
      CHECK(second[rank].after < 3s);
    }
  }
}

TEST_CASE("ranks in any trouble at any moment: nobody hangs") {
  std::atomic<int> round{0};
  for (; round < 200; ++round) {
    int const ranks = std::array{2, 3, 4, 8}[static_cast<std::size_t>(round % 4)];
    int const culprit = round / 4 % ranks;
    int const victim_call = round % 7;
    int const trouble = round / 2 % 4;
    auto const misbehave = [&](thread_communicator& comm, buffers& mine) {
      switch (trouble) {
        case 0: throw std::runtime_error{"trouble"};
        case 1: comm.abort("trouble"); break;
        case 2: mine.reduce_scatter(comm, 24, combine::add); break;
        default: return false;
      }
      return true;
    };
    try {
      // The deadline ends the rounds in which some ranks wait in a control call and others don't.
      run_ranks(ranks,
                [&](thread_communicator& comm) {
                  buffers mine;
                  auto part = comm.split(comm.rank() % 2, comm.rank());
                  for (int i = 0; i < 10; ++i) {
                    every_call()[static_cast<std::size_t>(i % 7)].make(comm, mine);
                    part.barrier(mine.stream);
                    if (comm.rank() == culprit && i == victim_call && !misbehave(comm, mine)) {
                      return;
                    }
                  }
                },
                {.deadline = 250ms});
    } catch (std::exception const&) {
    }
  }
  CHECK(round == 200);
}
