"""Pack and unpack against memcpy.

    python benchmarks/bench_pack.py [--threads 1 2] [--iterations 15] [--cases resnet50 small2000] [--json PATH] [--plot PATH]

Gradients stream through six slots of 8 MiB, as they do in an all-reduce, with the non-finite check on. The yardstick is
the C library's memcpy of as many bytes (bytes read plus bytes written), with as many threads, through the same slots in
pieces of the same size, in turns with ours (what fits into the caches: in blocks of several passes, the first not counted):
a `ratio` of 1.00 is the speed of memcpy, and of 2.00 half of it. Each of its threads copies its share of every piece and waits
for no other, and only the longest thread's copying is counted: no launching, no joining. `_foreach_copy_` is torch's way to do
the same, between the gradients and views of the slots, with a second call for the division; on one thread only, since torch's
threads go on spinning into the turns of the others.
"""

import argparse
import ctypes
import itertools
import math
import statistics
import sys
import threading
import time
from collections.abc import Callable

import machine
import torch
from rows import Piece, Row, add_output_options, interleave, print_header, print_row, timings, write_output
from shapes import NAMES, count, load

from gradpack import _C

SLOT_BYTES = 8 << 20
NUM_SLOTS = 6
CACHE_BYTES = 32 << 20
BASELINE = "memcpy"
WIRES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

memcpy = ctypes.CDLL(None).memcpy
memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
memcpy.restype = ctypes.c_void_p


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


def spans_of(gradients: list[torch.Tensor], begin: int, end: int) -> list[torch.Tensor]:
    """The parts of the gradients that lie in a slice of their stream."""
    found, start = [], 0
    for gradient in gradients:
        first, last = max(begin - start, 0), min(end - start, gradient.numel())
        if first < last:
            found.append(gradient.view(-1)[first:last])
        start += gradient.numel()
    return found


class Stream:
    """Gradients, the slots they stream through, and two ways to move one piece between them.

    Args:
        case: Whose gradients.
        wire: The wire dtype.
        divisor: What unpacking divides by.
    """

    def __init__(self, case: str, wire: str, divisor: int) -> None:
        torch.manual_seed(1)
        self.gradients = [torch.randn(shape) for shape in load(case)]
        self.numel = count(load(case))
        self.wire = WIRES[wire]
        self.divisor = divisor
        counts = [gradient.numel() for gradient in self.gradients]
        self.arrays = _C.describe(self.gradients, "bench_pack", "gradients", None, "grad", "auto")
        self.plan = _C.Plan(self.arrays.key, len(counts), [("float32", wire, list(range(len(counts))), counts)])
        self.nonfinite = _C.Nonfinite(len(counts))
        self.slots = [_C.Buffer(SLOT_BYTES) for _ in range(NUM_SLOTS)]
        for slot in self.slots:
            ctypes.memset(slot.address, 0, SLOT_BYTES)
        self.pieces = slices(self.numel, SLOT_BYTES // self.wire.itemsize)
        # Made once, for each piece and slot: views are not what is measured.
        self.spans = [spans_of(self.gradients, begin, end) for begin, end in self.pieces]
        self.views = [[self.views_into(slot, spans) for slot in self.slots] for spans in self.spans]

    def views_into(self, slot: _C.Buffer, spans: list[torch.Tensor]) -> list[torch.Tensor]:
        sizes = [span.numel() for span in spans]
        return list(torch.frombuffer(slot, dtype=self.wire)[: sum(sizes)].split(sizes))

    def by_gradpack(self, piece: int, slot: int, pack: bool) -> None:
        begin, end = self.pieces[piece]
        if pack:
            self.plan.pack(self.arrays, 0, begin, end, self.slots[slot], 0, self.nonfinite)
        else:
            self.plan.unpack(self.arrays, 0, begin, end, self.slots[slot], 0, self.divisor, None, self.nonfinite)

    def by_torch(self, piece: int, slot: int, pack: bool) -> None:
        spans, views = self.spans[piece], self.views[piece][slot]
        if pack:
            torch._foreach_copy_(views, spans)
        else:
            torch._foreach_copy_(spans, views)
            torch._foreach_div_(spans, self.divisor)

    def whole(self, move: Callable[[int, int, bool], None], pack: bool) -> Callable[[], None]:
        """All pieces one after the other. Which slot is next outlives a pass: slots rotate on, as they do from call to call."""
        slots = itertools.cycle(range(NUM_SLOTS))

        def run() -> None:
            for piece in range(len(self.pieces)):
                move(piece, next(slots), pack)

        return run

    def wrong(self, move: Callable[[int, int, bool], None]) -> int:
        """Goes there and back once more, looking at every element."""
        originals = [torch.randn(gradient.shape) for gradient in self.gradients]
        torch._foreach_copy_(self.gradients, originals)
        wanted = torch.cat([original.reshape(-1) for original in originals]).to(self.wire)
        wrong = 0
        for piece, (begin, end) in enumerate(self.pieces):
            move(piece, 0, True)
            wrong += int((torch.frombuffer(self.slots[0], dtype=self.wire)[: end - begin] != wanted[begin:end]).sum())
            move(piece, 0, False)
        found = torch.cat([gradient.reshape(-1) for gradient in self.gradients])
        return wrong + int((found != wanted.float() / self.divisor).sum()) + len(self.nonfinite.indices())


def measure(case: str, wire: str, direction: str, divisor: int, num_threads: int, iterations: int) -> list[Row]:
    _C.set_num_threads(num_threads)
    torch.set_num_threads(1)
    stream, pack = Stream(case, wire, divisor), direction == "pack"
    moved = stream.numel * (4 + stream.wire.itemsize)
    # Written, since memory that never was is one page of zeros, in the cache.
    flat = torch.full((moved // 2,), 1, dtype=torch.uint8)
    threads = Memcpy(num_threads)
    slots = itertools.cycle(stream.slots)

    def yardstick() -> float:
        copies = []
        for begin, end in slices(moved // 2, SLOT_BYTES):
            slot, there = next(slots).address, flat.data_ptr() + begin
            copies.append((slot, there, end - begin) if pack else (there, slot, end - begin))
        return threads.run(copies)

    ways = {"gradpack": stream.by_gradpack}
    if num_threads == 1:
        ways["_foreach_copy_"] = stream.by_torch
    # Of what fits into the caches, several passes in a row, the first not counted: otherwise each side finds there what the other
    # left, and the ratio says who reads less instead of who reads faster.
    samples = interleave(
        [Piece(BASELINE, yardstick), *(Piece(name, stream.whole(move, pack)) for name, move in ways.items())],
        iterations,
        passes=1 if moved > CACHE_BYTES else 6,
    )
    threads.close()
    return [
        Row(
            case=case,
            piece=f"{direction if pack else f'unpack/{divisor}'} {name}",
            tensors=len(stream.gradients),
            bytes=stream.numel * 4,
            dtype="float32",
            wire=wire,
            transport="memory",
            ranks=1,
            threads=num_threads,
            bus_gb_per_s=None,
            wrong=stream.wrong(move),
            extra_bytes=None,
            baseline=BASELINE,
            **timings([samples[name]], [samples[BASELINE]], moved),
        )
        for name, move in ways.items()
    ]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Pack and unpack against memcpy.")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, _C.num_threads()])
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--cases", nargs="+", choices=NAMES, default=["resnet50", "small2000"], metavar="CASE")
    parser.add_argument("--wires", nargs="+", choices=sorted(WIRES), default=list(WIRES))
    add_output_options(parser)
    options = parser.parse_args(argv)

    states = [machine.state()]
    print(machine.describe(states[0]))
    print_header()
    rows = []
    for case in options.cases:
        for num_threads in sorted(set(options.threads)):
            for wire in options.wires:
                for direction, divisor in (("pack", 1), ("unpack", 2), ("unpack", 3)):
                    for row in measure(case, wire, direction, divisor, num_threads, options.iterations):
                        rows.append(row)
                        print_row(row)
    speeds = [1 / row.ratio for row in rows if row.piece.endswith("gradpack")]
    geometric = math.exp(statistics.fmean(math.log(speed) for speed in speeds))
    print(f"gradpack's lowest speed {min(speeds):.2f} of memcpy's, geometric mean {geometric:.2f}")
    write_output(options, states, rows)
    return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
