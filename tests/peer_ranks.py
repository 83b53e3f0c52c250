"""A rank of test_peers.py: a process that does one thing after another for the test, each with a deadline."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import resource
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

CLONE_NEWNET = 0x40000000


class Rank:
    """The test's end of it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._children: list[int] = []

    def send(self, method: str, *args: Any) -> None:
        self._pipe.send((method, args))

    def result(self) -> Any:
        """Of what was sent last; raises what it raised."""
        assert self._pipe.poll(15), f"rank {self.rank} does not answer"
        error, value = self._pipe.recv()
        if error:
            raise error
        return value

    def call(self, method: str, *args: Any) -> Any:
        self.send(method, *args)
        value = self.result()
        if method == "fork" and isinstance(value, int):
            self._children.append(value)
        return value

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def end(self) -> None:
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        if self._process.is_alive():
            self.kill()
        self._process.join(10)
        self._pipe.close()


class _Served:
    """Methods that are not of Peers itself."""

    def __init__(self, rank: int, pipe: Connection) -> None:
        self.rank = rank
        self.pipe = pipe
        self.peers: Any = None

    def make(self, size: int, options: dict[str, Any]) -> None:
        from gradpack._C import Peers

        self.peers = Peers(self.rank, size, **{"host_timeout": 5.0, "interface": "", **options})

    def fork(self, what: str) -> Any:
        """A child that sleeps (its pid), one that also has copies nobody lists, or one that uses the object (what it met)."""
        read, write = os.pipe()
        if what == "copies":
            for link in list(Path("/proc/self/fd").iterdir()):
                if link.is_symlink():
                    os.dup(int(link.name))
        child = os.fork()
        if child == 0:
            if what == "use":
                self._use(write)
            time.sleep(5)
            os._exit(0)
        os.close(write)
        if what != "use":
            os.close(read)
            return child
        with open(read) as told:
            lines = told.read().splitlines()
        os.waitpid(child, 0)
        return lines

    def _use(self, write: int) -> None:
        uses = [
            lambda: self.peers.card(),
            lambda: self.peers.connect([b""]),
            lambda: self.peers.wait_connected(1.0),
            lambda: self.peers.unreached(),
            lambda: self.peers.enter(1),
            lambda: self.peers.step(1),
            lambda: self.peers.leave(),
            lambda: self.peers.verdict(1, 1.0),
            lambda: self.peers.verdict(1, 0.0),
            lambda: self.peers.positions(1.0),
            lambda: self.peers.give_up("K", "t"),
        ]
        for use in uses:
            try:
                use()
                os.write(write, b"nothing\n")
            except Exception as error:
                os.write(write, f"{type(error).__name__}: {error}\n".encode())
        self.peers.close()
        del self.peers
        os._exit(0)

    def first_gave_up(self, seconds: float) -> Any:
        """The verdict once it is of that kind: other bad news may be known before."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            verdict = self.peers.verdict(1, 0.0)
            if verdict and verdict[0] == "gave_up":
                return verdict
            time.sleep(0.001)
        return None

    def close_and_exit(self) -> None:
        self.peers.close()
        self.pipe.send((None, None))
        os._exit(0)

    def wake_ups(self) -> list[str]:
        """How often the thread has slept."""
        found = []
        for task in Path("/proc/self/task").iterdir():
            if (task / "comm").read_text() == "gradpack-peers\n":
                found += [line for line in (task / "status").read_text().splitlines() if "ctxt_switches" in line]
        assert len(found) == 2
        return found

    def unshare_network(self) -> bool:
        return ctypes.CDLL(None).unshare(CLONE_NEWNET) == 0

    def exhausted(self) -> tuple[int | None, str]:
        """Which error a process without free descriptors gets."""
        import gradpack._C  # noqa: F401

        resource.setrlimit(resource.RLIMIT_NOFILE, (0, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        try:
            self.make(1, {})
        except OSError as error:
            return error.errno, str(error)
        raise AssertionError("made without descriptors")


def _serve(rank: int, pipe: Connection) -> None:
    served = _Served(rank, pipe)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        try:
            target = served if hasattr(served, method) else served.peers
            pipe.send((None, getattr(target, method)(*args)))
        except Exception as error:
            pipe.send((error, None))
