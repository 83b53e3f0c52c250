"""Staged transports: packs through slots of staging, over any ``Collectives``.

A *slice* is what one collective carries (``slices.py``). The *opening* is the exchange that begins every call: each rank's header
and, in small worlds, the first bytes of its packs, so that a small model needs no other collective.
"""

from __future__ import annotations

from gradpack import _C, settings
from gradpack.groups import GroupState
from gradpack.packer import Packer, Planned
from gradpack.peers import Peers
from gradpack.transports.agreement import AgreeingTransport
from gradpack.transports.base import Run
from gradpack.transports.collectives import Collectives, Work, rows
from gradpack.transports.handshake import HEADER_BYTES, Header
from gradpack.transports.opening import ExpectedPayload, payload_limits
from gradpack.transports.pipeline import NUM_SLOTS, Pipeline
from gradpack.transports.slices import LINE_BYTES, Slice, payload_room, payload_slices, wire_slices

__all__ = ["StagedTransport", "Staging"]


class Staging:
    """The memory of one staged transport: the slots, then the opening as this rank sends it and as the others' arrive.

    Args:
        size: Number of ranks.
    """

    def __init__(self, size: int) -> None:
        try:
            slot_bytes = settings.get("GRADPACK_SLOT_BYTES")
        except ValueError:
            # Each call refuses such a setting before it comes here; telling the other ranks so takes a transport.
            slot_bytes = settings.SETTINGS["GRADPACK_SLOT_BYTES"].default
        self.slot_bytes = int(str(slot_bytes))
        self.payload_bytes, self.largest_payload_bytes = payload_limits(size)
        room = HEADER_BYTES + self.largest_payload_bytes
        self.opening = NUM_SLOTS * self.slot_bytes
        self.others = self.opening + room
        self.copies = self.others + (size - 1) * room
        self.buffer = _C.Buffer(self.copies + (size - 1) * room)


class StagedTransport(AgreeingTransport):
    """The pipeline over any collectives on host memory.

    Args:
        state: The group.
        peers: What is known of its ranks.
        staging: The memory.
        collectives: What carries bytes between the ranks, over ``staging.buffer``.
        why: Why this is the transport of the group.
    """

    name = "process_group"
    offers: tuple[str, ...] = ("process_group",)

    def __init__(self, state: GroupState, peers: Peers, staging: Staging, collectives: Collectives, why: str) -> None:
        super().__init__(state, peers)
        self.why = why
        self._staging = staging
        self._buffer = staging.buffer
        self._collectives = collectives
        self._pipeline = Pipeline(collectives, peers, staging.slot_bytes)
        self._expected = ExpectedPayload(staging.payload_bytes, staging.largest_payload_bytes)
        self._opening_bytes = HEADER_BYTES

    def explain(self, packer: Packer, requested: str) -> list[str]:
        """See ``Transport.explain``."""
        layout = packer.layout
        payload_bytes = self._staging.payload_bytes
        carrier = self._carrier(None)
        payload, slices = self._route(packer.planned(frozenset()), payload_bytes, carrier)
        opening = sum(part.numel * layout.groups[part.stream].wire_itemsize for part in payload)
        sizes = [part.numel * layout.groups[part.stream].wire_itemsize for part in slices]
        direct = sum(carrier.is_direct(nbytes) for nbytes in sizes)
        return [
            f"over: {self._collectives.explain()}",
            f"opening: one exchange of {HEADER_BYTES + payload_bytes:,} bytes a rank, {opening:,} of them payload",
            f"then: {len(slices)} slices, {direct} of them direct and {len(slices) - direct} sharded",
            f"through {NUM_SLOTS} slots of {self._staging.slot_bytes:,} bytes",
        ]

    def close(self) -> None:
        """See ``Transport.close``."""
        self._buffer = self._staging.buffer = _C.Buffer(0)
        self._collectives.close()

    def _policy(self) -> dict[str, int | bool | str]:
        return {
            "transport": self.name,
            "GRADPACK_SLOT_BYTES": self._staging.slot_bytes,
            "alltoall of the group": self._collectives.shards,
        }

    def _write(self, offset: int, data: bytes) -> None:
        memoryview(self._buffer)[offset : offset + len(data)] = data

    def _read(self, offset: int, nbytes: int) -> bytes:
        return bytes(memoryview(self._buffer)[offset : offset + nbytes])

    def _carrier(self, root: int | None) -> Pipeline:
        """What the slices of a call go through, a broadcast's or an all-reduce's."""
        return self._pipeline

    def _route(self, planned: Planned, payload_bytes: int, carrier: Pipeline) -> tuple[list[Slice], list[Slice]]:
        """What the opening carries, and the slices that follow it."""
        name = f"slices of {carrier.limit()} bytes after {payload_bytes}"
        route: tuple[list[Slice], list[Slice]] | None = planned.routes.get(name)
        if route is None:
            payload = payload_slices(planned.layout, payload_bytes)
            route = planned.routes[name] = payload, wire_slices(planned.layout, payload, carrier.limit())
        return route

    def _expected_payload(self) -> int:
        payload_bytes = self._expected.take()
        self._opening_bytes = HEADER_BYTES + payload_bytes
        return payload_bytes

    def _start_opening(self, header: Header, deadline: float) -> Work:
        staging = self._staging
        self._write(staging.opening, header.encode())
        sizes = [self._opening_bytes] * self._state.size
        return self._collectives.start_gather(staging.opening, sizes, staging.others, staging.copies, deadline)

    def _openings(self) -> list[int]:
        """Where the opening of each rank lies."""
        staging = self._staging
        return rows(self._state.rank, staging.opening, [self._opening_bytes] * self._state.size, staging.others)

    def _shown(self) -> list[bytes]:
        return [self._read(start, HEADER_BYTES) for start in self._openings()]

    def _show(self, header: Header, deadline: float) -> list[bytes]:
        self._expected_payload()
        self._start_opening(header, deadline).wait(deadline)
        return self._shown()

    def _note_agreed(self, fingerprint: bytes, run: Run | None) -> None:
        # Of a broadcast only one rank's bytes count, and an opening carries those of all.
        room = payload_room(run.planned.layout) if run is not None and run.call.root is None else 0
        self._expected.agreed(fingerprint, room)

    def _carry_out(self, run: Run) -> None:
        carrier = self._carrier(run.call.root)
        payload, slices = self._route(run.planned, self._expected_payload(), carrier)
        opening = self._open(run, payload)
        ahead = carrier.pack_ahead(run, slices)
        opening.wait(run.deadline)
        run.wire_bytes += (self._state.size - 1) * self._opening_bytes
        if not self._agree(run, self._shown()):
            payload, slices = self._route(run.planned, 0, carrier)
            ahead = carrier.pack_ahead(run, slices)
        try:
            starts = [start + HEADER_BYTES for start in self._openings()]
            for part in payload:
                carrier.finish_payload(run, part, [start + part.offset for start in starts])
            carrier.carry(run, slices, ahead)
        finally:
            self._mark_written(run.call)

    def _open(self, run: Run, payload: list[Slice]) -> Work:
        call, base = run.call, self._staging.opening + HEADER_BYTES
        header = self._header(call)
        if call.kind == "allreduce" or call.root == self._state.rank:
            for part in payload:
                run.planned.plan.pack(call.arrays, part.stream, part.begin, part.end, self._buffer, base + part.offset)
        return self._start_opening(header, run.deadline)

    def _exchange(self, data: bytes, deadline: float) -> list[bytes]:
        """Collects bytes of any length from all ranks, through the slots."""
        size, rank = self._state.size, self._state.rank
        # Not the slots' own size: that is a setting, and one of those that ranks may be about to be told they differ in.
        step = settings.MIN_SLOT_BYTES // (2 * size) // LINE_BYTES * LINE_BYTES or LINE_BYTES

        def gather(part: bytes, sizes: list[int]) -> list[bytes]:
            self._write(0, part)
            self._collectives.start_gather(0, sizes, step, size * step, deadline).wait(deadline)
            places = rows(rank, 0, sizes, step)
            return [self._read(place, nbytes) for place, nbytes in zip(places, sizes, strict=True)]

        lengths = [int.from_bytes(length, "little") for length in gather(len(data).to_bytes(8, "little"), [8] * size)]
        whole = [b""] * size
        for begin in range(0, max(lengths), step):
            parts = gather(data[begin : begin + step], [max(0, min(step, length - begin)) for length in lengths])
            whole = [so_far + part for so_far, part in zip(whole, parts, strict=True)]
        return whole
