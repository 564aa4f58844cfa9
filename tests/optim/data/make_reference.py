#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Write the files beside this one: ten steps of PyTorch's optimizers on fixed gradients.

    python3 -m pip install torch && python3 make_reference.py

A file holds words and numbers between white space: `elements N steps S states K`, `initial` and
N parameters, then for every step `gradient`, `parameter` and K times `state`, each followed by N
numbers, which for parameter and states are those after the step. Made with PyTorch 2.15.0.
"""

import pathlib

import torch

ELEMENTS = 11
STEPS = 10
FOLDER = pathlib.Path(__file__).resolve().parent

SGD_STATES = ["momentum_buffer"]
ADAM_STATES = ["exp_avg", "exp_avg_sq"]
ADAM = dict(lr=0.01, betas=(0.9, 0.99), eps=1e-8)
CASES = {
    "sgd_plain": (torch.optim.SGD, dict(lr=0.1), []),
    "sgd_plain_decay": (torch.optim.SGD, dict(lr=0.1, weight_decay=0.01), []),
    "sgd_momentum": (torch.optim.SGD, dict(lr=0.1, momentum=0.9), SGD_STATES),
    "sgd_nesterov": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, nesterov=True), SGD_STATES),
    "sgd_decay": (
        torch.optim.SGD,
        dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        SGD_STATES,
    ),
    "adam": (torch.optim.Adam, dict(**ADAM), ADAM_STATES),
    "adam_decay": (torch.optim.Adam, dict(**ADAM, weight_decay=0.1), ADAM_STATES),
    "adamw": (torch.optim.AdamW, dict(**ADAM, weight_decay=0.1), ADAM_STATES),
}


def inputs():
    """Parameters and gradients of several magnitudes and zero, the same for every case."""
    generator = torch.Generator().manual_seed(20)
    scale = torch.tensor([1, 1, 1, 1e-3, 1e-3, 1e-6, 1e-7, 1e2, 1e3, 1, 0], dtype=torch.float64)
    initial = torch.randn(ELEMENTS, generator=generator, dtype=torch.float64)
    gradients = torch.randn(STEPS, ELEMENTS, generator=generator, dtype=torch.float64) * scale
    gradients[4] = 0
    return initial, gradients


def line(word, values):
    digits = 17 if values.dtype == torch.float64 else 9
    return " ".join([word] + [f"{v:.{digits}g}" for v in values.tolist()])


def write(name, optimizer, options, states, master_type, parameter_type, gradient_type):
    initial, gradients = inputs()
    initial = initial.to(parameter_type)
    gradients = gradients.to(gradient_type)
    master = torch.nn.Parameter(initial.to(master_type))
    update = optimizer([master], foreach=False, **options)
    lines = [f"elements {ELEMENTS} steps {STEPS} states {len(states)}", line("initial", initial)]
    for gradient in gradients:
        master.grad = gradient.to(master_type)
        update.step()
        lines.append(line("gradient", gradient))
        lines.append(line("parameter", master.detach().to(parameter_type)))
        lines += [line("state", update.state[master][state]) for state in states]
    (FOLDER / f"{name}.txt").write_text("\n".join(lines) + "\n")


for case, (optimizer, options, states) in CASES.items():
    for suffix, dtype in [("float32", torch.float32), ("float64", torch.float64)]:
        write(f"{case}_{suffix}", optimizer, options, states, dtype, dtype, dtype)
optimizer, options, states = CASES["adamw"]
for suffix, dtype in [("bfloat16", torch.bfloat16), ("float16", torch.float16)]:
    write(f"adamw_{suffix}", optimizer, options, states, torch.float32, dtype, dtype)
