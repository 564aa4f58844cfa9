// SPDX-License-Identifier: MIT
#include "cost.hpp"

#include "digits.hpp"

namespace mlp {

std::vector<std::size_t> widths(settings const& settings) {
  std::vector<std::size_t> out{pixel_count};
  out.insert(out.end(), settings.hidden.begin(), settings.hidden.end());
  out.push_back(class_count);
  return out;
}

formula formula_of(settings const& settings, int stage, int rank) {
  formula out;
  auto const width = widths(settings);
  for (std::size_t u = 0; u + 1 < width.size(); ++u) {
    out.units.push_back({width[u] * width[u + 1], width[u + 1]});
  }
  out.ranks = static_cast<std::uint64_t>(settings.ranks);
  out.rank = static_cast<std::uint64_t>(rank);
  out.stage = stage;
  out.all_reduce = settings.stage1_all_reduce;
  out.reduce_per_microbatch = settings.policy(stage) == accumulate::reduce;
  out.keep_after_forward = settings.keep_after_forward;
  out.prefetch = settings.prefetch;
  out.microbatches = settings.microbatches;
  out.bucket_bytes = settings.bucket_bytes;
  out.p = out.b = out.r = settings.bf16 ? 2 : 4;
  out.g = 4;
  if (settings.device == device::cuda) {
    out.alignment_bytes = 256;
    out.sum_scratch_bytes = std::uint64_t{256} * 16;  // a sum for each of 256 blocks of threads
  }
  if (settings.communicator == communicator::nccl) {
    out.scratch_slots = out.ranks - 1;  // the other ranks', to be summed in order
    out.most_scratch_bytes = std::uint64_t{16} << 20U;
  }
  std::uint64_t const states = settings.optimizer == optimizer::sgd ? 1 : 2;
  out.o = 4 * (states + (settings.bf16 ? 1 : 0));  // the master weights
  out.hyperparameter_bytes = states == 1 ? 32 : 40;
  out.derived_bytes = states == 1 ? 64 : 112;
  return out;
}

byte_counts counts(zero::memory_bytes const& bytes) {
  return {.parameters = bytes[zero::category::parameters],
          .gradients = bytes[zero::category::gradients],
          .optimizer_state = bytes[zero::category::optimizer_state],
          .gathered_units = bytes[zero::category::gathered_units],
          .gradient_buckets = bytes[zero::category::gradient_buckets],
          .staging = bytes[zero::category::staging],
          .engine = bytes[zero::category::engine],
          .padding = bytes.padding};
}

std::uint64_t training_bytes(zero::traffic_bytes const& sent) {
  return sent[zero::traffic::gradients] + sent[zero::traffic::parameters] +
         sent[zero::traffic::recomputation] + sent[zero::traffic::mispredicted];
}

}  // namespace mlp
