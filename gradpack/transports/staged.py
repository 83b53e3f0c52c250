"""Staged transports: the agreement that opens a call, then packs through slots of staging, over any ``Collectives``.

A *slice* is what one collective carries (``slices.py``). The *opening* is the exchange that begins every call: each rank's header
and, in small worlds, the first bytes of its packs, so that a small model needs no other collective.
"""

from __future__ import annotations

import time
import weakref
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

from gradpack import _C, arrays, settings
from gradpack.errors import LayoutMismatch, TransportError, renamed
from gradpack.groups import GroupState
from gradpack.packer import Packer, Planned
from gradpack.peers import Peers, ranks_text
from gradpack.result import Result
from gradpack.transports import handshake
from gradpack.transports.base import Call, Transport
from gradpack.transports.collectives import Collectives, Work, rows
from gradpack.transports.handshake import HEADER_BYTES, Details, Header
from gradpack.transports.opening import ExpectedPayload, payload_limits
from gradpack.transports.pipeline import NUM_SLOTS, Pipeline, Run
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


class StagedTransport(Transport):
    """The agreement and the pipeline over any collectives on host memory.

    Args:
        state: The group.
        peers: What is known of its ranks.
        staging: The memory.
        collectives: What carries bytes between the ranks, over ``staging.buffer``.
    """

    name = "process_group"

    def __init__(self, state: GroupState, peers: Peers, staging: Staging, collectives: Collectives) -> None:
        # The state owns the transport and must die with its group, not when the garbage collector finds a cycle.
        self._state: GroupState = weakref.proxy(state)
        self._peers = peers
        self._staging = staging
        self._buffer = staging.buffer
        self._collectives = collectives
        self._pipeline = Pipeline(collectives, peers, staging.slot_bytes)
        self._expected = ExpectedPayload(staging.payload_bytes, staging.largest_payload_bytes)
        self._opening_bytes = HEADER_BYTES
        self.calls = 0
        """Calls that were carried, refusals too."""

    def run(self, call: Call) -> Result:
        """See ``Transport.run``."""
        nonfinite = _C.Nonfinite(len(call.arrays)) if call.options.check_finite and call.kind == "allreduce" else None
        divisor = self._state.size if call.options.op == "mean" and call.kind == "allreduce" else 1
        call.arrays.pack_logically(call.packer.logical)
        here = frozenset(_absent(call.arrays))
        deadline = self._deadline(call.options.timeout)
        run = Run(call, call.packer.planned(here), deadline, nonfinite, divisor)
        with self._guarded(call.collected.operation, call.number):
            self._carry_out(run)
        return call.result(nonfinite, run.wire_bytes)

    def refuse(self, operation: str, reason: Exception, timeout: float | None) -> None:
        """See ``Transport.refuse``."""
        deadline = self._deadline(timeout)
        header = Header(True, self._state.calls, 0, bytes(16), bytes(16), bytes(16), b"")
        with self._guarded(operation, self._state.calls):
            self._expected_payload()
            self._start_opening(header, deadline).wait(deadline)
            self._headers()
            self._exchange(Details.of_refusal(reason).encode(), deadline)

    def gather(self, operation: str, data: bytes, timeout: float | None) -> list[bytes]:
        """See ``Transport.gather``."""
        deadline = self._deadline(timeout)
        header = Header(
            False, self._state.calls, 0, handshake.fingerprint_of_gather(operation, self._state.size), bytes(16), bytes(16), b""
        )
        with self._guarded(operation, self._state.calls):
            self._expected_payload()
            self._start_opening(header, deadline).wait(deadline)
            if any(other.refused or other.fingerprint != header.fingerprint for other in self._headers()):
                mine = Details.of_gather(operation)
                details = [Details.decode(found) for found in self._exchange(mine.encode(), deadline)]
                handshake.check_details(operation, "", details, self._state.rank, None)
            self._expected.agreed(header.fingerprint, 0)
            return self._exchange(data, deadline) if data else []

    @contextmanager
    def _guarded(self, operation: str, number: int) -> Iterator[None]:
        """Breaks the group where a call ends with its collectives under way, and names the call in what the transport raises."""
        try:
            self.calls += 1
            self._peers.enter(number)
            self._peers.check()
            yield
        except LayoutMismatch:
            raise
        except TransportError as error:
            named = renamed(error, f"{operation}: call {number} on this group: {error}")
            self._state.break_(named)
            raise named from error.__cause__
        except BaseException as error:
            self._state.break_(error)
            raise
        finally:
            self._peers.leave()

    def explain(self, packer: Packer) -> list[str]:
        """See ``Transport.explain``."""
        layout = packer.layout
        payload_bytes = self._staging.payload_bytes
        payload, slices = self._route(packer.planned(frozenset()), payload_bytes)
        opening = sum(part.numel * layout.groups[part.stream].wire_itemsize for part in payload)
        sizes = [part.numel * layout.groups[part.stream].wire_itemsize for part in slices]
        direct = sum(self._pipeline.is_direct(nbytes) for nbytes in sizes)
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

    def _deadline(self, timeout: float | None) -> float:
        return time.monotonic() + (self._state.timeout if timeout is None else timeout)

    def _policy(self) -> dict[str, int | bool]:
        """What shapes the collectives beside the call itself, and must be equal on all ranks."""
        return {"GRADPACK_SLOT_BYTES": self._staging.slot_bytes, "alltoall of the group": self._collectives.shards}

    def _write(self, offset: int, data: bytes) -> None:
        memoryview(self._buffer)[offset : offset + len(data)] = data

    def _read(self, offset: int, nbytes: int) -> bytes:
        return bytes(memoryview(self._buffer)[offset : offset + nbytes])

    def _route(self, planned: Planned, payload_bytes: int) -> tuple[list[Slice], list[Slice]]:
        """What the opening carries, and the slices that follow it."""
        name = f"{self.name} after {payload_bytes} bytes"
        route: tuple[list[Slice], list[Slice]] | None = planned.routes.get(name)
        if route is None:
            payload = payload_slices(planned.layout, payload_bytes)
            route = planned.routes[name] = payload, wire_slices(planned.layout, payload, self._pipeline.limit())
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

    def _headers(self) -> list[Header]:
        """What each rank says as the call opens.

        Raises:
            TransportError: Some ranks are at another call, which is no call that this one may be paired with.
        """
        headers = [Header.decode(self._read(start, HEADER_BYTES)) for start in self._openings()]
        mine = headers[self._state.rank].call
        others = [f"rank {rank} at its call {header.call}" for rank, header in enumerate(headers) if header.call != mine]
        if others:
            raise TransportError(f"found {', '.join(others)}, wanted all at call {mine}: a rank has skipped or repeated one")
        return headers

    def _carry_out(self, run: Run) -> None:
        call = run.call
        payload, slices = self._route(run.planned, self._expected_payload())
        opening = self._open(run, payload)
        ahead = self._pipeline.pack_ahead(run, slices)
        opening.wait(run.deadline)
        run.wire_bytes += (self._state.size - 1) * self._opening_bytes
        if not self._agree(run):
            payload, slices = self._route(run.planned, 0)
            ahead = self._pipeline.pack_ahead(run, slices)
        try:
            starts = [start + HEADER_BYTES for start in self._openings()]
            for part in payload:
                self._pipeline.finish(run, part, [start + part.offset for start in starts])
            self._pipeline.carry(run, slices, ahead)
        finally:
            if call.kind == "allreduce" or self._state.rank != call.root:
                arrays.mark_written(call.arrays)

    def _open(self, run: Run, payload: list[Slice]) -> Work:
        call, base = run.call, self._staging.opening + HEADER_BYTES
        fingerprint = handshake.fingerprint_of(call.kind, call.root, call.packer, call.options, self._state.size, self._policy())
        names = call.packer.names_digest(call.collected.names)
        header = Header(False, call.number, len(call.arrays), fingerprint, call.packer.walk_digest(), names, call.arrays.present)
        if call.kind == "allreduce" or call.root == self._state.rank:
            for part in payload:
                run.planned.plan.pack(call.arrays, part.stream, part.begin, part.end, self._buffer, base + part.offset)
        return self._start_opening(header, run.deadline)

    def _agree(self, run: Run) -> bool:
        """Compares the headers. True where what is packed already is what all ranks agreed on; else ``run`` holds a new plan.

        Raises:
            LayoutMismatch: The ranks do not agree.
        """
        call = run.call
        operation = call.collected.operation
        headers = self._headers()
        mine = headers[self._state.rank]
        count = len(call.arrays)
        agreed = all(not header.refused and header.fingerprint == mine.fingerprint for header in headers)
        same_walk = all(header.walk == mine.walk for header in headers)
        same_names = len({header.names for header in headers if any(header.names)}) < 2
        same_presence = all(header.presence == mine.presence for header in headers)
        presence = [header.present for header in headers]
        if not agreed or not same_walk or not same_names or (not same_presence and count > handshake.PRESENCE_GRADIENTS):
            details = self._details(run)
            handshake.check_details(operation, call.collected.argument, details, self._state.rank, call.collected.names)
            if not agreed:
                raise LayoutMismatch(f"{operation}: found other options on other ranks, wanted the same on all")
            if not same_walk:
                orders = list(zip(*(found.orders for found in details), strict=True))
                call.packer.agree_logical(index for index in range(count) if len({tuple(order) for order in orders[index]}) > 1)
                call.arrays.pack_logically(call.packer.logical)
            presence = [bytes.fromhex(found.present) for found in details]
        if not same_presence:
            self._agree_presence(run, presence)
        # Of a broadcast only one rank's bytes count, and an opening carries those of all.
        self._expected.agreed(mine.fingerprint, payload_room(run.planned.layout) if call.root is None else 0)
        return same_walk and same_presence

    def _agree_presence(self, run: Run, presence: list[bytes]) -> None:
        call = run.call
        counts, partly, nowhere = handshake.missing_on_some(presence, len(call.arrays))
        if partly and call.options.missing == "error":
            index = partly[0]
            absent = [rank for rank, bits in enumerate(presence) if not bits[index // 8] >> (index % 8) & 1]
            others = f" (and {len(partly) - 1} more gradients)" if len(partly) > 1 else ""
            raise LayoutMismatch(
                f"{call.collected.where(index)}: None on {ranks_text(absent)}, an array elsewhere{others}; "
                "wanted one on every rank, or missing='zeros' or 'mean_present'"
            )
        lacking = [index for index in _absent(call.arrays) if counts[index]]
        if lacking:
            call.arrays = arrays.materialise(call.collected, call.arrays, lacking)
            call.arrays.pack_logically(call.packer.logical)
        if call.options.missing == "mean_present":
            run.counts = array("i", counts).tobytes()
        run.planned = call.packer.planned(frozenset(nowhere))

    def _details(self, run: Run) -> list[Details]:
        call = run.call
        mine = Details.of_call(
            call.kind, call.root, call.packer, call.options, self._policy(), call.collected.names, call.arrays.present
        )
        return [Details.decode(data) for data in self._exchange(mine.encode(), run.deadline)]

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


def _absent(described: _C.Arrays) -> list[int]:
    if not described.num_absent:
        return []
    present = described.present
    return [index for index in range(len(described)) if not present[index // 8] >> (index % 8) & 1]
