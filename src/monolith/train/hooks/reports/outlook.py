"""How long a run will still take: by its steps, and by its data where somebody knows how much is read."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple


class Ahead(NamedTuple):
    """What lies ahead of a run."""

    last_step: int | None
    """The step at which it ends; None where only the data, the time or a person ends it."""
    data_read: float | None
    """Which part of the data is done, from 0 to 1, over all epochs; None where nobody knows."""
    seconds_left: float | None
    """To the last step or the end of the data, whichever comes first; None where neither is known."""


class Outlook:
    """Looks ahead of a run. One thread looks; another may begin.

    Args:
        steps: How many steps this run is to take.
        max_steps: At which step it ends; the nearer of the two counts.
        read: Says which part of the data is done.
        timer: Seconds that never run backwards.
    """

    def __init__(
        self,
        *,
        steps: int | None = None,
        max_steps: int | None = None,
        read: Callable[[], float | None] = lambda: None,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps = steps
        self._max_steps = max_steps
        self._read = read
        self._timer = timer
        self._first_step = 0
        self._began = timer()
        self._first_read: tuple[float, float] | None = None
        """When the data was first asked how much of it is done, and what it said."""

    def begin(self, step: int) -> None:
        """Hear at which step the run begins."""
        self._first_step, self._began, self._first_read = step, self._timer(), None

    def look(self, step: int) -> Ahead:
        """Return what lies ahead at a step. What it takes to start is in neither speed: the data counts from
        when it is first looked at."""
        now, part = self._timer(), self._read()
        if part is not None and self._first_read is None:
            self._first_read = (now, part)
        ends = [] if self._steps is None else [self._first_step + self._steps]
        ends += [] if self._max_steps is None else [self._max_steps]
        last = min(ends, default=None)
        left = min(self._by_steps(step, last, now), self._by_data(part, now))
        return Ahead(last, part, left if math.isfinite(left) else None)

    def _by_steps(self, step: int, last: int | None, now: float) -> float:
        taken = step - self._first_step
        return math.inf if last is None or taken < 1 else max(last - step, 0) * (now - self._began) / taken

    def _by_data(self, part: float | None, now: float) -> float:
        if part is None or self._first_read is None:
            return math.inf
        then, first = self._first_read
        return (1 - part) * (now - then) / (part - first) if part > first else math.inf
