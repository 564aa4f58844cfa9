// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/control_client.hpp>
#include <zero/comm/control_hub.hpp>
#include <zero/comm/control_message.hpp>

#include <cstddef>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

/// @file
/// The control channel of ranks that are threads of one process. Nothing here is for users.

namespace zero::inline v0::detail {

/// The control channel of ranks that are threads of one process.
class memory_store {
 public:
  /// A client for each rank. The hub lives as long as any of them.
  [[nodiscard]] static std::vector<std::shared_ptr<control_client>> create(int ranks) {
    auto const shared = std::make_shared<hub_of_threads>();
    std::vector<std::shared_ptr<control_client>> all;
    shared->clients.resize(static_cast<std::size_t>(ranks));
    for (int rank = 0; rank < ranks; ++rank) {
      auto const made = std::make_shared<client>(rank, ranks, shared);
      shared->clients[static_cast<std::size_t>(rank)] = made.get();
      all.push_back(made);
    }
    return all;
  }

 private:
  class client;

  struct hub_of_threads {
    std::mutex mutex;
    std::vector<client*> clients;  // null: it is gone
    control_hub hub{[this](int rank, control_message const& message) {
      std::lock_guard const lock{mutex};
      if (client* const to = clients[static_cast<std::size_t>(rank)]; to != nullptr) {
        to->deliver(message);
      }
    }};
  };

  class client final : public control_client {
   public:
    client(int rank, int size, std::shared_ptr<hub_of_threads> shared)
        : control_client{rank, size}, shared_{std::move(shared)} {}
    ~client() override {
      {
        std::lock_guard const lock{shared_->mutex};
        shared_->clients[static_cast<std::size_t>(rank())] = nullptr;
      }
      control_message message;
      message.kind = control_kind::goodbye;
      send(message);
    }

    void send(control_message const& message) noexcept override {
      try {
        shared_->hub.receive(rank(), message);
      } catch (std::exception const& cause) {
        lose(cause.what());
      }
    }
    void deliver(control_message const& message) noexcept { receive(message); }

   private:
    std::shared_ptr<hub_of_threads> shared_;
  };
};

}  // namespace zero::inline v0::detail
