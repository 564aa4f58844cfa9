#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""PyTorch's fused AdamW on a GPU, for comparison with cuda_benchmark: bytes per second by its count.

float32: 28 bytes an element. bfloat16 parameter and gradient with float32 state: PyTorch's fused update takes one
type, so it is the gradient's cast, the update of float32 master weights, and the parameter's cast; counted as the
28 bytes an element that one pass moves.
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
master = torch.nn.Parameter(torch.zeros(ELEMENTS, device="cuda"))
master.grad = torch.zeros_like(master)
optimizer = torch.optim.AdamW([master], lr=1e-3, fused=True)
parameter = torch.zeros(ELEMENTS, device="cuda", dtype=torch.bfloat16)
gradient = torch.zeros_like(parameter)
source = torch.zeros(1 << 27, device="cuda")
target = torch.zeros_like(source)


def mixed():
    with torch.no_grad():
        master.grad.copy_(gradient)
        optimizer.step()
        parameter.copy_(master)


def seconds(work):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


for name, work in [("float32", optimizer.step), ("bfloat16 with float32 state", mixed)]:
    work()
    speeds, limits = [], []
    for _ in range(25):
        speeds.append(28 * ELEMENTS / seconds(work))
        limits.append(2 * source.nbytes / seconds(lambda: target.copy_(source)))
    ratios = [speed / limit for speed, limit in zip(speeds, limits)]
    print(f"PyTorch {torch.__version__} fused AdamW, {name}: of_copy={statistics.median(ratios):.3f} "
          f"GB_per_s={statistics.median(speeds) * 1e-9:.0f} copy_GB_per_s={statistics.median(limits) * 1e-9:.0f}")
