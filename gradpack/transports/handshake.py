"""How ranks agree before anything moves: the header that opens every call, and the details that follow when headers differ.

Every rank sees the same headers, so every rank reaches the same verdict: no decision is taken alone. A rank that refuses its
own arguments sends a header all the same, with its reason in the details.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gradpack.errors import LayoutMismatch
from gradpack.layout import digest
from gradpack.options import Options
from gradpack.packer import Packer
from gradpack.peers import ranks_text

__all__ = [
    "HEADER_BYTES",
    "PRESENCE_GRADIENTS",
    "Details",
    "Header",
    "check_details",
    "fingerprint_of",
    "fingerprint_of_gather",
    "missing_on_some",
]

PROTOCOL = 1
"""Raised whenever the sequence or the shape of collectives changes."""

PRESENCE_GRADIENTS = 4096
"""Gradients whose presence fits into the header; longer lists need the details where ranks differ."""

_STRUCT = struct.Struct("<8sIIQQ16s16s16s16s")
_MAGIC = b"gradpack"
HEADER_BYTES = 640
"""Bytes of a header on the wire: the fields, the presence bits and room to the next multiple of a cache line."""


@dataclass(slots=True)  # not frozen: that doubles what it costs to make one, and every call does
class Header:
    """What one rank says as a call opens.

    Attributes:
        refused: The rank refuses its own arguments.
        call: Which call on the group it is for the rank.
        count: Number of gradients.
        fingerprint: Of everything that must be equal.
        walk: Digest of the orders in which the gradients are walked.
        names: Digest of the names of the gradients, or zeros where they have none.
        present: One bit for each gradient, least significant first.
    """

    refused: bool
    call: int
    count: int
    fingerprint: bytes
    walk: bytes
    names: bytes
    present: bytes
    presence: bytes = b""

    def encode(self) -> bytes:
        """The header as ``HEADER_BYTES`` bytes."""
        presence = _digest_of_presence(self.present)
        fields = _STRUCT.pack(
            _MAGIC, PROTOCOL, self.refused, self.call, self.count, self.fingerprint, self.walk, self.names, presence
        )
        return (fields + self.present[: PRESENCE_GRADIENTS // 8]).ljust(HEADER_BYTES, b"\0")

    @staticmethod
    def decode(data: bytes) -> Header:
        """The header in the first bytes of ``data``; ``present`` then holds the first ``PRESENCE_GRADIENTS`` bits at most.

        Raises:
            LayoutMismatch: The bytes are no header of this version of gradpack.
        """
        magic, protocol, refused, call, count, fingerprint, walk, names, presence = _STRUCT.unpack_from(data)
        if magic != _MAGIC or protocol != PROTOCOL:
            raise LayoutMismatch(
                f"found a header of protocol {protocol} ({magic!r}), wanted {PROTOCOL} ({_MAGIC!r}): "
                "the ranks run different versions of gradpack"
            )
        bits = min(count, PRESENCE_GRADIENTS)
        present = data[_STRUCT.size : _STRUCT.size + (bits + 7) // 8]
        return Header(bool(refused), call, count, fingerprint, walk, names, present, presence)


@lru_cache(maxsize=64)
def _digest_of_presence(present: bytes) -> bytes:
    return digest(present.hex())


def fingerprint_of(kind: str, root: int | None, packer: Packer, options: Options, world: int, policy: dict[str, Any]) -> bytes:
    """16 bytes that are equal where the call may go on; kept in the packer, since every call needs it."""
    key = kind, root, *policy.values()
    found = packer.fingerprints.get(key)
    if found is None:
        shaping = [PROTOCOL, kind, root, options.op, options.missing, options.compress, world, *policy.values()]
        found = packer.fingerprints[key] = digest([*shaping, packer.layout.fingerprint().hex()])
    return found


def fingerprint_of_gather(operation: str, world: int) -> bytes:
    """16 bytes that are equal where all ranks meet in a call that moves no arrays."""
    return digest([PROTOCOL, operation, world])


@dataclass(frozen=True)
class Details:
    """What one rank says when headers differ: everything that a message or a decision needs.

    Attributes:
        refusal: Why the rank refuses its own arguments, or None.
        settings: What must be equal, by the name of the argument, in the order in which differences are named.
        specs: Shape and dtype of each gradient, as messages print them.
        orders: Memory order of each gradient.
        names: Name of each gradient; none where the rank gave none.
        present: Hexadecimal presence bits of all gradients.
    """

    refusal: str | None
    settings: dict[str, Any]
    specs: list[str]
    orders: list[list[int]]
    names: list[str]
    present: str

    @staticmethod
    def of_refusal(reason: BaseException) -> Details:
        """The details of a rank that refuses."""
        try:
            text = f": {reason}"
        except Exception:
            text = " that cannot be printed"
        return Details(f"{type(reason).__name__}{text}", {}, [], [], [], "")

    @staticmethod
    def of_gather(operation: str) -> Details:
        """The details of a rank in a call that moves no arrays."""
        return Details(None, {"kind of call": operation}, [], [], [], "")

    @staticmethod
    def of_call(
        kind: str,
        root: int | None,
        packer: Packer,
        options: Options,
        policy: dict[str, Any],
        names: Sequence[str] | None,
        present: bytes,
    ) -> Details:
        """The details of a rank that wants to go on."""
        settings = {"kind of call": kind, "root": root, "op": options.op, "compress": options.compress}
        settings |= dict(packer.layout.policy)
        settings |= {"missing": options.missing, **policy}
        specs = [str(spec) for spec in packer.specs]
        return Details(None, settings, specs, [list(spec.order) for spec in packer.specs], list(names or ()), present.hex())

    def encode(self) -> bytes:
        """The details as bytes, of any length."""
        found = [self.refusal, self.settings, self.specs, self.orders, self.names, self.present]
        return json.dumps(found, separators=(",", ":")).encode()

    @staticmethod
    def decode(data: bytes) -> Details:
        """Undoes ``encode``."""
        return Details(*json.loads(data))


def _differing(values: Sequence[Any], rank: int) -> str | None:
    """None where all are equal; else ``found here, other on ranks ...`` as ``rank`` sees it."""
    if all(value == values[0] for value in values):
        return None
    others: dict[str, list[int]] = {}
    for peer, value in enumerate(values):
        if value != values[rank]:
            others.setdefault(str(value), []).append(peer)
    return f"{values[rank]} here, " + ", ".join(f"{value} on {ranks_text(peers)}" for value, peers in others.items())


def check_details(operation: str, argument: str, details: Sequence[Details], rank: int, labels: Sequence[str] | None) -> None:
    """Raises what ``rank`` has to raise, or returns where the ranks differ in nothing that must be equal.

    Args:
        operation: Name of the call.
        argument: Name of the argument that holds the gradients.
        details: One for each rank.
        rank: This rank.
        labels: Names of this rank's gradients, or None.

    Raises:
        LayoutMismatch: A rank refused, or two ranks differ; the message names the first difference and the ranks.
    """
    refusals = [(peer, found.refusal) for peer, found in enumerate(details) if found.refusal is not None]
    if refusals:
        raise LayoutMismatch(f"{operation}: " + "; ".join(f"rank {peer} refused: {reason}" for peer, reason in refusals))
    for name in details[rank].settings:
        found = _differing([repr(other.settings.get(name, "nothing")) for other in details], rank)
        if found is not None:
            raise LayoutMismatch(f"{operation}: {name}: {found}")
    names = {name for other in details for name in other.settings}
    if names - details[rank].settings.keys():
        raise LayoutMismatch(f"{operation}: found other options on other ranks: {sorted(names)}")
    for index in range(max(len(other.specs) for other in details)):
        found = _differing([other.specs[index] if index < len(other.specs) else "nothing" for other in details], rank)
        if found is not None:
            name = f" {labels[index]!r}" if labels is not None and index < len(labels) else ""
            raise LayoutMismatch(f"{operation}: {argument}[{index}]{name}: {found}")
    # A rank that gave no names agrees with all.
    for index in range(max(len(other.names) for other in details)):
        given = {other.names[index] for other in details if other.names}
        if len(given) > 1:
            found = _differing([repr(other.names[index]) if other.names else "no name" for other in details], rank)
            raise LayoutMismatch(f"{operation}: {argument}[{index}]: {found}")


def missing_on_some(presence: Sequence[bytes], count: int) -> tuple[list[int], list[int], list[int]]:
    """Compares presence bits.

    Args:
        presence: The bits of each rank.
        count: Number of gradients.

    Returns:
        How many ranks have each gradient; the gradients that some ranks lack; those that all ranks lack.
    """
    counts = [sum(bits[index // 8] >> (index % 8) & 1 for bits in presence) for index in range(count)]
    partly = [index for index, held in enumerate(counts) if 0 < held < len(presence)]
    return counts, partly, [index for index, held in enumerate(counts) if not held]
