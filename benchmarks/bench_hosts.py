"""Ranks on two hosts with a slow network between: network namespaces of this machine, joined by a cable of limited rate.

    python benchmarks/bench_hosts.py [--rates 1 10] [--models mobilenetv2 resnet50] [--per-host 2] [--json PATH]

Needs root, ip and tc. Ratios are to one flat, preallocated all_reduce over gloo of all ranks, in 32 bits, iteration by iteration.
"""

from __future__ import annotations

import argparse
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import machine
import torch
import torch.distributed as dist
from rows import (
    Piece,
    Row,
    Samples,
    add_output_options,
    interleave,
    over_ranks,
    print_header,
    print_matrix,
    print_row,
    timings,
    write_output,
)
from shapes import NAMES, count, load

import gradpack

ADDRESSES = ["10.77.0.1", "10.77.0.2"]
DEADLINE_S = 600
WAYS = {
    "flat": None,
    "gradpack": {},
    "gradpack bf16": {"compress": "bf16"},
    "gradpack flat ranks": {"transport": "process_group"},
    "gradpack flat ranks bf16": {"transport": "process_group", "compress": "bf16"},
}


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def hosts(gigabits: float) -> Iterator[list[int]]:
    """Two network namespaces and the cable; yields a process in each."""
    holders = [subprocess.Popen(["unshare", "--net", "sleep", "infinity"]) for _ in ADDRESSES]
    try:
        inside = [["nsenter", f"--net=/proc/{holder.pid}/ns/net"] for holder in holders]
        home = os.stat("/proc/self/ns/net").st_ino
        while any(os.stat(f"/proc/{holder.pid}/ns/net").st_ino == home for holder in holders):
            if any(holder.poll() is not None for holder in holders):
                raise SystemExit("bench_hosts.py: unshare made no network namespace")
            time.sleep(0.01)
        run(*inside[0], "ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", str(holders[1].pid))
        for enter, address in zip(inside, ADDRESSES, strict=True):
            run(*enter, "ip", "address", "add", f"{address}/24", "dev", "cable")
            run(*enter, "ip", "link", "set", "cable", "up")
            run(*enter, "ip", "link", "set", "lo", "up")
            limit = ("rate", f"{gigabits}gbit", "burst", "256kb", "latency", "20ms")
            run(*enter, "tc", "qdisc", "add", "dev", "cable", "root", "tbf", *limit)
        yield [holder.pid for holder in holders]
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def work(folder: str, rank: int) -> None:
    """A rank: what it saw of each model."""
    options = pickle.loads(Path(folder, "task").read_bytes())
    world = 2 * options.per_host
    torch.set_num_threads(1)
    store = dist.TCPStore(ADDRESSES[0], 29500, world, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    found = {}
    for model in options.models:
        shapes = load(model)
        grads, flat = [torch.ones(shape) for shape in shapes], torch.ones(count(shapes))
        wrong = dict.fromkeys(WAYS, 0)

        def reduce(name: str, grads: list[torch.Tensor] = grads, flat: torch.Tensor = flat) -> None:
            arguments = WAYS[name]
            if arguments is None:
                dist.all_reduce(flat)
            else:
                gradpack.allreduce(grads, **arguments)

        def fill(grads: list[torch.Tensor] = grads, flat: torch.Tensor = flat) -> None:
            torch._foreach_zero_(grads)
            torch._foreach_add_(grads, float(rank))
            flat.fill_(float(rank))

        for name, arguments in WAYS.items():
            fill()
            reduce(name)
            mean = (world - 1) / 2
            wrong[name] = (
                int((flat != mean * world).sum()) if arguments is None else sum(int((grad != mean).sum()) for grad in grads)
            )
        pieces = [Piece(name, partial(reduce, name), fill) for name in WAYS]
        samples = interleave(pieces, options.iterations, warmup=1, ready=dist.barrier)
        found[model] = samples, wrong, gradpack.explain(grads).transport
    Path(folder, str(rank)).write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(options: argparse.Namespace, gigabits: float) -> list[dict[str, tuple[dict[str, Samples], dict[str, int], str]]]:
    """What each rank saw between hosts that are joined at such a rate."""
    with tempfile.TemporaryDirectory() as folder, hosts(gigabits) as holders:
        Path(folder, "task").write_bytes(pickle.dumps(options))
        ranks = []
        try:
            for rank in range(2 * options.per_host):
                host = rank // options.per_host
                environment = os.environ | {
                    "GRADPACK_HOST": f"host {host}",
                    "GLOO_SOCKET_IFNAME": "cable",
                    "OMP_NUM_THREADS": "1",
                }
                enter = ["nsenter", f"--net=/proc/{holders[host]}/ns/net"]
                command = [*enter, sys.executable, __file__, "--worker", folder, str(rank)]
                ranks.append(subprocess.Popen(command, env=environment))
            for process in ranks:
                if process.wait(DEADLINE_S) != 0:
                    raise SystemExit(f"a rank ended with {process.returncode}")
            return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(len(ranks))]
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", nargs="+", type=float, default=[1, 10], metavar="GBIT", help="of the cable, each way")
    parser.add_argument("--models", nargs="+", choices=NAMES, metavar="MODEL", default=["mobilenetv2", "resnet50"])
    parser.add_argument("--per-host", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    add_output_options(parser)
    options = parser.parse_args()
    if options.worker:
        return work(options.worker[0], int(options.worker[1]))
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        raise SystemExit("bench_hosts.py: wants root, ip and tc, for network namespaces and a limited rate")
    states = [machine.state()]
    print(machine.describe(states[0]))
    print_header()
    all_rows = []
    for gigabits in options.rates:
        seen = measure(options, gigabits)
        for model in options.models:
            samples = {name: [over_ranks([rank[model][0][name] for rank in seen])] for name in WAYS}
            for name, arguments in WAYS.items():
                nbytes = 4 * count(load(model))
                by_name = {"flat": "gloo", "gradpack": seen[0][model][2], "gradpack bf16": seen[0][model][2]}
                timed = timings(samples[name], samples["flat"], nbytes)
                row = Row(
                    case=f"{model} {gigabits:g}G",
                    piece=name,
                    tensors=len(load(model)),
                    bytes=nbytes,
                    dtype="float32",
                    wire="bfloat16" if arguments and "compress" in arguments else "float32",
                    transport=by_name.get(name, "process_group"),
                    ranks=2 * options.per_host,
                    threads=1,
                    bus_gb_per_s=None,
                    wrong=sum(rank[model][1][name] for rank in seen),
                    extra_bytes=None,
                    baseline="flat",
                    **timed,
                )
                print_row(row)
                all_rows.append(row)
    print_matrix(all_rows)
    states.append(machine.state())
    write_output(options, states, all_rows)


if __name__ == "__main__":
    main()
