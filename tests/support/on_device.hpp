// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/concept.hpp>
#include <zero/core/any_span.hpp>
#include <zero/device/host.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

/// @file
/// A communicator of another device as one of the host: each call copies its spans to the device,
/// runs there, and copies them back before it returns. So the host's conformance suite is the
/// device's, too.

namespace test {

/// A copy, in the device's memory, of the bytes [first, last) of the host.
template <class Device>
class image {
 public:
  image(typename Device::stream& stream, std::byte const* first, std::size_t bytes)
      : stream_{stream}, first_{first}, bytes_{bytes},
        memory_{static_cast<std::byte*>(Device::allocate(up(bytes)))} {
    if (bytes != 0) {
      Device::upload(stream_, words(const_cast<std::byte*>(first)), words(memory_));
    }
  }
  image(image const&) = delete;
  image& operator=(image const&) = delete;
  ~image() { Device::deallocate(memory_, up(bytes_)); }

  /// The place of a host address.
  [[nodiscard]] std::byte* at(void const* host) const {
    return memory_ == nullptr ? nullptr : memory_ + (static_cast<std::byte const*>(host) - first_);
  }

  /// Copy part of it back.
  void back(zero::any_span to) {
    if (!to.empty()) {
      Device::download(stream_, zero::const_any_span{at(to.data()), to.size(), to.dtype()}, to);
    }
  }

 private:
  static std::size_t up(std::size_t bytes) { return (bytes + 15) / 16 * 16; }
  /// In units of two bytes: no element is smaller.
  [[nodiscard]] zero::any_span words(std::byte* data) const {
    return {data, bytes_ / 2, zero::dtype::bfloat16};
  }

  typename Device::stream& stream_;
  std::byte const* first_;
  std::size_t bytes_;
  std::byte* memory_;
};

template <zero::communicator Inner>
class on_device {
 public:
  using device = zero::host;

  explicit on_device(Inner inner) : inner_{std::move(inner)} {}

  [[nodiscard]] int rank() const { return inner_.rank(); }
  [[nodiscard]] int size() const { return inner_.size(); }
  void set_deadline(std::chrono::milliseconds deadline) { inner_.set_deadline(deadline); }

  void reduce_scatter(zero::const_any_span full, zero::any_span shard, zero::combine how,
                      zero::reduction what, zero::host_stream& stream) {
    run(stream, full, shard,
        [&](auto from, auto to, auto& on) { inner_.reduce_scatter(from, to, how, what, on); });
  }
  void all_reduce(zero::const_any_span full, zero::any_span result, zero::combine how,
                  zero::reduction what, zero::host_stream& stream) {
    run(stream, full, result,
        [&](auto from, auto to, auto& on) { inner_.all_reduce(from, to, how, what, on); });
  }
  void all_gather(zero::const_any_span shard, zero::any_span full, zero::host_stream& stream) {
    run(stream, shard, full,
        [&](auto from, auto to, auto& on) { inner_.all_gather(from, to, on); });
  }
  void broadcast(zero::any_span data, int root, zero::host_stream& stream) {
    run(stream, data, data, [&](auto, auto to, auto& on) { inner_.broadcast(to, root, on); });
  }
  void barrier(zero::host_stream& stream) {
    run(stream, {}, {}, [&](auto, auto, auto& on) { inner_.barrier(on); });
  }
  void exchange(std::span<std::byte const> mine, std::span<std::byte> all) {
    inner_.exchange(mine, all);
  }
  [[nodiscard]] on_device split(int color, int key) { return on_device{inner_.split(color, key)}; }
  void abort(std::string_view reason) noexcept { inner_.abort(reason); }

 private:
  using inner_device = typename Inner::device;

  template <class Call>
  void run(zero::host_stream& stream, zero::const_any_span from, zero::any_span to, Call call) {
    stream.synchronize();
    typename inner_device::stream on{};
    auto const* const a = static_cast<std::byte const*>(from.data());
    auto const* const b = static_cast<std::byte const*>(to.data());
    std::less<> const before;
    bool const apart =
        a == nullptr || b == nullptr || !before(a, b + to.bytes()) || !before(b, a + from.bytes());
    auto const* const first = apart ? a : std::min(a, b, before);
    std::size_t const bytes =
        apart
            ? from.bytes()
            : static_cast<std::size_t>(std::max(a + from.bytes(), b + to.bytes(), before) - first);
    image<inner_device> input{on, first, a == nullptr ? 0 : bytes};
    std::optional<image<inner_device>> own;
    if (apart) {
      own.emplace(on, b, b == nullptr ? 0 : to.bytes());
    }
    image<inner_device>& output = own ? *own : input;
    call(zero::const_any_span{input.at(a), from.size(), from.dtype()},
         zero::any_span{output.at(b), to.size(), to.dtype()}, on);
    on.synchronize();
    if constexpr (requires { inner_.raise_if_failed(); }) {
      inner_.raise_if_failed();  // what the stream could not throw
    }
    if (b != nullptr) {
      output.back(to);
    }
  }

  Inner inner_;
};

}  // namespace test
