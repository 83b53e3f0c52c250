"""The contract of every transport: right sums and means for every dtype, size, op and wire, in worlds of 1 to 4 ranks."""

from __future__ import annotations

import os
import random

import pytest
import ranks_contract

from gradpack.testing import run_ranks
from gradpack.transports.opening import MAX_PAYLOAD_WORLD

KINDS = ["shared_memory", "hierarchical", "process_group", "allgather", "alltoall"]
OVER_TORCH = ("shared_memory", "hierarchical", "process_group")
LONG = os.environ.get("GRADPACK_TEST_LONG") == "1"
DTYPES = tuple(ranks_contract.DTYPES)
ELSEWHERE = {"GRADPACK_FULL_PATH": "1"}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of group: torch's, or an object with allgather alone or with alltoall too."""
    return request.param


def check(kind: str, world: int, listed: list[ranks_contract.Case], environment: dict[str, str]) -> None:
    backend = "gloo" if kind in OVER_TORCH else None
    if kind == "hierarchical" and world & (world - 1):
        # What travels in 16 bits between hosts is divided before it is rounded: test_hierarchical bounds that.
        listed = [case for case in listed if case.op == "sum" or not ranks_contract.travels_in_16_bits(case)]
    made = run_ranks(ranks_contract.run_cases, world, kind, listed, ELSEWHERE | environment, deadline=300, backend=backend)
    assert made == [len(listed)] * world


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_small_arrays(kind: str, world: int) -> None:
    listed = list(ranks_contract.cases((0, 1, 17, 4097), DTYPES, (1, 4)))
    check(kind, world, listed, {})


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_arrays_of_several_slices(kind: str, world: int) -> None:
    # Slots of 64 KiB make a few hundred kilobytes go round the slots.
    listed = list(ranks_contract.cases((100_003,), DTYPES, (1, 3, 4)))
    if not LONG:
        listed = random.Random(world).sample(listed, len(listed) // (2 if kind == "process_group" else 8))
    check(kind, world, listed, {"GRADPACK_SLOT_BYTES": "65536"})


@pytest.mark.parametrize("world", [2, 3])
def test_pack_boundaries(kind: str, world: int) -> None:
    # In a slot of 64 KiB a slice has 8192 float32 elements between two ranks and 9828 between three.
    counts = tuple(edge + step for edge in (4096, 8192, 9828, 16384) for step in (-1, 0, 1))
    listed = list(ranks_contract.cases(counts, ("float32", "bfloat16", "int16"), (1, 2)))
    if not LONG and kind != "process_group":
        listed = random.Random(world).sample(listed, len(listed) // 4)
    check(kind, world, listed, {"GRADPACK_SLOT_BYTES": "65536"})


@pytest.mark.parametrize("world", [8, MAX_PAYLOAD_WORLD + 1])
def test_many_ranks(kind: str, world: int) -> None:
    listed = list(ranks_contract.cases((1, 4097), ("float32", "bfloat16", "int32"), (3,)))
    check(kind, world, listed, {})


def test_more_splits_than_elements(kind: str) -> None:
    check(kind, 2, list(ranks_contract.cases((1, 5000), ("float32", "int64"), (20_000, 1_000_000))), {})
