"""gradpack.allreduce beside the other ways to average gradients, for the gradients of real models.

    python benchmarks/bench_allreduce.py [--ranks 4] [--models resnet50 scalar] [--runs 5] [--json PATH] [--plot PATH]
    python benchmarks/bench_allreduce.py --quick
    python benchmarks/bench_allreduce.py --mpi       # ranks started by mpirun, and MPI among the ways

DeepSpeed's all-reduce is among the ways where its package is installed.

Ranks are processes of this machine. All ways take turns in the same processes, after a barrier each time, and a turn is as long
as its slowest rank; docs/performance.md says the rest. Ends with what is wanted of gradpack, met or missed.
"""

import argparse
import ctypes
import gc
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import goals
import machine
import torch
import torch.distributed as dist
from peers import Ddp, DeepSpeedFlat, Gradients, Gradpack, Peer, build_deepspeed, make_peers
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

from gradpack.testing import run_ranks

BASELINE = "flat"
QUICK_MODELS = ["scalar", "policy_45k", "small2000", "mobilenetv2"]
DTYPES = ["float32", "float64", "float16", "bfloat16"]
# The one beside this Python, if there is: that of a wheel.
MPIRUN = [
    shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}") or "mpirun",
    "--bind-to",
    "none",
    "--oversubscribe",
    "--allow-run-as-root",
]
DEADLINE_S = 1800.0


def memory_of_process(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return next(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{field}:"))


def extra_memory(peer: Peer) -> int:
    """Prepares a peer and calls it twice (DDP makes its buckets anew for the second); returns by how much memory grew meanwhile.

    The kernel's record of the most memory that was resident is reset first, and what earlier peers freed is given back to it.
    """
    peer.release()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_of_process("VmRSS")
    peer.prepare()
    for _ in range(2 if peer.every == 1 else 1):
        peer.before()
        dist.barrier()
        peer.run()
    return memory_of_process("VmHWM") - before


def measure(rank: int, world: int, options: argparse.Namespace, run: int) -> dict[str, Any]:
    """One run on one rank: what it saw of each model."""
    dtype = getattr(torch, options.dtype)
    if options.deepspeed:
        DeepSpeedFlat.begin(options.deepspeed, rank, world)
    gc.disable()
    gc.freeze()
    # What a first use loads and connects is no memory of any one peer.
    for peer in chosen(make_peers(Gradients([()], dtype, rank, world), options.compress), options):
        extra_memory(peer)
    # Collections between the peers need not look at torch's own objects, which are many.
    gc.freeze()
    found = {}
    for model in options.models:
        if rank == 0:
            print(f"run {run + 1} of {options.runs}: {model}", file=sys.stderr, flush=True)
        gradients = Gradients(load(model), dtype, rank, world)
        peers = chosen(make_peers(gradients, options.compress), options)
        found[model] = measure_peers(peers, iterations_for(gradients.nbytes, options))
    return found


def chosen(peers: list[Peer], options: argparse.Namespace) -> list[Peer]:
    """Those that were asked for, and what their rows need."""
    if not options.only:
        return peers
    names = {BASELINE, "backward", *options.only}
    return [peer for peer in peers if peer.name in names]


def start_here(options: argparse.Namespace, run: int) -> list[dict[str, Any]]:
    """One run, in ranks that are children of this process; what each rank saw."""
    return run_ranks(measure, options.ranks, options, run, deadline=DEADLINE_S, timeout=DEADLINE_S)


def start_by_mpirun(options: argparse.Namespace, run: int) -> list[dict[str, Any]]:
    """One run, in ranks that mpirun starts."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "task").write_bytes(pickle.dumps((options, run)))
        command = [*MPIRUN, "-n", str(options.ranks), sys.executable, __file__, "--worker", folder]
        subprocess.run(command, check=True, timeout=DEADLINE_S)
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(options.ranks)]


def work(folder: str) -> None:
    """What mpirun starts: a rank of one run."""
    from mpi4py import MPI

    options, run = pickle.loads(Path(folder, "task").read_bytes())
    world, rank = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = MPI.COMM_WORLD.bcast(store and store.port)
    store = store or dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    Path(folder, str(rank)).write_bytes(pickle.dumps(measure(rank, world, options, run)))
    dist.barrier()
    dist.destroy_process_group()


def measure_peers(peers: list[Peer], iterations: int) -> dict[str, Any]:
    """For each peer samples, wrong elements, extra memory and what a row says of it."""
    extra, wrong = {}, {}
    for peer in peers:
        extra[peer.name] = extra_memory(peer)
        wrong[peer.name] = peer.wrong()
    pieces = [Piece(peer.name, peer.run, peer.before, peer.every) for peer in peers]
    samples = interleave(pieces, iterations, warmup=1, ready=dist.barrier)
    for peer in peers:
        if peer.every == 1:
            peer.before()
            dist.barrier()
            peer.run()
            wrong[peer.name] += peer.wrong()
        if isinstance(peer, Gradpack):
            peer.find_transport()
    return {
        peer.name: {
            "samples": samples[peer.name],
            "wrong": wrong[peer.name],
            "extra": extra[peer.name],
            "wire": peer.wire,
            "transport": peer.transport,
            "passes": peer.passes,
            "net": isinstance(peer, Ddp),
        }
        for peer in peers
    }


def iterations_for(nbytes: int, options: argparse.Namespace) -> int:
    """As many as noise asks for, and fewer where one takes seconds."""
    return options.iterations or min(100, max(5, round(4e8 / nbytes)))


def rows_of(
    model: str, runs: list[list[dict[str, Any]]], options: argparse.Namespace
) -> tuple[list[Row], dict[str, list[Samples]]]:
    """The rows of one model, and the samples behind them by piece, one for each run.

    Args:
        model: Which.
        runs: For each run what each rank saw of it.
        options: Of the command line.
    """
    shapes = load(model)
    nbytes = count(shapes) * getattr(torch, options.dtype).itemsize
    samples = {piece: [over_ranks([rank[piece]["samples"] for rank in run]) for run in runs] for piece in runs[0][0]}
    for piece, facts in runs[0][0].items():
        if facts["net"]:
            samples[piece] = [run.less(plain) for run, plain in zip(samples[piece], samples["backward"], strict=True)]
    rows = []
    for piece, facts in runs[0][0].items():
        inside = facts["transport"] == "memory"
        timed = timings(samples[piece], samples[BASELINE], nbytes * facts["passes"])
        bandwidth = None if inside else timed["gb_per_s"]
        row = Row(
            case=model,
            piece=f"{piece} (net)" if facts["net"] else piece,
            tensors=len(shapes),
            bytes=nbytes,
            dtype=options.dtype,
            wire=facts["wire"],
            transport=facts["transport"],
            ranks=options.ranks,
            threads=1,
            bus_gb_per_s=bandwidth and bandwidth * 2 * (options.ranks - 1) / options.ranks,
            wrong=sum(rank[piece]["wrong"] for run in runs for rank in run),
            extra_bytes=max(rank[piece]["extra"] for run in runs for rank in run),
            baseline=BASELINE,
            **timed,
        )
        rows.append(row)
    return rows, samples


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, choices=[2, 4, 8])
    parser.add_argument("--models", nargs="+", choices=NAMES, metavar="MODEL", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--compress", nargs="*", choices=["bf16", "fp16"], default=["bf16", "fp16"], help="wires of more rows")
    parser.add_argument("--runs", type=int, help="sets of processes (default: 5)")
    parser.add_argument("--iterations", type=int, help="of each run (default: 5 to 100, by size)")
    parser.add_argument("--only", nargs="+", metavar="PEER", help="no other ways than these")
    parser.add_argument("--mpi", action="store_true", help="start ranks by mpirun, and compare with MPI (needs mpi4py)")
    parser.add_argument("--worker", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="small models, one run of few iterations")
    add_output_options(parser)
    options = parser.parse_args()
    options.deepspeed = None if options.quick or options.worker else build_deepspeed()
    options.models = options.models or (QUICK_MODELS if options.quick else NAMES)
    options.runs = options.runs or (1 if options.quick else 5)
    options.iterations = options.iterations or (3 if options.quick else None)
    return options


def main() -> None:
    options = parse()
    if options.worker:
        return work(options.worker)
    states = [machine.state()]
    print(machine.describe(states[0]))
    print(f"runs: {options.runs}; ratios are to {BASELINE}, iteration by iteration; DDP is net of backward")
    # Each run is a set of processes that nothing has happened to yet.
    start = start_by_mpirun if options.mpi else start_here
    runs = [start(options, run) for run in range(options.runs)]
    print_header()
    all_rows, judged = [], []
    for model in options.models:
        rows, samples = rows_of(model, [[rank[model] for rank in run] for run in runs], options)
        for row in rows:
            print_row(row)
        all_rows += rows
        judged += goals.verdicts(model, options.dtype, options.ranks, samples, near=states[0]["share_a_cache"])
    print_matrix(all_rows)
    states.append(machine.state())
    print(machine.describe(states[1]))
    for line in judged:
        print(line)
    print(f"{sum(row.wrong for row in all_rows)} wrong elements")
    write_output(options, states, all_rows, verdicts=judged)


if __name__ == "__main__":
    main()
