"""Transports: how packs travel. ``select`` picks one for a group."""

from __future__ import annotations

from gradpack.groups import GroupState
from gradpack.transports.base import Transport

__all__ = ["select"]


def select(operation: str, state: GroupState, requested: str, timeout: float | None = None) -> Transport:
    """The transport of that name for the group, made at first use.

    Args:
        operation: Name of the call, for messages.
        state: The group.
        requested: ``"auto"`` or the name of a transport.
        timeout: Seconds to wait for the other ranks where they have to meet first; None for the group's own.

    Raises:
        TransportTimeout: They did not.
        TransportError: They cannot.
    """
    from gradpack.transports.process_group import ProcessGroupTransport

    return state.resource(ProcessGroupTransport.name, lambda: ProcessGroupTransport(operation, state, timeout))
