"""What lives as long as a group of ranks does: its transport with the staging, its plans, its worker thread."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Generic, Protocol, TypeVar

from gradpack import ranks
from gradpack.errors import TransportError, described
from gradpack.members import Ranks
from gradpack.peers import Peers
from gradpack.result import Handle, Result

__all__ = ["GroupState", "close", "resolve", "together"]


class _Resource(Protocol):
    def close(self) -> None: ...


_Made = TypeVar("_Made", bound=_Resource)
_Returned = TypeVar("_Returned")
_Value = TypeVar("_Value")


class GroupState:
    """Everything of gradpack's that lives as long as one group: transports with their staging, plans, the worker.

    Args:
        members: The ranks of the caller's group, known by a weak reference, so that the state dies with the group.
    """

    def __init__(self, members: Ranks) -> None:
        self.ranks = members
        self.rank = members.rank
        self.size = members.size
        self.timeout = members.timeout
        self.calls = 0
        self._broken: str | None = None
        self._told = False
        self.packers: dict[Any, Any] = {}
        self.peers: Peers | None = None
        self._resources: dict[str, _Resource] = {}
        self._inside: dict[str, object] = {}
        self._worker: ThreadPoolExecutor | None = None
        self._unreported: list[Future[Result]] = []

    def call(self, operation: str, *, counts: bool = True) -> AbstractContextManager[None]:
        """Guards one call: one thread at a time, a group that still works.

        Args:
            operation: Name of the call, for messages.
            counts: Whether every rank makes it.

        Raises:
            TransportError: One of these does not hold.
        """
        return self.entered(operation, works=True, counts=counts)

    @contextmanager
    def entered(self, operation: str, *, works: bool = False, counts: bool = False) -> Iterator[None]:
        """Keeps other threads out of the group.

        Raises:
            TransportError: Another thread is inside; with ``works``, an earlier call left the group broken.
        """
        mine = object()
        # Not a lock: a signal between taking it and the try would leave it taken for ever. Setting a default is atomic.
        try:
            if self._inside.setdefault("call", mine) is not mine:
                raise TransportError(
                    f"{operation}: group: found another thread inside a call on this group, wanted one call at a time"
                )
            if works:
                self.check_working(operation)
            self.calls += counts
            yield
        finally:
            try:
                self._leave(mine)
            finally:
                self._leave(mine)  # an interruption may have kept the first from it

    def _leave(self, mine: object) -> None:
        if self._inside.get("call") is mine:
            self._inside.pop("call", None)

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
        """From now on every call raises ``cause``, which left collectives behind that no later call may meet; others are told.

        Only its text is kept: its traceback would keep everything alive that the call held.
        """
        self._broken = self._broken or described(cause)
        # Whoever interrupts this, too, comes by here again on the way out.
        if self._told:
            return
        if self.peers is not None:
            self.peers.give_up(cause)
        if self.peers is None or not self.peers.met:
            self.ranks.abandon(cause)
        self._told = True

    @property
    def met(self) -> bool:
        """Whether something was made together with the other ranks, by settings that count from then on."""
        return bool(self._resources)

    def resource(self, name: str, make: Callable[[], _Made]) -> _Made:
        """The resource of that name, made at first use and closed with the group."""
        if name not in self._resources:
            self._resources[name] = make()
        return self._resources[name]  # type: ignore[return-value]

    def submit(self, run: Callable[[], Result]) -> Handle:
        """Runs a call on the group's one worker thread, after those submitted before it."""
        if self._worker is None:
            self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gradpack")
        future = self._worker.submit(run)
        self._unreported.append(future)
        _owing.add(self)
        # Weak: the future keeps its callbacks, and would keep the state.
        state = weakref.ref(self)

        def done(finished: Future[Result]) -> None:
            owner = state()
            if owner is not None and finished.exception() is None:
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
        # What is not in this list is done. Nothing may be submitted for it: at exit Python has closed all executors by now.
        wait(list(self._unreported))

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

    def close(self, *, again: bool = True) -> None:
        """Ends the worker, closes the transports and forgets the plans.

        Args:
            again: Whether the next call on the group may make new ones.
        """
        self.drain()
        if self._worker is not None:
            self._worker.shutdown(wait=True)
            self._worker = None
        resources, self._resources = self._resources, {}
        for resource in resources.values():
            resource.close()
        peers, self.peers = self.peers, None
        if peers is not None:
            peers.close()
        if again:
            self.ranks.renew()
        self.packers.clear()
        self.calls, self._broken, self._told = 0, None, False


class _ByIdentity(Generic[_Value]):
    """A mapping whose keys are known by a weak reference and compared by identity: communicators cannot be hashed."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Any], _Value]] = {}

    def get(self, key: Any) -> _Value | None:
        found = self._found.get(id(key))
        return found[1] if found is not None and found[0]() is key else None

    def set(self, key: Any, value: _Value) -> None:
        found, number = self._found, id(key)
        reference = weakref.ref(key, lambda gone: found.pop(number, None))
        found[number] = reference, value

    def keys(self) -> list[Any]:
        return [key for key in (reference() for reference, _ in list(self._found.values())) if key is not None]

    def values(self) -> list[_Value]:
        return [value for _, value in list(self._found.values())]

    def clear(self) -> None:
        self._found.clear()


_states: _ByIdentity[GroupState] = _ByIdentity()
_owing: set[GroupState] = set()
"""States with background calls that run, or failed and nobody knows: these outlive their groups."""

_parents_groups: _ByIdentity[bool] = _ByIdentity()


def resolve(operation: str, group: Any) -> GroupState:
    """The state of ``group``, made at first use.

    Args:
        operation: Name of the call, for messages.
        group: A torch process group, an mpi4py communicator, an object with rank, size and allgather, or None for torch's default
            process group.

    Raises:
        TransportError: There is no process group, it was destroyed, this rank is no member, or it belongs to a parent process.
        TypeError: ``group`` is of no kind that gradpack knows.
        BuildError: torch is not installed.
    """
    found = ranks.find(operation, group)
    if _parents_groups.get(found):
        raise TransportError(f"{operation}: group: found a group of the parent process in a forked child, wanted one made here")
    state = _states.get(found)
    if state is None:
        state = GroupState(ranks.of(operation, found))
        _states.set(found, state)
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


def together(function: Callable[..., _Returned], group: Any, *arguments: Any) -> _Returned:
    """Calls ``function(group, *arguments)``, which all ranks of the group call together; an interruption inside breaks the group.

    Wherever inside it comes: the other ranks may be in this call already, and a later one of ours must not meet theirs.
    """
    try:
        return untraced(function, group, *arguments)
    except Exception:
        raise
    except BaseException as interruption:
        with suppress(TransportError, TypeError):
            resolve("interruption", group).break_(interruption)
        raise


def close(group: Any = None) -> None:
    """Releases what gradpack keeps for a group: staging, the duplicate group, the worker thread, plans.

    Waits for background calls, each of which ends within its deadline. The next call on the group starts anew, so that a group
    broken by an earlier failure works again; then every rank must close.

    Args:
        group: As for ``allreduce``.

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


def _in_forked_child() -> None:
    for group in [*ranks.torch_groups(), *_states.keys()]:
        _parents_groups.set(group, True)
    for state in {*_states.values(), *_owing}:
        # Never freed here: gloo's destructor joins threads that stayed in the parent.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(state))
    _states.clear()
    _owing.clear()


def _at_exit() -> None:
    for state in {*_states.values(), *_owing}:
        try:
            with state.entered("exit"):
                state.close(again=False)
                state.raise_unreported()
        except Exception as error:
            warnings.warn(f"gradpack: a call was left behind at exit: {error!r}", RuntimeWarning, stacklevel=1)


os.register_at_fork(after_in_child=_in_forked_child)
atexit.register(_at_exit)
