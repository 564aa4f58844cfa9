// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/collective_checks.hpp>
#include <zero/comm/control_group.hpp>
#include <zero/comm/store_server.hpp>
#include <zero/comm/store_socket.hpp>
#include <zero/core/error.hpp>
#include <zero/device/wait.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

/// @file
/// `store`: the control channel between processes, over TCP. Rank 0 serves it in a thread. Ranks
/// exchange a few bytes through it, and a failure of one reaches all of them at once.

namespace zero::inline v0 {

struct store_options {
  /// The job's name: ranks of another are refused.
  std::string job = {};
  /// How long a rank waits for the others.
  std::chrono::milliseconds deadline = std::chrono::minutes{10};
  /// How long rank 0, which has finished, serves those that have not.
  std::chrono::milliseconds linger = std::chrono::seconds{10};
};

/// Tells where rank 0 serves, as far as is known: asked before each attempt to connect, of which
/// none lasts longer than a second then. Port 0: nothing new. What it throws, `store` throws.
using find_store = std::function<store_address()>;

namespace detail {

/// A rank's connection, and rank 0's server.
class store_client final : public control_client {
 public:
  store_client(int rank, int size, store_address address, store_options const& options,
               find_store find)
      : control_client{rank, size}, find_{std::move(find)} {
    if (rank == 0) {
      server_ = std::make_unique<store_server>(address, size, options.job, options.linger);
      address.port = server_->port();
    }
    address_ = address;
    greet(options);
    reader_ = std::thread{[this] { read(); }};
  }
  ~store_client() override {
    control_message message;
    message.kind = control_kind::goodbye;
    ending_.store(true);
    send(message);
    ::shutdown(socket_.get(), SHUT_WR);
    // The hub closes, having read all; a hub that is stuck is not waited for.
    static_cast<void>(
        end_.wait_until([this] { return ended_.load(); }, steady::now() + goodbye_time));
    ::shutdown(socket_.get(), SHUT_RDWR);
    reader_.join();
  }

  [[nodiscard]] store_address const& address() const noexcept { return address_; }

  void send(control_message const& message) noexcept override {
    try {
      std::string const bytes = frame(encode(message));
      std::string why;
      {
        std::lock_guard const lock{sending_};
        why = bytes.size() > largest_message
                  ? text("a message of ", bytes.size(), " bytes, which is too long")
                  : send_all(socket_.get(), bytes, steady::now() + send_time);
      }
      if (!why.empty() && !ending_.load()) {
        lose(why);
      }
    } catch (std::exception const& cause) {
      lose(cause.what());
    }
  }

 private:
  static constexpr std::chrono::seconds send_time{30};
  static constexpr std::chrono::seconds goodbye_time{2};
  static constexpr std::chrono::milliseconds retry_time{20};
  static constexpr std::chrono::seconds attempt_time{1};

  [[noreturn]] void give_up(std::string_view expected, std::string_view actual) const {
    throw communication_error{text("store: expected ", expected, " from ", address_.host, " port ",
                                   address_.port, ", actual ", actual, " (rank ", rank(), ")"),
                              0};
  }

  /// Connect, as soon as rank 0 serves.
  void connect(steady::time_point end, std::chrono::milliseconds deadline) {
    std::string why;
    for (;;) {
      if (store_address now = find_ ? find_() : store_address{}; now.port != 0) {
        address_ = std::move(now);
      }
      address_list const found = resolve(address_, 0, why);
      for (addrinfo const* at = found.get(); at != nullptr; at = at->ai_next) {
        unique_fd fd{::socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)};
        int code = ::connect(fd.get(), at->ai_addr, at->ai_addrlen) == 0 ? 0 : errno;
        if (code == EINPROGRESS) {
          socklen_t size = sizeof code;
          auto const patience = find_ ? std::min(end, steady::now() + attempt_time) : end;
          code = wait_for_socket(fd.get(), POLLOUT, patience) ? 0 : ETIMEDOUT;
          if (code == 0) {
            static_cast<void>(::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &code, &size));
          }
        }
        if (code == 0) {
          tune(fd.get());
          socket_ = std::move(fd);
          return;
        }
        why = system_text(code);
      }
      if (steady::now() + retry_time >= end) {
        give_up(text("a connection within ", deadline.count(), " ms"), why);
      }
      std::this_thread::sleep_for(retry_time);
    }
  }

  void greet(store_options const& options) {
    auto const wait = std::min<std::chrono::milliseconds>(options.deadline, std::chrono::hours{24});
    auto const end = steady::now() + wait;
    connect(end, wait);
    control_message hello;
    put(hello.body, greeting{.size = size(), .rank = rank()});
    hello.body += options.job;
    std::string why = send_all(socket_.get(), frame(encode(hello)), end);
    std::string bytes;
    bool wrong = false;
    auto state = frame_reader::state::open;
    while (why.empty() && !in_.next(bytes, wrong) && !wrong) {
      if (state != frame_reader::state::open) {
        break;
      }
      if (!wait_for_socket(socket_.get(), POLLIN, end)) {
        give_up("a store's answer", text("none within ", wait.count(), " ms"));
      }
      state = in_.read(socket_.get(), why);
      why = state == frame_reader::state::broken ? why : std::string{};
    }
    control_message answer;
    if (wrong || !why.empty() || bytes.empty() || !decode(bytes, answer)) {
      give_up("a store's answer", why.empty() ? "something else" : std::string_view{why});
    }
    if (answer.kind == control_kind::refused) {
      throw communication_error{answer.body, rank()};
    }
  }

  void read() noexcept {
    std::string why;
    try {
      auto state = frame_reader::state::open;
      while (state == frame_reader::state::open) {
        std::string bytes;
        bool wrong = false;
        while (in_.next(bytes, wrong)) {
          control_message message;
          if (decode(bytes, message)) {
            receive(message);
          }
        }
        pollfd one{socket_.get(), POLLIN, 0};
        static_cast<void>(::poll(&one, 1, -1));
        state = in_.read(socket_.get(), why);
        if (wrong) {
          break;
        }
      }
      std::string bytes;
      for (bool wrong = false; in_.next(bytes, wrong);) {  // what came before the end
        control_message message;
        if (decode(bytes, message)) {
          receive(message);
        }
      }
    } catch (std::exception const& cause) {
      why = cause.what();
    }
    if (!ending_.load()) {
      lose(why);
    }
    ended_.store(true);
    end_.notify();
  }

  find_store find_;
  std::unique_ptr<store_server> server_;  // the last to go
  store_address address_;
  unique_fd socket_;
  frame_reader in_;
  std::mutex sending_;
  std::atomic<bool> ending_{false};
  std::atomic<bool> ended_{false};
  waiter end_;
  std::thread reader_;
};

}  // namespace detail

/// One rank's connection to the store of a job. Communicators made from it keep it open. `find` is
/// for an address that may change until rank 0 serves.
///
/// @throws zero::usage_error          a wrong rank, size, port or deadline.
/// @throws zero::error                rank 0 can't listen at the address.
/// @throws zero::communication_error  rank 0 doesn't answer by the deadline, or refuses this rank:
///                                    another job, world size or version, or a rank that is there.
class store {
 public:
  store(int rank, int size, store_address address, store_options options = {}, find_store find = {})
      : deadline_{options.deadline} {
    auto const refuse = [&](std::string_view expected, auto const& actual) {
      throw usage_error{
          detail::text("store: expected ", expected, ", actual ", actual, " (rank ", rank, ")")};
    };
    if (size < 1) {
      refuse("at least 1 rank", size);
    }
    if (rank < 0 || rank >= size) {
      refuse(detail::text("a rank in [0, ", size, ")"), rank);
    }
    if (address.port < (rank == 0 ? 0 : 1) || address.port > 65535) {
      refuse("a port in [1, 65535]", address.port);
    }
    if (options.deadline.count() <= 0) {
      refuse("a deadline of at least 1 ms", detail::text(options.deadline.count(), " ms"));
    }
    client_ = std::make_shared<detail::store_client>(rank, size, std::move(address), options,
                                                     std::move(find));
    group_ = detail::control_group::world(client_);
  }

  [[nodiscard]] int rank() const noexcept { return client_->rank(); }
  [[nodiscard]] int size() const noexcept { return client_->size(); }
  /// Where it is served; on rank 0 with the port that was free.
  [[nodiscard]] store_address const& address() const noexcept { return client_->address(); }

  /// Collect `mine` of all ranks in `all`.
  ///
  /// Shapes:     mine [n], all [n * P].
  /// Units:      bytes.
  /// Ordering:   blocks.
  /// Collective: every rank, with the same size.
  /// @throws zero::usage_error          a wrong size. The peers get an error, too.
  /// @throws zero::communication_error  a rank failed, left, differs, or missed the deadline.
  void exchange(std::span<std::byte const> mine, std::span<std::byte> all) {
    try {
      static_cast<void>(detail::collective_checks{rank(), size()}.exchange(mine, all));
    } catch (usage_error const& cause) {
      abort(cause.what());
      throw;
    }
    group_->exchange(detail::operation::exchange, mine, all, deadline_);
  }

  /// Give every rank's pending and later exchanges an error.
  void abort(std::string_view reason) noexcept {
    try {
      group_->fail(rank(), detail::text("aborted by rank ", rank(), ": ", reason));
    } catch (std::exception const&) {
      group_->fail(rank(), "aborted");
    }
  }

  [[nodiscard]] std::shared_ptr<detail::control_client> client() const noexcept { return client_; }

 private:
  std::chrono::milliseconds deadline_;
  std::shared_ptr<detail::store_client> client_;
  std::shared_ptr<detail::control_group> group_;
};

}  // namespace zero::inline v0
