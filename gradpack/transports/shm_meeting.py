"""How the ranks of a group find out whether they share a host, and come to share a segment.

Every step is an all-gather over the group, and every decision follows from what all ranks have seen: none takes one alone. That
they share memory is shown by the segment itself, which each must find at the place that the leader of
its host (the first of its ranks) named.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradpack import _C, settings
from gradpack.errors import TransportError

__all__ = ["MAX_SEGMENT_BYTES", "Met", "meet"]

SLOTS = 4
"""Chunks of a lane that are packed and not yet unpacked everywhere, at most."""

SLOT_BYTES = 128 << 10
"""Small enough that the rings of all ranks stay in the caches, large enough that waiting for one another costs little
(``docs/transports.md``)."""

MIN_SLOT_BYTES = 16 << 10

MAX_SEGMENT_BYTES = 60 << 20
"""Less than the 64 MiB that a container's ``/dev/shm`` has by default."""

MAX_LANES = 16

SPIN_SECONDS = 100e-6
"""How long a rank with a processor of its own waits for another before it gives that processor up."""

_SHM = Path("/dev/shm")
_STALE_SECONDS = 60.0
_NAME = re.compile(r"gradpack-(\d+)-(\d+)-[0-9a-f]{16}")

Allgather = Callable[[bytes], list[bytes]]


@dataclass(frozen=True)
class Card:
    """What a rank says of itself.

    Attributes:
        host: Equal on ranks of one host.
        wanted: ``GRADPACK_TRANSPORT``.
        processors: Those that it may run on.
        threads: Those that it computes with.
        all_threads: Whether it is to have that many lanes, however many ranks there are.
    """

    host: str
    wanted: str
    processors: list[int]
    threads: int
    all_threads: bool


@dataclass(frozen=True)
class Met:
    """What the meeting has come to.

    Attributes:
        channel: This rank's end of its host's segment, or None.
        why: Why, to follow "a group that ...".
        warning: What rank 0 is to warn of, or None.
        hosts: Where there are segments: the ranks of each host, of which the first leads.
    """

    channel: _C.ShmChannel | None
    why: str
    warning: str | None = None
    hosts: tuple[tuple[int, ...], ...] = ()


def host() -> str:
    """What is equal on ranks of one host: ``GRADPACK_HOST`` or what the kernel drew when it started."""
    named = str(settings.get("GRADPACK_HOST"))
    if named:
        return f"named {named}"
    try:
        return f"boot {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    except OSError:
        return f"process {os.getpid()} of an unknown host"


def _card() -> Card:
    try:
        threads, wanted = int(str(settings.get("GRADPACK_NUM_THREADS"))), str(settings.get("GRADPACK_TRANSPORT"))
    except ValueError:
        threads, wanted = 0, "auto"  # each call refuses such a setting before it comes here
    return Card(host(), wanted, sorted(os.sched_getaffinity(0)), threads or _C.num_threads(), threads > 0)


def _shape(cards: list[Card]) -> tuple[int, int, int, bool]:
    """Lanes, slots, bytes of a slot, and whether the ranks' lanes outnumber the processors."""
    ranks, processors = len(cards), len({number for card in cards for number in card.processors})
    fair = max(1, processors // ranks)
    lanes = min(card.threads if card.all_threads else min(card.threads, fair) for card in cards)
    lanes = max(1, min(lanes, MAX_LANES, MAX_SEGMENT_BYTES // (ranks * SLOTS * SLOT_BYTES)))
    fits = MAX_SEGMENT_BYTES // (ranks * lanes * SLOTS) // 4096 * 4096
    return lanes, SLOTS, max(MIN_SLOT_BYTES, min(SLOT_BYTES, fits)), ranks * lanes > processors


def meet(rank: int, allgather: Allgather, several: bool) -> Met:
    """Has the ranks of each host of a group share a segment, if they can. Every rank of the group must call it.

    Args:
        rank: This rank.
        allgather: Collects bytes of all ranks, in rank order.
        several: Whether segments are of use where there is more than one host; the same on all ranks.

    Raises:
        TransportError: As ``allgather``.
    """

    def exchange(value: Any) -> list[Any]:
        found = []
        for peer, data in enumerate(allgather(json.dumps(value).encode())):
            try:
                found.append(json.loads(data))
            except ValueError as error:
                raise TransportError(f"found no card of rank {peer} ({error}), wanted what it sent") from error
        return found

    cards = [Card(**found) for found in exchange(asdict(_card()))]
    for peer, card in enumerate(cards):
        if card.wanted == "process_group":
            return Met(None, f"goes by the process group (GRADPACK_TRANSPORT on rank {peer})")
    found: dict[str, list[int]] = {}
    for peer, card in enumerate(cards):
        found.setdefault(card.host, []).append(peer)
    hosts = tuple(map(tuple, found.values()))
    if len(hosts) > 1 and not several:
        return Met(None, "has ranks on several hosts")
    if 1 < len(hosts) == len(cards):
        return Met(None, "has each rank on a host of its own")
    mine = found[cards[rank].host]
    lanes, slots, slot_bytes, crowded = _shape([cards[peer] for peer in mine])
    shape = {"ranks": len(mine), "lanes": lanes, "slots": slots, "slot_bytes": slot_bytes, "rank": mine.index(rank)}
    end = shape | {"spin": 0.0 if crowded else SPIN_SECONDS}
    problems = []
    for make in (_in_memory, _in_a_file):
        channel, problem = _share(rank, mine[0], exchange, make, end)
        if channel is not None:
            where = "one host" if len(hosts) == 1 else f"{len(hosts)} hosts"
            return Met(channel, f"has all {len(cards)} ranks on {where}", hosts=hosts)
        problems.append(problem)
    problem = "; ".join(problems)
    return Met(None, f"cannot share memory ({problem})", f"gradpack: shared memory is not available: {problem}")


def _share(
    rank: int,
    leader: int,
    exchange: Callable[[Any], list[Any]],
    make: Callable[[dict[str, Any]], _C.ShmChannel],
    end: dict[str, Any],
) -> tuple[_C.ShmChannel | None, str]:
    """The leader of a host makes a segment and the others open it: this rank's end, or why some have none."""
    channel, problem, offer = None, None, None
    if rank == leader:
        try:
            channel = make(end)
            offer = channel.location, channel.nonce.hex()
        except OSError as error:
            problem = str(error)
    offer = exchange(offer)[leader]
    if rank != leader and offer is not None:
        try:
            channel = _C.ShmChannel.attach(**end, location=offer[0], nonce=bytes.fromhex(offer[1]))
        except (OSError, ValueError) as error:
            problem = str(error)
    problems = [f"rank {peer}: {text}" for peer, text in enumerate(exchange(problem)) if text is not None]
    # All ranks are there, or none is to be: nobody need find it any more.
    if channel is not None:
        channel.hide()
    if problems and channel is not None:
        channel.close()
    return (None, ", ".join(problems)) if problems else (channel, "")


def _in_memory(end: dict[str, Any]) -> _C.ShmChannel:
    return _C.ShmChannel.create(**end)


def _in_a_file(end: dict[str, Any]) -> _C.ShmChannel:
    """For ranks that may not look into each other's ``/proc``: containers that share ``/dev/shm`` but no process numbers."""
    _sweep()
    path = _SHM / f"gradpack-{os.getpid()}-{_start_time(os.getpid())}-{os.urandom(8).hex()}"
    try:
        return _C.ShmChannel.create(**end, path=str(path))
    except OSError as error:
        wanted = end["ranks"] * end["lanes"] * end["slots"] * end["slot_bytes"] // 1_000_000 + 1
        raise OSError(f"{_SHM}: {error}, wanted {wanted} MB (Docker: --shm-size={max(64, wanted)}m)") from error


def _start_time(pid: int) -> int:
    """When a process began, in clock ticks since the host did; 0 where there is none of that number."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def _sweep() -> None:
    """Removes what processes left behind that were killed between making a segment and hiding it."""
    with suppress(OSError):
        for path in _SHM.iterdir():
            named = _NAME.fullmatch(path.name)
            if named and _start_time(int(named[1])) != int(named[2]):
                with suppress(OSError):
                    status = path.lstat()
                    if status.st_uid == os.getuid() and time.time() - status.st_mtime > _STALE_SECONDS:
                        path.unlink()
