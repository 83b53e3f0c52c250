"""Ctrl-C and other exceptions from nowhere: wherever they come inside a call, no later call meets the wrong one."""

from __future__ import annotations

import inspect
import itertools
import os
import sys
import threading
import time
from types import FrameType
from typing import Any

import pytest
import torch

import gradpack
from gradpack import groups
from gradpack.testing import assert_same, run_ranks

pytestmark = pytest.mark.usefixtures("over")

TIMEOUT = 3.0


class Interrupt:
    """Raises KeyboardInterrupt as the ``at``-th call of a gradpack function begins or ends, as a signal might.

    Not outside of what all ranks do together: whoever is interrupted there has not begun, or is done.
    """

    def __init__(self, at: int) -> None:
        self.at, self.seen, self.inside = at, 0, False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_name
        self.inside = (self.inside or (event, name) == ("call", "untraced")) and (event, name) != ("return", "untraced")
        # A generator that yields is no place where signals are looked at, and would be ended there without its finally.
        yields = event == "return" and frame.f_code.co_flags & inspect.CO_GENERATOR
        ours = f"{os.sep}gradpack{os.sep}" in frame.f_code.co_filename
        if self.inside and ours and event in ("call", "return") and not yields:
            self.seen += 1
            if self.seen == self.at:
                sys.setprofile(None)
                raise KeyboardInterrupt


def one_call(step: int, rank: int, world: int) -> None:
    grad = torch.full((30_000,), float(rank + step))
    gradpack.allreduce([grad], op="sum", timeout=TIMEOUT)
    assert_same(grad, torch.full((30_000,), float(sum(range(world)) + world * step)), f"step {step}")


def interrupted_anywhere(rank: int, world: int, first: int, step: int) -> int:
    """Interrupts one call after another, each at another place, closes, and goes on; returns at how many."""
    at = first
    while True:
        for call in range(2):
            one_call(call, rank, world)
        interrupt = Interrupt(at)
        ended = [torch.zeros(1)]
        began = time.monotonic()
        try:
            if rank == 0:
                sys.setprofile(interrupt)
            one_call(2, rank, world)
            sys.setprofile(None)
            one_call(3, rank, world)
            ended[0] += 1
        except KeyboardInterrupt:
            with pytest.raises(gradpack.TransportError, match="broken by an earlier failure"):
                one_call(3, rank, world)
        except gradpack.TransportError as error:
            assert "rank 0 was interrupted" in str(error), f"at {at}: {error}"
        assert time.monotonic() - began < 2, f"at {at}"
        gradpack.close()
        gradpack.allreduce(ended, op="sum")
        if ended[0] > 0:
            assert ended[0] == world, f"at {at}: some ranks went on"
            return at
        at += step


@pytest.mark.parametrize("first", [1, 2, 3, 4])
def test_an_interruption_anywhere_breaks_the_group_on_every_rank(first: int) -> None:
    step = 4 if os.environ.get("GRADPACK_TEST_LONG") == "1" else 12
    reached = run_ranks(interrupted_anywhere, 2, first, step, deadline=150, timeout=60)
    assert reached[0] == reached[1] > 100


def skips_a_call(rank: int, world: int) -> None:
    """What a call that one rank made alone would do to all later ones."""
    one_call(0, rank, world)
    if rank == 1:
        groups.resolve("test", None).calls += 1
    with pytest.raises(gradpack.TransportError, match=r"call [23] on this group: found rank [01] at its call [23], wanted all"):
        one_call(1, rank, world)
    gradpack.close()
    one_call(2, rank, world)


def test_calls_that_are_not_the_same_one_never_meet() -> None:
    run_ranks(skips_a_call, 2)


class Unprintable(Exception):
    """An exception of somebody else's whose text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no")


class Other(gradpack.TransportError):
    """A subclass that takes other arguments than the class it is of."""

    def __init__(self) -> None:
        super().__init__("of another make")


def fails_inside(rank: int, world: int, kind: type[Exception]) -> None:
    from gradpack.transports.pipeline import Pipeline
    from gradpack.transports.shared_memory import SharedMemoryTransport

    one_call(0, rank, world)

    def fails(*arguments: Any) -> None:
        raise kind

    if rank == 0:
        Pipeline.carry = SharedMemoryTransport._finish = fails  # type: ignore[method-assign]
    with pytest.raises(gradpack.TransportError if rank else kind.__mro__[1] if kind is Other else kind):
        one_call(1, rank, world)
        one_call(2, rank, world)
    with pytest.raises(gradpack.TransportError, match="broken by an earlier failure"):
        one_call(3, rank, world)


@pytest.mark.parametrize("kind", [ValueError, MemoryError, Unprintable, Other])
def test_an_error_inside_a_call_breaks_the_group_on_every_rank(kind: type[Exception]) -> None:
    run_ranks(fails_inside, 2, kind)


def bad_setting(rank: int, world: int, name: str, value: str, later: bool) -> str:
    if later:
        one_call(0, rank, world)
    if rank == 0:
        os.environ[name] = value
    with pytest.raises(
        ValueError if rank == 0 else gradpack.LayoutMismatch, match=f"environment: {name}: found '{value}'"
    ) as found:
        one_call(1, rank, world)
    os.environ.pop(name, None)
    one_call(2, rank, world)
    return str(found.value)


# What only a group's first call reads is nobody's concern later.
@pytest.mark.parametrize(
    ("setting", "later"),
    [("HOST_TIMEOUT", False), ("SLOT_BYTES", False), *itertools.product(["ARRAY_PROTOCOL", "NUM_THREADS"], [False, True])],
)
def test_a_bad_setting_on_one_rank_is_a_refusal(setting: str, later: bool) -> None:
    run_ranks(bad_setting, 2, f"GRADPACK_{setting}", "zz", later)


def late_and_closed(rank: int, world: int) -> None:
    """One rank gave up before the other came; both close, and the late one calls first."""
    if rank == 0:
        with pytest.raises(gradpack.TransportTimeout):
            gradpack.barrier(timeout=0.3)
        gradpack.close()
        time.sleep(0.7)
    else:
        time.sleep(0.6)
        gradpack.close()
    one_call(0, rank, world)


def test_closing_works_where_a_rank_has_never_met_the_others() -> None:
    run_ranks(late_and_closed, 2)


def enters_while_inside(rank: int, world: int) -> None:
    """What a thread does inside a call keeps others out, and no longer."""
    state = groups.resolve("test", None)
    inside, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with state.entered("test"):
            inside.set()
            go_on.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    for _ in range(2):
        with pytest.raises(gradpack.TransportError, match="another thread inside"), state.entered("test"):
            pass
    go_on.set()
    thread.join()
    with state.entered("test"):
        pass


def test_a_thread_inside_keeps_others_out() -> None:
    run_ranks(enters_while_inside, 1)
