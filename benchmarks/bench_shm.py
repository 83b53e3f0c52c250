"""Shared memory: how long the smallest call takes, and which chunks, slots, stores and ways are best, beside the memory bound.

Run it with torchrun::

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/bench_shm.py latency
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/bench_shm.py chunks --models resnet50 small2000
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 benchmarks/bench_shm.py ways --models resnet50
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import machine
import torch
import torch.distributed as dist
from rows import Piece, interleave
from shapes import NAMES, count, load

import gradpack
from gradpack import _C, groups
from gradpack.transports import shm_meeting

NEVER = 1 << 40


@dataclass(frozen=True)
class Setting:
    """How a group's segment is cut, and what its leader chooses.

    Attributes:
        slots: Of a ring.
        slot_kib: Size of one, and of the chunks that go through it.
        sharded: Chunks of so many bytes and more go the sharded way.
        past_caches: Whether gradients are written with streaming stores.
    """

    slots: int
    slot_kib: int
    sharded: int = 16 << 10
    past_caches: bool = False

    def __str__(self) -> str:
        way = {0: " sharded", NEVER: " symmetric"}.get(self.sharded, "")
        return f"{self.slots} x {self.slot_kib} KiB{way}{' streamed' if self.past_caches else ''}"


def group_of(setting: Setting) -> dist.ProcessGroup:
    """A group whose first call is done."""
    group = dist.new_group(list(range(dist.get_world_size())))
    shm_meeting.SLOTS, shm_meeting.SLOT_BYTES = setting.slots, setting.slot_kib << 10
    gradpack.allreduce([torch.zeros(1)], group=group)
    channel = groups.resolve("bench", group)._resources["transport"]._channel
    channel.set_tuning(setting.slot_kib << 10, setting.sharded, setting.past_caches)
    return group


def compare(models: Sequence[str], settings: Sequence[Setting], options: argparse.Namespace) -> None:
    """Every setting beside a pass over the same memory where it is."""
    made = {str(setting): group_of(setting) for setting in settings}
    for model in models:
        shapes = load(model)
        buffer = torch.zeros(count(shapes))
        grads = [torch.zeros(shape) for shape in shapes]
        ones = [torch.ones(shape) for shape in shapes]

        def reduce(group: dist.ProcessGroup, grads: list[torch.Tensor] = grads) -> None:
            gradpack.allreduce(grads, compress=options.compress, group=group)

        def fill(grads: list[torch.Tensor] = grads, ones: list[torch.Tensor] = ones) -> None:
            torch._foreach_copy_(grads, ones)

        def scale(buffer: torch.Tensor = buffer) -> None:
            buffer.mul_(1.0)

        pieces = [Piece("scale in place", scale, partial(buffer.fill_, 1.0))]
        pieces += [Piece(name, partial(reduce, group), fill) for name, group in made.items()]
        samples = interleave(pieces, options.iterations, warmup=3, ready=dist.barrier)
        slowest = {name: slowest_rank(found.seconds) for name, found in samples.items()}
        if dist.get_rank() == 0:
            bound = slowest["scale in place"]
            print(f"{model}, {4 * count(shapes):,} bytes, compress={options.compress}; medians, and of ratios to the first")
            for name, seconds in slowest.items():
                ratio = statistics.median(mine / its for mine, its in zip(seconds, bound, strict=True))
                print(f"  {name:<28} {1e3 * statistics.median(seconds):8.3f} ms  {ratio:5.2f}", flush=True)


def slowest_rank(seconds: Sequence[float]) -> list[float]:
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return list(found.tolist())


def latency(options: argparse.Namespace) -> None:
    """One float: calls in a row, since a barrier before each would cost more than they do."""
    rank, grad = dist.get_rank(), torch.ones(1)
    group = group_of(Setting(4, 256))
    channel = groups.resolve("bench", group)._resources["transport"]._channel
    described = _C.describe([grad], "bench", "grads", None, "grad", "auto")
    plan = _C.Plan(described.key, 1, [("float32", "float32", [0], [1])])
    header = bytes(640)

    def bare() -> None:
        channel.begin(header, plan, described, None, 2)
        channel.advance(time.monotonic() + 10)

    def in_a_row(call: Callable[[], object]) -> Callable[[], float]:
        def run() -> float:
            began = time.perf_counter()
            for _ in range(options.calls):
                call()
            return (time.perf_counter() - began) / options.calls

        return run

    pieces = {
        "the channel alone": bare,
        "gradpack.allreduce": lambda: gradpack.allreduce([grad], group=group),
        "gradpack.barrier": lambda: gradpack.barrier(group=group),
        "torch's all_reduce (gloo)": lambda: dist.all_reduce(grad),
    }
    # After a call that has agreed, so that the bare ones are on the same step on all ranks.
    samples = interleave(
        [Piece(name, in_a_row(call)) for name, call in pieces.items()], options.iterations, warmup=2, ready=dist.barrier
    )
    if rank == 0:
        print(f"one float, {dist.get_world_size()} ranks, {options.calls} calls in a row: median (least) of a call")
        for name, found in samples.items():
            print(f"  {name:<28} {1e6 * statistics.median(found.seconds):8.1f} µs ({1e6 * min(found.seconds):.1f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["latency", "chunks", "ways"])
    parser.add_argument("--models", nargs="+", choices=NAMES, default=["resnet50"])
    parser.add_argument("--compress", choices=["fp16", "bf16"])
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--slots", nargs="+", type=int, default=[2, 4, 6], help="of a ring")
    parser.add_argument("--kib", nargs="+", type=int, default=[64, 128, 256, 512], help="of a slot")
    parser.add_argument("--calls", type=int, default=200)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    if dist.get_rank() == 0:
        print(machine.describe(machine.state()))
    if options.what == "latency":
        latency(options)
    elif options.what == "chunks":
        settings = [
            Setting(slots, kib, past_caches=past)
            for past in (False, True)
            for slots, kib in itertools.product(options.slots, options.kib)
        ]
        compare(options.models, settings, options)
    else:
        compare(options.models, [Setting(4, kib, sharded) for kib in options.kib for sharded in (0, NEVER)], options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
