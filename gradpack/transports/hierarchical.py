"""Ranks on several hosts: those of one host sum through shared memory, one of each carries the sums to the other hosts.

A call opens among all ranks, as over a process group, and what fits into the opening is done with it. The rest goes through the
same pipeline, but between the *leaders* of the hosts: to pack is to sum the gradients of a host into the leader's slot, to unpack
is to spread a slot over the gradients of a host. The other ranks make the same steps with no bytes to exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from gradpack import _C
from gradpack.dtypes import DTYPES
from gradpack.groups import GroupState
from gradpack.packer import Packer
from gradpack.peers import Peers
from gradpack.result import Result
from gradpack.transports.base import Call, Run
from gradpack.transports.collectives import Collectives, Work
from gradpack.transports.drive import drive
from gradpack.transports.pipeline import Pipeline
from gradpack.transports.slices import Slice
from gradpack.transports.staged import StagedTransport, Staging

__all__ = ["HierarchicalTransport", "NoCollectives", "place_of"]


class _Done:
    def wait(self, deadline: float) -> None:
        """See ``Work.wait``."""


class NoCollectives(Collectives):
    """What a rank that leads no host exchanges with other hosts: nothing.

    Args:
        buffer: Where its pipeline is told that its slots are; nothing is written there.
    """

    shards = True
    replicates = True

    def __init__(self, buffer: _C.Buffer) -> None:
        self.buffer = buffer

    def start_gather(self, own: int, sizes: Sequence[int], target: int, scratch: int, deadline: float) -> Work:
        """See ``Collectives.start_gather``."""
        return _Done()

    def start_all_to_all(self, source: int, sizes: Sequence[int], target: int, deadline: float) -> Work:
        """See ``Collectives.start_all_to_all``."""
        return _Done()

    def start_broadcast(self, offset: int, nbytes: int, root: int, deadline: float) -> Work:
        """See ``Collectives.start_broadcast``."""
        return _Done()

    def explain(self) -> str:
        """See ``Collectives.explain``."""
        return "the leader of this host"

    def close(self) -> None:
        """See ``Collectives.close``."""
        self.buffer = _C.Buffer(0)


def place_of(rank: int, hosts: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Which of how many hosts a rank is on."""
    return next(host for host, ranks in enumerate(hosts) if rank in ranks), len(hosts)


def _division(run: Run, stream: int, *, of_host: bool) -> tuple[int, bytes | None]:
    """What the sum of a host is divided by, or that of all hosts: divisor and counts.

    One of the two: that of a host where it is rounded to 16 bits for the wire, since undivided it could overflow there.
    """
    wire = DTYPES[run.planned.layout.groups[stream].wire]
    early = wire.kind == "float" and wire.itemsize == 2
    return (run.divisor, run.counts) if early is of_host else (1, None)


class HostPipeline(Pipeline):
    """The pipeline between hosts.

    Args:
        collectives: What carries bytes between the leaders; ``NoCollectives`` on the other ranks.
        peers: All ranks.
        slot_bytes: Bytes of one slot.
        hosts: The ranks of each host.
        channel: This rank's end of the host's segment, of which the leader is rank 0.
        leads: Whether this rank is the leader.
    """

    def __init__(
        self,
        collectives: Collectives,
        peers: Peers,
        slot_bytes: int,
        hosts: Sequence[Sequence[int]],
        channel: _C.ShmChannel,
        leads: bool,
    ) -> None:
        super().__init__(collectives, peers, slot_bytes, place_of(peers.rank, hosts))
        self._members = hosts
        self._channel = channel
        self._leads = leads

    def pack_ahead(self, run: Run, slices: list[Slice]) -> int:
        """See ``Pipeline.pack_ahead``; packs none: ranks of a host that differ would make different numbers of steps."""
        return 0

    def finish_payload(self, run: Run, part: Slice, offsets: list[int]) -> None:
        """See ``Pipeline.finish_payload``; sums in the order of all other slices, host by host, and rounds where they do."""
        plan, elements, buffer = run.planned.plan, (part.begin, part.end), self._buffer
        first = [offsets[ranks[0]] for ranks in self._members]
        for ranks, out in zip(self._members, first, strict=True):
            rows = [offsets[rank] for rank in ranks]
            plan.reduce(part.stream, *elements, buffer, rows, buffer, out, *_division(run, part.stream, of_host=True))
        plan.reduce(part.stream, *elements, buffer, first, buffer, first[0], *_division(run, part.stream, of_host=False))
        plan.unpack(run.call.arrays, part.stream, *elements, buffer, first[0], nonfinite=run.nonfinite)

    def _rounds_sums(self, run: Run, stream: int) -> bool:
        return True

    def _pack_range(self, run: Run, stream: int, elements: tuple[int, int], offset: int) -> None:
        self._move(run, "collect", stream, elements, offset, *_division(run, stream, of_host=True), None)
        run.wire_bytes += (elements[1] - elements[0]) * run.planned.layout.groups[stream].wire_itemsize

    def _unpack_range(self, run: Run, stream: int, elements: tuple[int, int], offset: int) -> None:
        self._move(run, "spread", stream, elements, offset, 1, None, run.nonfinite)

    def _move(
        self,
        run: Run,
        kind: Literal["collect", "spread"],
        stream: int,
        elements: tuple[int, int],
        offset: int,
        divisor: int,
        counts: bytes | None,
        nonfinite: _C.Nonfinite | None,
    ) -> None:
        """Between the gradients of the host and a slot of its leader."""
        slot = self._buffer if self._leads else None
        plan, arrays = run.planned.plan, run.call.arrays
        self._channel.begin_range(kind, plan, arrays, stream, *elements, slot, offset, divisor, counts, nonfinite)
        drive(self._channel, self._peers, run.deadline)

    def _reduce(self, run: Run, stream: int, elements: tuple[int, int], offsets: list[int], out: int) -> None:
        if self._leads:
            division = _division(run, stream, of_host=False)
            run.planned.plan.reduce(stream, *elements, self._buffer, offsets, self._buffer, out, *division)

    def _launch(self, run: Run, part: Slice, index: int) -> Work:
        before = run.wire_bytes
        work = super()._launch(run, part, index)
        if not self._leads:
            run.wire_bytes = before
        return work


class HierarchicalTransport(StagedTransport):
    """Calls between the ranks of several hosts.

    Args:
        state: The group.
        peers: What is known of its ranks.
        staging: The memory.
        collectives: What carries bytes between all ranks, over ``staging.buffer``.
        why: Why this is the transport of the group.
        between: What carries bytes between the leaders, over the same buffer; ``NoCollectives`` on the other ranks.
        hosts: The ranks of each host, of which the first leads.
        channel: This rank's end of the host's segment, of which the leader is rank 0.
    """

    name = "hierarchical"
    offers = ("hierarchical", "process_group")

    def __init__(
        self,
        state: GroupState,
        peers: Peers,
        staging: Staging,
        collectives: Collectives,
        why: str,
        between: Collectives,
        hosts: Sequence[Sequence[int]],
        channel: _C.ShmChannel,
    ) -> None:
        super().__init__(state, peers, staging, collectives, why)
        leads = not isinstance(between, NoCollectives)
        self._between = between
        self._channel = channel
        self._hosts = HostPipeline(between, peers, staging.slot_bytes, hosts, channel, leads)
        self._requested = self.name

    def run(self, call: Call) -> Result:
        """See ``Transport.run``."""
        self._requested = "process_group" if call.options.transport == "process_group" else self.name
        try:
            return super().run(call)
        finally:
            self._requested = self.name

    def explain(self, packer: Packer, requested: str) -> list[str]:
        """See ``Transport.explain``."""
        lines = super().explain(packer, requested)
        if requested != "process_group":
            lines.append(f"in each host: a segment of {self._channel.nbytes:,} bytes; between hosts: {self._between.explain()}")
        return lines

    def close(self) -> None:
        """See ``Transport.close``."""
        super().close()
        self._channel.close()
        self._between.close()

    def _policy(self) -> dict[str, int | bool | str]:
        return super()._policy() | {"transport": self._requested}

    def _carrier(self, root: int | None) -> Pipeline:
        return self._hosts if root is None and self._requested != "process_group" else super()._carrier(root)
