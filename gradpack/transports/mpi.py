"""mpi4py communicators: packs travel by non-blocking MPI collectives, which this waits for with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from mpi4py import MPI

from gradpack import _C
from gradpack.errors import TransportError
from gradpack.peers import LOOK_SECONDS, Peers
from gradpack.transports.collectives import Collectives

__all__ = ["MPICollectives"]

_SPINS = 200
"""Looks at a request that follow one another at once; MPI moves bytes only while it is asked."""

_NAP_SECONDS = 0.0001

_left_behind: list[tuple[Any, _C.Buffer]] = []
"""Requests that never ended, with the memory that MPI may still write to: a collective cannot be cancelled."""


class _Waiting:
    """An MPI request whose waits have a deadline and end when another rank is lost."""

    def __init__(self, request: Any, what: str, peers: Peers) -> None:
        self._request = request
        self._what = what
        self._peers = peers

    def done(self) -> bool:
        return bool(self._request == MPI.REQUEST_NULL or self._request.Test())

    def keep(self, buffer: _C.Buffer) -> None:
        _left_behind.append((self._request, buffer))

    def wait(self, deadline: float) -> None:
        looked, turns = time.monotonic(), 0
        try:
            while not self.done():
                turns += 1
                if turns > _SPINS:
                    time.sleep(_NAP_SECONDS)
                now = time.monotonic()
                if now > deadline:
                    raise self._peers.late()
                if now - looked > LOOK_SECONDS:
                    self._peers.check()
                    looked = now
        except MPI.Exception as error:
            raise self._peers.broken(f"{self._what} ({error})") from error


class MPICollectives(Collectives):
    """The collectives of a communicator that nobody else uses.

    Args:
        comm: The communicator; whoever made it frees it.
        peers: What is known of its ranks.
        buffer: The memory that offsets count in.
    """

    shards = True
    replicates = False

    def __init__(self, comm: Any, peers: Peers, buffer: _C.Buffer) -> None:
        self.buffer = buffer
        self._comm = comm
        self._peers = peers
        self._started: list[_Waiting] = []

    def _start(self, what: str, start: Callable[..., Any], *arguments: Any) -> _Waiting:
        try:
            waiting = _Waiting(start(*arguments), what, self._peers)
        except MPI.Exception as error:
            raise TransportError(f"{what}: found {error}, wanted it started") from error
        self._started = [*(earlier for earlier in self._started if not earlier.done()), waiting]
        return waiting

    def _parts(self, offset: int, sizes: Sequence[int]) -> list[Any]:
        """The bytes of each other rank, end to end from ``offset`` on.

        A view that begins there, and no displacements from the buffer's start: Open MPI takes equal pointers to what is sent and
        what is received for an exchange in place.
        """
        counts = [0 if peer == self._peers.rank else nbytes for peer, nbytes in enumerate(sizes)]
        return [memoryview(self.buffer)[offset : offset + sum(counts)], counts, MPI.BYTE]

    def start_gather(self, own: int, sizes: Sequence[int], target: int, scratch: int, deadline: float) -> _Waiting:
        """See ``Collectives.start_gather``."""
        rank = self._peers.rank
        counts = [0 if peer == rank else sizes[rank] for peer in range(len(sizes))]
        sent = [memoryview(self.buffer)[own : own + sizes[rank]], (counts, [0] * len(sizes)), MPI.BYTE]
        return self._start("gather", self._comm.Ialltoallv, sent, self._parts(target, sizes))

    def start_all_to_all(self, source: int, sizes: Sequence[int], target: int, deadline: float) -> _Waiting:
        """See ``Collectives.start_all_to_all``."""
        received = self._parts(target, [sizes[self._peers.rank]] * len(sizes))
        return self._start("all-to-all", self._comm.Ialltoallv, self._parts(source, sizes), received)

    def start_broadcast(self, offset: int, nbytes: int, root: int, deadline: float) -> _Waiting:
        """See ``Collectives.start_broadcast``."""
        part = memoryview(self.buffer)[offset : offset + nbytes]
        return self._start("broadcast", self._comm.Ibcast, [part, nbytes, MPI.BYTE], root)

    def explain(self) -> str:
        """See ``Collectives.explain``."""
        return f"a duplicate of the communicator ({MPI.get_vendor()[0]})"

    def close(self) -> None:
        """See ``Collectives.close``."""
        for waiting in self._started:
            if not waiting.done():
                waiting.keep(self.buffer)
        self._started = []
        self.buffer = _C.Buffer(0)
        self._comm = None
