// SPDX-License-Identifier: MIT
#include <zero/cuda.hpp>

#include <cstdio>
#include <stdexcept>

// A CUDA training loop whose tensors are raw device pointers: two blocks of 128 weights w, in ZeRO
// stage 3, on two ranks that share the current GPU.
//
//             rank 0               rank 1
//   block 0   owns w[0..63]        owns w[64..127]     a block and its gradient are whole on a
//   block 1   owns w[128..191]     owns w[192..255]    rank while the block's lease lives
//   samples   0, 2, 4, ... 254     1, 3, 5, ... 255
//
// Sample i has the features x(i, j) = +1 or -1, orthogonal columns, and the target
// sum_j (j + 1) x(i, j). The loss is half the mean squared error, so its gradient is w[j] - (j + 1)
// exactly: a step of 1/2 halves the distance, and after 8 steps w[j] = (j + 1) (1 - 1/256).
constexpr int ranks = 2, blocks = 2, block = 128;
constexpr int features = blocks * block, rows = features / ranks;

struct array {  // this engine's tensor
  float* data;
  std::size_t size;
};

template <>
struct zero::tensor_traits<array> {
  using value_type = float;
  using device = zero::cuda;
  static std::span<float> elements(array& a) { return {a.data, a.size}; }
  static void rebind(array& a, std::span<float> storage) { a = {storage.data(), storage.size()}; }
};

__device__ float x(int i, int j) { return __popc(i & j) % 2 == 0 ? 1.0F : -1.0F; }

// A thread for each of the rank's samples: error = -target, and then += what block b predicts.
__global__ void start(float* error, int rank) {
  int const row = static_cast<int>(threadIdx.x), i = row * ranks + rank;
  error[row] = 0;
  for (int j = 0; j < features; ++j) error[row] -= static_cast<float>(j + 1) * x(i, j);
}
__global__ void forward(int b, float const* w, float* error, int rank) {
  int const row = static_cast<int>(threadIdx.x), i = row * ranks + rank;
  for (int j = 0; j < block; ++j) error[row] += w[j] * x(i, b * block + j);
}

// A thread for each weight of block b: the mean over the rank's samples of error times feature.
__global__ void backward(int b, float const* error, float* gradient, int rank) {
  int const j = static_cast<int>(threadIdx.x);
  float sum = 0;
  for (int row = 0; row < rows; ++row) sum += error[row] * x(row * ranks + rank, b * block + j);
  gradient[j] = sum / rows;
}

void train(zero::loopback& comm) {
  int const rank = comm.rank();
  zero::cuda_stream own;  // any stream will do
  cudaStream_t const stream = own.native();
  auto* const error = static_cast<float*>(zero::cuda::allocate(rows * sizeof(float)));
  array w[blocks]{}, gradient[blocks]{};  // empty: zero gives them storage
  auto const zeros = [](std::span<float> out, std::size_t) { std::ranges::fill(out, 0.0F); };
  std::vector<std::vector<zero::typed_parameter<array, array>>> units;
  for (int b = 0; b < blocks; ++b) {
    units.push_back({zero::parameter("w" + std::to_string(b), w[b], gradient[b], {block}, zeros)});
  }
  zero::sgd const half{.learning_rate = 0.5};
  zero::options const here{.stream = stream};
  zero::sharded_model model{comm, units, zero::stage3{}, half, zero::reduce_per_microbatch{}, here};
  for (int step = 0; step < 8; ++step) {
    {
      auto micro = model.microbatch(0, 1);
      start<<<1, rows, 0, stream>>>(error, rank);
      for (int b = 0; b < blocks; ++b) {
        auto lease = micro.forward(b);  // w[b] is whole while it lives
        forward<<<1, rows, 0, stream>>>(b, w[b].data, error, rank);
      }
      for (int b = blocks; b-- > 0;) {
        auto lease = micro.backward(b);  // and gradient[b] has somewhere to go
        backward<<<1, block, 0, stream>>>(b, error, gradient[b].data, rank);
      }
    }
    model.step();
  }
  if (cudaGetLastError() != cudaSuccess) throw std::runtime_error{"a kernel could not be launched"};
  auto evaluation = model.evaluation();
  for (int b = 0; b < blocks; ++b) {
    auto lease = evaluation.forward(b);
    float whole[block];
    zero::cuda::download(own, std::span{w[b].data, w[b].size}, std::span{whole});
    if (rank == 0) std::printf("w[%d] = %f\n", b * block + 99, whole[99]);
  }
  zero::cuda::deallocate(error, rows * sizeof(float));
}

int main() try { zero::run_loopback(ranks, train); } catch (std::exception const& error) {
  std::fprintf(stderr, "cuda_loop: %s\n", error.what());
  return 1;
}
