"""What a transport is: it takes the calls of one group, in order, and agrees with the other ranks before it moves anything."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from gradpack import _C
from gradpack.arrays import Collected
from gradpack.errors import TransportError
from gradpack.options import Options
from gradpack.packer import Packer, Planned
from gradpack.result import Result

__all__ = ["Call", "Run", "Transport"]


@dataclass
class Call:
    """One call on its way through a transport.

    Attributes:
        number: Which call on the group it is; the same on every rank.
        kind: ``"allreduce"`` or ``"broadcast"``.
        root: Rank whose values are broadcast, else None.
        collected: The arrays as the caller passed them.
        arrays: Their description.
        packer: How they are packed.
        options: What was asked for.
        began: ``time.perf_counter()`` when the call began.
    """

    number: int
    kind: str
    root: int | None
    collected: Collected
    arrays: _C.Arrays
    packer: Packer
    options: Options
    began: float = field(default_factory=time.perf_counter)

    def result(self, nonfinite: _C.Nonfinite | None, wire_bytes: int) -> Result:
        """The result of the call, now that it is done."""
        found = () if nonfinite is None else tuple(self.collected.label(index) for index in nonfinite.indices())
        return Result(None if nonfinite is None else not found, found, wire_bytes, time.perf_counter() - self.began)


@dataclass
class Run:
    """What a call in progress has settled: filled by the agreement, read by what moves the bytes.

    Attributes:
        call: The call.
        planned: Its packs.
        deadline: When to give up, as ``time.monotonic()`` counts.
        nonfinite: Where the kernels note what is not finite, if anyone wants to know.
        divisor: What sums are divided by.
        counts: An int32 for each array, that takes the place of ``divisor``; or None.
        wire_bytes: Bytes that this rank sent.
    """

    call: Call
    planned: Planned
    deadline: float
    nonfinite: _C.Nonfinite | None
    divisor: int
    counts: bytes | None = None
    wire_bytes: int = 0


class Transport(ABC):
    """Moves packs between the ranks of one group. Calls come one at a time, in the same order on every rank.

    Attributes:
        name: What ``transport=`` calls it.
        offers: What ``transport=`` may be, beside ``"auto"``, on a group whose transport it is.
        why: Why it is the transport of its group.
    """

    name: str
    offers: tuple[str, ...]
    why: str

    def check_offered(self, operation: str, requested: str) -> None:
        """Raises where calls on this group cannot go the way that was asked for by name; the same on all ranks.

        Raises:
            TransportError: They cannot.
        """
        if requested != "auto" and requested not in self.offers:
            wanted = " or ".join(map(repr, ("auto", *self.offers)))
            raise TransportError(f"{operation}: transport: found {requested!r} on a group that {self.why}, wanted {wanted}")

    @abstractmethod
    def run(self, call: Call) -> Result:
        """Agrees with the other ranks, then carries out ``call``.

        Raises:
            LayoutMismatch: The ranks do not agree; nothing was written, and the next call works.
            TransportError: The other ranks were not reached; the group is broken.
        """

    @abstractmethod
    def refuse(self, operation: str, reason: Exception, timeout: float | None) -> None:
        """Takes part in the agreement with ``reason`` in place of a call, so that the other ranks raise instead of waiting."""

    @abstractmethod
    def gather(self, operation: str, data: bytes, timeout: float | None) -> list[bytes]:
        """Collects bytes of every rank, in rank order; where they are empty it is a barrier.

        Raises:
            LayoutMismatch: Another rank makes another call.
            TransportError: As for ``run``.
        """

    @abstractmethod
    def explain(self, packer: Packer, requested: str) -> list[str]:
        """Lines that say how the packs of ``packer`` would travel by the transport that was asked for."""

    @abstractmethod
    def close(self) -> None:
        """Releases staging and communicators."""
