"""What one collective carries: pure arithmetic on a layout, the same on every rank.

A *slice* is a range of a stream: a pack, a part of a big one, or several small neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradpack.layout import Layout

__all__ = ["LINE_BYTES", "MERGE_BYTES", "Slice", "payload_room", "payload_slices", "round_up", "wire_slices"]

LINE_BYTES = 64
"""Bytes of a cache line, to multiples of which payloads and shards are laid out."""

MERGE_BYTES = 1 << 20
"""Neighbouring packs travel together until they reach this size: below it a collective costs more than it hides
(``benchmarks/bench_merge.py``)."""


def round_up(value: int, step: int) -> int:
    """The least multiple of ``step`` that is not below ``value``."""
    return -(-value // step) * step


@dataclass(frozen=True)
class Slice:
    """A range of a stream that one collective carries, in elements; ``offset`` is its place in the slot or the opening."""

    stream: int
    begin: int
    end: int
    offset: int = 0

    @property
    def numel(self) -> int:
        """Elements in the slice."""
        return self.end - self.begin


def payload_room(layout: Layout) -> int:
    """Bytes that the payload of an opening needs to hold all packs."""
    return sum(round_up(group.numel * group.wire_itemsize, LINE_BYTES) for group in layout.groups)


def payload_slices(layout: Layout, payload_bytes: int) -> list[Slice]:
    """The head of the streams, as much as fits into the payload of an opening."""
    slices, at = [], 0
    for stream, group in enumerate(layout.groups):
        fits = min(group.numel, (payload_bytes - at) // group.wire_itemsize)
        if fits > 0:
            slices.append(Slice(stream, 0, fits, at))
            at += round_up(fits * group.wire_itemsize, LINE_BYTES)
    return slices


def wire_slices(layout: Layout, payload: Sequence[Slice], limit: int) -> list[Slice]:
    """Cuts what the payload left over: small neighbouring packs together, big ones in near-equal parts.

    Args:
        layout: The packs.
        payload: What has travelled already.
        limit: The most bytes of a slice.
    """
    sent = {part.stream: part.end for part in payload}
    slices: list[Slice] = []
    for stream, group in enumerate(layout.groups):
        most = max(1, limit // group.wire_itemsize)
        small = MERGE_BYTES // group.wire_itemsize
        begin = sent.get(stream, 0)
        for cut in group.cuts[1:]:
            if cut <= begin or (cut < group.numel and cut - begin < small):
                continue
            parts = -(-(cut - begin) // most)
            for part in range(parts):
                first = begin + (cut - begin) * part // parts
                slices.append(Slice(stream, first, begin + (cut - begin) * (part + 1) // parts))
            begin = cut
    return slices
