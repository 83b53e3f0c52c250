"""Which collective of gloo carries a slice best: its own all-reduce, or all-to-all, direct or sharded.

*Direct*: every rank sends its slice to all others. *Sharded*: an all-to-all of shards, then every rank sends its shard to all
others. Neither sums anything here, while gloo's all-reduce does: gradpack sums as it unpacks. Also an all-gather of the slice.
Then many slices in a row, two at a time, over one to three groups that take turns. Medians of times and of ratios to the
all-reduce of the same bytes, iteration by iteration. Run it with torchrun::

    torchrun --standalone --nproc-per-node 2 benchmarks/bench_ways.py
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

SLICES = 12
SLICE_BYTES = 8 << 20
SIZES = [1 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20]


class Ways:
    """The ways to move ``nbytes``, over memory that exists."""

    def __init__(self, nbytes: int) -> None:
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self.group = dist.group.WORLD
        self.slice = torch.ones(nbytes // 4)
        self.sent = torch.ones(self.world * nbytes // 4)
        self.received = torch.ones(self.world * nbytes // 4)

    def exchange(self, counts: list[int], target: torch.Tensor, source: torch.Tensor) -> None:
        total = sum(counts)
        self.group.alltoall_base(target[:total], source[:total], counts, counts, dist.AllToAllOptions()).wait()

    def others(self, count: int) -> list[int]:
        return [0 if peer == self.rank else count for peer in range(self.world)]

    def all_reduce(self) -> None:
        dist.all_reduce(self.slice)

    def all_gather(self) -> None:
        self.group._allgather_base(self.received, self.slice).wait()

    def direct(self) -> None:
        count = self.slice.numel()
        if self.world > 2:
            for copy in range(self.world - 1):
                self.sent[copy * count : (copy + 1) * count].copy_(self.slice)
        self.exchange(self.others(count), self.received, self.slice if self.world == 2 else self.sent)

    def sharded(self) -> None:
        count = self.slice.numel() // self.world
        self.exchange(self.others(count), self.received, self.slice)
        for copy in range(self.world - 1):
            self.sent[copy * count : (copy + 1) * count].copy_(self.slice[:count])
        self.exchange(self.others(count), self.received, self.sent)


class Turns(Ways):
    """``SLICES`` slices, the way that they take between so many ranks, over several groups."""

    def __init__(self) -> None:
        super().__init__(SLICE_BYTES)
        self.flat = torch.ones(SLICES * SLICE_BYTES // 4)
        self.groups = [dist.new_group() for _ in range(3)]
        self.targets = [torch.ones_like(self.received) for _ in range(3)]

    def all_reduce(self) -> None:
        dist.all_reduce(self.flat)

    def over(self, groups: int) -> None:
        count = self.slice.numel() if self.world == 2 else self.slice.numel() // self.world
        counts = self.others(count)
        works: list[dist.Work] = []
        for turn in range(SLICES):
            if turn >= 2:
                works[turn - 2].wait()
            source = self.flat[turn * self.slice.numel() :]
            target = self.targets[turn % 3][: sum(counts)]
            group = self.groups[turn % groups]
            works.append(group.alltoall_base(target, source[: sum(counts)], counts, counts, dist.AllToAllOptions()))
        for work in works[-2:]:
            work.wait()


def table(columns: dict[str, Callable[[], None]], iterations: int, what: str) -> None:
    """Times the columns in turn, the first of which is what the others are compared with, and prints a line."""
    times: dict[str, list[float]] = {name: [] for name in columns}
    for iteration in range(iterations + 5):
        for name, call in columns.items():
            seconds = timed(call)
            if iteration >= 5:
                times[name].append(seconds)
    if dist.get_rank() == 0:
        cells = []
        for found in times.values():
            ratio = statistics.median(a / b for a, b in zip(found, next(iter(times.values())), strict=True))
            cells.append(f"{1e3 * statistics.median(found):8.3f} {ratio:5.2f}")
        print(f"{what:>9}  {'  '.join(cells)}")


def header(names: list[str], what: str) -> None:
    if dist.get_rank() == 0:
        print(f"{what:>9}  {'  '.join(f'{name:>14}' for name in names)}")


def timed(call: Callable[[], None]) -> float:
    dist.barrier()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=60)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks; medians of {options.iterations} iterations, ms, and of ratios to all_reduce")
    names = ["all_reduce", "all_gather", "direct", "sharded"]
    header(names, "bytes")
    for nbytes in SIZES:
        ways = Ways(nbytes)
        table({name: getattr(ways, name) for name in names}, options.iterations, str(nbytes))
    turns = Turns()
    columns = {"all_reduce": turns.all_reduce} | {f"{count} groups": partial(turns.over, count) for count in (1, 2, 3)}
    header(list(columns), "slices")
    table(columns, max(5, options.iterations // 4), f"{SLICES} x {SLICE_BYTES >> 20} MiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
