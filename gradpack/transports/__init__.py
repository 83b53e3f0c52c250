"""Transports: how packs travel. ``select`` picks one for a group."""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from gradpack import _C, settings
from gradpack.errors import TransportError, renamed
from gradpack.groups import GroupState
from gradpack.members import ObjectRanks
from gradpack.peers import Peers
from gradpack.ranks import MPIRanks, TorchRanks
from gradpack.transports import shm_meeting
from gradpack.transports.base import Transport
from gradpack.transports.collectives import Collectives
from gradpack.transports.hierarchical import HierarchicalTransport, NoCollectives, place_of
from gradpack.transports.shared_memory import SharedMemoryTransport
from gradpack.transports.staged import StagedTransport, Staging

__all__ = ["alone", "refuse", "select"]


def alone(state: GroupState) -> bool:
    """Whether there is nobody to talk to."""
    return state.size == 1 and not settings.get("GRADPACK_FULL_PATH")


def refuse(operation: str, state: GroupState, refusal: Exception) -> None:
    """Tells the other ranks why this one refuses its own arguments, before it raises that: they are waiting for its call.

    Raises:
        Exception: ``refusal`` itself, where they could not be told.
    """
    if alone(state):
        return
    state.drain()
    try:
        select(operation, state).refuse(operation, refusal, None)
    except Exception as error:
        # The caller's own mistake is what must be seen; that the others could not be told is its context.
        raise refusal from error


def select(operation: str, state: GroupState, timeout: float | None = None) -> Transport:
    """The transport that the group's calls are agreed on by, and go by unless they ask for another; made at first use.

    Args:
        operation: Name of the call, for messages.
        state: The group.
        timeout: Seconds to wait for the other ranks where they have to meet first; None for the group's own.

    Raises:
        TransportTimeout: They did not come.
        TransportError: They cannot meet.
    """
    deadline = time.monotonic() + (state.timeout if timeout is None else timeout)
    return state.resource("transport", lambda: _meet(operation, state, deadline))


def _meet(operation: str, state: GroupState, deadline: float) -> Transport:
    """Makes the transport of a group. Every rank of the group must come."""
    with _breaking(operation, state):
        peers = state.peers = Peers(state.rank, state.size)
        peers.meet(state.ranks.allgather, state.ranks.check, deadline)
        several = _connects_leaders(state)
        met = shm_meeting.meet(state.rank, lambda data: state.ranks.allgather(data, deadline, peers.check), several)
        if met.warning is not None and state.rank == 0:
            warnings.warn(met.warning, RuntimeWarning, stacklevel=2)
        if met.channel is None:
            return _staged(state, met.why, deadline)
        if len(met.hosts) > 1:
            return _hierarchical(state, peers, met, met.channel, deadline)
        owner = weakref.ref(state)

        def process_group(operation: str, deadline: float) -> Transport:
            found = owner()
            assert found is not None
            with _breaking(operation, found):
                return found.resource(StagedTransport.name, lambda: _staged(found, "was asked to", deadline))

        return SharedMemoryTransport(state, peers, met.channel, met.why, process_group)


@contextmanager
def _breaking(operation: str, state: GroupState) -> Iterator[None]:
    """Breaks the group where ranks that set up something together do not all come to an end with it."""
    try:
        yield
    except TransportError as error:
        named = renamed(error, f"{operation}: first call on this group: {error}")
        state.break_(named)
        raise named from error.__cause__
    except BaseException as error:
        state.break_(error)
        raise


def _connects_leaders(state: GroupState) -> bool:
    """Whether some ranks of the group can be connected apart from the others; the same on all ranks."""
    if not isinstance(state.ranks, TorchRanks):
        return False
    from gradpack.transports import process_group

    return process_group.backend_of(state.ranks) == "gloo"


def _hierarchical(
    state: GroupState, peers: Peers, met: shm_meeting.Met, channel: _C.ShmChannel, deadline: float
) -> HierarchicalTransport:
    staging = Staging(state.size)
    among_all = _collectives(state, peers, staging, deadline)
    leaders = [ranks[0] for ranks in met.hosts]
    between: Collectives = NoCollectives(staging.buffer)
    if state.rank in leaders:
        from gradpack.transports import process_group

        assert isinstance(state.ranks, TorchRanks)
        made = process_group.duplicates(state.ranks, peers, deadline, leaders)
        between = process_group.ProcessGroupCollectives(made, peers, staging.buffer, place_of(state.rank, met.hosts))
    return HierarchicalTransport(state, peers, staging, among_all, met.why, between, met.hosts, channel)


def _staged(state: GroupState, why: str, deadline: float) -> StagedTransport:
    assert state.peers is not None
    staging = Staging(state.size)
    return StagedTransport(state, state.peers, staging, _collectives(state, state.peers, staging, deadline), why)


def _collectives(state: GroupState, peers: Peers, staging: Staging, deadline: float) -> Collectives:
    ranks = state.ranks
    if isinstance(ranks, TorchRanks):
        from gradpack.transports import process_group

        return process_group.ProcessGroupCollectives(process_group.duplicates(ranks, peers, deadline), peers, staging.buffer)
    if isinstance(ranks, MPIRanks):
        from gradpack.transports.mpi import MPICollectives

        return MPICollectives(ranks.duplicate(deadline), peers, staging.buffer)
    assert isinstance(ranks, ObjectRanks)
    from gradpack.transports.byte_group import ByteGroupCollectives

    return ByteGroupCollectives(ranks, peers, staging.buffer)
