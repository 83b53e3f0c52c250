"""Any object with rank, size and ``allgather(data, timeout=seconds)``: packs travel through what it offers, as bytes.

``alltoall(parts, timeout=seconds)``, one part for each rank, is used where the object has it too: without it every rank gets all
bytes of all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

from gradpack import _C
from gradpack.errors import TransportError
from gradpack.members import ObjectRanks
from gradpack.peers import LOOK_SECONDS, Peers
from gradpack.transports.collectives import Collectives

__all__ = ["ByteGroupCollectives"]


class _Waiting:
    """A call of the object in its thread; the bytes are put in place by who waits."""

    def __init__(self, future: Future[Sequence[Any]], place: Callable[[Sequence[Any]], None], peers: Peers) -> None:
        self._future = future
        self._place = place
        self._peers = peers
        self._placed = False

    def wait(self, deadline: float) -> None:
        while not wait([self._future], LOOK_SECONDS).done:
            self._peers.check()
            if time.monotonic() > deadline:
                raise self._peers.late()
        if not self._placed:
            self._placed = True
            self._place(self._future.result())


class ByteGroupCollectives(Collectives):
    """Collectives made of what an object offers.

    Args:
        ranks: The object's ranks.
        peers: What is known of them.
        buffer: The memory that offsets count in.
    """

    replicates = False

    def __init__(self, ranks: ObjectRanks, peers: Peers, buffer: _C.Buffer) -> None:
        self.buffer = buffer
        self.shards = ranks.shards
        self._ranks = ranks
        self._peers = peers

    def _read(self, offset: int, nbytes: int) -> bytes:
        return bytes(memoryview(self.buffer)[offset : offset + nbytes])

    def _started(self, verb: str, argument: Any, sizes: Sequence[int], target: int, deadline: float) -> _Waiting:
        rank, buffer = self._peers.rank, self.buffer

        def place(found: Sequence[Any]) -> None:
            memory, at = memoryview(buffer), target
            for peer, (part, nbytes) in enumerate(zip(map(bytes, found), sizes, strict=True)):
                if len(part) != nbytes:
                    raise TransportError(
                        f"{verb} of the group: found {len(part)} bytes of rank {peer}, wanted {nbytes}: "
                        "its calls must come in the same order on every rank"
                    )
                if verb == "allgather" and peer == rank and part != argument:
                    raise TransportError(
                        f"{verb} of the group: found other bytes than this rank's at place {rank}, wanted rank order"
                    )
                if peer != rank:
                    memory[at : at + nbytes] = part
                    at += nbytes

        return _Waiting(self._ranks.start(verb, argument, deadline), place, self._peers)

    def start_gather(self, own: int, sizes: Sequence[int], target: int, scratch: int, deadline: float) -> _Waiting:
        """See ``Collectives.start_gather``."""
        return self._started("allgather", self._read(own, sizes[self._peers.rank]), sizes, target, deadline)

    def start_all_to_all(self, source: int, sizes: Sequence[int], target: int, deadline: float) -> _Waiting:
        """See ``Collectives.start_all_to_all``."""
        rank, parts = self._peers.rank, []
        for peer, nbytes in enumerate(sizes):
            parts.append(b"" if peer == rank else self._read(source, nbytes))
            source += len(parts[-1])
        received = [0 if peer == rank else sizes[rank] for peer in range(len(sizes))]
        return self._started("alltoall", parts, received, target, deadline)

    def start_broadcast(self, offset: int, nbytes: int, root: int, deadline: float) -> _Waiting:
        """See ``Collectives.start_broadcast``."""
        sizes = [nbytes if peer == root else 0 for peer in range(self._peers.size)]
        data = self._read(offset, nbytes) if self._peers.rank == root else b""
        return self._started("allgather", data, sizes, offset, deadline)

    def explain(self) -> str:
        """See ``Collectives.explain``."""
        return f"allgather{' and alltoall' if self.shards else ''} of the group"

    def close(self) -> None:
        """See ``Collectives.close``."""
        self.buffer = _C.Buffer(0)
