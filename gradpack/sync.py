"""``barrier`` and ``check_in_sync``: what ranks do together that moves no gradients."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from gradpack import _C, arrays, groups, transports
from gradpack.errors import DesyncError, LayoutMismatch
from gradpack.options import Options
from gradpack.packer import Packer
from gradpack.peers import ranks_text

__all__ = ["barrier", "check_in_sync"]

_CHUNK_BYTES = 1 << 20


def barrier(group: Any = None, *, timeout: float | timedelta | None = None) -> None:
    """Returns once every rank of the group has called it.

    Args:
        group: As for ``allreduce``.
        timeout: As for ``allreduce``.

    Raises:
        TransportTimeout: The deadline passed; the message names the ranks that did not come.
        LayoutMismatch: Another rank made another call.
        PeerLost: The process of another rank is gone.
        TransportError: As for ``allreduce``.

    Example:
        >>> gradpack.barrier(timeout=60)  # doctest: +SKIP
    """
    groups.together(_gather, group, "barrier", timeout, lambda: b"")


def check_in_sync(
    tensors: Any,
    *,
    names: Iterable[str] | None = None,
    group: Any = None,
    timeout: float | timedelta | None = None,
) -> None:
    """Checks that arrays hold the same bits on every rank, by their checksums.

    For parameters that are meant to be equal and drift apart: a rank that skipped a step, another seed, an update outside of what
    is reduced. Every rank of the group calls it; reads each array once.

    Args:
        tensors: As for ``broadcast``: a module brings its parameters and its buffers.
        names: As for ``allreduce``.
        group: As for ``allreduce``.
        timeout: As for ``allreduce``.

    Raises:
        DesyncError: Some array differs, on every rank; the message names the first, and the ranks where it is not as on most.
        LayoutMismatch: The arrays themselves differ in number, shape or dtype.
        TransportError: As for ``allreduce``.

    Example:
        >>> if step % 1000 == 0:  # doctest: +SKIP
        ...     gradpack.check_in_sync(model)
    """
    operation = "check_in_sync"
    collected: list[arrays.Collected] = []

    def checksums() -> bytes:
        found = arrays.collect(operation, "tensors", tensors, names=names, parameters="value")
        collected.append(found)
        described = arrays.describe(found)
        return json.dumps([[str(spec) for spec in arrays.specs_of(described)], _checksums(described)]).encode()

    state, everyone = groups.together(_gather, group, operation, timeout, checksums)
    _compare(collected[0], [json.loads(data) for data in everyone], state.rank)


def _gather(group: Any, operation: str, timeout: Any, make: Callable[[], bytes]) -> tuple[groups.GroupState, list[bytes]]:
    """Meets all ranks of the group and collects what ``make`` makes on each; a refusal reaches the others before it is raised."""
    state = groups.resolve(operation, group)
    with state.call(operation):
        try:
            state.raise_unreported()
            options = Options.make(operation, timeout=timeout)
            data = make()
        except Exception as refusal:
            transports.refuse(operation, state, refusal)
            raise
        if transports.alone(state):
            return state, [data]
        return state, transports.select(operation, state, options.timeout).gather(operation, data, options.timeout)


def _checksums(described: _C.Arrays) -> list[str]:
    """One checksum for each array, of its values in logical order: strides may differ between ranks."""
    packer = Packer(described.key, arrays.specs_of(described), Options.make("check_in_sync", splits=1), "check_in_sync")
    described.pack_logically(range(len(described)))
    planned = packer.planned(frozenset())
    buffer = _C.Buffer(_CHUNK_BYTES)
    found = [""] * len(described)
    for stream, group in enumerate(planned.layout.groups):
        begin, step = 0, _CHUNK_BYTES // group.wire_itemsize
        for index in group.gradients:
            end, hashed = begin + packer.specs[index].numel, hashlib.blake2b(digest_size=16)
            for first in range(begin, end, step):
                last = min(end, first + step)
                planned.plan.pack(described, stream, first, last, buffer, 0)
                hashed.update(memoryview(buffer)[: (last - first) * group.wire_itemsize])
            found[index], begin = hashed.hexdigest(), end
    return found


def _compare(collected: arrays.Collected, everyone: list[Any], rank: int) -> None:
    counts = [len(specs) for specs, _ in everyone]
    for index in range(max(counts)):
        specs = [specs[index] if index < len(specs) else "nothing" for specs, _ in everyone]
        other = next((peer for peer, spec in enumerate(specs) if spec != specs[rank]), None)
        if other is not None:
            where = collected.where(index) if index < counts[rank] else f"{collected.operation}: {collected.argument}[{index}]"
            raise LayoutMismatch(f"{where}: {specs[rank]} here, {specs[other]} on rank {other}")
    differing = [index for index in range(counts[rank]) if len({sums[index] for _, sums in everyone}) > 1]
    if differing:
        sums = [found[differing[0]] for _, found in everyone]
        usual = max(sums, key=lambda value: (sums.count(value), value == sums[0]))
        odd, most = ([peer for peer, value in enumerate(sums) if (value == usual) is same] for same in (False, True))
        more = f" (and {len(differing) - 1} more arrays)" if len(differing) > 1 else ""
        raise DesyncError(
            f"{collected.where(differing[0])}: found other values on {ranks_text(odd)} than on {ranks_text(most)}{more}, "
            "wanted the same on all"
        )
