// SPDX-License-Identifier: MIT
#include <zero/comm/launch.hpp>
#include <zero/core/error.hpp>

#include <doctest/doctest.h>
#include <support/thrown.hpp>
#include <support/watchdog.hpp>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace {

using namespace std::chrono_literals;
using variables = std::map<std::string, std::string>;

zero::launch launched(variables const& all) {
  return zero::launch_from_environment([&](char const* name) -> char const* {
    auto const found = all.find(name);
    return found == all.end() ? nullptr : found->second.c_str();
  });
}

std::string refusal(variables const& all) {
  return test::message_of([&] { static_cast<void>(launched(all)); });
}

variables const torchrun{
    {"RANK", "5"},        {"WORLD_SIZE", "8"},      {"LOCAL_RANK", "1"},
    {"MASTER_ADDR", "a"}, {"MASTER_PORT", "29500"}, {"TORCHELASTIC_RUN_ID", "j"}};

variables with(variables all, std::string const& name, std::string const& value) {
  all[name] = value;
  return all;
}
variables without(variables all, std::string const& name) {
  all.erase(name);
  return all;
}

}  // namespace

TEST_CASE("without a launcher the world is one rank") {
  zero::launch const me = launched({});
  CHECK(me.rank == 0);
  CHECK(me.size == 1);
  CHECK(me.local_rank == 0);
  CHECK(me.store.host == "127.0.0.1");
  zero::store const alone = zero::open_store(me);
  CHECK(alone.size() == 1);
}

TEST_CASE("torchrun's variables, and the port after the one that its own store holds") {
  zero::launch const me = launched(torchrun);
  CHECK(me.rank == 5);
  CHECK(me.size == 8);
  CHECK(me.local_rank == 1);
  CHECK(me.store.host == "a");
  CHECK(me.store.port == 29501);
  CHECK(me.job == "j");
  CHECK(me.store_file.empty());
}

namespace {

struct started {
  char const* by;
  variables all;
  int rank;
  int size;
  int local_rank;
  char const* job;
};

// On the second host of two, with two ranks each.
started const launchers[] = {{"mpirun of Open MPI",
                              {{"OMPI_COMM_WORLD_RANK", "3"},
                               {"OMPI_COMM_WORLD_SIZE", "4"},
                               {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                               {"PMIX_RANK", "3"},
                               {"PMIX_NAMESPACE", "prterun-1"}},
                              3,
                              4,
                              1,
                              "prterun-1"},
                             {"mpirun of MPICH",
                              {{"PMI_RANK", "3"},
                               {"PMI_SIZE", "4"},
                               {"MPI_LOCALRANKID", "1"},
                               {"MPI_LOCALNRANKS", "2"},
                               {"ZERO_JOB", "x"}},
                              3,
                              4,
                              1,
                              "x"},
                             {"mpirun of MPICH in a job of Slurm, whose task is the host's proxy",
                              {{"PMI_RANK", "3"},
                               {"PMI_SIZE", "4"},
                               {"MPI_LOCALRANKID", "1"},
                               {"SLURM_PROCID", "1"},
                               {"SLURM_NTASKS", "2"},
                               {"SLURM_LOCALID", "0"},
                               {"SLURM_JOB_ID", "99"}},
                              3,
                              4,
                              1,
                              "99"},
                             {"srun --mpi=pmi2",
                              {{"PMI_RANK", "3"},
                               {"PMI_SIZE", "4"},
                               {"SLURM_PROCID", "3"},
                               {"SLURM_NTASKS", "4"},
                               {"SLURM_LOCALID", "1"},
                               {"SLURM_JOB_ID", "99"},
                               {"SLURM_STEP_ID", "0"}},
                              3,
                              4,
                              1,
                              "99.0"},
                             {"srun --mpi=none",
                              {{"SLURM_PROCID", "3"},
                               {"SLURM_NTASKS", "4"},
                               {"SLURM_LOCALID", "1"},
                               {"SLURM_JOB_ID", "99"},
                               {"SLURM_STEP_ID", "0"}},
                              3,
                              4,
                              1,
                              "99.0"},
                             {"torchrun in a job of Slurm, whose task is the host's agent",
                              {{"RANK", "3"},
                               {"WORLD_SIZE", "4"},
                               {"LOCAL_RANK", "1"},
                               {"TORCHELASTIC_RUN_ID", "j"},
                               {"SLURM_PROCID", "1"},
                               {"SLURM_NTASKS", "2"},
                               {"SLURM_LOCALID", "0"}},
                              3,
                              4,
                              1,
                              "j"}};

}  // namespace

TEST_CASE("each launcher's variables say which rank this is, and which on its host") {
  for (started const& each : launchers) {
    CAPTURE(each.by);
    zero::launch const me = launched(with(each.all, "ZERO_STORE_ADDRESS", "[::1]:77"));
    CHECK(me.rank == each.rank);
    CHECK(me.size == each.size);
    CHECK(me.local_rank == each.local_rank);
    CHECK(me.job == each.job);
    CHECK(me.store.host == "::1");
    CHECK(me.store.port == 77);
  }
}

TEST_CASE("rank 0 is where MASTER_ADDR says, or where srun was called") {
  variables const srun = with(launchers[4].all, "ZERO_STORE_PORT", "4000");
  CHECK(launched(with(srun, "MASTER_ADDR", "b")).store.host == "b");
  zero::launch const me = launched(with(srun, "SLURM_LAUNCH_NODE_IPADDR", "10.0.0.1"));
  CHECK(me.store.host == "10.0.0.1");
  CHECK(me.store.port == 4000);
}

TEST_CASE("of several ranks, one that doesn't know which on its host it is chooses no GPU") {
  variables const mpich{{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"ZERO_STORE_ADDRESS", "a:1"}};
  std::string const refused =
      "launch: expected a number in [0, 1073741824] in MPI_LOCALRANKID, actual none (rank 1)";
  CHECK(refusal(mpich) == refused);
  // Of another process: the proxy that started this one.
  CHECK(refusal(with(with(mpich, "SLURM_LOCALID", "0"), "SLURM_PROCID", "0")) == refused);
  CHECK(refusal(without(torchrun, "LOCAL_RANK")) ==
        "launch: expected a number in [0, 1073741824] in LOCAL_RANK, actual none (rank 5)");
  CHECK(
      launched({{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}, {"ZERO_STORE_ADDRESS", "a:1"}}).local_rank ==
      0);
}

TEST_CASE("every malformed variable is named, with what was expected") {
  CHECK(refusal(with(torchrun, "RANK", "five")) ==
        "launch: expected a number in [0, 7] in RANK, actual \"five\"");
  CHECK(refusal(with(torchrun, "RANK", "8")) ==
        "launch: expected a number in [0, 7] in RANK, actual \"8\"");
  CHECK(refusal(with(torchrun, "RANK", "-1")) ==
        "launch: expected a number in [0, 7] in RANK, actual \"-1\"");
  CHECK(refusal(with(torchrun, "RANK", "1 ")) ==
        "launch: expected a number in [0, 7] in RANK, actual \"1 \"");
  CHECK(refusal(without(torchrun, "WORLD_SIZE")) ==
        "launch: expected a number in [1, 1073741824] in WORLD_SIZE, actual none");
  CHECK(refusal(with(torchrun, "WORLD_SIZE", "0")) ==
        "launch: expected a number in [1, 1073741824] in WORLD_SIZE, actual \"0\"");
  CHECK(refusal(with(torchrun, "WORLD_SIZE", "99999999999999")) ==
        "launch: expected a number in [1, 1073741824] in WORLD_SIZE, actual \"99999999999999\"");
  CHECK(refusal(with(torchrun, "LOCAL_RANK", "x")) ==
        "launch: expected a number in [0, 1073741824] in LOCAL_RANK, actual \"x\" (rank 5)");
  CHECK(refusal(with(torchrun, "MASTER_PORT", "65535")) ==
        "launch: expected a number in [1, 65534] in MASTER_PORT, actual \"65535\" (rank 5)");
  CHECK(refusal(with(torchrun, "ZERO_STORE_PORT", "0")) ==
        "launch: expected a number in [1, 65535] in ZERO_STORE_PORT, actual \"0\" (rank 5)");
  CHECK(refusal(without(torchrun, "MASTER_PORT")) ==
        "launch: expected a port in ZERO_STORE_PORT or MASTER_PORT, actual none (rank 5)");
  CHECK(refusal(without(torchrun, "MASTER_ADDR")) ==
        "launch: expected where rank 0 can be reached in ZERO_STORE_ADDRESS, ZERO_STORE_FILE or "
        "MASTER_ADDR, actual none (rank 5)");
  for (std::string const bad : {"host", ":80"}) {
    CHECK(refusal(with(torchrun, "ZERO_STORE_ADDRESS", bad)) ==
          "launch: expected host:port in ZERO_STORE_ADDRESS, actual \"" + bad + "\" (rank 5)");
  }
  for (std::string const bad : {"", "x", "70000", "-1"}) {
    CHECK(refusal(with(torchrun, "ZERO_STORE_ADDRESS", "host:" + bad)) ==
          "launch: expected a number in [1, 65535] in the port of ZERO_STORE_ADDRESS, actual \"" +
              bad + "\" (rank 5)");
  }
}

namespace {

/// A file that is gone after the test.
struct temporary {
  std::string path = (std::filesystem::temp_directory_path() /
                      ("zero_launch_test." +
                       std::to_string(std::chrono::steady_clock::now().time_since_epoch().count())))
                         .string();
  ~temporary() { std::remove(path.c_str()); }
};

zero::launch by_file(temporary const& file, int rank, int size, std::string job = "job 7") {
  return {.rank = rank,
          .size = size,
          .local_rank = 0,
          .store = {"127.0.0.1", 0},
          .store_file = file.path,
          .job = std::move(job)};
}

}  // namespace

TEST_CASE("ranks meet by a shared file, which is gone afterwards") {
  test::watchdog const limit;
  temporary const file;
  variables all{{"PMI_SIZE", "3"},
                {"MPI_LOCALRANKID", "0"},
                {"ZERO_STORE_FILE", file.path},
                {"ZERO_JOB", "job 7"},
                {"ZERO_STORE_HOST", "127.0.0.1"}};
  std::vector<std::thread> threads;
  for (int const rank : {2, 1, 0}) {
    zero::launch const me = launched(with(all, "PMI_RANK", std::to_string(rank)));
    threads.emplace_back([me] {
      zero::store mine = zero::open_store(me);
      std::array<int, 3> ranks{};
      mine.exchange(std::as_bytes(std::span{&me.rank, 1}),
                    std::as_writable_bytes(std::span{ranks}));
      CHECK(ranks == std::array{0, 1, 2});
    });
    std::this_thread::sleep_for(5ms);
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(!std::filesystem::exists(file.path));
}

TEST_CASE("a file that the same job has left when it was killed is no hindrance") {
  test::watchdog const limit;
  temporary const file;
  int closed = 0;
  {
    zero::store const gone{0, 1, {"127.0.0.1", 0}};
    closed = gone.address().port;
  }
  std::ofstream{file.path} << "zero store 1\njob 7\n127.0.0.1\n" << closed << "\nend\n";
  auto const meet = [&](int rank) {
    zero::store mine = zero::open_store(by_file(file, rank, 2), {.job = {}, .deadline = 20s});
    mine.exchange({}, {});
  };
  std::thread early{[&] { CHECK_NOTHROW(meet(1)); }};
  std::this_thread::sleep_for(100ms);  // it has tried the old address
  CHECK_NOTHROW(meet(0));
  early.join();
}

TEST_CASE("a file of another job is refused by name, and left as it is") {
  test::watchdog const limit;
  temporary const file;
  std::string const content = "zero store 1\nyesterday\n127.0.0.1\n1234\nend\n";
  std::ofstream{file.path} << content;
  for (int const rank : {0, 1}) {
    auto const here =
        test::failure_of([&] { static_cast<void>(zero::open_store(by_file(file, rank, 2))); });
    CHECK(here.message == "store file " + file.path +
                              ": expected job \"job 7\", actual \"yesterday\", whose file it is; "
                              "remove it if that job has ended (rank " +
                              std::to_string(rank) + ")");
  }
  std::ifstream in{file.path};
  CHECK(std::string{std::istreambuf_iterator<char>{in}, {}} == content);
}

TEST_CASE("a file that is none of ours, or cut short, is refused") {
  temporary const file;
  for (std::string const content :
       {"", "hello\n", "zero store 1\njob 7\n", "zero store 1\njob 7\nhost\n99999\nend\n",
        "zero store 1\njob 7\nhost\n80", "zero store 1\njob 7\nhost\n80\n"}) {
    std::ofstream{file.path} << content;
    auto const here =
        test::failure_of([&] { static_cast<void>(zero::open_store(by_file(file, 1, 2))); });
    CHECK(here.says("store file " + file.path + ": expected "));
    CHECK(here.says(", actual something else (rank 1)"));
  }
}

TEST_CASE("a file needs a job's name, a place, and a rank 0 that comes in time") {
  temporary const file;
  CHECK(test::message_of([&] { static_cast<void>(zero::open_store(by_file(file, 1, 2, ""))); }) ==
        "store file " + file.path +
            ": expected the name of the job, on one line, actual \"\" (rank 1)");
  zero::store_options const quick{.job = {}, .deadline = 50ms};
  CHECK(test::failure_of([&] {
          static_cast<void>(zero::open_store(by_file(file, 1, 2), quick));
        }).message == "store file " + file.path +
                          ": expected rank 0's address within 50 ms, actual no such file (rank 1)");
  auto nowhere = by_file(file, 0, 2);
  nowhere.store_file = "/no/such/folder/file";
  CHECK(test::failure_of([&] { static_cast<void>(zero::open_store(nowhere, quick)); }).message ==
        "store file /no/such/folder/file: expected a file that can be written, actual No such "
        "file or directory (rank 0)");
}
