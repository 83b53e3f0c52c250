"""What a group of ranks is to gradpack, and the plainest kind: any object with rank, size and ``allgather``."""

from __future__ import annotations

import operator
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any

from gradpack.errors import TransportError, TransportTimeout
from gradpack.options import MAX_SECONDS
from gradpack.peers import LOOK_SECONDS

__all__ = ["DEFAULT_SECONDS", "ObjectRanks", "Ranks"]

DEFAULT_SECONDS = 1800.0
"""How long a group without a timeout of its own waits for its ranks: as long as torch's process groups do by default."""


class Ranks(ABC):
    """The ranks of one group.

    Attributes:
        rank: This rank.
        size: Number of ranks.
        timeout: Seconds that the group waits for its ranks unless a call says otherwise.
    """

    rank: int
    size: int
    timeout: float

    @abstractmethod
    def allgather(self, data: bytes, deadline: float, look: Callable[[], None] = lambda: None) -> list[bytes]:
        """Collects a few bytes of every rank, in rank order, until ``time.monotonic()`` passes ``deadline``.

        ``look`` is called now and then while it waits, and may raise what ends that.

        Raises:
            TransportTimeout: The deadline passed; the message names the ranks that did not come, if the group can tell.
            TransportError: The ranks cannot be reached, or one gave up.
        """

    @abstractmethod
    def check(self) -> None:
        """Raises what is known to make a meeting hopeless in which this rank has what it needs.

        Raises:
            TransportError: Another rank gave up before all had met.
        """

    @abstractmethod
    def abandon(self, cause: BaseException) -> None:
        """Tells the ranks that may be waiting in ``allgather``, now or later, that this one gave up before they met.

        Does nothing where only a collective could tell.
        """

    @abstractmethod
    def renew(self) -> None:
        """From now on ``allgather`` is of a new meeting, which knows nothing of those before it."""


class ObjectRanks(Ranks):
    """The ranks of any object with ``rank``, ``size`` and ``allgather(data, timeout=seconds)``.

    Args:
        operation: Name of the call, for messages.
        group: The object; only a weak reference is kept.

    Raises:
        TypeError: The object lacks one of these.
    """

    def __init__(self, operation: str, group: Any) -> None:
        self._orders: SimpleQueue[Callable[[], None] | None] | None = None
        try:
            self._group = weakref.ref(group)
        except TypeError:
            raise TypeError(
                f"{operation}: group: found {type(group).__name__}, wanted an object that weak references can be made to"
            ) from None
        self.rank, self.size = (_whole(operation, group, name) for name in ("rank", "size"))
        if not 0 <= self.rank < self.size:
            raise ValueError(f"{operation}: group: found rank {self.rank} of {self.size}, wanted a rank from 0 to size - 1")
        timeout = getattr(group, "timeout", DEFAULT_SECONDS)
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= MAX_SECONDS:
            raise TypeError(
                f"{operation}: group: found {type(group).__name__} whose timeout is {timeout!r}, wanted a positive number"
            )
        self.timeout = float(timeout)

    @property
    def shards(self) -> bool:
        """Whether the object has ``alltoall`` too."""
        return callable(getattr(self._group(), "alltoall", None))

    def start(self, verb: str, argument: Any, deadline: float) -> Future[Sequence[Any]]:
        """Starts ``allgather`` or ``alltoall`` of the object in a thread: these block, and must not block signals too."""
        group = self._group()
        if group is None:
            raise TransportError("gradpack: group: found a group that is gone, wanted a living one")
        if self._orders is None:
            self._orders = SimpleQueue()
            # A daemon: one that blocks for ever must not hold up the end of the process.
            threading.Thread(target=_follow, args=(self._orders,), name="gradpack group", daemon=True).start()
        seconds = max(0.001, deadline - time.monotonic())
        future: Future[Sequence[Any]] = Future()
        method = getattr(group, verb)

        def order() -> None:
            try:
                future.set_result(self._run(method, verb, argument, seconds))
            except BaseException as error:
                future.set_exception(error)

        self._orders.put(order)
        return future

    def _run(self, method: Callable[..., Any], verb: str, argument: Any, seconds: float) -> Sequence[Any]:
        try:
            found: Any = method(argument, timeout=seconds)
        except TimeoutError as error:
            raise TransportTimeout(f"{verb} of the group: {error}") from error
        except Exception as error:
            raise TransportError(f"{verb} of the group: found {type(error).__name__}: {error}, wanted its result") from error
        if not isinstance(found, Sequence) or len(found) != self.size or not all(_is_bytes(part) for part in found):
            raise TransportError(f"{verb} of the group: found {type(found).__name__}, wanted bytes of each of {self.size} ranks")
        return found

    def allgather(self, data: bytes, deadline: float, look: Callable[[], None] = lambda: None) -> list[bytes]:
        """See ``Ranks.allgather``."""
        future = self.start("allgather", data, deadline)
        while not wait([future], LOOK_SECONDS).done:
            look()
            if time.monotonic() > deadline:
                raise TransportTimeout(f"found ranks absent at the deadline, wanted all {self.size} ranks here before it")
        return [bytes(part) for part in future.result()]

    def check(self) -> None:
        """See ``Ranks.check``."""

    def abandon(self, cause: BaseException) -> None:
        """See ``Ranks.abandon``."""

    def renew(self) -> None:
        """See ``Ranks.renew``."""
        orders, self._orders = self._orders, None
        if orders is not None:
            orders.put(None)

    def __del__(self) -> None:
        self.renew()


def _follow(orders: SimpleQueue[Callable[[], None] | None]) -> None:
    while (order := orders.get()) is not None:
        order()
        del order


def _is_bytes(value: Any) -> bool:
    return isinstance(value, bytes | bytearray | memoryview)


def _whole(operation: str, group: Any, name: str) -> int:
    value: Any = getattr(group, name, None)
    value = value() if callable(value) else value
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{operation}: group: found {type(group).__name__} whose {name} is {value!r}, wanted a whole number"
        ) from None
