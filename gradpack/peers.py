"""What a rank knows of the others of its group: who is gone, who gave up and why, who is where.

``_C.Peers`` learns it, in a thread of its own, over one connection to each other rank; this makes gradpack's errors of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable

from gradpack import _C, settings
from gradpack.errors import PeerLost, TransportError, TransportTimeout, described

__all__ = ["LOOK_SECONDS", "Peers", "ranks_text"]

LOOK_SECONDS = 0.1
"""Waits are slices of this length: in between, the main thread looks at signals and at what is known of the other ranks."""

_ANSWER_SECONDS = 0.25
"""How long the ranks that are asked where they are may take."""

_BLAME_SECONDS = 1.0
"""How long a broken connection may take to be explained: the news of a process that ended comes by another way."""

_CLASSES = {"TransportTimeout": TransportTimeout, "PeerLost": PeerLost}


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 2`` or ``ranks 1, 3``."""
    listed = sorted(ranks)
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"


class Peers:
    """The other ranks of one group, as long as its transport lives.

    Args:
        rank: This rank.
        size: Number of ranks.

    Attributes:
        met: Whether this rank is connected to all others.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.met = False
        self._call = 0
        self._step = 0
        try:
            seconds = float(str(settings.get("GRADPACK_HOST_TIMEOUT")))
        except ValueError:
            # Each call refuses such a setting before it comes here; telling the other ranks so takes connections.
            seconds = float(settings.SETTINGS["GRADPACK_HOST_TIMEOUT"].default)
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
        self._native = _C.Peers(rank, size, seconds, interface, host=str(settings.get("GRADPACK_HOST")))

    def meet(self, allgather: Callable[[bytes, float], list[bytes]], check: Callable[[], None], deadline: float) -> None:
        """Connects to all ranks. Every rank of the group must call it.

        Args:
            allgather: Collects bytes of all ranks, in rank order, until ``time.monotonic()`` passes a deadline.
            check: Raises what the group itself knows to make it hopeless.
            deadline: When to give up.

        Raises:
            TransportTimeout: Some ranks did not come, or cannot be reached.
            TransportError: As ``allgather``; a rank gave up.
        """
        cards = allgather(self._native.card(), deadline)
        try:
            self._native.connect(cards)
        except ValueError as error:
            raise TransportError(f"found no card of each rank ({error}), wanted what each of them sent") from error
        while not self._native.wait_connected(LOOK_SECONDS):
            self.check()
            check()
            if time.monotonic() > deadline:
                raise TransportTimeout(
                    f"found {ranks_text(self._native.unreached())} unreachable at the deadline, wanted connections to all "
                    f"{self.size} ranks"
                )
        self.met = True

    def enter(self, call: int) -> None:
        """This rank is inside its call number ``call`` now."""
        self._call, self._step = call, 0
        self._native.enter(call)

    def step(self, step: int) -> None:
        """Where inside the call this rank is."""
        self._step = step
        self._native.step(step)

    def leave(self) -> None:
        """The call is finished."""
        self._native.leave()

    def check(self, seconds: float = 0.0) -> None:
        """Raises what is known to make the call hopeless, after waiting for such news for ``seconds`` at most.

        Raises:
            PeerLost: The process of another rank is gone.
            TransportTimeout: Another rank gave up at its deadline.
            TransportError: Another rank gave up for another reason.
        """
        # Before the first call, one that is left without having made it.
        news = self._native.verdict(max(1, self._call), seconds)
        if news is None:
            return
        kind, rank, text = news
        if kind != "gave_up":
            raise PeerLost(f"found rank {rank} gone ({text}), wanted it alive")
        name, _, said = text.partition("\n")
        if name == "KeyboardInterrupt":
            raise TransportError(f"found that rank {rank} was interrupted, wanted it in this call")
        raise _CLASSES.get(name, TransportError)(f"rank {rank} gave up: {name}: {said}")

    def broken(self, what: str) -> TransportError:
        """The error of a connection that broke under a collective: that of the rank which is known to be the cause, if one is."""
        try:
            self.check(_BLAME_SECONDS)
        except TransportError as error:
            return error
        return PeerLost(f"{what}: found the connection to another rank broken, wanted it alive")

    def late(self) -> TransportTimeout:
        """The error of a deadline that passed: names the ranks that have not come as far as this one."""
        absent = []
        for rank, position in enumerate(self._native.positions(_ANSWER_SECONDS)):
            if position is None:
                absent.append(f"rank {rank} (its process does not answer: stopped, or its host is too busy)")
                continue
            call, inside, step = position
            if call < self._call:
                absent.append(f"rank {rank} ({'inside' if inside else 'after'} its call {call})")
            elif call == self._call and inside and step < self._step:
                absent.append(f"rank {rank} (inside this call, {self._step - step} steps behind)")
        found = f"{', '.join(absent)} absent" if absent else "all ranks in this call but their data late"
        return TransportTimeout(f"found {found} at the deadline, wanted all {self.size} ranks here before it")

    def give_up(self, cause: BaseException) -> None:
        """Tells all ranks that this one makes no more calls on the group, and why."""
        self._native.give_up(type(cause).__name__, described(cause).partition(": ")[2])

    def close(self) -> None:
        """Says farewell and ends the connections."""
        self._native.close()
