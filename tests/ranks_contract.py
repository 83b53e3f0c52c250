"""What the ranks of the contract suite do: all cases of one (transport, world) in one set of processes."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import gradpack
import gradpack.groups
from gradpack.testing import LocalGroup, assert_same, exact_values, local_group
from gradpack.transports import shm_meeting


@dataclass(frozen=True)
class Case:
    """One call of the contract suite."""

    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    op: str
    compress: str | None
    splits: int

    def __str__(self) -> str:
        return f"{self.dtype} {self.shapes} op={self.op} compress={self.compress} splits={self.splits}"


DTYPES = ["float32", "float64", "float16", "bfloat16", "complex64", "complex128", "int8", "int16", "int32", "int64", "uint8"] + [
    name for name in ("uint16", "uint32", "uint64") if hasattr(torch, name)
]


def cases(counts: tuple[int, ...], dtypes: tuple[str, ...], splits: tuple[int, ...]) -> Iterator[Case]:
    for dtype in dtypes:
        for count in counts:
            shapes = ((count,), (3, 5), (), (0, 7), (2, count // 2 + 1))
            for op in ("sum",) if "int" in dtype else ("mean", "sum"):
                for compress in (None, "fp16", "bf16") if dtype in ("float32", "float64") else (None,):
                    for packs in splits:
                        yield Case(dtype, shapes, op, compress, packs)


def travels_in_16_bits(case: Case) -> bool:
    return case.compress is not None or case.dtype in ("float16", "bfloat16")


def values_of(case: Case, rank: int, world: int) -> list[np.ndarray]:
    """Whole numbers in float64 (complex128 where the dtype is complex), one array a shape."""
    largest = (120 if case.dtype in ("int8",) else 240) // world
    arrays = []
    for place, shape in enumerate(case.shapes):
        count = int(np.prod(shape))
        real = exact_values(count, rank + place, largest).astype(np.float64).reshape(shape)
        if case.dtype.startswith("u"):
            real = real + largest
        arrays.append(real + 1j * real[::-1].reshape(shape) if case.dtype.startswith("complex") and shape else real)
    return arrays


def expected(case: Case, world: int, kind: str) -> list[torch.Tensor]:
    """The sum is exact; the mean is one correctly rounded division of it, and one more rounding where 16 bits travel back."""
    dtype = getattr(torch, case.dtype)
    totals = [sum(parts) for parts in zip(*(values_of(case, rank, world) for rank in range(world)), strict=True)]
    results = []
    for total in totals:
        if case.op == "sum":
            results.append(torch.as_tensor(np.asarray(total)).to(dtype))
            continue
        sixteen = travels_in_16_bits(case)
        # numpy divides in the accumulator's dtype; every value here is exact in it.
        if case.dtype.startswith("complex"):
            scalar = np.float32 if case.dtype == "complex64" else np.float64
            parts = [(np.asarray(part).astype(scalar) / scalar(world)) for part in (np.real(total), np.imag(total))]
            results.append(torch.complex(*(torch.as_tensor(part) for part in parts)).to(dtype))
            continue
        accumulator = np.float32 if sixteen or case.dtype == "float32" else np.float64
        mean = torch.as_tensor(np.asarray(total, dtype=accumulator) / accumulator(world))
        if sixteen and world > 2 and kind != "allgather":
            mean = mean.to({"fp16": torch.float16, "bf16": torch.bfloat16, None: dtype}[case.compress])
        results.append(mean.to(dtype))
    return results


class OnlyAllGather:
    """A group that offers no more than it must."""

    def __init__(self, group: LocalGroup) -> None:
        self.rank, self.size, self.allgather = group.rank, group.size, group.allgather


@functools.cache
def group_of(kind: str) -> Any:
    """The group that a kind of the contract suite means, the same object on every call; its first call is still to come."""
    if kind == "hierarchical":
        os.environ["GRADPACK_HOST"] = f"host {torch.distributed.get_rank() % 2}"
    elif kind != "shared_memory":
        os.environ["GRADPACK_TRANSPORT"] = "process_group"
    if kind in ("process_group", "shared_memory", "hierarchical"):
        return None
    return OnlyAllGather(local_group()) if kind == "allgather" else local_group()


def run_cases(rank: int, world: int, kind: str, listed: list[Case], environment: dict[str, str]) -> int:
    """Runs the cases under settings from the environment; returns how many calls really went through the transport."""
    os.environ.update(environment)
    if kind in ("shared_memory", "hierarchical") and "GRADPACK_SLOT_BYTES" in environment:
        shm_meeting.SLOT_BYTES = int(environment["GRADPACK_SLOT_BYTES"])
    for case in listed:
        grads = [torch.as_tensor(np.asarray(values)).to(getattr(torch, case.dtype)) for values in values_of(case, rank, world)]
        options: dict[str, Any] = {"op": case.op, "compress": case.compress, "splits": case.splits}
        result = gradpack.allreduce(grads, group=group_of(kind), **options)
        for place, (found, wanted) in enumerate(zip(grads, expected(case, world, kind), strict=True)):
            assert_same(found, wanted, f"{case}: gradient {place} on rank {rank}")
        assert result.finite is True and result.nonfinite == ()
        assert (result.wire_bytes > 0) == (world > 1)
    return calls_made(kind, world)


def calls_made(kind: str, world: int) -> int:
    """How many calls the group's transport has carried."""
    transport = gradpack.groups.resolve("test", group_of(kind)).resource("transport", lambda: None)
    names = {
        "shared_memory": "shared_memory",
        "hierarchical": [None, "shared_memory", "process_group"][world] if world < 3 else kind,
    }
    assert transport.name == names.get(kind, "process_group")
    return transport.calls
