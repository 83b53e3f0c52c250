"""Process groups: packs travel by the collectives of a torch.distributed backend (gloo for CPU gradients)."""

from __future__ import annotations

import time
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


class _Waiting:
    """A torch Work whose waits have a deadline."""

    def __init__(self, work: Any, what: str) -> None:
        self._work = work
        self._what = what

    def wait(self, deadline: float) -> None:
        while True:
            left = deadline - time.monotonic()
            if left <= 0 and not self._work.is_completed():
                raise TransportTimeout(f"{self._what}: the deadline passed before every rank arrived")
            try:
                self._work.wait(min(_LOOK, timedelta(seconds=max(left, 0.001))))
                return
            except RuntimeError as error:
                if not self._work.is_completed():
                    continue
                if "timed out" in str(error).lower():
                    raise TransportTimeout(f"{self._what}: {error}") from error
                raise PeerLost(f"{self._what}: {error}") from error


class ProcessGroupTransport(StagedTransport):
    """Staged packs over a duplicate of the caller's process group."""

    name = "process_group"

    def __init__(self, state: GroupState) -> None:
        super().__init__(state)
        try:
            self._group: Any = groups.duplicate(state.process_group, state.timeout)
        except RuntimeError as error:
            state.broken = error
            kind = TransportTimeout if "timed out" in str(error).lower() else TransportError
            raise kind(f"gradpack: group: could not be duplicated: {error}") from error
        self._bytes = torch.frombuffer(self._buffer, dtype=torch.uint8)

    def sums(self, dtype: str) -> bool:
        """See ``StagedTransport.sums``."""
        return dtype in _GLOO_DTYPES

    def _part(self, offset: int, nbytes: int) -> torch.Tensor:
        return self._bytes[offset : offset + nbytes]

    def start_all_reduce(self, offset: int, count: int, dtype: str) -> _Waiting:
        """See ``StagedTransport.start_all_reduce``."""
        kind = _GLOO_DTYPES[dtype]
        pack = self._part(offset, count * kind.itemsize).view(kind)
        return _Waiting(self._group.allreduce([pack], dist.AllreduceOptions()), "all-reduce")

    def start_all_gather(self, offset: int, nbytes: int, target: int) -> _Waiting:
        """See ``StagedTransport.start_all_gather``."""
        everyone = self._part(target, nbytes * self._state.size)
        return _Waiting(self._group._allgather_base(everyone, self._part(offset, nbytes)), "all-gather")

    def start_all_to_all(self, offset: int, nbytes: int, target: int) -> _Waiting:
        """See ``StagedTransport.start_all_to_all``."""
        size = nbytes * self._state.size
        work = self._group.alltoall_base(self._part(target, size), self._part(offset, size), [], [])
        return _Waiting(work, "all-to-all")

    def start_broadcast(self, offset: int, nbytes: int, root: int) -> _Waiting:
        """See ``StagedTransport.start_broadcast``."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        return _Waiting(self._group.broadcast([self._part(offset, nbytes)], options), "broadcast")

    def close(self) -> None:
        """See ``Transport.close``."""
        super().close()
        self._bytes = torch.empty(0, dtype=torch.uint8)
        duplicated, self._group = self._group, None
        groups.release(duplicated)
