// SPDX-License-Identifier: MIT
#include <doctest/doctest.h>

#include <support/counting_allocator.hpp>
#include <support/thrown.hpp>
#include <zero/device/host_stream.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

struct failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The event of all that `stream` was given.
zero::host_event record(zero::host_stream& stream) {
  zero::host_event event;
  stream.record(event);
  return event;
}

/// Work that keeps a stream busy until it is opened.
struct gate {
  std::atomic<bool> opened{false};
  std::atomic<bool> reached{false};

  void close(zero::host_stream& stream) {
    stream.enqueue([this] {
      reached = true;
      while (!opened) {
        std::this_thread::yield();
      }
    });
  }
};

}  // namespace

TEST_CASE("an inline stream runs work in the caller before enqueue returns") {
  zero::host_stream stream;
  CHECK_FALSE(stream.threaded());
  std::thread::id ran_on;
  stream.enqueue([&] { ran_on = std::this_thread::get_id(); });
  CHECK(ran_on == std::this_thread::get_id());
  CHECK(record(stream).ready());
  stream.synchronize();
}

TEST_CASE("a threaded stream runs work on one thread of its own") {
  zero::host_stream stream{true};
  CHECK(stream.threaded());
  std::array<std::thread::id, 2> ran_on;
  stream.enqueue([&] { ran_on[0] = std::this_thread::get_id(); });
  stream.enqueue([&] { ran_on[1] = std::this_thread::get_id(); });
  stream.synchronize();
  CHECK(ran_on[0] != std::this_thread::get_id());
  CHECK(ran_on[0] == ran_on[1]);
}

TEST_CASE("work runs in the order in which it was enqueued") {
  for (bool const threaded : {false, true}) {
    zero::host_stream stream{threaded};
    std::vector<int> order;
    for (int i = 0; i < 5000; ++i) {
      stream.enqueue([&order, i] { order.push_back(i); });
    }
    stream.synchronize();
    REQUIRE(order.size() == 5000);
    for (int i = 0; i < 5000; ++i) {
      CHECK(order[static_cast<std::size_t>(i)] == i);
    }
  }
}

TEST_CASE("work of 128 bytes arrives whole") {
  zero::host_stream stream{true};
  std::array<unsigned char, 120> bytes{};
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<unsigned char>(i * 7);
  }
  bool same = false;
  struct work {
    std::array<unsigned char, 120> bytes;
    bool* same;
    void operator()() const {
      *same = true;
      for (std::size_t i = 0; i < bytes.size(); ++i) {
        *same = *same && bytes[i] == static_cast<unsigned char>(i * 7);
      }
    }
  };
  static_assert(sizeof(work) == 128);
  stream.enqueue(work{bytes, &same});
  stream.synchronize();
  CHECK(same);
}

TEST_CASE("what can't be held in the ring is no work") {
  struct too_large {
    std::array<unsigned char, 129> bytes;
    void operator()() const {}
  };
  struct owner {
    std::string text;
    void operator()() const {}
  };
  CHECK_FALSE(zero::detail::stream_work<too_large>);
  CHECK_FALSE(zero::detail::stream_work<owner>);
  CHECK_FALSE(zero::detail::stream_work<int>);
  CHECK(zero::detail::stream_work<void (*)()>);
}

TEST_CASE("an event is ready once the work before it has run, whatever comes after") {
  zero::host_stream stream{true};
  zero::host_event const before = record(stream);
  CHECK(before.ready());
  gate first;
  gate second;
  first.close(stream);
  zero::host_event const after_first = record(stream);
  second.close(stream);
  CHECK_FALSE(after_first.ready());
  first.opened = true;
  after_first.wait();
  CHECK(after_first.ready());
  zero::host_event const after_second = record(stream);
  CHECK_FALSE(after_second.ready());
  second.opened = true;
  after_second.wait();
  CHECK(after_second.ready());
}

TEST_CASE("a default event is ready and can be waited for by anyone") {
  zero::host_event const event;
  CHECK(event.ready());
  event.wait();
  for (bool const threaded : {false, true}) {
    zero::host_stream stream{threaded};
    stream.wait(event);
    stream.synchronize();
  }
}

TEST_CASE("a stream that waits for another's event runs later work after the event") {
  for (int repeat = 0; repeat < 200; ++repeat) {
    zero::host_stream producer{true};
    zero::host_stream consumer{true};
    int value = 0;
    int seen = 0;
    for (int i = 0; i < 10; ++i) {
      producer.enqueue([&value] { ++value; });
      consumer.wait(record(producer));
      consumer.enqueue([&value, &seen] { seen = seen * 2 + value; });
      producer.wait(record(consumer));
    }
    producer.synchronize();
    consumer.synchronize();
    CHECK(value == 10);
    CHECK(seen == 2036);  // the sum of i * 2^(10 - i): 2^11 - 12
  }
}

TEST_CASE("an inline stream waits for another's event in the caller") {
  zero::host_stream producer{true};
  zero::host_stream inline_stream;
  int value = 0;
  producer.enqueue([&value] { value = 3; });
  inline_stream.wait(record(producer));
  CHECK(value == 3);
}

TEST_CASE("a stream may wait for its own event") {
  zero::host_stream stream{true};
  int value = 0;
  stream.enqueue([&value] { value = 1; });
  stream.wait(record(stream));
  stream.enqueue([&value] { value *= 5; });
  stream.synchronize();
  CHECK(value == 5);
}

TEST_CASE("a full ring makes the caller wait, and nothing is lost") {
  zero::host_stream stream{true};
  gate busy;
  busy.close(stream);
  std::atomic<int> enqueued{0};
  int ran = 0;
  std::thread producer{[&] {
    for (int i = 0; i < 300; ++i) {
      stream.enqueue([&ran] { ++ran; });
      ++enqueued;
    }
  }};
  while (enqueued < 127) {
    std::this_thread::yield();
  }
  std::this_thread::sleep_for(std::chrono::milliseconds{20});
  CHECK(enqueued == 127);  // and the gate
  busy.opened = true;
  producer.join();
  stream.synchronize();
  CHECK(ran == 300);
}

TEST_CASE("several threads may enqueue on one stream") {
  zero::host_stream stream{true};
  long sum = 0;
  std::vector<std::thread> producers;
  for (int p = 0; p < 4; ++p) {
    producers.emplace_back([&] {
      for (int i = 1; i <= 500; ++i) {
        stream.enqueue([&sum, i] { sum += i; });
      }
      stream.synchronize();
    });
  }
  for (auto& producer : producers) {
    producer.join();
  }
  CHECK(sum == 4L * 500 * 501 / 2);
}

TEST_CASE("an inline stream passes an exception on and stays usable") {
  zero::host_stream stream;
  CHECK(test::message_of<failure>([&] { stream.enqueue([] { throw failure{"inline"}; }); }) ==
        "inline");
  bool ran = false;
  stream.enqueue([&ran] { ran = true; });
  stream.synchronize();
  CHECK(ran);
}

TEST_CASE("a threaded stream keeps the first exception and discards later work") {
  zero::host_stream stream{true};
  bool before = false;
  bool after = false;
  stream.enqueue([&before] { before = true; });
  zero::host_event const good = record(stream);
  stream.enqueue([] { throw failure{"first"}; });
  zero::host_event const bad = record(stream);
  stream.enqueue([&after] {
    after = true;
    throw failure{"second"};
  });
  CHECK(test::message_of<failure>([&] { stream.synchronize(); }) == "first");
  CHECK(test::message_of<failure>([&] { stream.synchronize(); }) == "first");
  CHECK(test::message_of<failure>([&] { bad.wait(); }) == "first");
  CHECK(bad.ready());
  good.wait();  // its work ran before the failure
  CHECK(before);
  CHECK_FALSE(after);
}

TEST_CASE("a failure reaches the streams that wait for it") {
  zero::host_stream producer{true};
  zero::host_stream consumer{true};
  zero::host_stream inline_stream;
  bool ran = false;
  producer.enqueue([] { throw failure{"upstream"}; });
  consumer.wait(record(producer));
  consumer.enqueue([&ran] { ran = true; });
  CHECK(test::message_of<failure>([&] { consumer.synchronize(); }) == "upstream");
  CHECK(test::message_of<failure>([&] { inline_stream.wait(record(producer)); }) == "upstream");
  CHECK_FALSE(ran);
}

TEST_CASE("several threads can wait for one failure") {
  zero::host_stream stream{true};
  stream.enqueue([] { throw failure{"shared"}; });
  std::atomic<int> caught{0};
  std::vector<std::thread> waiters;
  for (int w = 0; w < 4; ++w) {
    waiters.emplace_back([&] {
      if (test::message_of<failure>([&] { stream.synchronize(); }) == "shared") {
        ++caught;
      }
    });
  }
  for (auto& thread : waiters) {
    thread.join();
  }
  CHECK(caught == 4);
}

TEST_CASE("the destructor waits for the work and drops an exception") {
  int ran = 0;
  {
    zero::host_stream stream{true};
    for (int i = 0; i < 100; ++i) {
      stream.enqueue([&ran] { ++ran; });
    }
  }
  CHECK(ran == 100);
  {
    zero::host_stream stream{true};
    stream.enqueue([] { throw failure{"dropped"}; });
  }
}

TEST_CASE("after construction a stream and its events allocate nothing") {
  for (bool const threaded : {false, true}) {
    zero::host_stream stream{threaded};
    zero::host_stream other{threaded};
    long sum = 0;
    stream.synchronize();
    long const before = counting_allocator::allocations;
    for (int i = 0; i < 1000; ++i) {
      stream.enqueue([&sum, i] { sum += i; });
      zero::host_event const event = record(stream);
      other.wait(event);
      other.enqueue([&sum] { sum += 1; });
      stream.wait(record(other));
      event.wait();
    }
    stream.synchronize();
    other.synchronize();
    CHECK(counting_allocator::allocations == before);
    CHECK(sum == 1000L * 999 / 2 + 1000);
  }
}

TEST_CASE("work that is discarded can learn why") {
  struct work {
    std::string* told;
    void operator()() const { *told = "it ran"; }
    void discarded(std::exception_ptr const& cause) const noexcept {
      *told = test::message_of<failure>([&] { std::rethrow_exception(cause); });
    }
  };
  std::string before;
  std::string after;
  {
    zero::host_stream stream{true};
    stream.enqueue(work{&before});
    stream.enqueue([] { throw failure{"disk full"}; });
    stream.enqueue([] {});
    stream.enqueue(work{&after});
  }
  CHECK(before == "it ran");
  CHECK(after == "disk full");
}
