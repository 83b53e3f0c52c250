"""What ranks do over groups that need no torch, with NumPy arrays: every kind of call, and what comes after a mistake.

Run by ``mpirun`` or as a program it takes the group from its argument: ``mpi``, or ``local`` with the number of ranks.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from typing import Any

import numpy as np

import gradpack
from gradpack.testing import assert_same, exact_values, local_group, run_ranks


def wanted(call: int, count: int, world: int, dtype: Any) -> Any:
    return sum(exact_values(count, rank + call, 30) for rank in range(world)).astype(dtype)


def raised(kind: type[BaseException], function: Any, *args: Any, **options: Any) -> str:
    try:
        function(*args, **options)
    except kind as error:
        return str(error)
    raise AssertionError(f"{function.__name__} did not raise {kind.__name__}")


def sums(group: Any, rank: int, world: int) -> None:
    for call, (dtype, count, options) in enumerate(
        [
            (np.float32, 1, {}),
            (np.float32, 700_001, {"splits": 3}),
            (np.float64, 100_003, {"compress": "fp16"}),
            (np.float32, 300_007, {"compress": "bf16", "async_op": True}),
            (np.float16, 200_001, {}),
            (np.int16, 50_001, {}),
            (np.complex64, 40_001, {}),
            (np.float32, 3_000_001, {"bytes_per_pack": 1 << 20}),
        ]
    ):
        grads = [exact_values(count, rank + call, 30).astype(dtype), exact_values(3, rank + call, 30).astype(np.int64)]
        result = gradpack.allreduce(grads, op="sum", group=group, **options)
        result = result.wait() if options.get("async_op") else result
        assert result.finite and result.wire_bytes > 0, result
        assert_same(grads[0], wanted(call, count, world, dtype), f"call {call} {dtype}")
        assert_same(grads[1], wanted(call, 3, world, np.int64), f"call {call}, second")


def check(group: Any) -> str:
    """All of it; returns what carries the bytes."""
    rank, world = group.rank, group.size
    sums(group, rank, world)
    values = [np.full((3, 4), rank, np.float32), np.array([rank == world - 1] * 100_000)]
    gradpack.broadcast(values, root=world - 1, group=group)
    assert values[0].tolist() == [[world - 1.0] * 4] * 3 and values[1].all()
    gradpack.check_in_sync(values, group=group)
    values[0][1, 1] += rank == 0
    assert "tensors[0]" in raised(gradpack.DesyncError, gradpack.check_in_sync, values, group=group)
    gradpack.barrier(group, timeout=20)
    assert "float32[4]" in raised(gradpack.LayoutMismatch, gradpack.allreduce, [np.zeros(4 + rank, np.float32)], group=group)
    mistake = {"splits": 0} if rank == 0 else {}
    kind = ValueError if rank == 0 else gradpack.LayoutMismatch
    assert "splits" in raised(kind, gradpack.allreduce, [np.zeros(4, np.float32)], group=group, **mistake)
    sums(group, rank, world)
    lines = gradpack.explain([np.zeros(4, np.float32)], group=group).lines
    gradpack.close(group)
    sums(group, rank, world)
    # A rank that does not come: the deadline is the call's own, and a group that is closed on every rank works again.
    grad = np.ones(4, np.float32)
    if rank == 0:
        time.sleep(1.5)
    elif hasattr(group, "Get_rank"):
        assert "absent" in raised(gradpack.TransportTimeout, gradpack.allreduce, [grad], group=group, timeout=0.5)
        assert "broken" in raised(gradpack.TransportError, gradpack.allreduce, [grad], group=group)
    gradpack.close(group)
    gc.collect()
    sums(group, rank, world)
    assert "torch" not in sys.modules or hasattr(sys.modules["torch"], "__file__")
    return next(line for line in lines if line.startswith("over: "))


def check_local(rank: int, world: int, transport: str = "auto") -> str:
    os.environ["GRADPACK_TRANSPORT"] = transport
    return check(local_group())


if __name__ == "__main__":
    if sys.argv[1] == "mpi":
        from mpi4py import MPI

        over = check(MPI.COMM_WORLD)
        assert ("MPI" in over) == (os.environ.get("GRADPACK_TRANSPORT") == "process_group"), over
        print(f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}: {over}, torch {'torch' in sys.modules}", flush=True)
    else:
        print(run_ranks(check_local, int(sys.argv[2]), backend=None), "torch", "torch" in sys.modules)
