"""Shared memory: the ranks of one host pack, sum and unpack through a small segment that all of them have mapped.

``_C.ShmChannel`` does the work; this has the ranks agree where their headers differ. ``docs/transports.md`` says how it works and
what it costs.
"""

from __future__ import annotations

from collections.abc import Callable

from gradpack import _C
from gradpack.errors import TransportError, renamed
from gradpack.groups import GroupState
from gradpack.packer import Packer
from gradpack.peers import Peers
from gradpack.result import Result
from gradpack.transports.agreement import AgreeingTransport
from gradpack.transports.base import Call, Run, Transport
from gradpack.transports.drive import drive
from gradpack.transports.handshake import HEADER_BYTES, Header

__all__ = ["SharedMemoryTransport"]


class SharedMemoryTransport(AgreeingTransport):
    """Calls between the ranks of one host.

    Args:
        state: The group.
        peers: What is known of its ranks.
        channel: This rank's end of the segment.
        why: Why this is the transport of the group.
        process_group: Makes the transport that calls with ``transport="process_group"`` take, together with all ranks.
    """

    name = "shared_memory"
    offers = ("shared_memory", "process_group")

    def __init__(
        self, state: GroupState, peers: Peers, channel: _C.ShmChannel, why: str, process_group: Callable[[str, float], Transport]
    ) -> None:
        super().__init__(state, peers)
        self.why = why
        self._channel = channel
        self._process_group = process_group
        self._requested = self.name

    def run(self, call: Call) -> Result:
        """See ``Transport.run``."""
        if call.options.transport != "process_group":
            return super().run(call)
        operation, deadline = call.collected.operation, self._deadline(call.options.timeout)
        # This group's ranks meet here first, whatever they ask for: those that ask for different transports are to be told.
        self._requested = call.options.transport
        try:
            self._guarded(operation, call.number, lambda: self._agree_to_leave(call, deadline))
        finally:
            self._requested = self.name
        return self._process_group(operation, deadline).run(call)

    def _agree_to_leave(self, call: Call, deadline: float) -> None:
        shown = self._show(self._header(call), deadline)
        if len({(header.refused, header.fingerprint) for header in self._headers(shown)}) > 1:
            self._agree(self._prepare(call), shown)

    def explain(self, packer: Packer, requested: str) -> list[str]:
        """See ``Transport.explain``."""
        if requested != self.name:
            return ["over: what the first call that asks for it makes"]
        return [f"over: a segment of {self._channel.nbytes:,} bytes that all ranks share"]

    def close(self) -> None:
        """See ``Transport.close``."""
        self._channel.close()

    def _policy(self) -> dict[str, int | bool | str]:
        return {"transport": self._requested}

    def _show(self, header: Header, deadline: float) -> list[bytes]:
        self._channel.begin(header.encode())
        self._finish(deadline)
        return self._channel.headers()

    def _exchange(self, data: bytes, deadline: float) -> list[bytes]:
        self._channel.begin_gather(data)
        self._finish(deadline)
        return self._channel.gathered()

    def _carry_out(self, run: Run) -> None:
        call, channel = run.call, self._channel
        header = self._header(call).encode()
        writes = True
        try:
            channel.begin(header, run.planned.plan, call.arrays, call.root, run.divisor, None, run.nonfinite)
            if self._finish(run.deadline, run) == "differ":
                writes = False
                self._agree(run, channel.headers())
                writes = True
                channel.carry(run.planned.plan, call.arrays, call.root, run.divisor, run.counts, run.nonfinite)
                self._finish(run.deadline, run)
        finally:
            if writes:
                self._mark_written(call)
        if self._state.size > 1:
            run.wire_bytes += HEADER_BYTES + (run.planned.layout.wire_bytes if call.root in (None, self._state.rank) else 0)

    def _finish(self, deadline: float, run: Run | None = None) -> str:
        """Drives what was begun to its end: ``"done"`` or ``"differ"``."""
        channel = self._channel
        try:
            return drive(channel, self._peers, deadline)
        except TransportError as error:
            place = channel.position() if run is not None else None
            if run is None or place is None:
                raise
            stream, begin, end = place
            packs = run.planned.layout.groups[stream].packs_text(begin, end)
            raise renamed(error, f"{packs}: {error}") from error.__cause__
