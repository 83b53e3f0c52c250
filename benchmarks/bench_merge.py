"""Up to which size neighbouring packs should travel in one collective, beside a flat, preallocated all-reduce of the same bytes.

Run it with torchrun::

    torchrun --standalone --nproc-per-node 2 benchmarks/bench_merge.py
"""

import argparse
import statistics
from functools import partial

import torch
import torch.distributed as dist
from rows import Piece, interleave

import gradpack
from gradpack.transports import slices

LIMITS = [64 << 10, 256 << 10, 1 << 20, 4 << 20]
SIZES = [300_000, 600_000, 2_000_000, 8_000_000, 32_000_000]


def reduce(grads: list[torch.Tensor], group: dist.ProcessGroup, options: argparse.Namespace) -> None:
    gradpack.allreduce(grads, options.splits, compress=options.compress, group=group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--splits", type=int, default=4)
    parser.add_argument("--compress", choices=["fp16", "bf16"])
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    ranks = list(range(dist.get_world_size()))
    flat_group = dist.new_group(ranks)
    groups = {limit: dist.new_group(ranks) for limit in LIMITS}
    if dist.get_rank() == 0:
        columns = "  ".join(f"{limit >> 10:>7} KiB" for limit in LIMITS)
        print(f"{len(ranks)} ranks, splits={options.splits}, compress={options.compress}: median ms, and median ratio to flat")
        print(f"{'bytes':>9} {'flat':>7}   merged up to: {columns}")
    for nbytes in SIZES:
        grads, flat = [torch.randn(nbytes // 32) for _ in range(8)], torch.randn(nbytes // 4)
        for limit, group in groups.items():
            slices.MERGE_BYTES = limit  # what travels together is worked out at a group's first call, and kept
            reduce(grads, group, options)
        pieces = [Piece("flat", partial(dist.all_reduce, flat, group=flat_group))]
        pieces += [Piece(str(limit), partial(reduce, grads, group, options)) for limit, group in groups.items()]
        samples = interleave(pieces, options.iterations, warmup=5, ready=dist.barrier)
        if dist.get_rank() == 0:
            beside = samples.pop("flat").seconds
            cells = []
            for found in samples.values():
                ratio = statistics.median(ours / flat for ours, flat in zip(found.seconds, beside, strict=True))
                cells.append(f"{1e3 * statistics.median(found.seconds):6.2f} {ratio:4.2f}")
            print(f"{nbytes:>9} {1e3 * statistics.median(beside):7.2f}                 {'  '.join(cells)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
