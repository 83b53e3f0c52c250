"""The agreement that opens every call, over any transport that can show headers to all ranks and collect bytes from them."""

from __future__ import annotations

import time
import weakref
from abc import abstractmethod
from array import array
from collections.abc import Callable
from typing import TypeVar

from gradpack import _C, arrays
from gradpack.errors import LayoutMismatch, TransportError, renamed
from gradpack.groups import GroupState
from gradpack.peers import Peers, ranks_text
from gradpack.result import Result
from gradpack.transports import handshake
from gradpack.transports.base import Call, Run, Transport
from gradpack.transports.handshake import Details, Header

__all__ = ["AgreeingTransport"]

_Returned = TypeVar("_Returned")


class AgreeingTransport(Transport):
    """What is the same in every transport whose ranks compare headers on the host.

    Args:
        state: The group.
        peers: What is known of its ranks.
    """

    def __init__(self, state: GroupState, peers: Peers) -> None:
        # The state owns the transport and must die with its group, not when the garbage collector finds a cycle.
        self._state: GroupState = weakref.proxy(state)
        self._peers = peers
        self.calls = 0
        """Calls that were carried, refusals too."""

    @abstractmethod
    def _policy(self) -> dict[str, int | bool | str]:
        """What shapes the traffic beside the call itself, and must be equal on all ranks."""

    @abstractmethod
    def _carry_out(self, run: Run) -> None:
        """Opens the call, agrees on it and moves its bytes."""

    @abstractmethod
    def _show(self, header: Header, deadline: float) -> list[bytes]:
        """Opens a call that moves no arrays; returns the headers of all ranks, in rank order."""

    @abstractmethod
    def _exchange(self, data: bytes, deadline: float) -> list[bytes]:
        """Collects bytes of any length from all ranks, in rank order."""

    def _note_agreed(self, fingerprint: bytes, run: Run | None) -> None:
        """All ranks agreed on a call, which moves the arrays of ``run`` if any."""

    def run(self, call: Call) -> Result:
        """See ``Transport.run``."""
        run = self._prepare(call)
        self._guarded(call.collected.operation, call.number, lambda: self._carry_out(run))
        return call.result(run.nonfinite, run.wire_bytes)

    def refuse(self, operation: str, reason: Exception, timeout: float | None) -> None:
        """See ``Transport.refuse``."""
        deadline = self._deadline(timeout)
        header = Header(True, self._state.calls, 0, bytes(16), bytes(16), bytes(16), b"")

        def tell() -> None:
            self._headers(self._show(header, deadline))
            self._exchange(Details.of_refusal(reason).encode(), deadline)

        self._guarded(operation, self._state.calls, tell)

    def gather(self, operation: str, data: bytes, timeout: float | None) -> list[bytes]:
        """See ``Transport.gather``."""
        deadline = self._deadline(timeout)
        fingerprint = handshake.fingerprint_of_gather(operation, self._state.size)
        header = Header(False, self._state.calls, 0, fingerprint, bytes(16), bytes(16), b"")

        def collect() -> list[bytes]:
            headers = self._headers(self._show(header, deadline))
            if any(other.refused or other.fingerprint != fingerprint for other in headers):
                found = self._exchange(Details.of_gather(operation).encode(), deadline)
                handshake.check_details(operation, "", [Details.decode(other) for other in found], self._state.rank, None)
            self._note_agreed(fingerprint, None)
            return self._exchange(data, deadline) if data else []

        return self._guarded(operation, self._state.calls, collect)

    def _guarded(self, operation: str, number: int, traffic: Callable[[], _Returned]) -> _Returned:
        """What ``traffic`` returns. Breaks the group where it ends half-way, and names the call in what it raises."""
        try:
            self.calls += 1
            self._peers.enter(number)
            self._peers.check()
            return traffic()
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

    def _deadline(self, timeout: float | None) -> float:
        return time.monotonic() + (self._state.timeout if timeout is None else timeout)

    def _prepare(self, call: Call) -> Run:
        nonfinite = _C.Nonfinite(len(call.arrays)) if call.options.check_finite and call.kind == "allreduce" else None
        divisor = self._state.size if call.options.op == "mean" and call.kind == "allreduce" else 1
        call.arrays.pack_logically(call.packer.logical)
        here = frozenset(_absent(call.arrays))
        return Run(call, call.packer.planned(here), self._deadline(call.options.timeout), nonfinite, divisor)

    def _header(self, call: Call) -> Header:
        fingerprint = handshake.fingerprint_of(call.kind, call.root, call.packer, call.options, self._state.size, self._policy())
        names = call.packer.names_digest(call.collected.names)
        return Header(False, call.number, len(call.arrays), fingerprint, call.packer.walk_digest(), names, call.arrays.present)

    def _headers(self, shown: list[bytes]) -> list[Header]:
        """What each rank says as the call opens.

        Raises:
            TransportError: Some ranks are at another call, which is no call that this one may be paired with.
        """
        headers = [Header.decode(data) for data in shown]
        mine = headers[self._state.rank].call
        others = [f"rank {rank} at its call {header.call}" for rank, header in enumerate(headers) if header.call != mine]
        if others:
            raise TransportError(f"found {', '.join(others)}, wanted all at call {mine}: a rank has skipped or repeated one")
        return headers

    def _agree(self, run: Run, shown: list[bytes]) -> bool:
        """Compares the headers. True where what is packed already is what all ranks agreed on; else ``run`` holds a new plan.

        Raises:
            LayoutMismatch: The ranks do not agree.
        """
        call = run.call
        operation = call.collected.operation
        headers = self._headers(shown)
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
        self._note_agreed(mine.fingerprint, run)
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

    def _mark_written(self, call: Call) -> None:
        if call.kind == "allreduce" or self._state.rank != call.root:
            arrays.mark_written(call.arrays)


def _absent(described: _C.Arrays) -> list[int]:
    if not described.num_absent:
        return []
    present = described.present
    return [index for index in range(len(described)) if not present[index // 8] >> (index % 8) & 1]
