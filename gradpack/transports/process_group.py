"""Process groups: packs travel by the collectives of a torch.distributed backend (gloo for CPU gradients)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradpack import _C
from gradpack.errors import TransportError, TransportTimeout
from gradpack.peers import LOOK_SECONDS, Peers
from gradpack.ranks import TorchRanks
from gradpack.transports.collectives import Collectives

__all__ = ["ProcessGroupCollectives", "backend_of", "duplicates"]

_LOOK = timedelta(seconds=LOOK_SECONDS)

LANES = 2
"""Duplicates of a gloo group, which carry slices in turn."""

MAX_LANES_WORLD = 8
"""Above this many ranks there is one duplicate: each has a socket to every rank."""

_POLL_SECONDS = 0.001

_GRACE = timedelta(seconds=1)
"""The backend gives up so much later than we do: our message says more, and no operation outlives its call for long."""


def _timed_out(error: RuntimeError) -> bool:
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


class _Waiting:
    """A torch Work whose waits have a deadline and end when another rank is lost."""

    def __init__(self, work: Any, what: str, peers: Peers) -> None:
        self._work = work
        self._what = what
        self._peers = peers

    def wait(self, deadline: float) -> None:
        while True:
            left = deadline - time.monotonic()
            if left <= 0 and not self._work.is_completed():
                raise self._peers.late()
            try:
                self._work.wait(min(_LOOK, timedelta(seconds=max(left, 0.001))))
                return
            except RuntimeError:
                if not self._work.is_completed():
                    self._peers.check()
                    continue
            # It may have completed after that wait gave up, so what the wait raised says nothing: the work itself is asked.
            try:
                self._work.wait()
                return
            except RuntimeError as error:
                raise (self._peers.late() if _timed_out(error) else self._peers.broken(self._what)) from error


class ProcessGroupCollectives(Collectives):
    """The collectives of torch process groups that nobody else uses, which take turns.

    Args:
        groups: The groups, of the same ranks.
        peers: What is known of its ranks.
        buffer: The memory that offsets count in.
        place: Which of how many ranks of the groups this is; None: those of ``peers``.
    """

    shards = True
    replicates = True

    def __init__(self, groups: Sequence[Any], peers: Peers, buffer: _C.Buffer, place: tuple[int, int] | None = None) -> None:
        self.buffer = buffer
        self._rank, self._size = place or (peers.rank, peers.size)
        self._groups = list(groups)
        self._peers = peers
        self._bytes = torch.frombuffer(buffer, dtype=torch.uint8)

    def _part(self, offset: int, nbytes: int) -> torch.Tensor:
        return self._bytes[offset : offset + nbytes]

    def _started(self, what: str, start: Callable[..., Any], *arguments: Any, options: Any, deadline: float) -> _Waiting:
        options.timeout = timedelta(seconds=max(0.0, deadline - time.monotonic())) + _GRACE
        return _Waiting(start(*arguments, options), what, self._peers)

    def _turn(self) -> Any:
        """The group whose turn it is: collectives come in the same order on every rank, so it is the same on all."""
        self._groups.append(self._groups.pop(0))
        return self._groups[-1]

    def _exchange(self, what: str, source: int, sent: list[int], target: int, received: list[int], deadline: float) -> _Waiting:
        # By all-to-all even where all ranks send the same bytes to everyone: gloo's all-gather and all-reduce take twice as long
        # for small messages and are no faster for large ones (benchmarks/bench_ways.py).
        outputs, inputs = self._part(target, sum(received)), self._part(source, sum(sent))
        options, start = dist.AllToAllOptions(), self._turn().alltoall_base
        return self._started(what, start, outputs, inputs, received, sent, options=options, deadline=deadline)

    def start_gather(self, own: int, sizes: Sequence[int], target: int, scratch: int, deadline: float) -> _Waiting:
        """See ``Collectives.start_gather``."""
        size, rank = self._size, self._rank
        nbytes = sizes[rank]
        if size > 2:
            memory = memoryview(self.buffer)
            for copy in range(size - 1):
                memory[scratch + copy * nbytes : scratch + (copy + 1) * nbytes] = memory[own : own + nbytes]
            own = scratch
        sent = [0 if peer == rank else nbytes for peer in range(size)]
        received = [0 if peer == rank else sizes[peer] for peer in range(size)]
        return self._exchange("gather", own, sent, target, received, deadline)

    def start_all_to_all(self, source: int, sizes: Sequence[int], target: int, deadline: float) -> _Waiting:
        """See ``Collectives.start_all_to_all``."""
        size, rank = self._size, self._rank
        sent = [0 if peer == rank else sizes[peer] for peer in range(size)]
        received = [0 if peer == rank else sizes[rank] for peer in range(size)]
        return self._exchange("all-to-all", source, sent, target, received, deadline)

    def start_broadcast(self, offset: int, nbytes: int, root: int, deadline: float) -> _Waiting:
        """See ``Collectives.start_broadcast``."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        part = self._part(offset, nbytes)
        return self._started("broadcast", self._turn().broadcast, [part], options=options, deadline=deadline)

    def explain(self) -> str:
        """See ``Collectives.explain``."""
        return f"{len(self._groups)} duplicates of the process group ({self._groups[0].name()})"

    def close(self) -> None:
        """See ``Collectives.close``."""
        self.buffer = _C.Buffer(0)
        self._bytes = torch.empty(0, dtype=torch.uint8)
        groups, self._groups = self._groups, []
        for group in groups:
            # A duplicate of gloo is ours alone and ends with its last reference; torch keeps a list of the others.
            if isinstance(group, dist.ProcessGroup) and group in dist.distributed_c10d._world.pg_map:
                dist.destroy_process_group(group)


class _MeetingStore(dist.Store):
    """The store of a meeting for a backend to connect by: waits end where a rank is lost, and hold up no other thread's."""

    def __init__(self, store: Any, peers: Peers, deadline: float) -> None:
        super().__init__()
        self._store = store
        self._peers = peers
        self._deadline = deadline

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> Any:
        self.wait([key])
        return self._store.get(key)

    def add(self, key: str, value: int) -> Any:
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> Any:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        while not self._store.check(list(keys)):
            self._peers.check()
            if time.monotonic() > self._deadline:
                raise self._peers.late()
            time.sleep(_POLL_SECONDS)


def backend_of(ranks: TorchRanks) -> str:
    """The backend that carries a group's CPU tensors."""
    try:
        return str(ranks.process_group._get_backend(torch.device("cpu")).name())
    except RuntimeError:
        return "gloo"  # a group for other devices only; gloo needs nothing but the store


def duplicates(ranks: TorchRanks, peers: Peers, deadline: float, members: Sequence[int] | None = None) -> list[Any]:
    """Groups of the same ranks, or of some of them, that nobody else uses. Each of these ranks must call it.

    Collectives that two libraries start on one group in different orders on different ranks give silently wrong sums; on a group
    of its own gradpack's order is the only one. In small worlds there are two: gloo moves the bytes of a group in one thread,
    which waits for its peers much of the time (``benchmarks/bench_ways.py``).

    Args:
        ranks: The ranks of the caller's group.
        peers: What is known of them: all have come, so this takes long only where one is lost.
        deadline: When to give up.
        members: Those of the ranks that the groups are of, where they are not of all; only with gloo.

    Raises:
        TransportTimeout: The deadline passed.
        PeerLost: The process of another rank is gone.
        TransportError: torch cannot make the group.
    """
    process_group = ranks.process_group
    backend = backend_of(ranks)
    name, places = ("lane", range(ranks.size)) if members is None else ("lane of leaders", members)
    timeout = timedelta(seconds=max(0.0, deadline - time.monotonic())) + _GRACE
    made: list[Any] = []
    failed: list[BaseException] = []

    def make() -> None:
        try:
            if backend == "gloo":
                store = _MeetingStore(ranks.store(), peers, deadline)
                for lane in range(LANES if len(places) <= MAX_LANES_WORLD else 1):
                    prefixed = dist.distributed_c10d.PrefixStore(f"{name} {lane}", store)
                    made.append(dist.ProcessGroupGloo(prefixed, places.index(ranks.rank), len(places), timeout))
            else:
                everyone = dist.get_process_group_ranks(process_group)
                made.append(dist.new_group(everyone, timeout=timeout, backend=backend))
        except BaseException as error:
            failed.append(error)

    # In a thread, since it may block where a rank is lost in the instant between its address and its connection.
    thread = threading.Thread(target=make, name="gradpack duplicate")
    thread.start()
    while thread.is_alive():
        thread.join(LOOK_SECONDS)
        if thread.is_alive():
            peers.check()
            if time.monotonic() > deadline:
                raise peers.late()
    if failed:
        error = failed[0]
        if isinstance(error, TransportError):
            raise error
        if isinstance(error, RuntimeError) and _timed_out(error):
            raise TransportTimeout(f"found the deadline passed as the group was duplicated ({error})") from error
        raise TransportError(f"found that the group cannot be duplicated ({error}), wanted a duplicate") from error
    return made
