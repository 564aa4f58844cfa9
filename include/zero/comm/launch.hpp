// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/store.hpp>
#include <zero/comm/store_file.hpp>
#include <zero/core/error.hpp>

#include <charconv>
#include <cstdlib>
#include <functional>
#include <string>
#include <string_view>
#include <system_error>

/// @file
/// Which rank a process is, as torchrun, mpirun and srun tell it, and where the ranks meet.
///
/// | launcher | rank, world size, local rank                     | store's host, port         |
/// |----------|--------------------------------------------------|----------------------------|
/// | torchrun | RANK, WORLD_SIZE, LOCAL_RANK                     | MASTER_ADDR, MASTER_PORT+1 |
/// | Open MPI | OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK         | the same                   |
/// | MPICH,   | PMI_RANK, PMI_SIZE, MPI_LOCALRANKID or, by srun, | the same                   |
/// | PMI      | SLURM_LOCALID                                    |                            |
/// | Slurm    | SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID        | the same, or the host that |
/// |          |                                                  | SLURM_LAUNCH_NODE_IPADDR   |
/// |          |                                                  | is: it must be rank 0's    |
///
/// They are looked for in this order, and without any of them the world is one rank. With more
/// than one rank, the local rank must be known: it chooses the GPU. torchrun's own
/// store may hold MASTER_PORT, hence the next one. For every launcher, ZERO_STORE_PORT is the port
/// itself, ZERO_STORE_ADDRESS is `host:port`, and ZERO_STORE_FILE names a file on a file system
/// that all ranks share, in which rank 0 leaves its address, with the host name ZERO_STORE_HOST
/// where it is set. ZERO_JOB names the job, whose ranks accept no others; without it, it is the
/// launcher's TORCHELASTIC_RUN_ID, PMIX_NAMESPACE or SLURM_JOB_ID and SLURM_STEP_ID.

namespace zero::inline v0 {

/// One process of a job.
struct launch {
  int rank = 0;
  int size = 1;
  int local_rank = 0;      ///< on this host: the number of its GPU
  store_address store;     ///< where rank 0 serves
  std::string store_file;  ///< or where it says so; empty: there is none
  std::string job;
};

/// Finds an environment variable; null where there is none.
using environment = std::function<char const*(char const*)>;

namespace detail {

class launch_reader {
 public:
  explicit launch_reader(environment const& find) : find_{find} {}

  [[nodiscard]] launch read() {
    launch out;
    struct names {
      char const* rank;
      char const* size;
      char const* local;
    };
    constexpr names launchers[] = {
        {"RANK", "WORLD_SIZE", "LOCAL_RANK"},
        {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
        {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"},
        {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"}};
    bool found = false;
    for (names const& each : launchers) {
      if (!found && has(each.rank)) {
        found = true;
        out.size = number(each.size, 1, most);
        out.rank = number(each.rank, 0, out.size - 1);
        rank_ = out.rank;
        out.local_rank = local_rank(each.local, out);
      }
    }
    out.job = job();
    if (has("ZERO_STORE_FILE")) {
      out.store_file = value("ZERO_STORE_FILE");
      out.store.host = has("ZERO_STORE_HOST") ? value("ZERO_STORE_HOST") : std::string{};
    } else if (!found) {
      out.store = {"127.0.0.1", 0};
    } else {
      out.store = address();
    }
    return out;
  }

 private:
  static constexpr int most = 1 << 30;

  /// Where the launcher doesn't tell it, Slurm's, if it has started this process itself.
  [[nodiscard]] int local_rank(char const* name, launch const& me) const {
    if (!has(name) && has("SLURM_LOCALID") && has("SLURM_PROCID") &&
        number("SLURM_PROCID", 0, most) == me.rank) {
      name = "SLURM_LOCALID";
    }
    return me.size == 1 && !has(name) ? 0 : number(name, 0, most);
  }

  [[nodiscard]] bool has(char const* name) const {
    char const* const found = find_(name);
    return found != nullptr && *found != '\0';
  }
  [[nodiscard]] std::string value(char const* name) const { return find_(name); }

  [[noreturn]] void refuse(std::string_view name, std::string_view expected,
                           std::string_view actual) const {
    throw usage_error{text("launch: expected ", expected, " in ", name, ", actual ", actual,
                           rank_ < 0 ? std::string{} : text(" (rank ", rank_, ")"))};
  }

  [[nodiscard]] int parse(std::string_view name, std::string_view digits, int least,
                          int largest) const {
    int out = 0;
    auto const [end, code] = std::from_chars(digits.data(), digits.data() + digits.size(), out);
    if (code != std::errc{} || end != digits.data() + digits.size() || out < least ||
        out > largest) {
      refuse(name, text("a number in [", least, ", ", largest, "]"), text("\"", digits, "\""));
    }
    return out;
  }

  [[nodiscard]] int number(char const* name, int least, int largest) const {
    if (!has(name)) {
      refuse(name, text("a number in [", least, ", ", largest, "]"), "none");
    }
    return parse(name, value(name), least, largest);
  }

  [[nodiscard]] std::string job() const {
    for (char const* const name : {"ZERO_JOB", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE"}) {
      if (has(name)) {
        return value(name);
      }
    }
    if (has("SLURM_JOB_ID")) {
      return value("SLURM_JOB_ID") +
             (has("SLURM_STEP_ID") ? "." + value("SLURM_STEP_ID") : std::string{});
    }
    return {};
  }

  [[nodiscard]] store_address address() const {
    constexpr int largest_port = 65535;
    if (has("ZERO_STORE_ADDRESS")) {
      std::string const whole = value("ZERO_STORE_ADDRESS");
      std::size_t const colon = whole.rfind(':');
      if (colon == std::string::npos || colon == 0) {
        refuse("ZERO_STORE_ADDRESS", "host:port", text("\"", whole, "\""));
      }
      std::string host = whole.substr(0, colon);
      if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
        host = host.substr(1, host.size() - 2);  // IPv6
      }
      return {std::move(host), parse("the port of ZERO_STORE_ADDRESS",
                                     std::string_view{whole}.substr(colon + 1), 1, largest_port)};
    }
    store_address out;
    if (has("MASTER_ADDR")) {
      out.host = value("MASTER_ADDR");
    } else if (has("SLURM_LAUNCH_NODE_IPADDR")) {
      out.host = value("SLURM_LAUNCH_NODE_IPADDR");
    } else {
      refuse("ZERO_STORE_ADDRESS, ZERO_STORE_FILE or MASTER_ADDR", "where rank 0 can be reached",
             "none");
    }
    if (has("ZERO_STORE_PORT")) {
      out.port = number("ZERO_STORE_PORT", 1, largest_port);
    } else if (has("MASTER_PORT")) {
      out.port = number("MASTER_PORT", 1, largest_port - 1) + 1;
    } else {
      refuse("ZERO_STORE_PORT or MASTER_PORT", "a port", "none");
    }
    return out;
  }

  environment const& find_;
  int rank_ = -1;
};

}  // namespace detail

/// Which rank this process is, of how many, and where they meet.
///
/// @throws zero::usage_error  a variable is missing or malformed; names it.
[[nodiscard]] inline launch launch_from_environment(
    environment const& find = [](char const* name) -> char const* { return std::getenv(name); }) {
  return detail::launch_reader{find}.read();
}

/// Connect to the job's store. With `options.job` empty it is the launch's.
///
/// Collective: every rank, where the address is in a file.
/// @throws zero::usage_error          a file without the job's name.
/// @throws zero::communication_error  as `store`; a file of another job.
[[nodiscard]] inline store open_store(launch const& me, store_options options = {}) {
  if (options.job.empty()) {
    options.job = me.job;
  }
  if (me.store_file.empty()) {
    return store{me.rank, me.size, me.store, std::move(options)};
  }
  return detail::open_store_file(me.store_file, me.rank, me.size, me.store.host,
                                 std::move(options));
}

}  // namespace zero::inline v0
