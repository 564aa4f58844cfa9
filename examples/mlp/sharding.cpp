// SPDX-License-Identifier: MIT
#include "sharding.hpp"

namespace mlp {

zero::stage stage_of(settings const& settings, int stage) {
  switch (stage) {
    case 0: return zero::stage0{};
    case 1:
      return zero::stage1{.gradients = settings.stage1_all_reduce
                                           ? zero::gradient_collective::all_reduce
                                           : zero::gradient_collective::reduce_scatter};
    case 2: return zero::stage2{};
    default:
      return zero::stage3{.prefetch = settings.prefetch,
                          .keep_after_forward = settings.keep_after_forward};
  }
}

zero::accumulation policy_of(settings const& settings, int stage) {
  if (settings.policy(stage) == accumulate::local) {
    return zero::local_accumulate{};
  }
  return zero::reduce_per_microbatch{};
}

zero::options options_of(settings const& settings) {
  zero::options out;
  if (settings.clip > 0) {
    out.clip_norm = settings.clip;
  }
  out.bucket_bytes = settings.bucket_bytes;
  out.overlap = settings.overlap;
  out.precision = settings.bf16 ? zero::bf16 : zero::fp32;
  return out;
}

}  // namespace mlp
