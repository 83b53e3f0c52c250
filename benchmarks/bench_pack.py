"""Pack and unpack against memcpy.

    python benchmarks/bench_pack.py [--threads 1 2] [--iterations 15] [--cases resnet50 small2000] [--json PATH]

Gradients stream through three slots of 16 MiB, as they do in an all-reduce, with the non-finite check on. The yardstick is
the C library's memcpy of as many bytes (bytes read plus bytes written), with as many threads, through the same slots in
pieces of the same size, alternating with ours (what fits into the caches: in
blocks of several passes, the first not counted): `ratio` is the median over iterations of its time over ours, so 1.00 is the
speed of memcpy. Each of its threads copies its share of every piece and waits for no other, and only the longest thread's
copying is counted: no launching, no joining.
"""

import argparse
import ctypes
import json
import math
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from gradpack import _C

SLOT_BYTES = 16 << 20
NUM_SLOTS = 3
CACHE_BYTES = 32 << 20
WIRES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

memcpy = ctypes.CDLL(None).memcpy
memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
memcpy.restype = ctypes.c_void_p


def resnet50_shapes() -> list[tuple[int, ...]]:
    """The shapes of torchvision's ResNet-50 parameters, in order."""
    shapes: list[tuple[int, ...]] = []

    def conv_and_norm(inputs: int, outputs: int, kernel: int) -> None:
        shapes.extend([(outputs, inputs, kernel, kernel), (outputs,), (outputs,)])

    conv_and_norm(3, 64, 7)
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            conv_and_norm(channels, width, 1)
            conv_and_norm(width, width, 3)
            conv_and_norm(width, width * 4, 1)
            if block == 0:
                conv_and_norm(channels, width * 4, 1)
            channels = width * 4
    shapes.extend([(1000, 2048), (1000,)])
    return shapes


CASES: dict[str, Callable[[], list[tuple[int, ...]]]] = {
    "resnet50": resnet50_shapes,
    "small2000": lambda: [(1000,)] * 2000,
}


class Memcpy:
    """Copies between a flat array and the slots with a fixed set of threads."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self.copies: list[tuple[int, int, int]] = []
        self.seconds = [0.0] * num_threads
        self.stop = False
        self.begin = threading.Barrier(num_threads)
        self.end = threading.Barrier(num_threads)
        self.workers = [threading.Thread(target=self.serve, args=(i,), daemon=True) for i in range(1, num_threads)]
        for worker in self.workers:
            worker.start()

    def share(self, thread: int) -> None:
        began = time.perf_counter()
        for to, source, nbytes in self.copies:
            first, last = (nbytes * k // self.num_threads // 64 * 64 for k in (thread, thread + 1))
            if thread + 1 == self.num_threads:
                last = nbytes
            memcpy(to + first, source + first, last - first)
        self.seconds[thread] = time.perf_counter() - began

    def serve(self, thread: int) -> None:
        while True:
            self.begin.wait()
            if self.stop:
                return
            self.share(thread)
            self.end.wait()

    def run(self, copies: list[tuple[int, int, int]]) -> float:
        self.copies = copies
        self.begin.wait()
        self.share(0)
        self.end.wait()
        return max(self.seconds)

    def close(self) -> None:
        self.stop = True
        self.begin.wait()
        for worker in self.workers:
            worker.join()


def slices(total: int, most: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + most, total)) for begin in range(0, total, most)]


def measure(case: str, wire: str, direction: str, divisor: int, num_threads: int, iterations: int) -> dict[str, Any]:
    torch.manual_seed(1)
    gradients = [torch.randn(shape) for shape in CASES[case]()]
    originals = [gradient.clone() for gradient in gradients]
    numel = sum(gradient.numel() for gradient in gradients)
    wire_size = WIRES[wire].itemsize
    moved = numel * (4 + wire_size)

    _C.set_num_threads(num_threads)
    arrays = _C.describe(gradients, "bench_pack", "gradients", None, "grad", "auto")
    counts = [gradient.numel() for gradient in gradients]
    plan = _C.Plan(arrays.key, len(gradients), [("float32", wire, list(range(len(gradients))), counts)])
    nonfinite = _C.Nonfinite(len(gradients))
    slots = [_C.Buffer(SLOT_BYTES) for _ in range(NUM_SLOTS)]
    for slot in slots:
        ctypes.memset(slot.address, 0, SLOT_BYTES)

    # What a slot holds, and where the next piece goes, outlive a pass: slots rotate on, as they do from call to call.
    pieces = slices(numel, SLOT_BYTES // wire_size)
    turn = 0

    def ours() -> float:
        nonlocal turn
        began = time.perf_counter()
        for begin, end in pieces:
            slot = slots[turn % NUM_SLOTS]
            turn += 1
            if direction == "pack":
                plan.pack(arrays, 0, begin, end, slot, 0, nonfinite)
            else:
                plan.unpack(arrays, 0, begin, end, slot, 0, divisor, None, nonfinite)
        return time.perf_counter() - began

    flat = torch.full((moved // 2,), 1, dtype=torch.uint8)  # written: unwritten memory is one page of zeros, in the cache
    threads = Memcpy(num_threads)
    yardstick_turn = 0

    def yardstick() -> float:
        nonlocal yardstick_turn
        copies = []
        for begin, end in slices(moved // 2, SLOT_BYTES):
            slot = slots[yardstick_turn % NUM_SLOTS].address
            yardstick_turn += 1
            there = flat.data_ptr() + begin
            copies.append((slot, there, end - begin) if direction == "pack" else (there, slot, end - begin))
        return threads.run(copies)

    times, ratios = [], []
    # Of what fits into the caches, several passes in a row, the first not counted: otherwise each side finds there what the other
    # left, and the ratio says who reads less instead of who reads faster.
    passes = 1 if moved > CACHE_BYTES else 6
    for iteration in range(iterations + 2):
        copied, packed = (sum([side() for _ in range(passes)][min(1, passes - 1) :]) for side in (yardstick, ours))
        if iteration >= 2:
            times.append(packed / max(1, passes - 1))
            ratios.append(copied / packed)
    threads.close()

    # Once more, looking at every element.
    wrong = 0
    wanted = torch.cat([original.reshape(-1) for original in originals]).to(WIRES[wire])
    for gradient, original in zip(gradients, originals, strict=True):
        gradient.copy_(original)
    for begin, end in pieces:
        plan.pack(arrays, 0, begin, end, slots[0], 0, nonfinite)
        packed_slice = torch.frombuffer(slots[0], dtype=WIRES[wire])[: end - begin]
        wrong += int((packed_slice != wanted[begin:end]).sum())
        plan.unpack(arrays, 0, begin, end, slots[0], 0, divisor, None, nonfinite)
    unpacked = torch.cat([gradient.reshape(-1) for gradient in gradients])
    wrong += int((unpacked != wanted.float() / divisor).sum()) + len(nonfinite.indices())

    median = statistics.median(times)
    return {
        "case": case,
        "tensors": len(gradients),
        "bytes": numel * 4,
        "dtype": "float32",
        "wire": wire,
        "direction": direction if direction == "pack" else f"unpack/{divisor}",
        "threads": num_threads,
        "min_ms": min(times) * 1e3,
        "median_ms": median * 1e3,
        "gb_per_s": moved / median / 1e9,
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "wrong": wrong,
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Pack and unpack against memcpy.")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, _C.num_threads()])
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--wires", nargs="+", choices=sorted(WIRES), default=list(WIRES))
    parser.add_argument("--json", metavar="PATH", help="write the rows there too")
    options = parser.parse_args(argv)

    print(f"simd {_C.simd_name()}, {platform.machine()}, torch {torch.__version__}")
    header = (
        f"{'case':<10} {'dtype->wire':<18} {'direction':<9} {'threads':>7} {'min ms':>8} {'med ms':>8} {'GB/s':>6} {'ratio':>5}"
    )
    print(header + f" {'(min-max)':>11} {'wrong':>5}")
    rows = []
    for case in options.cases:
        for num_threads in sorted(set(options.threads)):
            for wire in options.wires:
                for direction, divisor in (("pack", 1), ("unpack", 2), ("unpack", 3)):
                    row = measure(case, wire, direction, divisor, num_threads, options.iterations)
                    rows.append(row)
                    print(
                        f"{case:<10} {'float32->' + wire:<18} {row['direction']:<9} {num_threads:>7} {row['min_ms']:>8.3f}"
                        f" {row['median_ms']:>8.3f} {row['gb_per_s']:>6.1f} {row['ratio']:>5.2f}"
                        f" {row['ratio_min']:>5.2f}-{row['ratio_max']:<5.2f} {row['wrong']:>5}",
                        flush=True,
                    )
    geometric = math.exp(statistics.fmean(math.log(row["ratio"]) for row in rows))
    print(f"lowest ratio {min(row['ratio'] for row in rows):.2f}, geometric mean {geometric:.2f}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"simd": _C.simd_name(), "torch": torch.__version__, "rows": rows}, file, indent=1)
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
