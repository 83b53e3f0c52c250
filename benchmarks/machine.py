"""The state of the machine, which figures depend on and which changes under a virtual machine without a word.

Two processes measure it: what copying costs one of them alone and both at once, and how fast one reads what the other has just
written. Processors that share a cache hand data over faster than memory delivers it; processors that are two threads of one core
copy slower at once even from their nearest cache. The best of several rounds counts, since others may be at work too; the load
says whether they were.
"""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gradpack import _C
from gradpack.testing import run_ranks

SIZES = {"near": 256 << 10, "memory": 64 << 20}
HANDED_BYTES = 1 << 20
ROUNDS = 15


def seconds_of(work: Callable[[], object], repeats: int) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - began) / repeats


def probe(rank: int, world: int, path: str) -> dict[str, float]:
    """GB/s of copying (bytes read and written) and of reading, as this rank sees them; microseconds of a barrier."""
    found: dict[str, float] = {}
    for name, nbytes in SIZES.items():
        there, here = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
        repeats = max(1, (64 << 20) // nbytes)
        alone, together = [], []
        for _ in range(ROUNDS):
            dist.barrier()
            if rank == 0:
                alone.append(seconds_of(partial(here.copy_, there), repeats))
            dist.barrier()
            together.append(seconds_of(partial(here.copy_, there), repeats))
        found[f"{name}_together"] = 2 * nbytes / min(together) / 1e9
        if rank == 0:
            found[f"{name}_alone"] = 2 * nbytes / min(alone) / 1e9

    shared = torch.from_file(path, shared=True, size=HANDED_BYTES, dtype=torch.uint8)
    here = torch.zeros(HANDED_BYTES, dtype=torch.uint8)
    windows = torch.ones(128 * HANDED_BYTES, dtype=torch.uint8).split(HANDED_BYTES)  # those in front have left the caches
    handed, unseen, waited = [], [], []
    for number in range(40):
        if rank == 0:
            shared.fill_(number)
        dist.barrier()
        if rank == 1:
            handed.append(seconds_of(partial(here.copy_, shared), 1))
            unseen.append(seconds_of(partial(here.copy_, windows[number]), 1))
        waited.append(seconds_of(dist.barrier, 1))
    if rank == 1:
        found["handed_over"] = HANDED_BYTES / min(handed) / 1e9
        found["from_memory"] = HANDED_BYTES / statistics.median(unseen) / 1e9
    found["barrier_us"] = 1e6 * statistics.median(waited)
    return found


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def state() -> dict[str, Any]:
    """Measures, in about a second."""
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.truncate(HANDED_BYTES)
        first, second = run_ranks(probe, 2, file.name)
    found = second | first
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "simd": _C.simd_name(),
        **found,
        "share_a_core": found["near_together"] < 0.75 * found["near_alone"],
        # A shared cache was seen to give twice the speed of memory; without one, it is memory's at best.
        "share_a_cache": found["handed_over"] > 1.2 * found["from_memory"],
    }


def describe(found: dict[str, Any]) -> str:
    """The state in three lines."""
    core = "share a core" if found["share_a_core"] else "are cores of their own"
    cache = "share a cache" if found["share_a_cache"] else "share no cache"
    return (
        f"{found['processor']}, {found['cores']} processors, load {found['load']:.2f}; instruction set {found['simd']};"
        f" torch {found['torch']}, Python {found['python']}\n"
        f"copying, GB/s read + written: near {found['near_alone']:.0f} alone, {found['near_together']:.0f} each of two at once;"
        f" memory {found['memory_alone']:.1f} alone, {found['memory_together']:.1f} each of two at once\n"
        f"reading 1 MiB, GB/s: {found['handed_over']:.1f} just written by the other, {found['from_memory']:.1f} from memory:"
        f" two processors now {core} and {cache}; a barrier of two takes {found['barrier_us']:.0f} µs"
    )
