"""The wall clock, watched: whether somebody set it while a process runs.

Intervals and timeouts use the monotonic clock, which nobody can set. Wall time is for stamps: event times,
names, ages of files between machines. When it jumps, stamps from before and after it do not fit together, so
each jump is said once, with its size; and signs of life of other processes are timed from when they changed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Hashable
from typing import Self

from monolith.observe.metrics import Metrics

JUMP_SECONDS = 5.0
"""A smaller step is none: NTP corrects a clock by less, and slowly."""
_READ_WITHIN_SECONDS = 0.1
"""Two clocks that were read further apart than this, since the process was stopped, say nothing."""

_log = logging.getLogger(__name__)


class ClockWatch:
    """Compares the wall clock with the monotonic one, from a thread of its own while a block lasts.

    Args:
        metrics: Counts `clock_jumps`.
        every: Seconds between two looks.
        clock: Unix seconds.
        timer: Seconds that only grow.
    """

    def __init__(
        self,
        metrics: Metrics | None = None,
        *,
        every: float = 2.0,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every = every
        self._clock, self._timer = clock, timer
        metrics = Metrics() if metrics is None else metrics
        self._count = metrics.counter("clock_jumps", "Times that the wall clock of this machine was set")
        self._drift = self._look_at_both()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="clock-watch", daemon=True)

    def look(self) -> float | None:
        """Return by how many seconds the wall clock jumped since the last look, and warn; None if not."""
        drift = self._look_at_both()
        if drift is None:
            return None
        before, self._drift = self._drift, drift
        if before is None or abs(drift - before) < JUMP_SECONDS:
            return None
        jump = drift - before
        self._count.inc()
        _log.warning(
            "the wall clock of this machine jumped %s by %.0f s: it was set, or the machine was suspended. "
            "Saving, publishing and timeouts continue as before; stamps from before and after the jump "
            "do not fit together.",
            *("ahead" if jump > 0 else "back", abs(jump)),
        )
        return jump

    def _look_at_both(self) -> float | None:
        """Return how far the wall clock is ahead of the monotonic one; None if that cannot be told now."""
        before, wall, after = self._timer(), self._clock(), self._timer()
        return None if after - before > _READ_WITHIN_SECONDS else wall - after

    def _watch(self) -> None:
        while not self._stop.wait(self._every):
            self.look()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


class Sightings:
    """How long ago other processes gave a sign of life, timed by our own clock. For one caller at a time.

    A sign of life is a stamp that its process renews. Its own clock and ours may be set, each by its own, so
    only a change of the stamp counts, and when we saw it. What the wall clocks say counts once: when a
    stamp is first seen, within bounds, and not if ours was set since we began to look.

    Args:
        clock: Unix seconds.
        timer: Seconds that only grow.
    """

    def __init__(
        self, clock: Callable[[], float] = time.time, timer: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock, self._timer = clock, timer
        self._drift = clock() - timer()
        self._seen: dict[Hashable, tuple[float, float]] = {}

    def age(self, who: Hashable, stamp: float, *, renewed_at: float, most: float) -> float:
        """Return the seconds since a stamp was renewed.

        Args:
            renewed_at: When that was by the wall clock of its process, for a stamp that is first seen.
            most: Its age counts as no more than this then.
        """
        now, seen = self._timer(), self._seen.get(who)
        if seen is None:
            wall = self._clock()
            was_set = abs(wall - now - self._drift) > JUMP_SECONDS
            by_wall = 0.0 if was_set else min(max(wall - renewed_at, 0.0), most)
            self._seen[who] = seen = stamp, now - by_wall
        elif seen[0] != stamp:
            self._seen[who] = seen = stamp, now
        return now - seen[1]

    def keep(self, known: Collection[Hashable]) -> None:
        """Forget all others."""
        self._seen = {who: seen for who, seen in self._seen.items() if who in known}
