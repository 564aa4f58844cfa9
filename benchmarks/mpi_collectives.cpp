// SPDX-License-Identifier: MIT
//
// What `collectives_benchmark` measures, in MPI between two processes: reduce-scatter and
// all-gather of 64 MiB of fp32 in place, and calls of 4 KiB. Prints medians and quartiles.
//
//   mpirun -np 2 mpi_collectives             (as root, or on one core: --allow-run-as-root,
//   --oversubscribe)
//
// Malloc is kept from giving memory back, and the buffers are in huge pages where the system gives
// them: what MPI's own temporary buffers cost would dominate otherwise. `--as-it-comes` does
// neither. With glibc 2.35 or later, GLIBC_TUNABLES=glibc.malloc.hugetlb=1 gives MPI's buffers huge
// pages, too.

#include <mpi.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <vector>

#if defined(__linux__)
#include <malloc.h>
#include <sys/mman.h>
#endif

namespace {

constexpr int elements = 16 << 20;  // 64 MiB
constexpr int small_elements = 1024;
constexpr int repeats = 51;
constexpr int small_calls = 1000;

float* allocate(bool tuned) {
  constexpr std::size_t bytes = sizeof(float) * static_cast<std::size_t>(elements);
  constexpr std::size_t huge_page = std::size_t{2} << 20U;
  auto* const memory = static_cast<float*>(std::aligned_alloc(tuned ? huge_page : 64, bytes));
#if defined(__linux__)
  if (tuned) {
    madvise(memory, bytes, MADV_HUGEPAGE);
  }
#endif
  std::fill_n(memory, elements, 0.0F);
  return memory;
}

/// The seconds that `call` takes, `calls` times in a row, until the slower rank has done it.
template <class Call>
std::vector<double> measure(int calls, Call const& call) {
  std::vector<double> out;
  for (int i = 0; i < repeats; ++i) {
    MPI_Barrier(MPI_COMM_WORLD);
    double const start = MPI_Wtime();
    for (int k = 0; k < calls; ++k) {
      call();
    }
    double mine = (MPI_Wtime() - start) / calls;
    double slower = 0;
    MPI_Allreduce(&mine, &slower, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    out.push_back(slower);
  }
  std::sort(out.begin(), out.end());
  return out;
}

void print(int rank, char const* name, std::vector<double> const& seconds, double unit,
           char const* unit_name) {
  if (rank == 0) {
    std::size_t const last = seconds.size() - 1;
    std::printf("%-24s %9.3f %s  (quartiles %.3f to %.3f, %zu runs)\n", name,
                seconds[last / 2] / unit, unit_name, seconds[last / 4] / unit,
                seconds[last * 3 / 4] / unit, seconds.size());
  }
}

}  // namespace

int main(int argc, char** argv) {
  bool const tuned = argc < 2 || std::string_view{argv[1]} != "--as-it-comes";
#if defined(__GLIBC__)
  if (tuned) {
    mallopt(M_MMAP_MAX, 0);
    mallopt(M_TRIM_THRESHOLD, -1);
    mallopt(M_TOP_PAD, 256 << 20);
  }
#endif
  MPI_Init(&argc, &argv);
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (size != 2) {
    std::fprintf(stderr, "mpi_collectives: expected 2 processes, actual %d (rank %d)\n", size,
                 rank);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  float* const data = allocate(tuned);

  auto const reduce_scatter = [&](int count) {
    return [data, count] {
      std::array<int, 2> const counts{count / 2, count / 2};
      MPI_Reduce_scatter(MPI_IN_PLACE, data, counts.data(), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    };
  };
  auto const all_gather = [&](int count) {
    return [data, count] {
      MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, data, count / 2, MPI_FLOAT, MPI_COMM_WORLD);
    };
  };
  print(rank, "reduce_scatter 64 MiB", measure(1, reduce_scatter(elements)), 1e-3, "ms");
  print(rank, "all_gather 64 MiB", measure(1, all_gather(elements)), 1e-3, "ms");
  print(rank, "reduce_scatter 4 KiB", measure(small_calls, reduce_scatter(small_elements)), 1e-6,
        "us");
  print(rank, "all_gather 4 KiB", measure(small_calls, all_gather(small_elements)), 1e-6, "us");
  std::free(data);
  MPI_Finalize();
}
