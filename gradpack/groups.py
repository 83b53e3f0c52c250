"""Groups of ranks: who takes part, how to meet over torch.distributed, and what lives as long as a group does."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from gradpack.errors import BuildError, TransportError
from gradpack.result import Handle, Result

__all__ = ["GroupState", "close", "duplicate", "release", "resolve", "untraced"]


class _Closeable(Protocol):
    def close(self) -> None: ...


_Resource = TypeVar("_Resource", bound=_Closeable)
_Returned = TypeVar("_Returned")


class GroupState:
    """Everything of gradpack's that lives as long as one process group: transports with their staging, plans, the worker.

    Args:
        process_group: The caller's group. Only a weak reference is kept, so that the state dies with it.
    """

    def __init__(self, process_group: Any) -> None:
        dist = _torch_distributed("gradpack")
        self._process_group = weakref.ref(process_group)
        self.rank: int = dist.get_rank(process_group)
        self.size: int = dist.get_world_size(process_group)
        self.timeout = _default_timeout(process_group)
        self._broken: str | None = None
        self.packers: dict[Any, Any] = {}
        self._resources: dict[str, _Closeable] = {}
        self._inside = threading.Lock()
        self._worker: ThreadPoolExecutor | None = None
        self._pending: set[Future[Result]] = set()
        self._unreported: list[Future[Result]] = []

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

    @contextmanager
    def entered(self, operation: str) -> Iterator[None]:
        """Keeps other threads out of the group.

        Raises:
            TransportError: Another thread is inside.
        """
        if not self._inside.acquire(blocking=False):
            raise TransportError(
                f"{operation}: group: found another thread inside a call on this group, wanted one call at a time"
            )
        try:
            yield
        finally:
            self._inside.release()

    @contextmanager
    def call(self, operation: str) -> Iterator[None]:
        """Guards one call: one thread at a time, a group that still works.

        Raises:
            TransportError: One of these does not hold.
        """
        with self.entered(operation):
            self.check_working(operation)
            yield

    def check_working(self, operation: str) -> None:
        """Raises the first cause where the group is broken.

        Raises:
            TransportError: An earlier call left the group broken.
        """
        if self._broken is not None:
            raise TransportError(
                f"{operation}: group: broken by an earlier failure ({self._broken}), wanted a new process group, or "
                "gradpack.close(group) on every rank"
            )

    def break_(self, cause: BaseException) -> None:
        """From now on every call raises ``cause``: it left collectives behind that no later call may meet.

        Only its text is kept: its traceback would keep everything alive that the call held.
        """
        self._broken = self._broken or f"{type(cause).__name__}: {cause}"

    def resource(self, name: str, make: Callable[[], _Resource]) -> _Resource:
        """The resource of that name, made at first use and closed with the group."""
        if name not in self._resources:
            self._resources[name] = make()
        return self._resources[name]  # type: ignore[return-value]

    def submit(self, run: Callable[[], Result]) -> Handle:
        """Runs a call on the group's one worker thread, after those submitted before it."""
        if self._worker is None:
            self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gradpack")
        future = self._worker.submit(run)
        self._pending.add(future)
        self._unreported.append(future)
        _owing.add(self)
        # Weak: the future keeps its callbacks, and would keep the state.
        state = weakref.ref(self)

        def done(finished: Future[Result]) -> None:
            owner = state()
            if owner is not None:
                owner._pending.discard(finished)
                if finished.exception() is None:
                    owner._reported(finished)

        def reported() -> None:
            owner = state()
            if owner is not None:
                owner._reported(future)

        future.add_done_callback(done)
        return Handle(future, reported)

    def _reported(self, future: Future[Result]) -> None:
        if future in self._unreported:
            self._unreported.remove(future)
        if not self._unreported:
            _owing.discard(self)

    def drain(self) -> None:
        """Waits until the worker has nothing left to do: calls run in the order in which they were made."""
        for future in list(self._pending):
            future.exception()

    def raise_unreported(self) -> None:
        """Waits until the worker has nothing left to do, then raises what a background call found and nobody waited for.

        Not before: which of them are done at some moment differs between ranks, and ranks must raise at the same call.

        Raises:
            GradpackError: The first such error.
        """
        while self._unreported:
            first = self._unreported[0]
            error = first.exception()
            self._reported(first)
            if error is not None:
                raise error

    def close(self) -> None:
        """Ends the worker, closes the transports and forgets the plans; the next call on the group makes new ones."""
        self.drain()
        if self._worker is not None:
            self._worker.shutdown(wait=True)
            self._worker = None
        resources, self._resources = self._resources, {}
        for resource in resources.values():
            resource.close()
        self.packers.clear()
        self._broken = None


_states: weakref.WeakKeyDictionary[Any, GroupState] = weakref.WeakKeyDictionary()
_owing: set[GroupState] = set()
"""States with background calls that run, or failed and nobody knows: these outlive their groups."""

_parents_groups: weakref.WeakSet[Any] = weakref.WeakSet()


def _torch_distributed(operation: str) -> Any:
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise BuildError(f"{operation}: group: torch is not installed, wanted it: pip install 'gradpack[torch]'") from error
    if not dist.is_available():
        raise BuildError(f"{operation}: group: found a torch built without distributed, wanted one with it")
    return dist


def resolve(operation: str, group: Any) -> GroupState:
    """The state of ``group``, made at first use.

    Args:
        operation: Name of the call, for messages.
        group: A torch process group, or None for the default one.

    Raises:
        TransportError: There is no process group, it was destroyed, this rank is no member, or it belongs to a parent process.
        TypeError: ``group`` is no process group.
        BuildError: torch is not installed.
    """
    dist = _torch_distributed(operation)
    if group is None:
        if not dist.is_initialized():
            raise TransportError(
                f"{operation}: group: found no process group, wanted one: call torch.distributed.init_process_group()"
            )
        group = dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise TransportError(f"{operation}: group: found a group without this rank, wanted one that it is a member of")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{operation}: group: found {type(group).__name__}, wanted a torch.distributed process group or None")
    if group in _parents_groups:
        raise TransportError(f"{operation}: group: found a group of the parent process in a forked child, wanted one made here")
    if group not in dist.distributed_c10d._world.pg_map:
        raise TransportError(f"{operation}: group: found a destroyed group, wanted a living one")
    state = _states.get(group)
    if state is None:
        state = _states[group] = GroupState(group)
    return state


_untraced: Callable[..., Any] | None = None


def _call(function: Callable[..., _Returned], *arguments: Any) -> _Returned:
    return function(*arguments)


def untraced(function: Callable[..., _Returned], *arguments: Any) -> _Returned:
    """Calls a function where torch.compile does not look: what talks to other processes cannot be traced."""
    global _untraced
    if "torch._dynamo" not in sys.modules:
        return function(*arguments)  # nothing has been compiled, and the compiler takes seconds to import
    if _untraced is None:
        compiler: Any = sys.modules["torch"].compiler
        _untraced = compiler.disable(_call)
    found: _Returned = _untraced(function, *arguments)
    return found


def close(group: Any = None) -> None:
    """Releases what gradpack keeps for a group: staging, the duplicate group, the worker thread, plans.

    Waits for background calls, each of which ends within its deadline. The next call on the group starts anew, so that a group
    broken by an earlier failure works again; then every rank must close.

    Args:
        group: A torch process group, or None for the default one.

    Raises:
        TransportError: There is no such group, or another thread is inside a call on it.
        GradpackError: A background call failed and nobody has waited for it.

    Example:
        >>> gradpack.close()  # doctest: +SKIP
    """
    state = resolve("close", group)
    with state.entered("close"):
        state.close()
        state.raise_unreported()


def _default_timeout(process_group: Any) -> float:
    """Seconds that the caller's group itself waits for its peers."""
    import torch

    try:
        timeout = process_group._get_backend(torch.device("cpu")).options._timeout
    except (RuntimeError, AttributeError):
        # A group without a CPU backend, or a backend that keeps no options: torch's own default stands in.
        timeout = torch.distributed.constants.default_pg_timeout
    return float(timeout.total_seconds())


def duplicate(process_group: Any, timeout: float) -> Any:
    """A group of the same ranks that nobody else uses. Every rank of the group must call it.

    Collectives that two libraries start on one group in different orders on different ranks give silently wrong sums; on a group
    of its own gradpack's order is the only one.

    Args:
        process_group: The caller's group.
        timeout: Seconds to wait for the other ranks.
    """
    import torch.distributed as dist

    try:
        import torch

        backend = process_group._get_backend(torch.device("cpu")).name()
    except RuntimeError:
        backend = "gloo"  # a group for other devices only; gloo needs nothing but the store
    if backend != "gloo":
        ranks = dist.get_process_group_ranks(process_group)
        return dist.new_group(ranks, timeout=timedelta(seconds=timeout), backend=backend)
    store: Any = dist.distributed_c10d._get_process_group_store(process_group)
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    prefix = f"gradpack/{process_group.group_name}"
    # A connection waits for one thing at a time: two groups that meet in crossed order on one would never meet. Not every store,
    # nor every torch, can make another.
    with suppress(AttributeError, RuntimeError):
        store = store.clone()
    # Each rank counts its duplicates in the store, which may outlive the group (an elastic agent's does), so that none reads the
    # addresses that an earlier one left behind. A rank that has met fewer, since another gave up before it came, catches up.
    counted = [f"{prefix}/duplicates of rank {peer}" for peer in range(size)]
    own = store.add(counted[rank], 1)
    number = max(own, *(store.add(key, 0) for key in counted))
    if number > own:
        store.add(counted[rank], number - own)
    meeting = dist.distributed_c10d.PrefixStore(f"{prefix}/duplicate {number}", store)
    with _subnormals_kept():
        return dist.ProcessGroupGloo(meeting, rank, size, timedelta(seconds=timeout))


@contextmanager
def _subnormals_kept() -> Iterator[None]:
    """Undoes ``torch.set_flush_denormal(True)`` for a while: threads that are started inherit the mode, and gloo's sum."""
    import torch

    smallest = float("5e-324")
    flushed = smallest == 0.0 or smallest * 1.0 == 0.0
    if flushed:
        torch.set_flush_denormal(False)
    try:
        yield
    finally:
        if flushed:
            torch.set_flush_denormal(True)


def release(duplicated: Any) -> None:
    """Ends what ``duplicate`` made."""
    import torch.distributed as dist

    # A duplicate of gloo is ours alone and ends with its last reference; torch keeps a list of the others.
    if isinstance(duplicated, dist.ProcessGroup) and duplicated in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(duplicated)


def _in_forked_child() -> None:
    torch_c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if torch_c10d is not None:
        for process_group in torch_c10d._world.pg_map:
            _parents_groups.add(process_group)
    for state in {*_states.values(), *_owing}:
        # Never freed here: gloo's destructor joins threads that stayed in the parent.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(state))
    _states.clear()
    _owing.clear()


def _at_exit() -> None:
    for state in {*_states.values(), *_owing}:
        try:
            with state.entered("exit"):
                state.close()
                state.raise_unreported()
        except Exception as error:
            warnings.warn(f"gradpack: a call was left behind at exit: {error!r}", RuntimeWarning, stacklevel=1)


os.register_at_fork(after_in_child=_in_forked_child)
atexit.register(_at_exit)
