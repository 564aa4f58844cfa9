// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/concept.hpp>
#include <zero/core/any_span.hpp>

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

/// @file
/// A communicator that tells the test what is called, before it is enqueued and before the stream
/// runs it: the test may look, wait, or throw.

namespace test {

/// One collective of one rank.
struct collective_call {
  char const* operation;
  int rank;
  std::size_t number;  ///< this rank's calls so far, all communicators together; the first is 1
  zero::const_any_span input;
  zero::any_span output;
};

struct hooks {
  std::function<void(collective_call const&)> before_call;
  std::function<void(collective_call const&)> in_stream;
  std::size_t calls = 0;
};

/// What it is split into has the same hooks.
template <class Communicator>
class hooked {
 public:
  using device = typename Communicator::device;
  using stream = typename device::stream;

  hooked(Communicator inner, std::shared_ptr<test::hooks> hooks)
      : inner_{std::move(inner)}, hooks_{std::move(hooks)} {}

  [[nodiscard]] int rank() const noexcept { return inner_.rank(); }
  [[nodiscard]] int size() const noexcept { return inner_.size(); }
  void set_deadline(std::chrono::milliseconds deadline) { inner_.set_deadline(deadline); }

  void reduce_scatter(zero::const_any_span full, zero::any_span shard, zero::combine how,
                      zero::reduction what, stream& on) {
    announce({"reduce_scatter", rank(), 0, full, shard}, on);
    inner_.reduce_scatter(full, shard, how, what, on);
  }
  void all_gather(zero::const_any_span shard, zero::any_span full, stream& on) {
    announce({"all_gather", rank(), 0, shard, full}, on);
    inner_.all_gather(shard, full, on);
  }
  void all_reduce(zero::const_any_span full, zero::any_span result, zero::combine how,
                  zero::reduction what, stream& on) {
    announce({"all_reduce", rank(), 0, full, result}, on);
    inner_.all_reduce(full, result, how, what, on);
  }
  void broadcast(zero::any_span data, int root, stream& on) {
    announce({"broadcast", rank(), 0, data, data}, on);
    inner_.broadcast(data, root, on);
  }
  void barrier(stream& on) {
    announce({"barrier", rank(), 0, {}, {}}, on);
    inner_.barrier(on);
  }
  void exchange(std::span<std::byte const> mine, std::span<std::byte> all) {
    inner_.exchange(mine, all);
  }
  [[nodiscard]] hooked split(int color, int key) { return {inner_.split(color, key), hooks_}; }
  void abort(std::string_view reason) noexcept { inner_.abort(reason); }

 private:
  void announce(collective_call call, stream& on) {
    call.number = ++hooks_->calls;
    if (hooks_->before_call) {
      hooks_->before_call(call);
    }
    if (hooks_->in_stream) {
      on.enqueue([hooks = hooks_.get(), call] { hooks->in_stream(call); });
    }
  }

  Communicator inner_;
  std::shared_ptr<test::hooks> hooks_;
};

}  // namespace test
