"""Process groups: packs travel by the collectives of a torch.distributed backend (gloo for CPU gradients)."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradpack import groups
from gradpack.errors import PeerLost, TransportError, TransportTimeout
from gradpack.groups import GroupState
from gradpack.transports.staged import StagedTransport

__all__ = ["ProcessGroupTransport"]

_GLOO_DTYPES: dict[str, torch.dtype] = {
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    # Sums wrap, so the bits of an unsigned sum are those of the signed one.
    "uint32": torch.int32,
    "uint64": torch.int64,
    "float32": torch.float32,
    "float64": torch.float64,
}
"""What gloo sums. It also sums 16-bit floats, but in 16 bits, where a finite mean can overflow: those go the sharded way."""

_LOOK = timedelta(milliseconds=100)
"""Waits are slices of this length, so that the main thread looks at signals in between."""


_GRACE = timedelta(seconds=1)
"""The backend gives up so much later than we do: our message says more, and no operation outlives its call for long."""


def _timed_out(error: RuntimeError) -> bool:
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


class _Waiting:
    """A torch Work whose waits have a deadline."""

    def __init__(self, work: Any, what: str, size: int) -> None:
        self._work = work
        self._what = what
        self._late = f"{what}: found the deadline passed, wanted all {size} ranks to arrive before it"

    def wait(self, deadline: float) -> None:
        while True:
            left = deadline - time.monotonic()
            if left <= 0 and not self._work.is_completed():
                raise TransportTimeout(self._late)
            try:
                self._work.wait(min(_LOOK, timedelta(seconds=max(left, 0.001))))
                return
            except RuntimeError:
                if not self._work.is_completed():
                    continue
            # It may have completed after that wait gave up, so what the wait raised says nothing: the work itself is asked.
            try:
                self._work.wait()
                return
            except RuntimeError as error:
                if _timed_out(error):
                    raise TransportTimeout(self._late) from error
                raise PeerLost(f"{self._what}: found the connection to another rank broken, wanted it alive") from error


class ProcessGroupTransport(StagedTransport):
    """Staged packs over a duplicate of the caller's process group."""

    name = "process_group"

    def __init__(self, operation: str, state: GroupState, timeout: float | None) -> None:
        super().__init__(state)
        seconds = state.timeout if timeout is None else timeout
        try:
            self._group: Any = groups.duplicate(state.process_group, seconds)
        except RuntimeError as error:
            failed = TransportError(f"{operation}: group: found that it cannot be duplicated ({error}), wanted a duplicate")
            if _timed_out(error):
                failed = TransportTimeout(
                    f"{operation}: group: found the deadline of {seconds:g} s passed as the group was duplicated, "
                    f"wanted all {state.size} ranks to arrive before it"
                )
            state.break_(failed)
            raise failed from error
        self._bytes = torch.frombuffer(self._buffer, dtype=torch.uint8)

    def sums(self, dtype: str) -> bool:
        """See ``StagedTransport.sums``."""
        return dtype in _GLOO_DTYPES

    def _part(self, offset: int, nbytes: int) -> torch.Tensor:
        return self._bytes[offset : offset + nbytes]

    def _started(self, what: str, start: Callable[..., Any], *arguments: Any, options: Any, deadline: float) -> _Waiting:
        options.timeout = timedelta(seconds=max(0.0, deadline - time.monotonic())) + _GRACE
        return _Waiting(start(*arguments, options), what, self._state.size)

    def start_all_reduce(self, offset: int, count: int, dtype: str, deadline: float) -> _Waiting:
        """See ``StagedTransport.start_all_reduce``."""
        kind = _GLOO_DTYPES[dtype]
        pack = self._part(offset, count * kind.itemsize).view(kind)
        options = dist.AllreduceOptions()
        return self._started("all-reduce", self._group.allreduce, [pack], options=options, deadline=deadline)

    def start_all_gather(self, offset: int, nbytes: int, target: int, deadline: float) -> _Waiting:
        """See ``StagedTransport.start_all_gather``."""
        everyone, mine = self._part(target, nbytes * self._state.size), self._part(offset, nbytes)
        options = dist.distributed_c10d.AllgatherOptions()
        return self._started("all-gather", self._group._allgather_base, everyone, mine, options=options, deadline=deadline)

    def start_all_to_all(self, offset: int, nbytes: int, target: int, deadline: float) -> _Waiting:
        """See ``StagedTransport.start_all_to_all``."""
        size = nbytes * self._state.size
        received, sent = self._part(target, size), self._part(offset, size)
        even: list[int] = []
        options = dist.AllToAllOptions()
        start = self._group.alltoall_base
        return self._started("all-to-all", start, received, sent, even, even, options=options, deadline=deadline)

    def start_broadcast(self, offset: int, nbytes: int, root: int, deadline: float) -> _Waiting:
        """See ``StagedTransport.start_broadcast``."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        part = self._part(offset, nbytes)
        return self._started("broadcast", self._group.broadcast, [part], options=options, deadline=deadline)

    def close(self) -> None:
        """See ``Transport.close``."""
        super().close()
        self._bytes = torch.empty(0, dtype=torch.uint8)
        duplicated, self._group = self._group, None
        groups.release(duplicated)
