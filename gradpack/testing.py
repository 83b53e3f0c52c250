"""For tests of gradpack and of programs that use it: ranks as processes, exact data, reports that say where arrays differ.

Ranks are forked from a server that has imported torch and gradpack and started no thread, so a rank costs milliseconds; they
meet in a process group over loopback, or over pipes where there is no torch. A test that hangs is ended at its deadline, with the
processes it started.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any

__all__ = [
    "LocalGroup",
    "Outcome",
    "RanksFailed",
    "assert_same",
    "every_rank_raises",
    "exact_values",
    "local_group",
    "run_ranks",
    "try_ranks",
]


class RanksFailed(AssertionError):
    """A rank raised, died or passed the deadline; the message holds what is known of each."""


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    Attributes:
        value: What its function returned.
        error: What its function raised, or None.
        text: The traceback, or why there is none.
        exitcode: Of the process: negative for a signal, None where it had to be ended.
    """

    value: Any = None
    error: BaseException | None = None
    text: str = ""
    exitcode: int | None = None


class LocalGroup:
    """Ranks of one host that are connected by pipes: a group for ``group=`` that needs no torch.

    Args:
        rank: This rank.
        pipes: A connection to each other rank; None in the place of this one.

    Example:
        >>> group = gradpack.testing.local_group()  # doctest: +SKIP
        >>> gradpack.allreduce([numpy_array], group=group)  # doctest: +SKIP
    """

    def __init__(self, rank: int, pipes: Sequence[Connection | None]) -> None:
        self.rank = rank
        self.size = len(pipes)
        self._pipes = pipes

    def allgather(self, data: bytes, timeout: float) -> list[bytes]:
        """Collects bytes of every rank, in rank order.

        Raises:
            TimeoutError: Some rank did not come within ``timeout`` seconds.
            ConnectionError: The process of another rank is gone.
        """
        return self.alltoall([data] * self.size, timeout)

    def alltoall(self, parts: Sequence[bytes], timeout: float) -> list[bytes]:
        """Sends ``parts[r]`` to each rank r and returns what each sent here; raises as ``allgather`` does."""
        end = time.monotonic() + timeout
        found = list(parts)
        for turn in range(self.size):
            peer = (turn - self.rank) % self.size
            pipe = self._pipes[peer]
            if pipe is None:
                continue
            # A pipe holds little, so nobody writes before the other side reads.
            if self.rank > peer:
                pipe.send_bytes(b"ready")
                found[peer] = self._receive(pipe, peer, end)
            else:
                self._receive(pipe, peer, end)
            pipe.send_bytes(parts[peer])
            if self.rank < peer:
                found[peer] = self._receive(pipe, peer, end)
        return found

    def _receive(self, pipe: Connection, peer: int, end: float) -> bytes:
        if not pipe.poll(max(0.0, end - time.monotonic())):
            raise TimeoutError(f"rank {peer} did not come")
        try:
            return pipe.recv_bytes()
        except EOFError as error:
            raise ConnectionError(f"rank {peer} is gone") from error


_local_group: LocalGroup | None = None


def local_group() -> LocalGroup:
    """The group of a rank that ``run_ranks`` or ``try_ranks`` started with ``backend=None``.

    Raises:
        RuntimeError: This process is no such rank.
    """
    if _local_group is None:
        raise RuntimeError("local_group: found no group, wanted a rank started with backend=None")
    return _local_group


def _connect(context: ForkServerContext, world: int) -> list[list[Connection | None]]:
    """A pipe between each two ranks: for each rank its ends, None in the place of itself."""
    ends: list[list[Connection | None]] = [[None] * world for _ in range(world)]
    for first in range(world):
        for second in range(first):
            ends[first][second], ends[second][first] = context.Pipe(duplex=True)
    return ends


_server: ForkServerContext | None = None


def _context() -> ForkServerContext:
    global _server
    if _server is None:
        _server = multiprocessing.get_context("forkserver")
        _server.set_forkserver_preload(["torch.distributed", "gradpack.functional", "gradpack.transports.process_group"])
    return _server


def _portable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


@contextmanager
def _process_group(rank: int, world: int, port: int, timeout: float, backend: str) -> Iterator[None]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _pipe_group(rank: int, pipes: Sequence[Connection | None]) -> Iterator[None]:
    global _local_group
    _local_group = LocalGroup(rank, pipes)
    yield
    _local_group = None


def _settings() -> dict[str, str]:
    """Gradpack's settings here and now; the server that ranks are forked from has those of when it began."""
    return {name: value for name, value in os.environ.items() if name.startswith("GRADPACK_")}


def _rank_main(
    rank: int,
    world: int,
    make_group: Callable[[], AbstractContextManager[None]],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    settings: dict[str, str],
    out: Connection,
) -> None:
    for name in _settings():
        del os.environ[name]
    os.environ.update(settings)
    try:
        with make_group():
            out.send(Outcome(value=function(rank, world, *args)))
    except BaseException as error:
        out.send(Outcome(error=_portable(error), text=traceback.format_exc()))


def try_ranks(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    deadline: float = 60.0,
    timeout: float = 30.0,
    backend: str | None = "gloo",
) -> list[Outcome]:
    """Runs ``function(rank, world, *args)`` on every rank and says how each ended; raises nothing of theirs.

    Args:
        function: A function of a module (it travels by name).
        world: Number of ranks.
        *args: What else it gets; anything that pickles.
        deadline: Seconds after which the ranks that are left are killed.
        timeout: Seconds of the process group's own timeout.
        backend: Of the process group; None for no process group but a ``local_group``, which needs no torch.

    Returns:
        One ``Outcome`` for each rank.
    """
    context = _context()
    groups: list[Callable[[], AbstractContextManager[None]]]
    links: list[list[Connection | None]] = []
    if backend is None:
        links = _connect(context, world)
        groups = [partial(_pipe_group, rank, links[rank]) for rank in range(world)]
    else:
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
        groups = [partial(_process_group, rank, world, store.port, timeout, backend) for rank in range(world)]
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    settings = _settings()
    processes = [
        context.Process(
            target=_rank_main, args=(rank, world, groups[rank], function, args, settings, pipes[rank][1]), daemon=True
        )
        for rank in range(world)
    ]
    outcomes: list[Outcome | None] = [None] * world
    end = time.monotonic() + deadline
    try:
        for process, (_, child_end) in zip(processes, pipes, strict=True):
            process.start()
            child_end.close()
        for link in filter(None, chain.from_iterable(links)):
            link.close()
        ranks = {pipe: rank for rank, (pipe, _) in enumerate(pipes)}
        while ranks and time.monotonic() < end:
            for pipe in wait(list(ranks), timeout=max(0.0, end - time.monotonic())):
                assert isinstance(pipe, Connection)
                rank = ranks.pop(pipe)
                try:
                    outcomes[rank] = pipe.recv()
                except EOFError:
                    outcomes[rank] = Outcome(text="the process ended without a word")
        for process in processes:
            process.join(max(0.1, end - time.monotonic()))
    finally:
        for process in processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                process.join()
                outcomes[processes.index(process)] = outcomes[processes.index(process)] or Outcome(text="killed at the deadline")
        for pipe, _ in pipes:
            pipe.close()
    return [
        Outcome(found.value, found.error, found.text, process.exitcode)
        for found, process in zip(
            (outcome or Outcome(text="killed at the deadline") for outcome in outcomes), processes, strict=True
        )
    ]


def run_ranks(function: Callable[..., Any], world: int, *args: Any, deadline: float = 60.0, **options: Any) -> list[Any]:
    """Runs ``function(rank, world, *args)`` on every rank, all of which must return.

    Args:
        function: As for ``try_ranks``.
        world: As for ``try_ranks``.
        *args: As for ``try_ranks``.
        deadline: As for ``try_ranks``.
        **options: As for ``try_ranks``.

    Returns:
        What each rank returned.

    Raises:
        RanksFailed: A rank did not return, or its process ended badly afterwards.

    Example:
        >>> run_ranks(my_module.my_test, 2)  # doctest: +SKIP
    """
    __tracebackhide__ = True  # pytest then shows the ranks' tracebacks, not this frame
    outcomes = try_ranks(function, world, *args, deadline=deadline, **options)
    failed = [rank for rank, outcome in enumerate(outcomes) if outcome.text or outcome.exitcode]
    if failed:
        told = "\n".join(f"rank {rank} (exit code {outcomes[rank].exitcode}): {outcomes[rank].text}" for rank in failed)
        raise RanksFailed(f"{len(failed)} of {world} ranks failed:\n{told}") from outcomes[failed[0]].error
    return [outcome.value for outcome in outcomes]


def exact_values(count: int, rank: int, largest: int = 60) -> Any:
    """Whole numbers whose sums over a few ranks are exact in every dtype, neighbours and ranks distinct.

    Args:
        count: How many.
        rank: Whose.
        largest: The greatest magnitude; ``largest`` times the number of ranks must be at most 256 for bfloat16.

    Returns:
        A NumPy array of int64, shape ``[count]``.
    """
    import numpy as np

    period = 2 * largest + 1
    index = np.arange(count)
    return (7 * index + 11 * rank + index // period) % period - largest


def assert_same(found: Any, wanted: Any, what: str = "array") -> None:
    """Asserts that two arrays (torch or NumPy) hold the same bits, NaN counting as equal to NaN.

    Raises:
        AssertionError: They differ; the message gives the number of wrong elements and the first, with both values.
    """
    import numpy as np

    def bits(value: Any) -> Any:
        if hasattr(value, "detach"):
            value = value.detach()
            value = value.double() if str(value.dtype) == "torch.bfloat16" else value
            value = value.resolve_conj().numpy()
        return np.asarray(value)

    left, right = bits(found), bits(wanted)
    if left.shape != right.shape or left.dtype != right.dtype:
        raise AssertionError(f"{what}: found {left.dtype}{list(left.shape)}, wanted {right.dtype}{list(right.shape)}")
    wrong = ~((left == right) | ((left != left) & (right != right)))
    if left.dtype.kind == "f":
        wrong |= (np.signbit(left) != np.signbit(right)) & (left == left)
    if wrong.any():
        first = tuple(int(axis[0]) for axis in np.nonzero(wrong)) if left.shape else ()
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {left.size} elements are wrong, the first at {first}: "
            f"found {left[first]!r}, wanted {right[first]!r}"
        )


def every_rank_raises(outcomes: Sequence[Outcome], kind: type[BaseException]) -> list[str]:
    """The messages of the errors, one for each rank, all of which must be of class ``kind``."""
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome.error, kind), f"rank {rank}: {outcome.error!r} {outcome.text}"
    return [str(outcome.error) for outcome in outcomes]
