// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/concept.hpp>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// @file
/// A communicator that writes down what is asked of it, in a journal in which the test notes its
/// compute, and that can hold collectives back in their stream.

namespace test {

/// A collective as it was enqueued.
struct call {
  std::string_view operation;
  zero::const_any_span from;
  zero::any_span to;
  zero::combine how = zero::combine::overwrite;
  void const* stream = nullptr;
};

/// Lets as many through as it has been opened for.
class gate {
 public:
  void open(int more) {
    {
      std::lock_guard const lock{mutex_};
      permits_ += more;
    }
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock lock{mutex_};
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return permits_ > 0; });
    --permits_;
    ++passed_;
  }
  /// Wait until `count` have come, whether they passed or not.
  void await(int count) {
    std::unique_lock lock{mutex_};
    changed_.wait(lock, [&] { return waiting_ >= count; });
  }
  int passed() {
    std::lock_guard const lock{mutex_};
    return passed_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int permits_ = 0;
  int waiting_ = 0;
  int passed_ = 0;
};

/// One rank's collectives and notes, in the order in which it made them.
struct journal {
  std::vector<call> calls;
  std::vector<std::string> lines;
  /// What a call is in `lines`; nothing where it is empty.
  std::function<std::string(call const&)> describe = [](call const& made) {
    return std::string{made.operation} + " " + std::to_string(made.to.size());
  };
  /// Reductions, and gathers, wait here, in their stream.
  gate* reductions = nullptr;
  gate* gathers = nullptr;

  void note(std::string line) { lines.push_back(std::move(line)); }

  void add(call const& made) {
    calls.push_back(made);
    if (std::string line = describe(made); !line.empty()) {
      lines.push_back(std::move(line));
    }
  }

  /// Where a line is first, counted from `from`; `lines.size()` where it isn't.
  [[nodiscard]] std::size_t find(std::string_view line, std::size_t from = 0) const {
    while (from < lines.size() && lines[from] != line) {
      ++from;
    }
    return from;
  }
};

/// Its parts write into the same journal, which must outlive them.
template <zero::communicator Inner>
class recording_communicator {
 public:
  using device = typename Inner::device;
  using stream = typename device::stream;

  recording_communicator(Inner inner, journal& log) : inner_{std::move(inner)}, log_{&log} {}

  [[nodiscard]] int rank() const { return inner_.rank(); }
  [[nodiscard]] int size() const { return inner_.size(); }
  void set_deadline(std::chrono::milliseconds deadline) { inner_.set_deadline(deadline); }

  void reduce_scatter(zero::const_any_span full, zero::any_span shard, zero::combine how,
                      zero::reduction what, stream& on) {
    log_->add({"reduce_scatter", full, shard, how, &on});
    hold(log_->reductions, on);
    inner_.reduce_scatter(full, shard, how, what, on);
  }
  void all_reduce(zero::const_any_span full, zero::any_span result, zero::combine how,
                  zero::reduction what, stream& on) {
    log_->add({"all_reduce", full, result, how, &on});
    hold(log_->reductions, on);
    inner_.all_reduce(full, result, how, what, on);
  }
  void all_gather(zero::const_any_span shard, zero::any_span full, stream& on) {
    log_->add({"all_gather", shard, full, zero::combine::overwrite, &on});
    hold(log_->gathers, on);
    inner_.all_gather(shard, full, on);
  }
  void broadcast(zero::any_span data, int root, stream& on) {
    log_->add({"broadcast", data, data, zero::combine::overwrite, &on});
    inner_.broadcast(data, root, on);
  }
  void barrier(stream& on) {
    log_->add({"barrier", {}, {}, zero::combine::overwrite, &on});
    inner_.barrier(on);
  }
  void exchange(std::span<std::byte const> mine, std::span<std::byte> all) {
    inner_.exchange(mine, all);
  }
  [[nodiscard]] recording_communicator split(int color, int key) {
    return {inner_.split(color, key), *log_};
  }
  void abort(std::string_view reason) noexcept { inner_.abort(reason); }

 private:
  static void hold(gate* at, stream& on) {
    if (at != nullptr) {
      on.enqueue([at] { at->pass(); });
    }
  }

  Inner inner_;
  journal* log_;
};

}  // namespace test
