// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/collective.hpp>
#include <zero/comm/collective_checks.hpp>
#include <zero/comm/concept.hpp>
#include <zero/core/any_span.hpp>
#include <zero/core/error.hpp>
#include <zero/device/host.hpp>
#include <zero/device/host_copy.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

/// @file
/// `solo`: a communicator of one rank, for world size 1 by the same code path. A reduction
/// over one rank still averages, rounds and adds; nothing waits.

namespace zero::inline v0 {
namespace detail {

/// Whether a communicator of one rank was aborted, and the one that it was split from.
class solo_failure {
 public:
  explicit solo_failure(std::shared_ptr<solo_failure const> parent = nullptr)
      : parent_{std::move(parent)} {}

  void set(std::string_view reason) noexcept {
    std::lock_guard const lock{mutex_};
    if (happened_.load()) {
      return;
    }
    try {
      message_ = text("aborted by rank 0: ", reason);
    } catch (std::exception const&) {
      message_ = "out of memory";  // short enough to need none
    }
    happened_.store(true);
  }

  void raise_if_happened() const {
    if (happened_.load()) {
      throw communication_error{message_, 0};
    }
    for (solo_failure const* above = parent_.get(); above != nullptr;
         above = above->parent_.get()) {
      if (above->happened_.load()) {
        throw communication_error{text("the parent communicator failed: ", above->message_), 0};
      }
    }
  }

 private:
  std::shared_ptr<solo_failure const> parent_;
  std::mutex mutex_;
  std::atomic<bool> happened_{false};
  std::string message_;  // written once, before `happened_`
};

}  // namespace detail

/// The one rank of a group of one. See `thread_communicator` for what each function does.
///
/// Ordering: one thread at a time makes its calls; `abort` may come from any thread.
/// @throws zero::usage_error          an argument is wrong; it can't be used any more.
/// @throws zero::communication_error  it was aborted before the call.
template <class Device>
class basic_solo {
 public:
  using device = Device;
  using stream = typename Device::stream;

  basic_solo() : failure_{std::make_shared<detail::solo_failure>()} {}
  basic_solo(basic_solo&&) noexcept = default;
  basic_solo& operator=(basic_solo&&) noexcept = default;
  ~basic_solo() = default;

  [[nodiscard]] int rank() const noexcept { return 0; }
  [[nodiscard]] int size() const noexcept { return 1; }

  /// Checked, and without a use: nothing waits.
  void set_deadline(std::chrono::milliseconds deadline) {
    check([&] { checks().deadline(deadline); });
  }

  void reduce_scatter(const_any_span full, any_span shard, combine how, reduction what,
                      stream& on) {
    reduce(check([&] { return checks().reduce_scatter(full, shard, how, what); }), on);
  }

  void all_gather(const_any_span shard, any_span full, stream& on) {
    copy(check([&] { return checks().all_gather(shard, full); }), on);
  }

  void all_reduce(const_any_span full, any_span result, combine how, reduction what, stream& on) {
    reduce(check([&] { return checks().all_reduce(full, result, how, what); }), on);
  }

  void broadcast(any_span data, int root, stream& on) {
    copy(check([&] { return checks().broadcast(data, root); }), on);
  }

  void barrier(stream& /*on*/) {
    check([] {});
  }

  void exchange(std::span<std::byte const> mine, std::span<std::byte> all) {
    detail::collective const call = check([&] { return checks().exchange(mine, all); });
    detail::host_copy(call.output, call.input, call.output_bytes);
  }

  [[nodiscard]] basic_solo split(int color, [[maybe_unused]] int key) {
    check([&] { checks().split(color); });
    return basic_solo{std::make_shared<detail::solo_failure>(failure_)};
  }

  void abort(std::string_view reason) noexcept { failure_->set(reason); }

 private:
  explicit basic_solo(std::shared_ptr<detail::solo_failure> failure) noexcept
      : failure_{std::move(failure)} {}

  [[nodiscard]] static detail::collective_checks checks() noexcept { return {0, 1}; }

  template <class Function>
  std::invoke_result_t<Function const&> check(Function const& function) {
    failure_->raise_if_happened();
    try {
      return function();
    } catch (usage_error const& cause) {
      abort(cause.what());
      throw;
    }
  }

  void reduce(detail::collective const& call, stream& on) {
    any_span const result = output(call);
    if (call.how == combine::add) {
      Device::add(on, input(call), result);
    } else {
      Device::convert(on, input(call), result);
    }
  }

  void copy(detail::collective const& call, stream& on) {
    if (call.output_bytes != 0) {  // nor has a root's broadcast an output
      Device::copy(on, input(call), output(call));
    }
  }

  [[nodiscard]] static const_any_span input(detail::collective const& call) noexcept {
    return {call.input, call.input_bytes / size_bytes(call.input_dtype), call.input_dtype};
  }
  [[nodiscard]] static any_span output(detail::collective const& call) noexcept {
    return {call.output, call.output_bytes / size_bytes(call.output_dtype), call.output_dtype};
  }

  std::shared_ptr<detail::solo_failure> failure_;
};

using solo = basic_solo<host>;

static_assert(communicator<solo>);

}  // namespace zero::inline v0
