"""Which element of which gradient lies where in which pack: pure arithmetic, no arrays.

The gradients of one dtype form a *dtype group*; end to end, in order, they are the group's *stream*. Cuts divide the stream
into packs. Counts and offsets are in elements of the gradients' dtype and have no upper limit.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

from gradpack.dtypes import COMPRESS, DTYPES, wire_dtype

__all__ = ["MAX_PACKS", "ArraySpec", "Group", "Layout", "Pack", "Span", "digest", "plan_layout"]


MAX_PACKS = 1 << 20
"""More packs than this for one dtype group are refused: such a number is a size passed by mistake, or the other way round."""


@dataclass(frozen=True)
class ArraySpec:
    """What a layout needs to know of one gradient.

    Attributes:
        shape: Sizes of the dimensions.
        dtype: Name of the dtype.
        order: Dimensions from outermost to innermost in memory, or ``()`` for the logical (row-major) order.
    """

    shape: tuple[int, ...]
    dtype: str
    order: tuple[int, ...] = ()

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Span:
    """A run of ``count`` elements of gradient ``gradient``, and its place in the pack."""

    gradient: int
    gradient_offset: int
    pack_offset: int
    count: int


@dataclass(frozen=True)
class Group:
    """The gradients of one dtype, in order.

    Attributes:
        dtype: Of the gradients.
        wire: Dtype of the scalars in the packs.
        gradients: Indices into the caller's list.
        offsets: Prefix sums of their element counts, ``len(gradients) + 1`` of them.
        cuts: Pack boundaries in the stream, from 0 to ``numel``.
    """

    dtype: str
    wire: str
    gradients: tuple[int, ...]
    offsets: tuple[int, ...]
    cuts: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements in the stream."""
        return self.offsets[-1]

    @property
    def wire_itemsize(self) -> int:
        """Wire bytes of one element (of both its scalars where the dtype is complex)."""
        return wire_itemsize(self.dtype, self.wire)

    def packs_text(self, begin: int, end: int) -> str:
        """The packs that hold the elements ``begin`` to ``end`` of the stream, as messages name them."""
        first, last = (bisect_right(self.cuts, at, 1, len(self.cuts) - 1) for at in (begin, max(begin, end - 1)))
        packs = f"pack {first}" if first == last else f"packs {first} to {last}"
        return f"{packs} of {len(self.cuts) - 1} of {self.dtype}"


def wire_itemsize(dtype: str, wire: str) -> int:
    """Wire bytes of one element of ``dtype`` whose scalars travel as ``wire``."""
    return DTYPES[wire].itemsize * (2 if DTYPES[dtype].kind == "complex" else 1)


@dataclass(frozen=True)
class Pack:
    """One contiguous wire buffer: elements ``begin`` to ``end`` of a group's stream.

    Attributes:
        index: Position in ``Layout.packs``.
        group: The dtype group.
        begin: First element.
        end: One past the last element.
    """

    index: int
    group: Group
    begin: int
    end: int

    @property
    def numel(self) -> int:
        """Elements in the pack."""
        return self.end - self.begin

    @property
    def nbytes(self) -> int:
        """Bytes of the pack on the wire."""
        return self.numel * self.group.wire_itemsize

    @property
    def spans(self) -> Iterator[Span]:
        """The runs that the pack is made of, in order; gradients without elements have none."""
        offsets, at = self.group.offsets, self.begin
        place = bisect_right(offsets, at) - 1
        while at < self.end:
            stop = min(self.end, offsets[place + 1])
            if stop > at:
                yield Span(self.group.gradients[place], at - offsets[place], at - self.begin, stop - at)
                at = stop
            place += 1


@dataclass(frozen=True)
class Layout:
    """The packs of one list of gradients. Printable; equal lists and options give equal layouts.

    Attributes:
        specs: The gradients, in the caller's order.
        groups: The dtype groups, in order of first appearance.
        policy: How the streams were cut: ``splits`` or ``bytes_per_pack``, ``cut``, ``compress``, ``alignment``.

    Example:
        >>> layout = plan_layout([ArraySpec((3,), "float32"), ArraySpec((5,), "float32")], splits=2)
        >>> [(span.gradient, span.count) for span in layout.packs[1].spans]
        [(1, 4)]
    """

    specs: tuple[ArraySpec, ...]
    groups: tuple[Group, ...]
    policy: tuple[tuple[str, int | str | None], ...]

    @cached_property
    def packs(self) -> tuple[Pack, ...]:
        """All packs, group by group. Empty ones are legal and cost nothing."""
        ranges = [(group, begin, end) for group in self.groups for begin, end in zip(group.cuts, group.cuts[1:], strict=False)]
        return tuple(Pack(index, *found) for index, found in enumerate(ranges))

    @cached_property
    def numel(self) -> int:
        """Elements in all packs."""
        return sum(group.numel for group in self.groups)

    @cached_property
    def wire_bytes(self) -> int:
        """Bytes of all packs."""
        return sum(group.numel * group.wire_itemsize for group in self.groups)

    def fingerprint(self) -> bytes:
        """16 bytes that are equal where shapes, dtypes, their order and the policy are.

        Memory order is left out: ranks that differ in it alone agree on a walk instead of refusing.
        """
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> bytes:
        return digest([[(spec.shape, spec.dtype) for spec in self.specs], self.policy])

    def __str__(self) -> str:
        policy = ", ".join(f"{name}={value!r}" for name, value in self.policy)
        lines = [f"Layout of {len(self.specs)} gradients in {len(self.packs)} packs, {self.wire_bytes:,} wire bytes ({policy})"]
        for pack in self.packs[:_PRINTED]:
            spans = list(pack.spans)
            held = f"gradients {spans[0].gradient} to {spans[-1].gradient}" if spans else "empty"
            travels = pack.group.dtype if pack.group.dtype == pack.group.wire else f"{pack.group.dtype} as {pack.group.wire}"
            lines.append(f"  pack {pack.index}: {pack.numel:,} elements, {travels}, {pack.nbytes:,} bytes, {held}")
        if len(self.packs) > _PRINTED:
            lines.append(f"  and {len(self.packs) - _PRINTED} more")
        return "\n".join(lines)


_PRINTED = 32


def digest(value: object) -> bytes:
    """16 bytes of a hash of any value that JSON can hold."""
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).digest()[:16]


def _even_cuts(total: int, packs: int) -> list[int]:
    size = total // packs
    return [*(size * index for index in range(packs)), total]


def _move_to_gradients(cuts: Iterable[int], offsets: Sequence[int]) -> list[int]:
    moved = []
    for cut in cuts:
        above = bisect_left(offsets, cut)
        below = max(above - 1, 0)
        moved.append(offsets[below] if cut - offsets[below] <= offsets[above] - cut else offsets[above])
    return moved


def plan_layout(
    specs: Iterable[ArraySpec],
    *,
    splits: int = 4,
    bytes_per_pack: int | None = None,
    cut: str = "even",
    compress: str | None = None,
    alignment: int = 1,
    absent: Iterable[int] = (),
    operation: str = "plan_layout",
) -> Layout:
    """Plans the packs of a list of gradients.

    Args:
        specs: The gradients.
        splits: Packs per dtype group; near-equal, the last takes the remainder.
        bytes_per_pack: Wire bytes of a pack, in place of ``splits``; the last pack of a group holds what is left. A pack
            holds one element at least.
        cut: ``"even"``, or ``"gradient"`` to move each cut to the nearest boundary between two gradients (the lower of two).
        compress: ``None``, ``"fp16"`` or ``"bf16"``: the wire dtype of float32 and float64 gradients.
        alignment: Bytes; cuts move down to a multiple of it, so that every pack but the last of a group fills whole lines.
        absent: Gradients that take no part: in ``specs`` and in the fingerprint, in no pack.
        operation: Name of the call, for messages.

    Returns:
        The layout. Every element of every gradient that is not absent is in exactly one pack.

    Raises:
        ValueError: An argument is out of range or asks for more than ``MAX_PACKS`` packs, or ``alignment`` is asked of
            ``cut="gradient"``.

    Example:
        >>> from gradpack.layout import ArraySpec, plan_layout
        >>> [pack.numel for pack in plan_layout([ArraySpec((10,), "float32")], splits=3).packs]
        [3, 3, 4]
    """
    for argument, value in (
        ("splits", splits),
        ("bytes_per_pack", 1 if bytes_per_pack is None else bytes_per_pack),
        ("alignment", alignment),
    ):
        if value < 1:
            raise ValueError(f"{operation}: {argument}: found {value}, wanted a positive integer")
    if splits > MAX_PACKS:
        raise ValueError(f"{operation}: splits: found {splits}, wanted at most {MAX_PACKS}")
    if cut not in ("even", "gradient"):
        raise ValueError(f"{operation}: cut: found {cut!r}, wanted 'even' or 'gradient'")
    if compress not in COMPRESS:
        raise ValueError(f"{operation}: compress: found {compress!r}, wanted one of {', '.join(map(repr, COMPRESS))}")
    if alignment > 1 and cut == "gradient":
        raise ValueError(f"{operation}: alignment: found {alignment} with cut='gradient', wanted 1 or cut='even'")
    specs = tuple(specs)
    left_out = frozenset(absent)
    for index, spec in enumerate(specs):
        if min(spec.shape, default=0) < 0:
            raise ValueError(f"{operation}: specs[{index}]: found shape {spec.shape}, wanted sizes that are not negative")
    if not left_out <= frozenset(range(len(specs))):
        raise ValueError(f"{operation}: absent: found {sorted(left_out)}, wanted indices from 0 to {len(specs) - 1}")
    members: dict[str, list[int]] = {}
    for index, spec in enumerate(specs):
        if index not in left_out:
            members.setdefault(spec.dtype, []).append(index)
    groups = []
    for dtype, gradients in members.items():
        wire = wire_dtype(dtype, compress)
        itemsize = wire_itemsize(dtype, wire)
        offsets = tuple(accumulate((specs[index].numel for index in gradients), initial=0))
        total = offsets[-1]
        if bytes_per_pack is None:
            cuts = _even_cuts(total, splits)
        else:
            size = max(1, bytes_per_pack // itemsize)
            if total // size > MAX_PACKS:
                least = -(-total // MAX_PACKS) * itemsize
                raise ValueError(f"{operation}: bytes_per_pack: found {bytes_per_pack}, wanted {least} or more here")
            cuts = [*range(0, total, size), total] if total else [0, 0]
        if cut == "gradient":
            cuts = _move_to_gradients(cuts, offsets)
        elif alignment > 1:
            step = -(-alignment // itemsize)
            cuts = [*(place - place % step for place in cuts[:-1]), total]
        groups.append(Group(dtype, wire, tuple(gradients), offsets, tuple(cuts)))
    packs: tuple[str, int | str | None] = ("splits", splits) if bytes_per_pack is None else ("bytes_per_pack", bytes_per_pack)
    return Layout(specs, tuple(groups), (packs, ("cut", cut), ("compress", compress), ("alignment", alignment)))
