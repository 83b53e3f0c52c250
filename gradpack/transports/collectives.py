"""What a group offers to a staged transport: three collectives on one buffer, started in the same order on every rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from gradpack import _C

__all__ = ["Collectives", "Work", "rows"]


class Work(Protocol):
    """A collective that was started."""

    def wait(self, deadline: float) -> None:
        """Waits until it is done or ``time.monotonic()`` passes ``deadline``; looks at signals at least five times a second.

        Raises:
            TransportTimeout: The deadline passed.
            PeerLost: The process of another rank is gone.
            TransportError: Another rank gave up.
        """


class Collectives(ABC):
    """Collectives on bytes of one buffer. No rank sends anything to itself: its own bytes stay where they are.

    What is started must end by itself soon after its deadline, since the buffer is freed no sooner.

    Attributes:
        buffer: The memory that offsets count in.
        shards: Whether ``start_all_to_all`` is there. Without it every rank gets all bytes of all ranks and sums them alone.
        replicates: Whether ``start_gather`` needs ``scratch`` in worlds of more than two.
    """

    buffer: _C.Buffer
    shards: bool
    replicates: bool

    @abstractmethod
    def start_gather(self, own: int, sizes: Sequence[int], target: int, scratch: int, deadline: float) -> Work:
        """Starts to send the bytes at ``own`` to all ranks; rank r has ``sizes[r]`` of them.

        What comes from the others lands at ``target`` in rank order, end to end, this rank's left out (see ``rows``).
        ``scratch`` is room for one copy of this rank's bytes for each other rank.
        """

    @abstractmethod
    def start_all_to_all(self, source: int, sizes: Sequence[int], target: int, deadline: float) -> Work:
        """Starts to send ``sizes[r]`` bytes to each other rank r, which lie end to end at ``source`` in rank order.

        Each other rank's bytes for this one, ``sizes[rank]`` of them, land at ``target`` likewise.
        """

    @abstractmethod
    def start_broadcast(self, offset: int, nbytes: int, root: int, deadline: float) -> Work:
        """Starts to send ``nbytes`` of ``root`` to all, in place."""

    @abstractmethod
    def explain(self) -> str:
        """A few words on what carries the bytes."""

    @abstractmethod
    def close(self) -> None:
        """Releases what the collectives hold, the buffer too."""


def rows(rank: int, own: int, sizes: Sequence[int], target: int) -> list[int]:
    """Where the bytes of each rank lie after ``start_gather``."""
    found = []
    for peer, nbytes in enumerate(sizes):
        found.append(own if peer == rank else target)
        target += 0 if peer == rank else nbytes
    return found
