"""The kinds of groups: how the ranks of each exchange a few bytes before anything else exists.

A group is a ``torch.distributed`` process group, an mpi4py communicator, or any object with ``rank``, ``size`` and
``allgather(data, timeout=seconds)``. This is where they differ; what is above asks for no more than ``Ranks`` (``members.py``).
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from gradpack.errors import BuildError, PeerLost, TransportError, TransportTimeout, described
from gradpack.members import DEFAULT_SECONDS, ObjectRanks, Ranks
from gradpack.peers import ranks_text

__all__ = ["MPIRanks", "TorchRanks", "find", "of", "torch_groups"]

_POLL_SECONDS = 0.02


class TorchRanks(Ranks):
    """The ranks of a torch process group, which meet in the group's store.

    The store may outlive the group (an elastic agent's does), so meetings are numbered: each rank counts its own in the store,
    and one that has met fewer times than another, since that gave up before it came, catches up.

    Args:
        process_group: The group; only a weak reference is kept.
    """

    def __init__(self, process_group: Any) -> None:
        import torch.distributed as dist

        self._process_group = weakref.ref(process_group)
        self._name = process_group.group_name
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        self.timeout = _torch_timeout(process_group)
        self._meeting: Any = None
        self._reserved = 0
        self._exchanges = 0

    @property
    def process_group(self) -> Any:
        """The caller's group.

        Raises:
            TransportError: It is gone.
        """
        process_group = self._process_group()
        if process_group is None:
            raise TransportError("gradpack: group: found a destroyed group, wanted a living one")
        return process_group

    def _counter(self) -> Any:
        import torch.distributed as dist

        store: Any = dist.distributed_c10d._get_process_group_store(self.process_group)
        if store is None:
            raise TransportError("gradpack: group: found a process group without a store, wanted one to meet in")
        return store

    def store(self) -> Any:
        """A store that only the ranks of this meeting use, over the group's own connection, so nobody may wait in it.

        A connection does one thing at a time: two threads that wait on one in crossed order would never meet. A connection of
        one's own is no way out: where several ranks make one at the same moment, torch's server often takes five seconds.
        """
        import torch.distributed as dist

        if self._meeting is None:
            store = self._counter()
            counted = [f"gradpack/{self._name}/meetings of rank {peer}" for peer in range(self.size)]
            own = self._reserved or store.add(counted[self.rank], 1)
            number = max(own, *(store.add(key, 0) for key in counted))
            if number > own:
                store.add(counted[self.rank], number - own)
            self._meeting = dist.distributed_c10d.PrefixStore(f"gradpack/{self._name}/meeting {number}", store)
            self._exchanges = 0
        return self._meeting

    def allgather(self, data: bytes, deadline: float, look: Callable[[], None] = lambda: None) -> list[bytes]:
        """See ``Ranks.allgather``."""
        try:
            return self._allgather(data, deadline, look)
        except RuntimeError as error:
            if isinstance(error, TransportError):
                raise
            raise PeerLost(
                f"found the store of the group broken ({error}), wanted it alive with the rank that holds it"
            ) from error

    def _allgather(self, data: bytes, deadline: float, look: Callable[[], None]) -> list[bytes]:
        store = self.store()
        self._exchanges += 1
        keys = [f"exchange {self._exchanges} of rank {peer}" for peer in range(self.size)]
        store.set(keys[self.rank], data)
        pause = 0.0005
        for key in keys:
            while not store.check([key]):
                look()
                self._raise_abandoned(store)
                if time.monotonic() > deadline:
                    absent = [peer for peer, key in enumerate(keys) if not store.check([key])]
                    raise TransportTimeout(
                        f"found {ranks_text(absent)} absent at the deadline, wanted all {self.size} ranks here before it"
                    )
                # Not store.wait: that writes a warning to the terminal each time it looks in vain.
                time.sleep(pause)
                pause = min(2 * pause, _POLL_SECONDS)
        # Cards of those that gave up before this rank came are there too.
        self._raise_abandoned(store)
        return [bytes(store.get(key)) for key in keys]

    def check(self) -> None:
        """See ``Ranks.check``."""
        try:
            self._raise_abandoned(self.store())
        except TransportError:
            raise
        except RuntimeError:
            return  # the store is broken, which the connections to the other ranks explain better

    def _raise_abandoned(self, store: Any) -> None:
        if store.check(["abandoned"]):
            rank, name, text = bytes(store.get("abandoned")).decode(errors="replace").split("\n", 2)
            if name == "KeyboardInterrupt":
                raise TransportError(f"found that rank {rank} was interrupted, wanted it in this call")
            kind = {"TransportTimeout": TransportTimeout, "PeerLost": PeerLost}.get(name, TransportError)
            raise kind(f"rank {rank} gave up: {name}: {text}")

    def abandon(self, cause: BaseException) -> None:
        """See ``Ranks.abandon``."""
        name, _, text = described(cause).partition(": ")
        with suppress(RuntimeError):
            self.store().set("abandoned", f"{self.rank}\n{name}\n{text}".encode(errors="replace"))

    def renew(self) -> None:
        """See ``Ranks.renew``."""
        if self._meeting is not None:
            self._meeting = None
            # At once, so that a rank which comes late, and has met nobody yet, does not find the meeting that is over.
            with suppress(RuntimeError):
                self._reserved = self._counter().add(f"gradpack/{self._name}/meetings of rank {self.rank}", 1)


class MPIRanks(Ranks):
    """The ranks of an mpi4py communicator, which meet over a duplicate of it.

    Args:
        comm: The communicator; only a weak reference is kept.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = weakref.ref(comm)
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.timeout = DEFAULT_SECONDS
        self._duplicate: Any = None
        self._made: Any = None

    def duplicate(self, deadline: float) -> Any:
        """A communicator of the same ranks that nobody else uses, made once a meeting.

        Raises:
            TransportTimeout: The deadline passed.
        """
        from mpi4py import MPI

        if self._duplicate is None:
            comm = self._comm()
            if comm is None or comm == MPI.COMM_NULL:
                raise TransportError("gradpack: group: found a communicator that is freed, wanted a living one")
            # One that a meeting before this left unfinished is the one that the other ranks are about to make.
            self._made = self._made or comm.Idup()
            duplicate, request = self._made
            self._wait(request, deadline)
            self._duplicate, self._made = duplicate, None
            self._duplicate.Set_errhandler(MPI.ERRORS_RETURN)
        return self._duplicate

    def allgather(self, data: bytes, deadline: float, look: Callable[[], None] = lambda: None) -> list[bytes]:
        """See ``Ranks.allgather``."""
        comm = self.duplicate(deadline)
        lengths = memoryview(bytearray(8 * self.size))
        self._wait(comm.Iallgather(len(data).to_bytes(8, "little"), lengths), deadline, look)
        counts = lengths.cast("q").tolist()
        found = memoryview(bytearray(sum(counts)))
        self._wait(comm.Iallgatherv(data, [found, counts]), deadline, look)
        starts = [sum(counts[:rank]) for rank in range(self.size)]
        return [bytes(found[start : start + count]) for start, count in zip(starts, counts, strict=True)]

    def _wait(self, request: Any, deadline: float, look: Callable[[], None] = lambda: None) -> None:
        pause = 0.0
        while not request.Test():
            look()
            if time.monotonic() > deadline:
                raise TransportTimeout(f"found ranks absent at the deadline, wanted all {self.size} ranks here before it")
            time.sleep(pause)
            pause = min(pause + 0.0001, _POLL_SECONDS)

    def check(self) -> None:
        """See ``Ranks.check``."""

    def abandon(self, cause: BaseException) -> None:
        """See ``Ranks.abandon``."""

    def renew(self) -> None:
        """See ``Ranks.renew``."""
        from mpi4py import MPI

        duplicate, self._duplicate = self._duplicate, None
        if duplicate is not None and not MPI.Is_finalized():
            duplicate.Free()


def _mpi() -> Any:
    """``mpi4py.MPI`` if the program has imported it: only then can the program hold a communicator."""
    return sys.modules.get("mpi4py.MPI")


def _torch_distributed(operation: str) -> Any:
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise BuildError(
            f"{operation}: group: torch is not installed, wanted it, or a group that needs none: pip install torch"
        ) from error
    if not dist.is_available():
        raise BuildError(f"{operation}: group: found a torch built without distributed, wanted one with it")
    return dist


def find(operation: str, group: Any) -> Any:
    """The object that stands for ``group``: itself, or the default process group for None.

    Raises:
        TransportError: There is no process group, it was destroyed, or this rank is no member.
        TypeError: ``group`` is of no kind that gradpack knows.
        BuildError: torch is not installed, and None stands for its default group.
    """
    dist: Any = _torch_distributed(operation) if group is None else sys.modules.get("torch.distributed")
    if group is None:
        if not dist.is_initialized():
            raise TransportError(
                f"{operation}: group: found no process group, wanted one: call torch.distributed.init_process_group()"
            )
        group = dist.group.WORLD
    if dist is not None and dist.is_available():
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise TransportError(f"{operation}: group: found a group without this rank, wanted one that it is a member of")
        if isinstance(group, dist.ProcessGroup):
            if group not in dist.distributed_c10d._world.pg_map:
                raise TransportError(f"{operation}: group: found a destroyed group, wanted a living one")
            return group
    if _mpi() is not None and isinstance(group, _mpi().Comm):
        if group == _mpi().COMM_NULL or not group.Is_intra():
            raise TransportError(f"{operation}: group: found no intracommunicator with this rank, wanted one")
        return group
    if not callable(getattr(group, "allgather", None)):
        raise TypeError(
            f"{operation}: group: found {type(group).__name__}, wanted a torch.distributed process group, an mpi4py "
            "communicator, an object with rank, size and allgather, or None"
        )
    return group


def of(operation: str, group: Any) -> Ranks:
    """The ranks of what ``find`` found.

    Raises:
        TypeError: It lacks something, or no weak reference to it can be made.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and isinstance(group, dist.ProcessGroup):
        return TorchRanks(group)
    if _mpi() is not None and isinstance(group, _mpi().Comm):
        return MPIRanks(group)
    return ObjectRanks(operation, group)


def torch_groups() -> list[Any]:
    """All process groups of torch that this process knows."""
    torch_c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return list(torch_c10d._world.pg_map) if torch_c10d is not None else []


def _torch_timeout(process_group: Any) -> float:
    """Seconds that the caller's group itself waits for its peers."""
    import torch

    try:
        timeout = process_group._get_backend(torch.device("cpu")).options._timeout
    except (RuntimeError, AttributeError):
        # A group without a CPU backend, or a backend that keeps no options: torch's own default stands in.
        timeout = torch.distributed.constants.default_pg_timeout
    return float(timeout.total_seconds())
