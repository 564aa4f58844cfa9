// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/concept.hpp>
#include <zero/core/any_span.hpp>
#include <zero/device/host.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

/// @file
/// A device whose time is counted, not measured: work on a stream takes the ticks that the test
/// says, and waiting for it moves this thread's clock. Work runs as late as the program allows,
/// when it is waited for, so what doesn't wait reads what was there before; and streams are
/// asynchronous unless asked otherwise.

namespace test {

using ticks = std::int64_t;

/// The time of one rank, which is one thread.
struct simulated_clock {
  ticks now = 0;
  ticks waited = 0;
};

[[nodiscard]] inline simulated_clock& simulated_time() {
  thread_local simulated_clock clock;
  return clock;
}

/// What the rank's own processor does takes time, too.
inline void compute(ticks duration) { simulated_time().now += duration; }

class simulated_queue {
 public:
  void enqueue(ticks duration, std::function<void()> work) {
    end_ = std::max(end_, simulated_time().now) + duration;
    pending_.push_back(std::move(work));
  }

  [[nodiscard]] std::uint64_t enqueued() const noexcept { return done_ + pending_.size(); }
  /// When all that was enqueued is done.
  [[nodiscard]] ticks end() const noexcept { return end_; }
  void not_before(ticks time) { end_ = std::max(end_, time); }

  /// Run the first `count` pieces of work that were ever enqueued; after a failure, none.
  void run(std::uint64_t count) noexcept {
    while (done_ < count) {
      std::function<void()> const work = std::move(pending_.front());
      pending_.pop_front();
      ++done_;
      if (!failure_) {
        try {
          work();
        } catch (...) {
          failure_ = std::current_exception();
        }
      }
    }
  }

  void rethrow() const {
    if (failure_) {
      std::rethrow_exception(failure_);
    }
  }

 private:
  std::deque<std::function<void()>> pending_;
  std::uint64_t done_ = 0;
  ticks end_ = 0;
  std::exception_ptr failure_;
};

class simulated_event {
 public:
  simulated_event() = default;
  explicit simulated_event(std::shared_ptr<simulated_queue> queue)
      : queue_{std::move(queue)}, place_{queue_->enqueued()}, end_{queue_->end()} {}

  [[nodiscard]] bool ready() const {
    if (end_ > simulated_time().now) {
      return false;
    }
    if (queue_) {
      queue_->run(place_);
    }
    return true;
  }

  void wait() const {
    simulated_clock& clock = simulated_time();
    clock.waited += std::max<ticks>(0, end_ - clock.now);
    clock.now = std::max(clock.now, end_);
    if (queue_) {
      queue_->run(place_);
      queue_->rethrow();
    }
  }

  [[nodiscard]] ticks end() const noexcept { return end_; }

 private:
  std::shared_ptr<simulated_queue> queue_;
  std::uint64_t place_ = 0;
  ticks end_ = 0;
};

class simulated_stream {
 public:
  /// One that isn't asynchronous waits for each piece of work at once.
  explicit simulated_stream(bool asynchronous = true) : asynchronous_{asynchronous} {}
  simulated_stream(simulated_stream const&) = delete;
  simulated_stream& operator=(simulated_stream const&) = delete;
  ~simulated_stream() { queue_->run(queue_->enqueued()); }

  [[nodiscard]] bool threaded() const noexcept { return asynchronous_; }
  [[nodiscard]] static bool capturing() noexcept { return false; }

  void enqueue(ticks duration, std::function<void()> work) {
    queue_->enqueue(duration, std::move(work));
    if (!asynchronous_) {
      synchronize();
    }
  }
  template <class F>
  void enqueue(F work) {
    enqueue(0, std::function<void()>{work});
  }

  void record(simulated_event& event) { event = simulated_event{queue_}; }
  void wait(simulated_event const& event) {
    queue_->not_before(event.end());
    enqueue([event] { event.wait(); });
  }
  void synchronize() { simulated_event{queue_}.wait(); }

 private:
  bool asynchronous_;
  std::shared_ptr<simulated_queue> queue_ = std::make_shared<simulated_queue>();
};

/// The host's memory and operations, which take no time, on simulated streams.
class simulated_device {
 public:
  using stream = simulated_stream;
  using event = simulated_event;

  static constexpr std::string_view name = "simulated";
  static constexpr std::size_t alignment_bytes = zero::host::alignment_bytes;
  static constexpr std::size_t reduce_blocks = 0;
  static constexpr bool has_host_memory = true;
  static constexpr bool any_collective_order = true;

  [[nodiscard]] static stream engine_stream(void* /*native*/) { return stream{false}; }
  [[nodiscard]] static stream communication_stream(bool overlap, void* /*native*/) {
    return stream{overlap};
  }
  [[nodiscard]] static void* allocate_host(std::size_t bytes) { return allocate(bytes); }
  static void deallocate_host(void* memory, std::size_t bytes) noexcept {
    deallocate(memory, bytes);
  }
  template <class Work>
  static void clean_up(Work const& work) noexcept {
    zero::host::clean_up(work);
  }

  [[nodiscard]] static void* allocate(std::size_t bytes) { return zero::host::allocate(bytes); }
  static void deallocate(void* memory, std::size_t bytes) noexcept {
    zero::host::deallocate(memory, bytes);
  }

  static void fill_zero(stream& on, zero::any_span to) {
    on.enqueue([to] {
      zero::host_stream now;
      zero::host::fill_zero(now, to);
    });
  }
  static void copy(stream& on, zero::const_any_span from, zero::any_span to) {
    on.enqueue([from, to] {
      zero::host_stream now;
      zero::host::copy(now, from, to);
    });
  }
  static void upload(stream& on, zero::const_any_span from, zero::any_span to) {
    copy(on, from, to);
    on.synchronize();
  }
  static void download(stream& on, zero::const_any_span from, zero::any_span to) {
    upload(on, from, to);
  }
  static void publish(stream& on, zero::const_any_span from, zero::any_span to) {
    copy(on, from, to);
  }
  static void convert(stream& on, zero::const_any_span from, zero::any_span to) {
    on.enqueue([from, to] {
      zero::host_stream now;
      zero::host::convert(now, from, to);
    });
  }
  static void add(stream& on, zero::const_any_span from, zero::any_span to) {
    on.enqueue([from, to] {
      zero::host_stream now;
      zero::host::add(now, from, to);
    });
  }
  template <class Function>
  static void launch(stream& on, std::size_t n, Function function) {
    on.enqueue([n, function]() mutable { function(std::size_t{0}, n); });
  }
  template <class T, class Function>
  static void accumulate(stream& on, std::size_t n, Function function, T* result,
                         void* /*scratch*/) {
    on.enqueue([n, function, result]() mutable { *result += function(std::size_t{0}, n); });
  }
};

static_assert(zero::device<simulated_device>);

/// How long a collective of `elements` takes.
using durations = std::function<ticks(std::string_view operation, std::size_t elements)>;

/// A communicator of the host on simulated streams: its collectives run when they are waited for.
template <zero::communicator Inner>
class simulated_communicator {
 public:
  using device = simulated_device;

  simulated_communicator(Inner inner, durations duration)
      : state_{std::make_shared<state>(std::move(inner), std::move(duration))} {}

  [[nodiscard]] int rank() const { return state_->inner.rank(); }
  [[nodiscard]] int size() const { return state_->inner.size(); }
  void set_deadline(std::chrono::milliseconds deadline) { state_->inner.set_deadline(deadline); }

  void reduce_scatter(zero::const_any_span full, zero::any_span shard, zero::combine how,
                      zero::reduction what, simulated_stream& on) {
    run("reduce_scatter", full.size(), on,
        [=](state& s) { s.inner.reduce_scatter(full, shard, how, what, s.now); });
  }
  void all_reduce(zero::const_any_span full, zero::any_span result, zero::combine how,
                  zero::reduction what, simulated_stream& on) {
    run("all_reduce", full.size(), on,
        [=](state& s) { s.inner.all_reduce(full, result, how, what, s.now); });
  }
  void all_gather(zero::const_any_span shard, zero::any_span full, simulated_stream& on) {
    run("all_gather", full.size(), on, [=](state& s) { s.inner.all_gather(shard, full, s.now); });
  }
  void broadcast(zero::any_span data, int root, simulated_stream& on) {
    run("broadcast", data.size(), on, [=](state& s) { s.inner.broadcast(data, root, s.now); });
  }
  void barrier(simulated_stream& on) {
    run("barrier", 0, on, [](state& s) { s.inner.barrier(s.now); });
  }
  void exchange(std::span<std::byte const> mine, std::span<std::byte> all) {
    state_->inner.exchange(mine, all);
  }
  [[nodiscard]] simulated_communicator split(int color, int key) {
    return {state_->inner.split(color, key), state_->duration};
  }
  void abort(std::string_view reason) noexcept { state_->inner.abort(reason); }

 private:
  struct state {
    state(Inner wrapped, durations takes) : inner{std::move(wrapped)}, duration{std::move(takes)} {}
    Inner inner;
    durations duration;
    zero::host_stream now;
  };

  template <class Call>
  void run(std::string_view operation, std::size_t elements, simulated_stream& on, Call call) {
    on.enqueue(state_->duration(operation, elements), [s = state_, call] { call(*s); });
  }

  std::shared_ptr<state> state_;
};

}  // namespace test
