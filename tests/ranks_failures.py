"""What the ranks of the failure tests do: call after call until one of them is killed, stopped, interrupted or leaves."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from dataclasses import dataclass

import torch

import gradpack
from gradpack.testing import assert_same

TIMEOUT = 3.0
"""Seconds that calls wait for the others: much more than any call takes, and than death takes to be noticed."""

WAYS = ["SIGKILL", "SIGSTOP", "SIGINT", "exit", "raise", "never", "close"]


@dataclass(frozen=True)
class Point:
    """One way and one moment to fail.

    Attributes:
        way: A signal, ``"exit"`` (``sys.exit`` between calls), ``"raise"`` (an exception that ends the process), ``"never"`` (no
            more calls), ``"close"`` (``gradpack.close`` on this rank alone).
        world: Number of ranks.
        victim: The rank that fails.
        after: Seconds, from before the first call on, or calls where the way is no signal.
    """

    way: str
    world: int
    victim: int
    after: float


def points(count: int, seed: int) -> list[Point]:
    """Random ways and moments; the first call, which makes the connections, takes some 50 ms of them."""
    draw = random.Random(seed)
    made = []
    for index in range(count):
        way, world = WAYS[index % len(WAYS)], draw.randint(2, 4)
        after = draw.choice([0.05, 0.15, 0.4]) * draw.random() if way.startswith("SIG") else draw.randint(0, 6)
        made.append(Point(way, world, draw.randrange(world), after))
    return made


def note(path: str) -> None:
    """Writes down when the failure began."""
    with open(path, "w") as file:
        file.write(str(time.monotonic()))


def strike(way: str, after: float, path: str) -> None:
    """Starts a child that sends this process a signal later, and lives on with all that it inherited."""
    parent = os.getpid()
    # A shell has background jobs ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Python drops what is raised in the callbacks of a fork, an interruption too.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    if os.fork():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        return
    time.sleep(after)
    note(path)
    os.kill(parent, getattr(signal, way))
    # It holds copies of every socket of a dead parent for as long as the others may need to notice.
    time.sleep(TIMEOUT + 2)
    if way == "SIGSTOP":
        os.kill(parent, signal.SIGKILL)
    os._exit(0)


def one_call(number: int, rank: int, world: int) -> None:
    """A call of a size and kind of its own, whose result is known."""
    count = [3, 20_000, 400_000, 3_000_000][number % 4]
    step = number % 16  # So that bfloat16 holds every sum.
    grads = [torch.full((count,), float(rank + step)), torch.full((7,), rank, dtype=torch.int32)]
    compress = "bf16" if number % 3 == 2 else None
    gradpack.allreduce(grads, op="sum", compress=compress, timeout=TIMEOUT)
    total = float(sum(range(world)) + world * step)
    assert_same(grads[0], torch.full((count,), total), f"call {number}")
    assert_same(grads[1], torch.full((7,), sum(range(world)), dtype=torch.int32), f"call {number}")


def run(rank: int, world: int, point: Point, path: str) -> tuple[str, str, float, float, str, str]:
    """Calls until something happens.

    Returns:
        Class and text of the error, when its call began and when it came, and class and text of what the next call raised.
    """
    is_victim = rank == point.victim
    number, began = 0, time.monotonic()
    try:
        if is_victim and point.way.startswith("SIG"):
            strike(point.way, point.after, path)
        while True:
            if is_victim and not point.way.startswith("SIG") and number == point.after:
                leave(point.way, path)
            began = time.monotonic()
            one_call(number, rank, world)
            number += 1
    except BaseException as error:
        if is_victim and not isinstance(error, KeyboardInterrupt):
            raise
        came, first = time.monotonic(), error
    second = ("", "")
    if not is_victim:
        try:
            gradpack.allreduce([torch.ones(3)], timeout=TIMEOUT)
        except gradpack.GradpackError as error:
            second = type(error).__name__, str(error)
    return type(first).__name__, str(first), began, came, *second


def leave(way: str, path: str) -> None:
    note(path)
    if way == "exit":
        sys.exit(0)
    if way == "raise":
        raise ZeroDivisionError
    if way == "close":
        gradpack.close()
    time.sleep(TIMEOUT + 2)
    os._exit(0)
