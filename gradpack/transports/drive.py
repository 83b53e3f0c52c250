"""Drives a channel through shared memory: in slices of time, with a look at signals and at the other ranks in between."""

from __future__ import annotations

import time
from typing import Literal

from gradpack import _C
from gradpack.peers import LOOK_SECONDS, Peers

__all__ = ["drive"]


def drive(channel: _C.ShmChannel, peers: Peers, deadline: float) -> Literal["done", "differ"]:
    """Ends what was begun on the channel, and says how.

    Raises:
        TransportTimeout: ``time.monotonic()`` passed ``deadline``.
        PeerLost: The process of another rank is gone.
        TransportError: Another rank gave up.
    """
    while True:
        status = channel.advance(min(deadline, time.monotonic() + LOOK_SECONDS))
        if status != "waiting":
            return status
        peers.step(channel.steps())
        peers.check()
        if time.monotonic() > deadline:
            raise peers.late()
