"""Ranks that say they are on several hosts: through shared memory in each, between their leaders by the process group."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
import ranks_failures
import torch

import gradpack
from gradpack import groups
from gradpack.testing import assert_same, run_ranks, try_ranks

HOSTS = {"pairs": [0, 0, 1, 1], "in turn": [0, 1, 0, 1], "one alone": [0, 0, 0, 1], "three": [0, 1, 2, 0, 1]}


def on(hosts: list[int], rank: int) -> None:
    os.environ["GRADPACK_HOST"] = f"host {hosts[rank]}"


def transport() -> object:
    return groups.resolve("test", None)._resources["transport"]


def random_grads(rank: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    counts = [0, 1, 4097, 70_000, 900_001]
    return [(torch.randn(count, generator=generator) * 100).to(dtype) for count in counts]


def sums(rank: int, world: int, hosts: list[int]) -> tuple[str, list[bytes]]:
    on(hosts, rank)
    found = []
    for dtype, compress in ((torch.float32, None), (torch.float64, None), (torch.float32, "bf16"), (torch.float16, None)):
        bits = []
        for splits in (1, 4, 9):
            grads = random_grads(rank, dtype)
            result = gradpack.allreduce(grads, splits, compress=compress)
            assert result.finite is True
            assert result.wire_bytes > 0
            bits.append([grad.numpy().tobytes() for grad in grads])
        assert bits[0] == bits[1] == bits[2]
        found += bits[0]
        # In double, from the values as they travel: each host's mean share is rounded, then their sum.
        wire = {"bf16": torch.bfloat16, None: dtype}[compress]
        everyone = [[grad.to(wire).double() for grad in random_grads(peer, dtype)] for peer in range(world)]
        ulp = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24, torch.float64: 2.0**-53}[wire]
        for place, grad in enumerate(grads):
            parts = torch.stack([peer[place] for peer in everyone])
            error = (grad.double() - parts.mean(0)).abs()
            assert bool((error <= (len(set(hosts)) + world + 1) * ulp * parts.abs().sum(0) / world + 1e-7).all())
    lines = gradpack.explain([torch.ones(3)]).lines
    assert transport().name == "hierarchical"  # type: ignore[attr-defined]
    return lines[0], found


@pytest.mark.parametrize("hosts", HOSTS)
def test_sums_are_close_and_the_same_bits_on_all_ranks(hosts: str) -> None:
    number = len(set(HOSTS[hosts]))
    (first, bits), *others = run_ranks(sums, len(HOSTS[hosts]), HOSTS[hosts], deadline=120)
    assert (
        first
        == f"transport: hierarchical: the group has all {len(HOSTS[hosts])} ranks on {number} hosts; {len(HOSTS[hosts])} ranks"
    )
    assert all(other == (first, bits) for other in others)


def what_it_offers(rank: int, world: int) -> None:
    on([0, 0, 1], rank)
    grad = torch.full((900_000,), float(rank))
    gradpack.allreduce([grad], op="sum", transport="hierarchical")
    assert_same(grad, torch.full_like(grad, 3.0))
    gradpack.allreduce([grad], transport="process_group")
    assert_same(grad, torch.full_like(grad, 3.0))
    for _ in range(2):
        with pytest.raises(
            gradpack.TransportError,
            match="found 'shared_memory' on a group that has all 3 ranks on 2 hosts, wanted 'auto' or 'hierarchical' or",
        ):
            gradpack.allreduce([grad], transport="shared_memory")
        with pytest.raises(gradpack.LayoutMismatch, match=r"transport: '(hierarchical|process_group)' here"):
            gradpack.allreduce([grad], transport=["auto", "process_group", "hierarchical"][rank])
        with pytest.raises(gradpack.LayoutMismatch, match=r"grads\[0\]: float32"):
            gradpack.allreduce([torch.ones(900_000 + (rank == 1))])
        assert_same(grad, torch.full_like(grad, 3.0))
    values = torch.full((900_000,), float(rank))
    gradpack.broadcast([values], root=1)
    assert_same(values, torch.ones_like(values))
    gradpack.check_in_sync([values])
    gradpack.barrier()
    # Which gradients are there, and whether they are finite, is known on all hosts.
    module = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(300_000)) for _ in range(3)])
    for place, parameter in enumerate(module):
        if (place + rank) % 3:
            parameter.grad = torch.full((300_000,), float(rank + 1))
    if rank == 2 and module[0].grad is not None:
        module[0].grad[299_999] = float("inf")
    result = gradpack.allreduce(module, missing="mean_present")
    assert result.nonfinite == ("0",)
    for place, parameter in enumerate(module):
        there = [peer + 1 for peer in range(3) if (place + peer) % 3]
        assert parameter.grad is not None
        assert_same(parameter.grad[:299_999], torch.full((299_999,), float(np.float32(sum(there)) / np.float32(len(there)))))
    gradpack.close()
    gradpack.allreduce([grad])
    assert_same(grad, torch.full_like(grad, 3.0))


def test_every_call_among_hosts() -> None:
    run_ranks(what_it_offers, 3)


def large(rank: int, world: int) -> None:
    on([0, 0, 1, 1], rank)
    for compress, dtype in (("fp16", torch.float32), (None, torch.float16)):
        grad = torch.full((900_000,), 60_000.0, dtype=dtype)
        assert gradpack.allreduce([grad], compress=compress).finite is True
        assert_same(grad, torch.full_like(grad, 60_000.0))


def test_a_mean_of_16_bit_values_does_not_overflow_between_hosts() -> None:
    run_ranks(large, 4)


def fails(rank: int, world: int, point: ranks_failures.Point, path: str, hosts: list[int]) -> object:
    on(hosts, rank)
    return ranks_failures.run(rank, world, point, path)


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
@pytest.mark.parametrize("way", ["SIGKILL", "SIGSTOP", "exit"])
def test_a_rank_that_dies_or_stops_is_named_on_all_hosts(way: str, victim: int, tmp_path: Path) -> None:
    draw = random.Random(victim)
    point = ranks_failures.Point(way, 4, victim, 0.05 + 0.3 * draw.random() if way != "exit" else 3)
    path = tmp_path / "when"
    outcomes = try_ranks(fails, 4, point, str(path), HOSTS["in turn"], timeout=20, deadline=40)
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        found, text, began, came, *_ = outcome.value
        assert found == ("TransportTimeout" if way == "SIGSTOP" else "PeerLost"), (rank, text, outcome.text)
        assert f"rank {victim}" in text
        assert came - max(began, float(path.read_text())) < (ranks_failures.TIMEOUT + 1 if way == "SIGSTOP" else 2)
