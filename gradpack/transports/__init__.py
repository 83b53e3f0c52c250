"""Transports: how packs travel. ``select`` picks one for a group."""

from __future__ import annotations

from gradpack.groups import GroupState
from gradpack.transports.base import Transport

__all__ = ["select"]


def select(state: GroupState, requested: str) -> Transport:
    """The transport of that name for the group, made at first use.

    Args:
        state: The group.
        requested: ``"auto"`` or the name of a transport.
    """
    from gradpack.transports.process_group import ProcessGroupTransport

    return state.resource(ProcessGroupTransport.name, lambda: ProcessGroupTransport(state))
