// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/collective.hpp>
#include <zero/core/error.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

/// @file
/// What ranks and their hub tell each other in the control channel. Nothing here is for users.

namespace zero::inline v0::detail {

enum class control_kind : std::uint8_t {
  hello,     ///< a client's first: body = greeting
  welcome,   ///< the hub's answer
  refused,   ///< the hub's other answer: body = why
  open,      ///< a rank joins a group: body = world ranks of its members
  exchange,  ///< to the hub: body = wire_call, bytes. From it: all ranks' bytes
  announce,  ///< a payload call was enqueued: body = wire_call
  late,      ///< a call missed its deadline: body = late_call
  failed,    ///< the group has failed: rank = origin, body = message
  leave,     ///< a rank's handle is gone: sequence = payload calls that it issued
  goodbye    ///< a client ends, and its groups with it
};

struct control_message {
  control_kind kind = control_kind::hello;
  std::int32_t rank = -1;  ///< in the group
  std::uint64_t sequence = 0;
  std::string group = {};  ///< empty for the world
  std::string body = {};
};

/// What must agree of a call, as bytes.
struct wire_call {
  std::uint8_t op = 0;
  std::uint8_t how = 0;
  std::uint8_t what = 0;
  std::uint8_t input_dtype = 0;
  std::uint8_t output_dtype = 0;
  std::uint8_t unused[3] = {};
  std::int32_t root = 0;
  std::int32_t unused_too = 0;
  std::uint64_t count = 0;
  std::uint64_t place = 0;
};

struct late_call {
  wire_call call;
  std::uint64_t deadline_ms = 0;
};

/// Sequence numbers from here on are of the exchanges in which a communicator starts.
inline constexpr std::uint64_t first_start = std::uint64_t{1} << 63U;

[[nodiscard]] inline std::string title(operation op, std::uint64_t sequence) {
  return sequence < first_start ? text(name(op), " #", sequence)
                                : text("start #", sequence - first_start);
}

template <class T>
  requires std::is_trivially_copyable_v<T>
void put(std::string& out, T const& value) {
  out.append(reinterpret_cast<char const*>(&value), sizeof value);
}

/// Takes a value off the front; false where there are too few bytes.
template <class T>
  requires std::is_trivially_copyable_v<T>
[[nodiscard]] bool take(std::string_view& from, T& value) noexcept {
  if (from.size() < sizeof value) {
    return false;
  }
  std::memcpy(&value, from.data(), sizeof value);
  from.remove_prefix(sizeof value);
  return true;
}

[[nodiscard]] inline wire_call to_wire(collective const& call) noexcept {
  wire_call out;
  out.op = static_cast<std::uint8_t>(call.op);
  out.how = static_cast<std::uint8_t>(call.how);
  out.what = static_cast<std::uint8_t>(call.what);
  out.input_dtype = static_cast<std::uint8_t>(call.input_dtype);
  out.output_dtype = static_cast<std::uint8_t>(call.output_dtype);
  out.root = call.root;
  out.count = call.count;
  out.place = call.place;
  return out;
}

[[nodiscard]] inline collective from_wire(wire_call const& call) noexcept {
  return {.op = static_cast<operation>(call.op),
          .how = static_cast<combine>(call.how),
          .what = static_cast<reduction>(call.what),
          .input_dtype = static_cast<dtype>(call.input_dtype),
          .output_dtype = static_cast<dtype>(call.output_dtype),
          .root = call.root,
          .count = static_cast<std::size_t>(call.count),
          .place = call.place};
}

/// A message without its length.
[[nodiscard]] inline std::string encode(control_message const& message) {
  std::string out;
  put(out, message.kind);
  put(out, message.rank);
  put(out, message.sequence);
  put(out, static_cast<std::uint32_t>(message.group.size()));
  out += message.group;
  out += message.body;
  return out;
}

/// False where the bytes are none.
[[nodiscard]] inline bool decode(std::string_view bytes, control_message& message) {
  std::uint32_t group = 0;
  if (!take(bytes, message.kind) || message.kind > control_kind::goodbye ||
      !take(bytes, message.rank) || !take(bytes, message.sequence) || !take(bytes, group) ||
      bytes.size() < group) {
    return false;
  }
  message.group = bytes.substr(0, group);
  message.body = bytes.substr(group);
  return true;
}

}  // namespace zero::inline v0::detail
