"""What a fleet needs to keep going when servers are lost: ways to find, reach and replace them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from monolith.observe import Metrics
from monolith.store import ServerGroup
from monolith.train.fleet.standbys import Standbys

LOOK_EVERY = 0.2
"""Seconds between two looks for a server that is lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepGoing:
    """Asks a fleet to keep going, and says how."""

    find: Callable[[int], Sequence[str]]
    """Where a place may be served now: addresses, the likeliest first."""
    connect: Callable[[str], ServerGroup]
    """Makes connections to one address, to be closed by whoever asked."""
    spare: Callable[[int], str | None] | None = None
    """Gives a place to a spare server, as the chief, and returns where it is; None where there is none."""
    served: Callable[[int, str], None] | None = None
    """Told where a place is served from now on, as the chief, for those who come later."""
    spare_after: timedelta = timedelta(seconds=5)
    """How long a lost server may take to come back before a spare takes its place."""
    standbys: Standbys | None = None
    """Who keeps second copies of the shares, as the chief; None where there are none."""
    metrics: Metrics | None = None
    """Where losses are counted."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
