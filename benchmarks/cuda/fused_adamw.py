#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""PyTorch's fused AdamW on a GPU, for comparison with cuda_benchmark: bytes per second by its count.

float32: 28 bytes an element. (PyTorch keeps no master weights, so its bfloat16 does less.)
"""
import statistics
import sys

try:
    import torch
except ImportError:
    sys.exit("skipped: PyTorch is not installed")
if not torch.cuda.is_available():
    sys.exit("skipped: PyTorch finds no GPU")

ELEMENTS = 1 << 26
parameter = torch.nn.Parameter(torch.zeros(ELEMENTS, device="cuda"))
parameter.grad = torch.zeros_like(parameter)
optimizer = torch.optim.AdamW([parameter], lr=1e-3, fused=True)
source = torch.zeros(1 << 27, device="cuda")
target = torch.zeros_like(source)


def seconds(work):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


optimizer.step()
speeds, limits = [], []
for _ in range(25):
    speeds.append(28 * ELEMENTS / seconds(optimizer.step))
    limits.append(2 * source.nbytes / seconds(lambda: target.copy_(source)))
ratios = [speed / limit for speed, limit in zip(speeds, limits)]
print(f"PyTorch {torch.__version__} fused AdamW, float32: of_copy={statistics.median(ratios):.3f} "
      f"GB_per_s={statistics.median(speeds) * 1e-9:.0f} copy_GB_per_s={statistics.median(limits) * 1e-9:.0f}")
