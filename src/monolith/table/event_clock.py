"""The clock that expires rows: what time it is, by the events that are trained on.

Rows age in event time. The newest event is no clock: a single record with a wrong date would age all
rows at once. Nor is the wall clock: training on last month's data is not a month of silence. So the time
is what nearly all events of late have reached. A few records cannot move it, whatever dates they have,
and it goes back where older data is trained on, because what is being trained has not expired.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import numpy as np
from torch import Tensor

from monolith.errors import ConfigError

BATCHES = 64
"""How many batches are remembered."""
SAMPLES = 16
"""How many event times are remembered of each: these stand for the whole batch, evenly from old to new."""
SHARE = 0.9
"""The share of the remembered event times that are not newer than now."""
LEAST = 64
"""Event times without which nobody can tell what time it is."""

_LOOK_AT = 256


class EventClock:
    """Tells the time by the last batches of events. Not thread-safe.

    Args:
        max_ahead: How far it may be ahead of the wall clock at most.
        wall: Unix seconds.
    """

    def __init__(
        self, *, max_ahead: timedelta = timedelta(hours=1), wall: Callable[[], float] = time.time
    ) -> None:
        if max_ahead < timedelta(0):
            raise ConfigError(f"event clock: max_ahead must not be negative, got {max_ahead}")
        self._max_ahead = max_ahead
        self._wall = wall
        self._batches: deque[list[int]] = deque(maxlen=BATCHES)

    def observe(self, event_times: Tensor) -> None:
        """Take note of a batch: Unix seconds of its events, int64 of shape (n,). 0 says nothing."""
        times = event_times.numpy()
        if len(times) > _LOOK_AT:
            times = times[:: math.ceil(len(times) / _LOOK_AT)]
        times = np.sort(times[times > 0])
        if len(times) > SAMPLES:
            times = times[(2 * np.arange(SAMPLES) + 1) * len(times) // (2 * SAMPLES)]
        if len(times):
            self._batches.append(times.tolist())

    def now(self) -> int | None:
        """Return Unix seconds; None as long as there are too few events to tell."""
        times = sorted(time for batch in self._batches for time in batch)
        if len(times) < LEAST:
            return None
        reached = times[math.ceil(SHARE * len(times)) - 1]
        return min(reached, int(self._wall() + self._max_ahead.total_seconds()))

    def state(self) -> list[list[int]]:
        """Return what it remembers, for a checkpoint."""
        return [list(batch) for batch in self._batches]

    def restore(self, state: Sequence[Sequence[int]]) -> None:
        """Go on with what was remembered."""
        self._batches = deque((list(batch) for batch in state), maxlen=BATCHES)
