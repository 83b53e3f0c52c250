"""How large the payload of the opening should be, and whether the store could do its work.

Every call of gradpack opens with one exchange that carries a header and the first bytes of the packs. This measures whole calls
for models of several sizes under several fixed payloads and under the one that follows what calls need, beside a flat,
preallocated all-reduce of the same bytes in the same run, and an agreement through the store (each rank sets its header, then
reads the others'). Run it with torchrun::

    torchrun --standalone --nproc-per-node 2 benchmarks/bench_opening.py
"""

import argparse
import itertools
import statistics
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from rows import Piece, interleave

import gradpack
from gradpack.transports import opening

FOLLOWS = -1
PAYLOADS = [0, 1 << 10, 4 << 10, 16 << 10, 64 << 10, FOLLOWS]
SIZES = [4, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 512 << 10, 1 << 20, 1536 << 10, 2 << 20, 4 << 20]


def make_groups() -> dict[int, dist.ProcessGroup]:
    """One group for each payload, since a group's transport fixes its payload when it is made."""
    groups = {}
    defaults = opening.PAYLOAD_BYTES, opening.LARGEST_PAYLOAD_BYTES
    for payload in PAYLOADS:
        opening.PAYLOAD_BYTES, opening.LARGEST_PAYLOAD_BYTES = defaults if payload == FOLLOWS else (payload, 0)
        groups[payload] = dist.new_group(list(range(dist.get_world_size())))
        reduce([torch.ones(1)], groups[payload])
    return groups


def reduce(grads: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    gradpack.allreduce(grads, group=group)


def through_the_store(store: dist.Store, calls: Iterator[int]) -> None:
    rank, world, call = dist.get_rank(), dist.get_world_size(), next(calls)
    store.set(f"{call}/{rank}", b"\0" * 640)
    for peer in range(world):
        store.get(f"{call}/{peer}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--tensors", type=int, default=4)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    groups = make_groups()
    flat_group = dist.new_group(list(range(dist.get_world_size())))
    store, calls = dist.distributed_c10d._get_default_store(), itertools.count()
    if dist.get_rank() == 0:
        columns = " ".join("   follows" if payload == FOLLOWS else f"{payload >> 10:>6} KiB" for payload in PAYLOADS)
        print(f"{dist.get_world_size()} ranks; medians of {options.iterations} iterations, ms, and of ratios to flat")
        print(f"{'bytes':>9} {'flat':>7}  gradpack with a payload of: {columns}   agreement by store")
    for nbytes in SIZES:
        grads = [part.clone() for part in torch.ones(max(1, nbytes // 4)).chunk(options.tensors)]
        flat = torch.ones(max(1, nbytes // 4))
        pieces = [Piece("flat", partial(dist.all_reduce, flat, group=flat_group))]
        pieces += [Piece(str(payload), partial(reduce, grads, group)) for payload, group in groups.items()]
        pieces.append(Piece("store", partial(through_the_store, store, calls)))
        samples = interleave(pieces, options.iterations, warmup=10, ready=dist.barrier)
        if dist.get_rank() == 0:
            beside, agreed = samples.pop("flat").seconds, samples.pop("store").seconds
            cells = []
            for found in samples.values():
                ratio = statistics.median(ours / flat for ours, flat in zip(found.seconds, beside, strict=True))
                cells.append(f"{1e3 * statistics.median(found.seconds):5.2f} {ratio:4.1f}")
            flat_ms, store_ms = (1e3 * statistics.median(seconds) for seconds in (beside, agreed))
            print(f"{nbytes:>9} {flat_ms:7.3f}  {'':27}{' '.join(cells)}   {store_ms:6.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
