"""How much of the packs travels with the headers, in the exchange that opens every call."""

from __future__ import annotations

from collections import OrderedDict

from gradpack.transports.slices import LINE_BYTES

__all__ = ["LARGEST_PAYLOAD_BYTES", "MAX_PAYLOAD_WORLD", "PAYLOAD_BYTES", "ExpectedPayload", "payload_limits"]

PAYLOAD_BYTES = 64 << 10
"""Bytes of payload in an opening of which nothing is known: models that fit pay one collective, a scalar next to nothing for the
room (``benchmarks/bench_opening.py``)."""

LARGEST_PAYLOAD_BYTES = 2 << 20
"""The most that a rank sends in an opening, to all others together, where a call of that size is expected."""

MAX_PAYLOAD_WORLD = 8
"""Above this many ranks the opening is the headers alone: its size grows with their number."""

_SMALLEST_BYTES = 1 << 10
_REMEMBERED = 64


def payload_limits(size: int) -> tuple[int, int]:
    """The least and the most bytes of payload in an opening between ``size`` ranks."""
    if size > MAX_PAYLOAD_WORLD:
        return 0, 0
    return PAYLOAD_BYTES, max(PAYLOAD_BYTES, LARGEST_PAYLOAD_BYTES // max(1, size - 1) // LINE_BYTES * LINE_BYTES)


class ExpectedPayload:
    """Guesses the payload of the next call from those that followed one another before, the same on every rank.

    Only calls that all ranks agreed on count, so that all have seen the same ones.

    Args:
        least: The payload where nothing is known.
        most: Calls of more than this go through the slots too.
    """

    def __init__(self, least: int, most: int) -> None:
        self._least = least
        self._most = most
        self._before: bytes | None = None
        self._last: bytes | None = None
        self._follows: OrderedDict[bytes, int] = OrderedDict()

    def take(self) -> int:
        """Bytes of payload of the call that begins now."""
        self._before, self._last = self._last, None
        return self._least if self._before is None else self._follows.get(self._before, self._least)

    def agreed(self, fingerprint: bytes, nbytes: int) -> None:
        """All ranks agreed on the call that ``take`` was asked for."""
        if self._before is not None and self._most:
            # Of a call that goes through the slots anyway, the opening takes what it can while the first slots are filled.
            self._follows[self._before] = max(nbytes, _SMALLEST_BYTES) if nbytes <= self._most else self._most // 2
            self._follows.move_to_end(self._before)
            if len(self._follows) > _REMEMBERED:
                self._follows.popitem(last=False)
        self._last = fingerprint
