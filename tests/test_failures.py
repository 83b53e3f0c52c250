"""Ranks that die, stop, leave or are interrupted at random moments: every survivor says so in time, and nothing is left."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ranks_failures
import torch
from ranks_failures import TIMEOUT

import gradpack
from gradpack.testing import assert_same, run_ranks, try_ranks

pytestmark = pytest.mark.usefixtures("over")

LONG = os.environ.get("GRADPACK_TEST_LONG") == "1"
POINTS = ranks_failures.points(200, seed=7)

NOTICED = 2.0
"""Seconds within which every survivor knows of a death."""

SLACK = 1.0
"""Seconds by which a loaded machine may miss a deadline."""

EXPECTED = {
    "SIGKILL": {"PeerLost"},
    "exit": {"PeerLost"},
    "raise": {"PeerLost"},
    "close": {"PeerLost"},
    # Interrupted inside a call, or between two, where nobody hears of it before the process ends.
    "SIGINT": {"TransportError", "PeerLost"},
    "SIGSTOP": {"TransportTimeout"},
    "never": {"TransportTimeout"},
}
"""Classes of the survivors' errors."""


@pytest.mark.parametrize("index", range(len(POINTS) if LONG else 14))
def test_every_survivor_knows(index: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    point, path = POINTS[index], tmp_path / "when"
    outcomes = try_ranks(ranks_failures.run, point.world, point, str(path), timeout=20, deadline=40)
    for rank, outcome in enumerate(outcomes):
        if rank == point.victim:
            continue
        what = f"{point}: rank {rank}: {outcome.value or outcome.text}"
        assert outcome.value is not None, what
        found, text, began, came, next_found, next_text = outcome.value
        # A rank that never came is absent: nobody knows its process.
        never_came = found == "TransportTimeout" and "first call" in text and f"found rank {point.victim} absent" in text
        assert found in EXPECTED[point.way] or never_came, what
        assert f"rank {point.victim}" in text, what
        assert re.match(r"allreduce: (first call|call \d+) on this group: ", text), what
        assert next_found == "TransportError" and "broken by an earlier failure" in next_text, what
        in_time = TIMEOUT + SLACK if found == "TransportTimeout" else NOTICED
        waited = came - max(began, float(path.read_text()))
        assert waited < in_time, f"{waited:.2f} s: {what}"
        assert outcome.exitcode == 0, f"{outcome.exitcode}: {what}"
    if point.way == "SIGINT":
        assert outcomes[point.victim].value[0] == "KeyboardInterrupt", outcomes[point.victim]
    assert "terminate called" not in capfd.readouterr().err


def again(rank: int, world: int) -> None:
    """After a failure a rank closes, and where all did the group works again."""
    gradpack.allreduce([torch.ones(3)])
    if rank == 1:
        time.sleep(1)
    else:
        with pytest.raises(gradpack.TransportTimeout, match=r"found rank 1 \(after its call 1\) absent at the deadline"):
            gradpack.allreduce([torch.ones(3)], timeout=0.5)
    grad = torch.full((100_000,), float(rank))
    if rank == 1:
        with pytest.raises(gradpack.TransportTimeout, match=r"call 2 on this group: rank [02] gave up: TransportTimeout"):
            gradpack.allreduce([grad])
        assert_same(grad, torch.full((100_000,), 1.0))
    gradpack.close()
    gradpack.allreduce([grad], op="sum")
    assert_same(grad, torch.full((100_000,), 3.0))


def test_a_group_that_is_closed_everywhere_works_again() -> None:
    run_ranks(again, 3)


def before_the_first_call(rank: int, world: int) -> tuple[str, float]:
    if rank == 1:
        time.sleep(1.5)
    began = time.monotonic()
    with pytest.raises(gradpack.TransportTimeout) as caught:
        gradpack.allreduce([torch.ones(3)], timeout=0.5)
    seconds = time.monotonic() - began
    if rank != 1:
        time.sleep(2)
    gradpack.close()
    gradpack.allreduce([torch.ones(3)])
    return str(caught.value), seconds


def test_a_rank_that_comes_too_late_to_meet_is_named_and_told() -> None:
    first, second, third = run_ranks(before_the_first_call, 3)
    absent = "allreduce: first call on this group: found rank 1 absent at the deadline, wanted all 3 ranks here before it"
    # The first of the two that wait tells the other, if that is not at its own deadline by then.
    assert absent in (first[0], third[0])
    assert all("found rank 1 absent" in message for message, _ in (first, third))
    assert second[0].startswith("allreduce: first call on this group: rank ") and "gave up: TransportTimeout: " in second[0]
    assert second[1] < 0.4


def catches_up(rank: int, world: int) -> None:
    """A rank that comes when the others have given up, closed and begun anew meets them there."""
    if rank == 1:
        time.sleep(1.5)
    else:
        with pytest.raises(gradpack.TransportTimeout, match="found rank 1 absent"):
            gradpack.allreduce([torch.ones(3)], timeout=0.5)
        gradpack.close()
    gradpack.allreduce([torch.ones(3)])


def test_a_rank_that_comes_late_meets_those_that_began_anew() -> None:
    run_ranks(catches_up, 3)


def interrupted_before_it_meets(rank: int, world: int) -> tuple[str, float]:
    began = time.monotonic()
    try:
        if rank == 1:
            gradpack.allreduce(interrupts())
        gradpack.allreduce([torch.ones(3)])
    except KeyboardInterrupt:
        return "", 0.0
    except gradpack.TransportError as error:
        return str(error), time.monotonic() - began
    raise AssertionError


def interrupts() -> Iterator[torch.Tensor]:
    time.sleep(0.3)
    yield torch.ones(3)
    raise KeyboardInterrupt


def test_an_interruption_before_ranks_have_met_is_told() -> None:
    (message, seconds), _ = run_ranks(interrupted_before_it_meets, 2)
    assert message == "allreduce: first call on this group: found that rank 1 was interrupted, wanted it in this call"
    assert seconds < NOTICED


def holds_the_store(rank: int, world: int) -> str:
    """Rank 0 has the only store in its process, as ``torchrun`` never has it but ``init_process_group`` by hand does."""
    gradpack.allreduce([torch.ones(3)])
    if rank == 0:
        os._exit(0)
    with pytest.raises(gradpack.PeerLost) as caught:
        gradpack.allreduce([torch.ones(3)])
    return str(caught.value)


def test_a_rank_that_is_gone_is_named_by_all() -> None:
    outcomes = try_ranks(holds_the_store, 4)
    for outcome in outcomes[1:]:
        assert "found rank 0 gone (" in outcome.value, outcome
