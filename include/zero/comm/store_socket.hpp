// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/error.hpp>

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

/// @file
/// The sockets of a store. Nothing here is for users.

namespace zero::inline v0 {

/// Where rank 0 serves a store. As its own, rank 0 may give port 0 for any free one.
struct store_address {
  std::string host;
  int port = 0;
};

namespace detail {

[[nodiscard]] inline std::string system_text(int code) {
  return std::error_code{code, std::generic_category()}.message();
}

/// A file descriptor that is closed once.
class unique_fd {
 public:
  unique_fd() = default;
  explicit unique_fd(int fd) noexcept : fd_{fd} {}
  unique_fd(unique_fd&& other) noexcept : fd_{std::exchange(other.fd_, -1)} {}
  unique_fd& operator=(unique_fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~unique_fd() {
    if (fd_ >= 0) {
      ::close(fd_);
    }
  }

  [[nodiscard]] int get() const noexcept { return fd_; }
  [[nodiscard]] bool empty() const noexcept { return fd_ < 0; }

 private:
  int fd_ = -1;
};

using address_list = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

/// The addresses of a host; null with the reason in `why`.
[[nodiscard]] inline address_list resolve(store_address const& address, int flags,
                                          std::string& why) {
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_STREAM;
  wanted.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  int const code = ::getaddrinfo(address.host.empty() ? nullptr : address.host.c_str(),
                                 std::to_string(address.port).c_str(), &wanted, &found);
  if (code != 0) {
    why = text("host ", address.host, ": ", std::string_view{::gai_strerror(code)});
    found = nullptr;
  }
  return {found, &::freeaddrinfo};
}

inline void set_option(int fd, int level, int option, int value) noexcept {
  static_cast<void>(::setsockopt(fd, level, option, &value, sizeof value));
}

/// Small messages leave at once, and a host that is gone is noticed.
inline void tune(int fd) noexcept {
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 4);
}

using steady = std::chrono::steady_clock;

/// What poll() takes, at least 0.
[[nodiscard]] inline int poll_time(steady::time_point end) noexcept {
  auto const left = std::chrono::ceil<std::chrono::milliseconds>(end - steady::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 3'600'000));
}

/// Wait until `fd` is ready for `events`; false at `end`.
[[nodiscard]] inline bool wait_for_socket(int fd, short events, steady::time_point end) noexcept {
  pollfd one{fd, events, 0};
  for (;;) {
    int const ready = ::poll(&one, 1, poll_time(end));
    if (ready > 0) {
      return true;
    }
    if (ready == 0 || errno != EINTR) {
      return false;
    }
  }
}

/// Send all bytes; the reason where that failed.
[[nodiscard]] inline std::string send_all(int fd, std::string_view bytes, steady::time_point end) {
  while (!bytes.empty()) {
    ssize_t const sent = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) {
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!wait_for_socket(fd, POLLOUT, end)) {
        return "it takes no more bytes";
      }
    } else if (errno != EINTR) {
      return system_text(errno);
    }
  }
  return {};
}

/// The most that a message may have; more is no store's.
inline constexpr std::uint32_t largest_message = 256U << 20U;

[[nodiscard]] inline std::string frame(std::string_view message) {
  auto const size = static_cast<std::uint32_t>(message.size());
  std::string out{reinterpret_cast<char const*>(&size), sizeof size};
  out += message;
  return out;
}

/// Bytes that arrive, cut into messages.
class frame_reader {
 public:
  enum class state : std::uint8_t { open, closed, broken };

  explicit frame_reader(std::uint32_t largest = largest_message) noexcept : largest_{largest} {}

  void set_largest(std::uint32_t bytes) noexcept { largest_ = bytes; }

  /// Read what is there, without waiting.
  [[nodiscard]] state read(int fd, std::string& why) {
    char buffer[16384];
    for (;;) {
      ssize_t const got = ::recv(fd, buffer, sizeof buffer, MSG_DONTWAIT);
      if (got > 0) {
        bytes_.append(buffer, static_cast<std::size_t>(got));
      } else if (got == 0) {
        why = "its connection was closed";
        return state::closed;
      } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
        return state::open;
      } else if (errno != EINTR) {
        why = system_text(errno);
        return state::broken;
      }
    }
  }

  /// Take a whole message off the front. `wrong` where the bytes can be none.
  [[nodiscard]] bool next(std::string& message, bool& wrong) {
    std::uint32_t size = 0;
    wrong = false;
    if (bytes_.size() < sizeof size) {
      return false;
    }
    std::memcpy(&size, bytes_.data(), sizeof size);
    wrong = size > largest_;
    if (wrong || bytes_.size() - sizeof size < size) {
      return false;
    }
    message.assign(bytes_, sizeof size, size);
    bytes_.erase(0, sizeof size + size);
    return true;
  }

 private:
  std::uint32_t largest_;
  std::string bytes_;
};

}  // namespace detail
}  // namespace zero::inline v0
