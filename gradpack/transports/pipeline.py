"""The way of packs through the slots of the staging: pack, exchange, sum in rank order, unpack; a few slots make these overlap.

*Direct*: every rank sends its slice to all others and sums what it has. One message each way, so small slices go this way in any
world, and all slices in a world of two, where it moves no more bytes than any other way.

*Sharded*: an all-to-all gives each rank its shard of the slice from every rank; it sums the rows in rank order, divides, and
sends the result to all others. Each rank moves ``2 (n - 1) / n`` times the slice, the least that an all-reduce can do.

Either way gradpack's own kernels sum, in rank order, so results depend neither on the way nor on how the packs are cut.
"""

from __future__ import annotations

from itertools import pairwise

from gradpack.dtypes import DTYPES
from gradpack.errors import TransportError, renamed
from gradpack.peers import Peers
from gradpack.transports.base import Run
from gradpack.transports.collectives import Collectives, Work, rows
from gradpack.transports.slices import LINE_BYTES, Slice, round_up

__all__ = ["DIRECT_BYTES", "NUM_SLOTS", "Pipeline"]

NUM_SLOTS = 6
"""Slices that are packed, on the wire or not yet unpacked: enough that a rank has work while it waits (``docs/design.md``)."""

_AHEAD = 2
"""Slices that are packed while the agreement is on its way; more would hold up the first."""

DIRECT_BYTES = 4 << 20
"""The most that a rank sends the direct way where the sharded one is there too (``benchmarks/bench_ways.py``)."""


def where(run: Run, part: Slice) -> str:
    """The packs that a slice is of, as messages name them."""
    return run.planned.layout.groups[part.stream].packs_text(part.begin, part.end)


class Pipeline:
    """Slices through the first ``NUM_SLOTS * slot_bytes`` of a buffer.

    Args:
        collectives: What carries the bytes.
        peers: The ranks, which are told where this one is.
        slot_bytes: Bytes of one slot.
        place: Which of how many partners this rank is; None: which of the ranks.
    """

    def __init__(self, collectives: Collectives, peers: Peers, slot_bytes: int, place: tuple[int, int] | None = None) -> None:
        self._collectives = collectives
        self._buffer = collectives.buffer
        self._peers = peers
        self._rank, self._size = place or (peers.rank, peers.size)
        self._slot_bytes = slot_bytes

    def limit(self) -> int:
        """The most bytes of a slice: both ways keep what is sent and what arrives in one slot."""
        size = self._size
        if size == 1:
            return self._slot_bytes
        if size == 2 or not self._collectives.shards:
            return self._slot_bytes // self._direct_rows() // LINE_BYTES * LINE_BYTES
        return self._slot_bytes // (2 * size - 1) // LINE_BYTES * LINE_BYTES * size

    def _direct_rows(self) -> int:
        return 2 * self._size - 1 if self._size > 2 and self._collectives.replicates else self._size

    def is_direct(self, nbytes: int) -> bool:
        """Whether a slice of so many bytes goes the direct way; else it is sharded."""
        if self._size <= 2 or not self._collectives.shards:
            return True
        fits = round_up(nbytes, LINE_BYTES) * self._direct_rows() <= self._slot_bytes
        return fits and (self._size - 1) * nbytes <= DIRECT_BYTES

    def pack_ahead(self, run: Run, slices: list[Slice]) -> int:
        """Packs the first slices while the agreement is on its way; returns how many."""
        ahead = min(_AHEAD, len(slices))
        for index in range(ahead):
            self._pack(run, slices[index], index)
        return ahead

    def carry(self, run: Run, slices: list[Slice], ahead: int) -> None:
        """Slices are launched one after another, and each is unpacked when the slots are full; every rank makes the same steps.

        Args:
            run: The call.
            slices: What is to travel.
            ahead: How many of them are packed already.
        """
        works: list[Work] = []
        lag = NUM_SLOTS - 1
        for step in range(len(slices) + lag):
            if step < len(slices):
                if step >= ahead:
                    self._pack(run, slices[step], step)
                works.append(self._launch(run, slices[step], step))
            if 1 <= step <= len(slices):
                works[step - 1] = self._advance(run, slices[step - 1], step - 1, works[step - 1])
            if step >= lag:
                self._peers.step(step - lag + 1)
                self._wait(run, slices[step - lag], works[step - lag])
                self._unpack(run, slices[step - lag], step - lag)

    def finish_payload(self, run: Run, part: Slice, offsets: list[int]) -> None:
        """Writes to the gradients a slice that came with the opening, that of rank r at ``offsets[r]``; may overwrite these."""
        self.finish(run, part, offsets)

    def finish(self, run: Run, part: Slice, offsets: list[int]) -> None:
        """Writes to the gradients what the partners have of a slice, at ``offsets``; may overwrite the first."""
        call, elements = run.call, (part.begin, part.end)
        if call.root is not None:
            if call.root != self._rank:
                self._unpack_range(run, part.stream, elements, offsets[call.root])
            return
        if self._rounds_sums(run, part.stream):
            self._reduce(run, part.stream, elements, offsets, offsets[0])
            self._unpack_range(run, part.stream, elements, offsets[0])
        else:
            plan = run.planned.plan
            plan.reduce_unpack(call.arrays, part.stream, *elements, self._buffer, offsets, run.divisor, run.counts, run.nonfinite)

    def _rounds_sums(self, run: Run, stream: int) -> bool:
        """Whether sums are rounded to the wire dtype before they are unpacked.

        The sharded way rounds them to 16 bits for the way back. Which way a slice goes depends on its size, results must not.
        """
        wire = DTYPES[run.planned.layout.groups[stream].wire]
        return self._size > 2 and self._collectives.shards and wire.kind == "float" and wire.itemsize == 2

    def _pack_range(self, run: Run, stream: int, elements: tuple[int, int], offset: int) -> None:
        run.planned.plan.pack(run.call.arrays, stream, *elements, self._buffer, offset)

    def _unpack_range(self, run: Run, stream: int, elements: tuple[int, int], offset: int) -> None:
        run.planned.plan.unpack(run.call.arrays, stream, *elements, self._buffer, offset, nonfinite=run.nonfinite)

    def _reduce(self, run: Run, stream: int, elements: tuple[int, int], offsets: list[int], out: int) -> None:
        run.planned.plan.reduce(stream, *elements, self._buffer, offsets, self._buffer, out, run.divisor, run.counts)

    def _wait(self, run: Run, part: Slice, work: Work) -> None:
        try:
            work.wait(run.deadline)
        except TransportError as error:
            raise renamed(error, f"{where(run, part)}: {error}") from error.__cause__

    def _nbytes(self, run: Run, part: Slice) -> int:
        return part.numel * run.planned.layout.groups[part.stream].wire_itemsize

    def _is_direct(self, run: Run, part: Slice) -> bool:
        return self.is_direct(self._nbytes(run, part))

    def _slot(self, index: int) -> int:
        return index % NUM_SLOTS * self._slot_bytes

    def _direct(self, run: Run, part: Slice, index: int) -> tuple[int, list[int], int, int]:
        """Where this rank's bytes of a slice lie, how many each rank has, and where the others' and the copies go."""
        nbytes, own = self._nbytes(run, part), self._slot(index)
        step = round_up(nbytes, LINE_BYTES)
        return own, [nbytes] * self._size, own + step, own + step * self._size

    def _shards(self, run: Run, part: Slice) -> tuple[int, list[tuple[int, int]], list[int]]:
        """Room for one shard, and the elements and the bytes of each; the last ones may be short or empty."""
        itemsize, size = run.planned.layout.groups[part.stream].wire_itemsize, self._size
        room = round_up(-(-part.numel // size) * itemsize, LINE_BYTES)
        cuts = [min(part.end, part.begin + rank * (room // itemsize)) for rank in range(size + 1)]
        ranges = list(pairwise(cuts))
        return room, ranges, [(end - begin) * itemsize for begin, end in ranges]

    def _pack(self, run: Run, part: Slice, index: int) -> None:
        call, slot = run.call, self._slot(index)
        if call.root is not None and call.root != self._rank:
            return
        if call.root is not None or self._is_direct(run, part):
            self._pack_range(run, part.stream, (part.begin, part.end), slot)
            return
        # This rank's own shard first, then those of the others, end to end.
        room, ranges, sizes = self._shards(run, part)
        begin, end = ranges[self._rank]
        before = sum(sizes[: self._rank])
        for first, last, offset in ((begin, end, 0), (part.begin, begin, room), (end, part.end, room + before)):
            self._pack_range(run, part.stream, (first, last), slot + offset)

    def _launch(self, run: Run, part: Slice, index: int) -> Work:
        nbytes, others, slot = self._nbytes(run, part), self._size - 1, self._slot(index)
        if run.call.root is not None:
            run.wire_bytes += others * nbytes if run.call.root == self._rank else 0
            return self._collectives.start_broadcast(slot, nbytes, run.call.root, run.deadline)
        if self._is_direct(run, part):
            run.wire_bytes += others * nbytes
            return self._collectives.start_gather(*self._direct(run, part, index), run.deadline)
        room, _, sizes = self._shards(run, part)
        run.wire_bytes += nbytes - sizes[self._rank] + others * sizes[self._rank]
        return self._collectives.start_all_to_all(slot + room, sizes, slot + self._size * room, run.deadline)

    def _advance(self, run: Run, part: Slice, index: int, work: Work) -> Work:
        """The middle of the sharded way: sums this rank's shard and starts to spread it."""
        if run.call.root is not None or self._is_direct(run, part):
            return work
        self._wait(run, part, work)
        slot = self._slot(index)
        room, ranges, sizes = self._shards(run, part)
        received = slot + self._size * room
        offsets = rows(self._rank, slot, [sizes[self._rank]] * self._size, received)
        self._reduce(run, part.stream, ranges[self._rank], offsets, slot)
        return self._collectives.start_gather(slot, sizes, received, slot + room, run.deadline)

    def _unpack(self, run: Run, part: Slice, index: int) -> None:
        call, slot = run.call, self._slot(index)
        if call.root is not None:
            if call.root != self._rank:
                self._unpack_range(run, part.stream, (part.begin, part.end), slot)
            return
        if not self._is_direct(run, part):
            room, ranges, sizes = self._shards(run, part)
            for elements, row in zip(ranges, rows(self._rank, slot, sizes, slot + self._size * room), strict=True):
                self._unpack_range(run, part.stream, elements, row)
            return
        own, sizes, target, _ = self._direct(run, part, index)
        self.finish(run, part, rows(self._rank, own, sizes, target))
