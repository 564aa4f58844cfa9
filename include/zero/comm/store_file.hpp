// SPDX-License-Identifier: MIT
#pragma once

#include <zero/comm/store.hpp>
#include <zero/core/error.hpp>

#include <unistd.h>

#include <charconv>
#include <chrono>
#include <cstdio>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

/// @file
/// A store whose address rank 0 leaves in a file that all ranks can read. Nothing here is for
/// users.

namespace zero::inline v0::detail {

/// The lines of the file: what it is, the job, host, port and an end.
struct store_file_content {
  std::string job;
  store_address address;
};

class store_file {
 public:
  store_file(std::string path, std::string job, int rank)
      : path_{std::move(path)}, job_{std::move(job)}, rank_{rank} {
    if (job_.empty() || job_.find('\n') != std::string::npos) {
      throw usage_error{text("store file ", path_, ": expected the name of the job, on one line, ",
                             "actual \"", job_, "\" (rank ", rank_, ")")};
    }
  }

  /// Make the whole file visible at once.
  /// @throws zero::error  it can't be written, or is another job's.
  void publish(store_address const& address) const {
    static_cast<void>(read());
    std::string const draft = text(path_, ".", ::getpid(), ".draft");
    std::string const content =
        text(first_line, "\n", job_, "\n", address.host, "\n", address.port, "\nend\n");
    std::FILE* const file = std::fopen(draft.c_str(), "wbx");
    bool good = file != nullptr &&
                std::fwrite(content.data(), 1, content.size(), file) == content.size() &&
                std::fflush(file) == 0 && ::fsync(::fileno(file)) == 0;
    int code = good ? 0 : errno;
    if (file != nullptr && std::fclose(file) != 0 && good) {
      good = false;
      code = errno;
    }
    if (good && std::rename(draft.c_str(), path_.c_str()) != 0) {
      good = false;
      code = errno;
    }
    if (!good) {
      static_cast<void>(std::remove(draft.c_str()));
      refuse("a file that can be written", system_text(code));
    }
  }

  /// Wait for the file.
  /// @throws zero::communication_error  it isn't there by the deadline, or is another job's.
  [[nodiscard]] store_address wait(std::chrono::milliseconds deadline) const {
    auto const time = std::min<std::chrono::milliseconds>(deadline, std::chrono::hours{24});
    auto const end = steady::now() + time;
    for (;;) {
      if (store_address found = read(); found.port != 0) {
        return found;
      }
      if (steady::now() >= end) {
        refuse(text("rank 0's address within ", time.count(), " ms"), "no such file");
      }
      std::this_thread::sleep_for(std::chrono::milliseconds{10});
    }
  }

  /// The address; port 0 where there is no file.
  /// @throws zero::communication_error  a file of another job, or of something else.
  [[nodiscard]] store_address read() const {
    std::FILE* const file = std::fopen(path_.c_str(), "rb");
    if (file == nullptr) {
      return {};
    }
    std::string whole(4096, '\0');
    whole.resize(std::fread(whole.data(), 1, whole.size(), file));
    static_cast<void>(std::fclose(file));
    std::string_view rest = whole;
    auto const line = [&] {
      std::size_t const end = rest.find('\n');
      std::string_view const out = rest.substr(0, end);
      rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
      return out;
    };
    if (line() != first_line) {
      refuse("a store's address", "something else");
    }
    if (std::string_view const job = line(); job != job_) {
      refuse(text("job \"", job_, "\""), text("\"", job,
                                              "\", whose file it is; remove it if that "
                                              "job has ended"));
    }
    store_address out{std::string{line()}, 0};
    std::string_view const port = line();
    auto const [end, code] = std::from_chars(port.data(), port.data() + port.size(), out.port);
    if (code != std::errc{} || end != port.data() + port.size() || out.port < 1 ||
        out.port > 65535 || line() != "end") {
      refuse("a host, a port and an end", "something else");
    }
    return out;
  }

  void remove() const noexcept { static_cast<void>(std::remove(path_.c_str())); }

 private:
  static constexpr std::string_view first_line = "zero store 1";

  [[noreturn]] void refuse(std::string_view expected, std::string_view actual) const {
    throw communication_error{text("store file ", path_, ": expected ", expected, ", actual ",
                                   actual, " (rank ", rank_, ")"),
                              0};
  }

  std::string path_;
  std::string job_;
  int rank_;
};

/// Rank 0 serves at `host` (empty: this host's name), and says where in the file, which it removes
/// once all ranks are there. The others look at it again while nobody answers: a job that was
/// killed and begins again finds what it left.
[[nodiscard]] inline store open_store_file(std::string const& path, int rank, int size,
                                           std::string host, store_options options) {
  store_file const file{path, options.job, rank};
  store_address address;
  if (rank != 0) {
    address = file.wait(options.deadline);
  } else {
    char name[256] = {};
    if (host.empty() && ::gethostname(name, sizeof name - 1) == 0) {
      host = name;
    }
    address = {std::move(host), 0};
  }
  store out{rank, size, std::move(address), std::move(options),
            rank == 0 ? find_store{} : [file] { return file.read(); }};
  if (rank == 0) {
    file.publish(out.address());
  }
  try {
    out.exchange({}, {});
  } catch (communication_error const&) {
    if (rank == 0) {
      file.remove();
    }
    throw;
  }
  if (rank == 0) {
    file.remove();
  }
  return out;
}

}  // namespace zero::inline v0::detail
