#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Check in the PTX of AdamW's kernels that a thread reads and writes 16 bytes at a time.

  check_ptx.py NVCC INCLUDE SOURCE

A thread updates a pack of 8 elements: 2 accesses of 16 bytes for each stream of 4-byte elements, 1 for one of
2-byte elements. It loads 7 constants of 16 bytes, and 2 smaller numbers: the multiplier of the gradient and
whether there is one. Whole packs go through CUB's transform: from sm_90 on its inputs come into shared memory,
one bulk copy for each stream, and the packs from there; before, they come from global memory. The compiler makes
several copies of a pack's code, all alike. What is left, and what isn't aligned, goes through CUB's loop, which
reads and writes packs too where it finds them.
"""
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CONSTANTS = 7
SMALL = 2
# {template arguments: (16-byte loads, 16-byte stores)}; gradient, parameter or master, m, v; m, v, master, parameter.
PACK = {
    "float, float": (2 * 4, 2 * 3),
    "bfloat16, bfloat16": (1 + 2 * 3, 2 * 3 + 1),
    "bfloat16, float": (2 * 4, 2 * 3 + 1),
}
WIDE = r"(?:\.[a-z]+)*\.(?:v4\.[ubfs]32|v2\.[ubfs]64)\b"


def expected_of(architecture, kernel, types):
    loads, stores = PACK[types]
    of_copy = {"wide stores": stores}
    if kernel == "loop":
        return {**of_copy, "wide global loads": CONSTANTS + loads}, {}
    of_copy |= {"stores": stores}
    if architecture < 90:
        return {**of_copy, "wide global loads": CONSTANTS + loads, "global loads": CONSTANTS + loads + SMALL}, {}
    of_copy |= {"wide global loads": CONSTANTS, "global loads": CONSTANTS + SMALL, "wide shared loads": loads}
    return of_copy, {"bulk copies": 4}


def count(body):
    def of(pattern):
        return len(re.findall(pattern, body))

    return {
        "wide stores": of(r"\bst\.global" + WIDE),
        "stores": of(r"\bst\.\w"),
        "wide global loads": of(r"\bld\.global" + WIDE),
        "global loads": of(r"\bld\.global\b"),
        "wide shared loads": of(r"\bld\.shared" + WIDE),
        "bulk copies": of(r"\bcp\.async\.bulk\.shared"),
    }


def types_of(entry):
    tail = entry[entry.index("adamw") :]
    if tail.startswith("adamwEff"):
        return "float, float"
    return "bfloat16, float" if re.match(r"adamwENS\w*?bfloat16Ef", tail) else "bfloat16, bfloat16"


def kernels_of(ptx):
    """{(kernel, types): counts} of each entry."""
    found = {}
    for part in re.split(r"\.entry ", ptx)[1:]:
        entry, body = part.split("(", 1)
        if "update_elements" in entry and "adamw" in entry:
            found["transform" if "transform_kernel" in entry else "loop", types_of(entry)] = count(body)
    return found


def compile_for(architecture, nvcc, include, source):
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "adamw.ptx"
        subprocess.run([nvcc, "-std=c++20", "--expt-relaxed-constexpr", f"-arch=sm_{architecture}", "-I", include,
                        "-ptx", source, "-o", ptx], check=True)
        return ptx.read_text()


def main(*arguments):
    failed = False
    for architecture in 80, 90, 100:
        found = kernels_of(compile_for(architecture, *arguments))
        for kernel in "transform", "loop":
            for types in PACK:
                of_copy, once = expected_of(architecture, kernel, types)
                actual = found.get((kernel, types), count(""))
                copies = max(1, actual["wide stores"] // of_copy["wide stores"])
                expected = {name: copies * number for name, number in of_copy.items()} | once
                wrong = [name for name, number in expected.items() if actual[name] != number]
                failed = failed or bool(wrong)
                print(f"sm_{architecture}, {kernel} of {types}, {copies} copies:",
                      ", ".join(f"{name} {actual[name]}" + (f" (expected {number})" if name in wrong else "")
                                for name, number in expected.items()))
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
