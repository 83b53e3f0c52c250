"""Packer: a layout, the native plan that moves its elements, and what the ranks have agreed about both."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradpack import _C
from gradpack.layout import ArraySpec, Layout, digest, plan_layout
from gradpack.options import Options

__all__ = ["Packer", "Planned"]

_MAX_PLANS = 8


@dataclass(frozen=True)
class Planned:
    """The packs of the gradients that take part in a call.

    Attributes:
        layout: The packs.
        plan: The extension's side of it; stream ``i`` is ``layout.groups[i]``.
        routes: What transports have worked out for these packs, by the transport's name.
    """

    layout: Layout
    plan: _C.Plan
    routes: dict[str, Any] = field(default_factory=dict)


class Packer:
    """What is worth keeping between calls that have the same arrays (addresses apart) and the same options.

    Args:
        key: ``Arrays.key`` of the arrays.
        specs: Their description.
        options: How to pack them.
        operation: Name of the call that asks, for messages.
    """

    def __init__(self, key: bytes, specs: Iterable[ArraySpec], options: Options, operation: str) -> None:
        self._key = key
        self._operation = operation
        self._options = options
        self.specs = tuple(specs)
        self.logical: tuple[int, ...] = ()
        self.fingerprints: dict[tuple[Any, ...], bytes] = {}
        self._plans: OrderedDict[frozenset[int], Planned] = OrderedDict()
        self._walk_digest: bytes | None = None
        self._names: tuple[str, ...] = ()
        self._names_digest = bytes(16)
        self.planned(frozenset())

    @property
    def layout(self) -> Layout:
        """The packs where no gradient is absent."""
        return self.planned(frozenset()).layout

    def planned(self, absent: frozenset[int]) -> Planned:
        """The packs where the gradients ``absent`` take no part; a few such sets are remembered."""
        planned = self._plans.get(absent)
        if planned is None:
            options = self._options
            layout = plan_layout(
                self.specs,
                splits=options.splits,
                bytes_per_pack=options.bytes_per_pack,
                cut=options.cut,
                compress=options.compress,
                absent=absent,
                operation=self._operation,
            )
            streams = [
                (group.dtype, group.wire, group.gradients, [self.specs[index].numel for index in group.gradients])
                for group in layout.groups
            ]
            planned = self._plans[absent] = Planned(layout, _C.Plan(self._key, len(self.specs), streams))
            if len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)
        else:
            self._plans.move_to_end(absent)
        return planned

    def walk_digest(self) -> bytes:
        """16 bytes that are equal where all gradients are walked in the same order."""
        if self._walk_digest is None:
            logical = set(self.logical)
            self._walk_digest = digest(
                [(index, spec.order) for index, spec in enumerate(self.specs) if spec.order and index not in logical]
            )
        return self._walk_digest

    def names_digest(self, names: Sequence[str] | None) -> bytes:
        """16 bytes that are equal where gradients have the same names in the same order; zeros where they have none."""
        if names is None:
            return bytes(16)
        found = tuple(names)
        if self._names != found:
            self._names, self._names_digest = found, digest(list(found))
        return self._names_digest

    def agree_logical(self, indices: Iterable[int]) -> None:
        """From now on the gradients ``indices`` are walked in logical order: their memory order differs between ranks."""
        self.logical = tuple(sorted({*self.logical, *indices}))
        self._walk_digest = None
