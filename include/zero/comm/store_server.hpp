// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/control_hub.hpp>
#include <zero/comm/control_message.hpp>
#include <zero/comm/store_socket.hpp>
#include <zero/core/error.hpp>

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

/// @file
/// The side of a store that serves: a thread of rank 0 with a hub, and a connection to each rank.
/// Nothing here is for users.

namespace zero::inline v0::detail {

/// The first bytes of a connection, before the job's name.
struct greeting {
  std::uint64_t magic = 0x7a65726f73746f72;  // "zerostor"
  std::uint32_t version = 1;
  std::int32_t size = 0;
  std::int32_t rank = 0;
  std::uint32_t unused = 0;
};

class store_server {
 public:
  /// @throws zero::error  the address can't be listened to.
  store_server(store_address const& address, int size, std::string job,
               std::chrono::milliseconds linger)
      : size_{size}, job_{std::move(job)}, linger_{linger}, listener_{listen(address)},
        port_{bound_port()} {
    int ends[2] = {-1, -1};
    if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) {
      throw error{text("store: expected a pipe, actual ", system_text(errno), " (rank 0)")};
    }
    wake_read_ = unique_fd{ends[0]};
    wake_write_ = unique_fd{ends[1]};
    thread_ = std::thread{[this] { serve(); }};
  }
  store_server(store_server const&) = delete;
  store_server& operator=(store_server const&) = delete;
  /// Serves until all ranks have gone, for no longer than `linger`.
  ~store_server() {
    ending_.store(true);
    static_cast<void>(::write(wake_write_.get(), "x", 1));
    thread_.join();
  }

  [[nodiscard]] int port() const noexcept { return port_; }

 private:
  struct connection {
    unique_fd fd;
    frame_reader in{4096};  // before it has said who it is
    std::string out;
    int rank = -1;
    bool closing = false;  // once `out` is sent
    bool gone = false;
  };

  [[nodiscard]] static bool is_loopback(addrinfo const& at) noexcept {
    if (at.ai_family == AF_INET) {
      auto const* const in = reinterpret_cast<sockaddr_in const*>(at.ai_addr);
      return (ntohl(in->sin_addr.s_addr) >> 24U) == 127;
    }
    auto const* const in = reinterpret_cast<sockaddr_in6 const*>(at.ai_addr);
    return IN6_IS_ADDR_LOOPBACK(&in->sin6_addr);
  }

  /// Only a loopback address is listened to as such; with another, every interface is.
  [[nodiscard]] static unique_fd listen(store_address const& address) {
    std::string why;
    address_list const found = resolve(address, AI_PASSIVE, why);
    for (addrinfo const* at = found.get(); at != nullptr; at = at->ai_next) {
      unique_fd fd{::socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)};
      set_option(fd.get(), SOL_SOCKET, SO_REUSEADDR, 1);
      sockaddr_storage to{};
      std::memcpy(&to, at->ai_addr, at->ai_addrlen);
      if (!is_loopback(*at)) {
        if (at->ai_family == AF_INET) {
          reinterpret_cast<sockaddr_in*>(&to)->sin_addr.s_addr = INADDR_ANY;
        } else {
          reinterpret_cast<sockaddr_in6*>(&to)->sin6_addr = in6addr_any;
        }
      }
      if (::bind(fd.get(), reinterpret_cast<sockaddr const*>(&to), at->ai_addrlen) == 0 &&
          ::listen(fd.get(), SOMAXCONN) == 0) {
        return fd;
      }
      why = system_text(errno);
    }
    throw error{text("store: expected to listen on ", address.host, " port ", address.port,
                     ", actual ", why, " (rank 0)")};
  }

  [[nodiscard]] int bound_port() const noexcept {
    sockaddr_storage at{};
    socklen_t size = sizeof at;
    static_cast<void>(::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&at), &size));
    return ntohs(at.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&at)->sin6_port
                                          : reinterpret_cast<sockaddr_in*>(&at)->sin_port);
  }

  void serve() noexcept {
    try {
      steady::time_point end = steady::time_point::max();
      while (steady::now() < end) {
        if (ending_.load()) {
          end = std::min(end, steady::now() + linger_);
          bool const used = std::any_of(connections_.begin(), connections_.end(),
                                        [](connection const& each) { return each.rank >= 0; });
          if (!used) {
            return;
          }
        }
        wait(end);
        accept();
        for (connection& each : connections_) {
          talk(each);
        }
        std::erase_if(connections_, [](connection const& each) { return each.gone; });
      }
    } catch (std::exception const&) {
      connections_.clear();  // no memory: each rank sees its connection close
    }
  }

  void wait(steady::time_point end) {
    std::vector<pollfd> all{{wake_read_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    for (connection const& each : connections_) {
      auto const events = static_cast<short>(POLLIN | (each.out.empty() ? 0 : POLLOUT));
      all.push_back({each.fd.get(), events, 0});
    }
    int const time = end == steady::time_point::max() ? -1 : poll_time(end);
    static_cast<void>(::poll(all.data(), all.size(), time));
    char byte = 0;
    while (::read(wake_read_.get(), &byte, 1) > 0) {
    }
  }

  void accept() {
    for (;;) {
      unique_fd fd{::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)};
      if (fd.empty()) {
        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
          std::this_thread::sleep_for(std::chrono::milliseconds{20});  // until something is free
        }
        return;
      }
      tune(fd.get());
      connections_.emplace_back().fd = std::move(fd);
    }
  }

  void talk(connection& with) {
    std::string why;
    frame_reader::state const state = with.in.read(with.fd.get(), why);
    std::string message;
    bool wrong = false;
    while (!with.closing && with.in.next(message, wrong)) {
      if (with.rank < 0) {
        greet(with, message);
      } else {
        hear(with, message, wrong);
      }
    }
    if (wrong && !with.closing) {
      refuse(with, "store: expected a rank of this library, actual bytes of something else");
    }
    flush(with);
    bool const ended = state != frame_reader::state::open || (with.closing && with.out.empty());
    if (ended && !with.gone) {
      drop(with, why);
    }
  }

  void hear(connection& from, std::string_view bytes, bool& wrong) {
    control_message message;
    if (!decode(bytes, message)) {
      wrong = true;
      return;
    }
    int const rank = from.rank;
    from.rank = message.kind == control_kind::goodbye ? -1 : rank;
    from.closing = message.kind == control_kind::goodbye;
    hub_.receive(rank, message);
  }

  /// Check who has connected.
  void greet(connection& with, std::string_view bytes) {
    control_message hello;
    greeting said;
    greeting const own;
    std::string_view body;
    bool known = decode(bytes, hello) && hello.kind == control_kind::hello;
    if (known) {
      body = hello.body;
      known = take(body, said) && said.magic == own.magic;
    }
    if (!known) {
      refuse(with, "store: expected a rank of this library, actual bytes of something else");
      return;
    }
    std::string const rank = text(" (rank ", said.rank, ")");
    bool const twice = std::any_of(connections_.begin(), connections_.end(),
                                   [&](connection const& each) { return each.rank == said.rank; });
    if (said.version != own.version) {
      refuse(with, text("store: expected version ", own.version, " as on rank 0, actual ",
                        said.version, rank));
    } else if (body != job_) {
      refuse(with,
             text("store: expected job \"", job_, "\" as on rank 0, actual \"", body, "\"", rank));
    } else if (said.size != size_) {
      refuse(with, text("store: expected a world of ", size_, " ranks as on rank 0, actual ",
                        said.size, rank));
    } else if (said.rank < 0 || said.rank >= size_) {
      refuse(with, text("store: expected a rank in [0, ", size_, "), actual ", said.rank, rank));
    } else if (twice) {
      refuse(with, text("store: expected one connection of each rank, actual another", rank));
    } else {
      with.rank = said.rank;
      with.in.set_largest(largest_message);
      control_message welcome;
      welcome.kind = control_kind::welcome;
      with.out += frame(encode(welcome));
    }
  }

  static void refuse(connection& with, std::string const& why) {
    control_message refused;
    refused.kind = control_kind::refused;
    refused.body = why;
    with.out += frame(encode(refused));
    with.closing = true;
  }

  void deliver(int rank, control_message const& message) {
    for (connection& each : connections_) {
      if (each.rank == rank && !each.gone) {
        each.out += frame(encode(message));
        flush(each);
      }
    }
  }

  static void flush(connection& to) {
    while (!to.out.empty()) {
      ssize_t const sent = ::send(to.fd.get(), to.out.data(), to.out.size(), MSG_NOSIGNAL);
      if (sent < 0) {
        return;  // again later; an error ends the next read
      }
      to.out.erase(0, static_cast<std::size_t>(sent));
    }
  }

  void drop(connection& lost, std::string const& why) {
    lost.gone = true;
    if (int const rank = std::exchange(lost.rank, -1); rank >= 0) {
      hub_.lost(rank, why.empty() ? "its messages make no sense" : why);
    }
  }

  int size_;
  std::string job_;
  std::chrono::milliseconds linger_;
  unique_fd listener_;
  int port_;
  unique_fd wake_read_;
  unique_fd wake_write_;
  std::atomic<bool> ending_{false};
  std::list<connection> connections_;  // of the thread
  control_hub hub_{[this](int rank, control_message const& message) { deliver(rank, message); }};
  std::thread thread_;
};

}  // namespace zero::inline v0::detail
