"""Staged transports: pack into a slot, a collective on the slot, unpack; three slots make the three overlap.

A *slice* is what one collective carries (``slices.py``). The *opening* is the all-gather that begins every call: each rank's
header and, in small worlds, the first bytes of its packs, so that a small model needs no other collective.

A 16-bit wire (and a dtype that the backend cannot sum) goes the *sharded* way: an all-to-all gives each rank its shard of the
slice from every rank, it sums them in rank order in float32, divides, rounds once, and an all-gather spreads the result.
"""

from __future__ import annotations

import time
import weakref
from abc import abstractmethod
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from gradpack import _C, arrays, settings
from gradpack.dtypes import DTYPES
from gradpack.errors import LayoutMismatch, TransportError
from gradpack.groups import GroupState
from gradpack.packer import Packer, Planned
from gradpack.result import Result
from gradpack.transports import handshake
from gradpack.transports.base import Call, Transport
from gradpack.transports.handshake import HEADER_BYTES, Details, Header
from gradpack.transports.slices import LINE_BYTES, Slice, payload_slices, round_up, wire_slices

__all__ = ["PAYLOAD_BYTES", "StagedTransport", "Work"]

NUM_SLOTS = 3
PAYLOAD_BYTES = 64 << 10
"""Bytes of payload in the opening: models that fit pay one collective, and a scalar next to nothing for the room."""

MAX_PAYLOAD_WORLD = 8
"""Above this many ranks the opening is the headers alone: its size grows with their number."""


class Work(Protocol):
    """A collective that was started."""

    def wait(self, deadline: float) -> None:
        """Waits until it is done or ``time.monotonic()`` passes ``deadline``.

        Raises:
            TransportTimeout: The deadline passed.
            PeerLost: The connection to another rank broke.
        """


@dataclass
class _Run:
    """What a call in progress has settled: filled by the agreement, read by the pipeline."""

    call: Call
    planned: Planned
    deadline: float
    nonfinite: _C.Nonfinite | None
    divisor: int
    counts: bytes | None = None
    wire_bytes: int = 0


class StagedTransport(Transport):
    """The pipeline over any set of collectives on host memory.

    A subclass supplies the collectives. Their offsets are bytes in the staging; what they start must end by itself soon after its
    deadline, since staging is freed no sooner.

    Args:
        state: The group.
    """

    def __init__(self, state: GroupState) -> None:
        # The state owns the transport and must die with its group, not when the garbage collector finds a cycle.
        self._state: GroupState = weakref.proxy(state)
        try:
            slot_bytes = settings.get("GRADPACK_SLOT_BYTES")
        except ValueError:
            # Each call refuses such a setting before it comes here; telling the other ranks so takes a transport.
            slot_bytes = settings.SETTINGS["GRADPACK_SLOT_BYTES"].default
        self._slot_bytes = int(str(slot_bytes))
        self._payload_bytes = PAYLOAD_BYTES if state.size <= MAX_PAYLOAD_WORLD else 0
        self._opening_bytes = HEADER_BYTES + self._payload_bytes
        self._opening = NUM_SLOTS * self._slot_bytes
        self._openings = self._opening + self._opening_bytes
        self._buffer = _C.Buffer(self._openings + state.size * self._opening_bytes)
        self.calls = 0

    @abstractmethod
    def sums(self, dtype: str) -> bool:
        """Whether ``start_all_reduce`` sums scalars of ``dtype`` as the numerics want it."""

    @abstractmethod
    def start_all_reduce(self, offset: int, count: int, dtype: str, deadline: float) -> Work:
        """Starts to sum ``count`` scalars over the ranks, in place."""

    @abstractmethod
    def start_all_gather(self, offset: int, nbytes: int, target: int, deadline: float) -> Work:
        """Starts to collect ``nbytes`` of every rank, in rank order, at ``target``."""

    @abstractmethod
    def start_all_to_all(self, offset: int, nbytes: int, target: int, deadline: float) -> Work:
        """Starts to send the r-th ``nbytes`` to rank r; what comes from rank r lands r-th at ``target``."""

    @abstractmethod
    def start_broadcast(self, offset: int, nbytes: int, root: int, deadline: float) -> Work:
        """Starts to send ``nbytes`` of ``root`` to all, in place."""

    def run(self, call: Call) -> Result:
        """See ``Transport.run``."""
        nonfinite = _C.Nonfinite(len(call.arrays)) if call.options.check_finite and call.kind == "allreduce" else None
        divisor = self._state.size if call.options.op == "mean" and call.kind == "allreduce" else 1
        call.arrays.pack_logically(call.packer.logical)
        here = frozenset(_absent(call.arrays))
        deadline = self._deadline(call.options.timeout)
        run = _Run(call, call.packer.planned(here), deadline, nonfinite, divisor)
        with self._guarded(call.collected.operation):
            self._carry_out(run)
        return call.result(nonfinite, run.wire_bytes)

    def refuse(self, operation: str, reason: Exception, timeout: float | None) -> None:
        """See ``Transport.refuse``."""
        deadline = self._deadline(timeout)
        header = Header(True, 0, bytes(16), bytes(16), b"")
        with self._guarded(operation):
            self._write(self._opening, header.encode())
            self.start_all_gather(self._opening, self._opening_bytes, self._openings, deadline).wait(deadline)
            self._exchange(Details.of_refusal(reason).encode(), deadline)

    @contextmanager
    def _guarded(self, operation: str) -> Iterator[None]:
        """Breaks the group where a call ends with its collectives under way, and names the call in what the transport raises."""
        self.calls += 1
        try:
            yield
        except LayoutMismatch:
            raise
        except TransportError as error:
            named = type(error)(f"{operation}: call {self.calls} on this group: {error}")
            self._state.break_(named)
            raise named from error.__cause__
        except BaseException as error:
            self._state.break_(error)
            raise

    def explain(self, packer: Packer) -> list[str]:
        """See ``Transport.explain``."""
        layout = packer.layout
        payload, slices = self._route(packer.planned(frozenset()), self._payload_bytes)
        opening = sum(part.numel * layout.groups[part.stream].wire_itemsize for part in payload)
        ways = {"all-reduce" if self.sums(group.wire) else "sharded" for group in layout.groups}
        return [
            f"opening: one all-gather of {self._opening_bytes:,} bytes a rank, {opening:,} of them payload",
            f"then: {len(slices)} collectives ({', '.join(sorted(ways)) or 'none'})",
            f"through {NUM_SLOTS} slots of {self._slot_bytes:,} bytes",
        ]

    def close(self) -> None:
        """See ``Transport.close``."""
        self._buffer = _C.Buffer(0)

    def _deadline(self, timeout: float | None) -> float:
        return time.monotonic() + (self._state.timeout if timeout is None else timeout)

    def _write(self, offset: int, data: bytes) -> None:
        memoryview(self._buffer)[offset : offset + len(data)] = data

    def _read(self, offset: int, nbytes: int) -> bytes:
        return bytes(memoryview(self._buffer)[offset : offset + nbytes])

    def _route(self, planned: Planned, payload_bytes: int) -> tuple[list[Slice], list[Slice]]:
        """What the opening carries, and the slices that follow it."""
        name = f"{self.name} after {payload_bytes} bytes"
        route: tuple[list[Slice], list[Slice]] | None = planned.routes.get(name)
        if route is None:
            # A sharded slice needs the other half of its slot for the shards of the other ranks, and room to make shards equal.
            half = self._slot_bytes // 2 - self._state.size * LINE_BYTES
            limits = [self._slot_bytes if self.sums(group.wire) else half for group in planned.layout.groups]
            payload = payload_slices(planned.layout, payload_bytes)
            route = planned.routes[name] = payload, wire_slices(planned.layout, payload, limits)
        return route

    def _carry_out(self, run: _Run) -> None:
        call = run.call
        payload, slices = self._route(run.planned, self._payload_bytes)
        opening = self._open(run, payload)
        ahead = self._pack_ahead(run, slices)
        opening.wait(run.deadline)
        run.wire_bytes += (self._state.size - 1) * self._opening_bytes
        if not self._agree(run):
            payload, slices = self._route(run.planned, 0)
            ahead = self._pack_ahead(run, slices)
        try:
            self._finish_payload(run, payload)
            self._pipeline(run, slices, ahead)
        finally:
            if call.kind == "allreduce" or self._state.rank != call.root:
                arrays.mark_written(call.arrays)

    def _open(self, run: _Run, payload: list[Slice]) -> Work:
        call, base = run.call, self._opening + HEADER_BYTES
        fingerprint = handshake.fingerprint_of(
            call.kind, call.root, call.packer, call.options, self._state.size, self._slot_bytes
        )
        header = Header(False, len(call.arrays), fingerprint, call.packer.walk_digest(), call.arrays.present)
        self._write(self._opening, header.encode())
        if call.kind == "allreduce" or call.root == self._state.rank:
            for part in payload:
                run.planned.plan.pack(call.arrays, part.stream, part.begin, part.end, self._buffer, base + part.offset)
        return self.start_all_gather(self._opening, self._opening_bytes, self._openings, run.deadline)

    def _pack_ahead(self, run: _Run, slices: list[Slice]) -> int:
        """Packs the first slices while the agreement is on its way; returns how many."""
        ahead = min(NUM_SLOTS - 1, len(slices))
        for index in range(ahead):
            self._pack(run, slices[index], index)
        return ahead

    def _agree(self, run: _Run) -> bool:
        """Compares the headers. True where what is packed already is what all ranks agreed on; else ``run`` holds a new plan.

        Raises:
            LayoutMismatch: The ranks do not agree.
        """
        call, size = run.call, self._state.size
        operation = call.collected.operation
        starts = [self._openings + rank * self._opening_bytes for rank in range(size)]
        headers = [Header.decode(self._read(start, HEADER_BYTES)) for start in starts]
        mine = headers[self._state.rank]
        count = len(call.arrays)
        agreed = all(not header.refused and header.fingerprint == mine.fingerprint for header in headers)
        same_walk = all(header.walk == mine.walk for header in headers)
        same_presence = all(header.presence == mine.presence for header in headers)
        presence = [header.present for header in headers]
        if not agreed or not same_walk or (not same_presence and count > handshake.PRESENCE_GRADIENTS):
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
        return same_walk and same_presence

    def _agree_presence(self, run: _Run, presence: list[bytes]) -> None:
        call = run.call
        counts, partly, nowhere = handshake.missing_on_some(presence, len(call.arrays))
        if partly and call.options.missing == "error":
            index = partly[0]
            absent = [rank for rank, bits in enumerate(presence) if not bits[index // 8] >> (index % 8) & 1]
            others = f" (and {len(partly) - 1} more gradients)" if len(partly) > 1 else ""
            raise LayoutMismatch(
                f"{call.collected.where(index)}: None on {handshake.ranks_text(absent)}, an array elsewhere{others}; "
                "wanted one on every rank, or missing='zeros' or 'mean_present'"
            )
        lacking = [index for index in _absent(call.arrays) if counts[index]]
        if lacking:
            call.arrays = arrays.materialise(call.collected, call.arrays, lacking)
            call.arrays.pack_logically(call.packer.logical)
        if call.options.missing == "mean_present":
            run.counts = array("i", counts).tobytes()
        run.planned = call.packer.planned(frozenset(nowhere))

    def _details(self, run: _Run) -> list[Details]:
        call = run.call
        mine = Details.of_call(call.kind, call.root, call.packer, call.options, self._slot_bytes, call.arrays.present)
        return [Details.decode(data) for data in self._exchange(mine.encode(), run.deadline)]

    def _exchange(self, data: bytes, deadline: float) -> list[bytes]:
        """All-gathers bytes of any length, through the slots."""
        size = self._state.size
        source, target = 0, self._slot_bytes
        # Not the slots' own size: that is a setting, and one of those that ranks may be about to be told they differ in.
        step = max(LINE_BYTES, settings.MIN_SLOT_BYTES // size // LINE_BYTES * LINE_BYTES)

        def gather(part: bytes, nbytes: int) -> list[bytes]:
            self._write(source, part.ljust(nbytes, b"\0"))
            self.start_all_gather(source, nbytes, target, deadline).wait(deadline)
            return [self._read(target + rank * nbytes, nbytes) for rank in range(size)]

        lengths = [int.from_bytes(length, "little") for length in gather(len(data).to_bytes(8, "little"), 8)]
        whole = [b""] * size
        for begin in range(0, max(lengths), step):
            nbytes = min(step, max(lengths) - begin)
            parts = gather(data[begin : begin + nbytes], nbytes)
            whole = [so_far + part for so_far, part in zip(whole, parts, strict=True)]
        return [found[:length] for found, length in zip(whole, lengths, strict=True)]

    def _finish_payload(self, run: _Run, payload: list[Slice]) -> None:
        call, plan = run.call, run.planned.plan
        starts = [self._openings + rank * self._opening_bytes + HEADER_BYTES for rank in range(self._state.size)]
        for part in payload:
            where = (call.arrays, part.stream, part.begin, part.end, self._buffer)
            if call.kind == "allreduce":
                rows = [start + part.offset for start in starts]
                plan.reduce_unpack(*where, rows, run.divisor, run.counts, run.nonfinite)
            elif call.root is not None and call.root != self._state.rank:
                plan.unpack(*where, starts[call.root] + part.offset)

    def _pipeline(self, run: _Run, slices: list[Slice], ahead: int) -> None:
        """Slice k is launched while k-1 is on the wire and k-2 is unpacked; every rank makes the same steps in the same order."""
        works: list[Work] = []
        for step in range(len(slices) + NUM_SLOTS - 1):
            if step < len(slices):
                if step >= ahead:
                    self._pack(run, slices[step], step)
                works.append(self._launch(run, slices[step], step))
            if 1 <= step <= len(slices):
                works[step - 1] = self._advance(run, slices[step - 1], step - 1, works[step - 1])
            if step >= 2:
                works[step - 2].wait(run.deadline)
                self._unpack(run, slices[step - 2], step - 2)

    def _slot(self, index: int) -> int:
        return index % NUM_SLOTS * self._slot_bytes

    def _shard_bytes(self, run: _Run, part: Slice) -> int:
        group = run.planned.layout.groups[part.stream]
        itemsize = group.wire_itemsize
        return round_up(-(-part.numel // self._state.size) * itemsize, LINE_BYTES)

    def _pack(self, run: _Run, part: Slice, index: int) -> None:
        call = run.call
        if call.kind == "allreduce" or call.root == self._state.rank:
            run.planned.plan.pack(call.arrays, part.stream, part.begin, part.end, self._buffer, self._slot(index))

    def _launch(self, run: _Run, part: Slice, index: int) -> Work:
        group, size = run.planned.layout.groups[part.stream], self._state.size
        nbytes = part.numel * group.wire_itemsize
        offset = self._slot(index)
        if run.call.root is not None:
            run.wire_bytes += (size - 1) * nbytes if run.call.root == self._state.rank else 0
            return self.start_broadcast(offset, nbytes, run.call.root, run.deadline)
        if self.sums(group.wire):
            run.wire_bytes += 2 * (size - 1) * nbytes // size
            return self.start_all_reduce(offset, nbytes // DTYPES[group.wire].itemsize, group.wire, run.deadline)
        shard = self._shard_bytes(run, part)
        run.wire_bytes += 2 * (size - 1) * shard
        return self.start_all_to_all(offset, shard, offset + self._slot_bytes // 2, run.deadline)

    def _advance(self, run: _Run, part: Slice, index: int, work: Work) -> Work:
        """The middle of the sharded way: sums this rank's shard and starts to spread it."""
        group = run.planned.layout.groups[part.stream]
        if run.call.root is not None or self.sums(group.wire):
            return work
        work.wait(run.deadline)
        size, rank, shard = self._state.size, self._state.rank, self._shard_bytes(run, part)
        rows = self._slot(index) + self._slot_bytes // 2
        per_shard = shard // group.wire_itemsize
        begin = min(part.end, part.begin + rank * per_shard)
        end = min(part.end, begin + per_shard)
        offsets = [rows + peer * shard for peer in range(size)]
        run.planned.plan.reduce(part.stream, begin, end, self._buffer, offsets, self._buffer, rows, run.divisor, run.counts)
        return self.start_all_gather(rows, shard, self._slot(index), run.deadline)

    def _unpack(self, run: _Run, part: Slice, index: int) -> None:
        call, group = run.call, run.planned.layout.groups[part.stream]
        if call.root == self._state.rank:
            return
        divides = call.root is None and self.sums(group.wire)
        run.planned.plan.unpack(
            call.arrays,
            part.stream,
            part.begin,
            part.end,
            self._buffer,
            self._slot(index),
            run.divisor if divides else 1,
            run.counts if divides else None,
            run.nonfinite,
        )


def _absent(described: _C.Arrays) -> list[int]:
    if not described.num_absent:
        return []
    present = described.present
    return [index for index in range(len(described)) if not present[index // 8] >> (index % 8) & 1]
