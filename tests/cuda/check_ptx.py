#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Check in the PTX of AdamW's kernels that a thread reads and writes 16 bytes at a time.

  check_ptx.py NVCC INCLUDE SOURCE

A thread updates 8 elements: 2 accesses of 16 bytes for each stream of 4-byte elements, 1 for one of 2-byte
elements; it loads 7 constants of 16 bytes. The compiler makes several copies of that, all alike.
"""
import re
import subprocess
import sys
import tempfile
from pathlib import Path

# {template arguments: (16-byte loads, 16-byte stores)}; constants, parameter or master, gradient, m, v.
EXPECTED = {
    "float, float": (7 + 2 * 4, 2 * 3),
    "bfloat16, bfloat16": (7 + 2 * 3 + 1, 2 * 3 + 1),
    "bfloat16, float": (7 + 2 * 4, 2 * 3 + 1),
}
WIDE = r"\.global(?:\.[a-z]+)*\.v4\.[ubfs]32|\.global(?:\.[a-z]+)*\.v2\.[ubfs]64"


def types_of(entry):
    tail = entry[entry.index("adamw") :]
    if tail.startswith("adamwEff"):
        return "float, float"
    return "bfloat16, float" if re.match(r"adamwENS\w*?bfloat16Ef", tail) else "bfloat16, bfloat16"


def main(nvcc, include, source):
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "adamw.ptx"
        subprocess.run([nvcc, "-std=c++20", "--expt-relaxed-constexpr", "-arch=sm_90", "-I", include, "-ptx", source,
                        "-o", ptx], check=True)
        text = ptx.read_text()
    found = {}
    for entry, body in re.findall(r"\.entry (\w*update_elements\w*adamw\w*)\((.*?)\n}\n", text, re.DOTALL):
        found[types_of(entry)] = (len(re.findall(r"\bld" + WIDE, body)), len(re.findall(r"\bst" + WIDE, body)))
    failed = False
    for types, (loads, stores) in EXPECTED.items():
        actual = found.get(types, (0, 0))
        copies = max(1, actual[1] // stores)
        failed = failed or actual != (copies * loads, copies * stores)
        print(f"adamw of {types}: expected {loads} loads and {stores} stores of 16 bytes in each of {copies} copies, "
              f"actual {actual[0]} and {actual[1]}")
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
