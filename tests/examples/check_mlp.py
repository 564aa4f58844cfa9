#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Run mlp as a user would and check what it says: check_mlp.py MLP DATA GROUP

The expected bytes are worked out here, from the widths and the settings, by none of the code that is
tested: neither zero's nor the example's.
"""

import json
import os
import pathlib
import pty
import re
import subprocess
import sys
import tempfile

MLP, DATA, GROUP = pathlib.Path(sys.argv[1]).resolve(), *sys.argv[2:4]
SMALL = ["--hidden", "24,24,24,24", "--epochs", "1", "--batch", "72"]


def check(condition, what):
    if not condition:
        sys.exit(f"check_mlp: expected {what}")


def run(*flags, cwd=None):
    return subprocess.run([MLP, *flags], capture_output=True, text=True, cwd=cwd, timeout=500)


def train(*flags):
    """The JSON of a run that succeeds, a dictionary a stage."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "out.json"
        done = run(*flags, "--json", str(file), cwd=folder)
        check(done.returncode == 0, f"status 0 of {flags}, actual {done.returncode}: {done.stderr}")
        check(done.stderr == "", f"no progress bar where there is no terminal, actual {done.stderr!r}")
        results = json.loads(file.read_text())
    for one in results:
        check_agreement(one, done.stdout)
    return results


CATEGORIES = ["parameters", "gradients", "optimizer_state", "gathered_units", "gradient_buckets",
              "staging", "engine"]


def check_agreement(one, table):
    """What holds in every run: planned, allocated and formula agree, and the table shows them."""
    for key in ["planned_bytes", "allocated_bytes", "formula_bytes"]:
        count = one[key]
        check(list(count) == CATEGORIES + ["padding", "peak"], f"all categories in {key}, actual {count}")
        check(count["peak"] == sum(count[c] for c in CATEGORIES) + count["padding"],
              f"a peak that is the sum, actual {count}")
        check(count == one["planned_bytes"], f"equal bytes, actual {one}")
        check(f"{count['peak']:,}" in table, f"{count['peak']:,} in the table:\n{table}")
    check(one["sent_bytes_per_step"] == one["formula_sent_bytes_per_step"], f"equal traffic, actual {one}")
    check(one["bind_peak_bytes"] >= one["planned_bytes"]["peak"], f"a peak while binding, actual {one}")
    check(one["seconds_per_step"] > 0, f"a time, actual {one}")
    check(one["parameter_checksum"] in table, f"{one['parameter_checksum']} in the table:\n{table}")


def same_bits(results, what):
    sums = {one["parameter_checksum"] for one in results}
    check(len(sums) == 1, f"the same parameters over {what}, actual {sums}")


def defaults():
    """96 % of the test set, in every stage, and the same bits."""
    results = train()
    check([one["stage"] for one in results] == [0, 1, 2, 3], "four stages")
    check([one["policy"] for one in results] == ["local", "local", "reduce", "reduce"], "those policies")
    same_bits(results, "stages")
    for one in results:
        check(one["ranks"] == 4, "four ranks")
        check(one["test_accuracy"] >= 0.96, f"96 %, actual {one['test_accuracy']}")


def memory():
    """Persistent bytes and traffic are those of Rajbhandari et al. (2020), worked out by hand."""
    # Widths that divide by everything, so that nothing is padded and every rank owns a quarter.
    flags = ["--hidden", "64,64,64", "--epochs", "1", "--accumulate", "local", "--prefetch", "0"]
    # Layers 0 to 2: 64 * 64 + 64 = 4160 = 4 * 1040 elements, a slice being 1040 = 65 * 16.
    # Layer 3: 64 * 10 + 10 = 650; a slice is 163 rounded up to 176, so rank 0 owns 176 of them.
    whole = 3 * 4160 + 650
    shard = 3 * 1040 + 176
    sent = 3 * shard  # elements: 3 peers
    # Padding: 4 * 176 - 650 = 54 elements of each whole layer 3, and what a step keeps beside tensors: state,
    # hyperparameters, 7 vectors a parameter, counts, flags, messages and sums, 1456 bytes, to a multiple of 64.
    beside = 96 + 48 + 8 * 112 + 64 + 2 * 16 + 5 * (48 + 16) + 16
    padding = [54 * wholes + beside // 4 for wholes in [4, 2, 2, 1]]
    want = {0: (whole, whole, 2 * whole, 0, padding[0], 2 * sent),
            1: (whole, whole, 2 * shard, 0, padding[1], 2 * sent),
            2: (whole, whole, 2 * shard, 0, padding[2], 2 * sent),
            3: (shard, whole, 2 * shard, 4160, padding[3], 3 * sent)}
    for one in train(*flags):
        bytes_of = one["allocated_bytes"]
        actual = tuple(bytes_of[c] // 4 for c in ["parameters", "gradients", "optimizer_state",
                                                   "gathered_units", "padding"])
        actual += (one["sent_bytes_per_step"] // 4,)
        check(actual == want[one["stage"]], f"{want[one['stage']]} in stage {one['stage']}, actual {actual}")
        check(one["parameters"] == whole, f"{whole} parameters, actual {one['parameters']}")

    # bf16: 2 bytes a parameter, 4 a reduced gradient, 12 of state; 32 elements are 64 bytes.
    shard = 3 * 1056 + 192
    results = train(*flags[:-4], "--accumulate", "reduce", "--precision", "bf16", "--prefetch", "0")
    for one in results:
        bytes_of = one["allocated_bytes"]
        stage = one["stage"]
        want = (2 * (shard if stage == 3 else whole), 4 * (whole if stage == 0 else shard),
                12 * (whole if stage == 0 else shard), 2 * 2 * 4160)
        actual = tuple(bytes_of[c] for c in ["parameters", "gradients", "optimizer_state",
                                              "gradient_buckets"])
        check(actual == want, f"{want} in stage {stage} with bf16, actual {actual}")


def bits():
    """The checksum depends on ranks, micro-batches, policy, precision and clipping, on nothing else."""
    seen = set()
    short = ["--hidden", "24,24,24,24", "--epochs", "1", "--batch", "144"]
    for ranks in ["1", "2", "3", "4", "8"]:
        for precision in ["fp32", "bf16"]:
            for policy in ["local", "reduce"]:
                sums = []
                for clip in [[], ["--clip", "0.5"]]:
                    flags = [*short, "--ranks", ranks, "--microbatches", "3", "--precision", precision,
                             "--accumulate", policy, *clip]
                    results = train(*flags)
                    results += train(*flags, "--bucket-bytes", "4000", "--prefetch", "3", "--overlap", "off",
                                     "--keep-after-forward", "--stage1", "all-reduce")
                    same_bits(results, f"stages with {flags}")
                    sums.append(results[0]["parameter_checksum"])
                check(sums[0] != sums[1], f"parameters that depend on clipping, actual {sums} with {flags}")
                seen.update(sums)
    check(len(seen) > 30, f"parameters that depend on ranks, precision and policy, actual {len(seen)} of 40")
    losses = [train(*SMALL, "--microbatches", "3", "--accumulate", policy, "--stage", "2")[0]["loss"]
              for policy in ["local", "reduce"]]
    check(abs(losses[0] - losses[1]) < 1e-3, f"policies that agree within rounding, actual {losses}")
    same_bits(train(*SMALL) + train(*SMALL, "--bucket-bytes", "100000000", "--prefetch", "100"), "one bucket")


def progress_bar():
    """On a terminal, each stage draws a bar that fills, and is cleared at the end."""
    master, terminal = pty.openpty()
    with subprocess.Popen([MLP, *SMALL], stdout=subprocess.PIPE, stderr=terminal) as process:
        os.close(terminal)
        drawn = b""
        try:
            while part := os.read(master, 4096):
                drawn += part
        except OSError:  # where the other end is closed
            pass
        table = process.communicate(timeout=500)[0]
    os.close(master)
    check(process.returncode == 0, f"status 0 on a terminal, actual {process.returncode}: {drawn!r}")
    check(b"stage 3" in table and b"\x1b" not in table, f"a table without a bar, actual {table!r}")
    for stage, bar in enumerate(drawn.decode().split("\r\x1b[K")[:-1]):
        percents = []
        for line in bar.split("\r")[1:]:
            found = re.fullmatch(rf"stage {stage} \[(#*)( *)\] +(\d+) %  loss \d+\.\d{{4}}", line)
            check(found, f"a bar of stage {stage}, actual {line!r}")
            percents.append(int(found[3]))
            check((len(found[1]), len(found[2])) == (percents[-1] // 2, 50 - percents[-1] // 2),
                  f"a bar of {percents[-1]} %, actual {line!r}")
        check(percents == sorted(percents) and len(percents) > 10 and percents[-1] == 100,
              f"a bar that fills, actual {percents}")
    check(drawn.count(b"\r\x1b[K") == 4 and drawn.endswith(b"\r\x1b[K"), f"four bars, actual {drawn!r}")


def settings():
    """Every optimizer, more ranks than elements of a layer, a batch smaller than the ranks, a terminal."""
    progress_bar()
    for optimizer in ["sgd", "adam", "adamw"]:
        results = train(*SMALL, "--optimizer", optimizer)
        same_bits(results, f"stages with {optimizer}")
        check(results[0]["optimizer"] == optimizer, optimizer)
    same_bits(train("--hidden", "1", "--ranks", "13", "--epochs", "1", "--batch", "700"), "13 ranks")
    same_bits(train("--hidden", "3", "--ranks", "8", "--epochs", "1", "--batch", "5", "--microbatches", "2",
                    "--accumulate", "reduce"), "a batch of 5 for 8 ranks")
    first, again, other = (train(*SMALL, "--stage", "1", "--seed", seed)[0]["parameter_checksum"]
                           for seed in ["1", "1", "2"])
    check(first == again != other, "parameters that depend on the seed")


def cuda():
    """On CUDA devices: the accuracy of the host, and one checksum over stages."""
    started = run("--device", "cuda", "--stage", "0", *SMALL)
    if "expected a GPU" in started.stderr:
        refuse(1, ["--device", "cuda"], "--device cuda", "expected a GPU")
        print(f"skipped: {started.stderr.strip()}")
        sys.exit(77)
    flags = ["--ranks", "2", "--epochs", "1"]
    host = train(*flags)
    device = train(*flags, "--device", "cuda", "--communicator", "loopback")
    same_bits(host, "stages on the host")
    same_bits(device, "stages on the device")
    for one, other in zip(host, device):
        check((one["device"], one["communicator"]) == ("host", "threads"), "threads on the host")
        check((other["device"], other["communicator"]) == ("cuda", "loopback"), "loopback on the device")
        check(abs(one["test_accuracy"] - other["test_accuracy"]) < 0.02,
              f"equal accuracies, actual {one['test_accuracy']} and {other['test_accuracy']}")
        check(abs(one["loss"] - other["loss"]) < 0.02, f"equal losses, actual {one['loss']} and {other['loss']}")
    for ranks, precision, policy in [("2", "bf16", "local"), ("3", "fp32", "reduce")]:
        flags = [*SMALL, "--device", "cuda", "--ranks", ranks, "--microbatches", "2", "--precision", precision,
                 "--accumulate", policy, "--clip", "0.5"]
        same_bits(train(*flags) + train(*flags, "--stage", "3", "--bucket-bytes", "4000", "--overlap", "off",
                                        "--keep-after-forward"), f"stages with {flags}")
    same_bits(train("--hidden", "3", "--ranks", "4", "--epochs", "1", "--batch", "3", "--stage", "1",
                    "--device", "cuda") +
              train("--hidden", "3", "--ranks", "4", "--epochs", "1", "--batch", "3", "--stage", "3",
                    "--device", "cuda"), "stages where ranks have no sample")
    flags = [*SMALL, "--device", "cuda", "--stage", "3", "--communicator"]
    if "without" in run(*flags, "nccl", "--ranks", "1").stderr:
        refuse(1, [*flags, "nccl"], "--communicator nccl", "expected a build with NCCL")
    else:
        one_gpu = "cudaErrorInvalidDevice" in run(*flags, "nccl", "--ranks", "2").stderr
        # The largest layer: 64 * 24 + 24 = 1560 elements; half of them, rounded up to 64, are 832.
        # NCCL receives the other rank's slice in a scratch of 832 * 4 bytes, 13 times 256.
        for ranks, scratch in [("1", 0)] if one_gpu else [("1", 0), ("2", 3328)]:
            results = [train(*flags, one, "--ranks", ranks)[0] for one in ["loopback", "nccl"]]
            same_bits(results, f"communicators of {ranks} rank(s)")
            staging = [one["allocated_bytes"]["staging"] for one in results]
            check(staging == [0, scratch], f"[0, {scratch}] bytes of staging, actual {staging}")
        refuse(1, [*flags, "nccl", "--ranks", "64"], "cudaSetDevice", "cudaErrorInvalidDevice", "(rank ")
    refuse(2, ["--device", "cuda", "--communicator", "threads"], "--communicator", "expected loopback|nccl",
           "actual threads")


def race():
    """The training loop with overlap, as short as it can be for ThreadSanitizer: over each communicator of
    CUDA devices, in every stage, with both policies."""
    flags = ["--device", "cuda", "--ranks", "3", "--hidden", "8,8,8", "--epochs", "1", "--batch", "240",
             "--microbatches", "2", "--clip", "0.5"]
    available = ["loopback"]
    if "without" not in run(*flags, "--stage", "0", "--communicator", "nccl").stderr:
        available.append("nccl")
    for policy in ["local", "reduce"]:
        results = []
        for communicator in available:
            results += train(*flags, "--accumulate", policy, "--communicator", communicator)
        check(len(results) == 4 * len(available), "every stage")
        same_bits(results, f"stages and communicators, {policy}")


def refuse(status, flags, *texts):
    done = run(*flags)
    check(done.returncode == status, f"status {status} of {flags}, actual {done.returncode}: {done.stderr}")
    check(done.stderr.count("\n") == 1, f"one line about {flags}, actual {done.stderr!r}")
    check(done.stdout == "", f"nothing but the error, actual {done.stdout!r}")
    for text in texts:
        check(text in done.stderr, f"{text!r} about {flags}, actual {done.stderr!r}")


def errors():
    """Bad flags and bad files: one line that names what is wrong, expected and actual."""
    for flag, value in [("--ranks", "0"), ("--ranks", "-2"), ("--ranks", "four"), ("--stage", "4"),
                        ("--stage", "-1"), ("--microbatches", "0"), ("--accumulate", "both"),
                        ("--precision", "fp8"), ("--optimizer", "lion"), ("--learning-rate", "nan"),
                        ("--learning-rate", "-1"), ("--learning-rate", "inf"), ("--clip", "nan"),
                        ("--clip", "-0.5"), ("--prefetch", "-1"), ("--stage1", "gather"),
                        ("--bucket-bytes", "-1"), ("--bucket-bytes", "1e3"), ("--hidden", "0"),
                        ("--hidden", "8,0"), ("--hidden", "wide"), ("--batch", "0"), ("--epochs", "0"),
                        ("--seed", "-1"), ("--overlap", "maybe"), ("--device", "tpu"),
                        ("--communicator", "mpi"), ("--communicator", "nccl"), ("--communicator", "loopback")]:
        refuse(2, [f"{flag}={value}"], flag, "expected", "actual", value.split(",")[-1])
    refuse(1, ["--device", "cuda"], "--device cuda", "expected", "CUDA compiler", "actual")
    refuse(2, ["--ranks"], "--ranks")
    refuse(2, ["--width", "3"], "--width")
    refuse(2, ["digits.csv"], "digits.csv")
    done = run("--help")
    check(done.returncode == 0 and "--keep-after-forward" in done.stdout, "help on standard output")

    with tempfile.TemporaryDirectory() as folder:
        good = pathlib.Path(DATA).read_text().splitlines()
        file = pathlib.Path(folder) / "bad.csv"

        def refuse_file(lines, *texts):
            file.write_text("\n".join(lines) + "\n" if lines else "")
            refuse(1, ["--data", str(file), *SMALL], str(file), "expected", "actual", "(rank ", *texts)

        refuse(1, ["--data", folder + "/none.csv"], "none.csv", "expected", "actual", "No such file", "(rank ")
        refuse(1, ["--data", folder], folder, "expected", "actual")
        refuse_file([], "at least 5 lines", "actual 0")
        refuse_file(good[:4], "at least 5 lines", "actual 4")
        refuse_file(good[:7] + [good[7].rsplit(",", 1)[0]], "line 8", "65 columns", "actual 64")
        refuse_file(good[:7] + [good[7] + ",1"], "line 8", "65 columns", "actual 66")
        refuse_file(good[:2] + ["x" + good[2]] + good[3:], "line 3", "column 1", "from 0 to 16", '"x0"')
        refuse_file(["17" + good[0][1:]] + good[1:], "line 1", "column 1", "from 0 to 16", '"17"')
        refuse_file(good[:-1] + [good[-1].rsplit(",", 1)[0] + ",10"], f"line {len(good)}", "column 65",
                    "from 0 to 9", '"10"')
        refuse_file(good[:9] + ["-1" + good[9][1:]], "line 10", '"-1"')
        refuse_file(good[:9] + ["1.5" + good[9][1:]], "line 10", '"1.5"')
        refuse_file(good[:9] + [good[9].replace(",", ",,", 1)], "line 10", "actual 66")
        refuse_file(good[:9] + ["", good[9]], "line 10", "blank")
        refuse_file(good[:9] + ['"' + good[9]], "line 10", "quotation")
        refuse(1, ["--json", folder + "/none/out.json"], "--json", "none/out.json")
        file.write_text("\r\n".join(good) + "\r\n")  # as Windows writes it
        same_bits(train("--data", str(file), "--stage", "0", *SMALL) + train("--stage", "0", *SMALL),
                  "line endings")


globals()[GROUP]()
