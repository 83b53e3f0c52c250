"""Which collective of gloo carries a slice best: its own all-reduce, or all-to-all, direct or sharded.

*Direct*: every rank sends its slice to all others. *Sharded*: an all-to-all of shards, then every rank sends its shard to all
others. Neither sums anything here, while gloo's all-reduce does: gradpack sums as it unpacks. Also an all-gather of the slice.
Medians of times and of ratios to the all-reduce of the same bytes, iteration by iteration. Run it with torchrun::

    torchrun --standalone --nproc-per-node 2 benchmarks/bench_ways.py
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

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
    names = ["all_reduce", "all_gather", "direct", "sharded"]
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks; medians of {options.iterations} iterations, ms, and of ratios to all_reduce")
        print(f"{'bytes':>9}  {'  '.join(f'{name:>14}' for name in names)}")
    for nbytes in SIZES:
        ways = Ways(nbytes)
        times: dict[str, list[float]] = {name: [] for name in names}
        for iteration in range(options.iterations + 5):
            for name in names:
                seconds = timed(getattr(ways, name))
                if iteration >= 5:
                    times[name].append(seconds)
        if dist.get_rank() == 0:
            cells = []
            for name in names:
                ratio = statistics.median(a / b for a, b in zip(times[name], times["all_reduce"], strict=True))
                cells.append(f"{1e3 * statistics.median(times[name]):8.3f} {ratio:5.2f}")
            print(f"{nbytes:>9}  {'  '.join(cells)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
