"""The tide: the daily hours in which cheap borrowed machines exist.

A run on such machines may only train inside its window. Outside of it the run stops, with
a final checkpoint, and somebody starts it again the next day.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from monolith.errors import ConfigError
from monolith.train.hook import Hook, Run

_log = logging.getLogger(__name__)

_MINUTES_PER_DAY = 24 * 60


def before(hour1: int, minute1: int | None, hour2: int, minute2: int | None) -> bool:
    """Whether the first time of day is strictly earlier than the second; no minute is minute 0."""
    return (hour1, minute1 or 0) < (hour2, minute2 or 0)


@dataclass(frozen=True, slots=True)
class TideWindow:
    """Hours of the day in UTC, from the start on and up to the end, which is not among them.

    An end earlier than the start is on the next day. Start and end alike mean all day.
    """

    start_hour: int
    """The hour of the day, in UTC, at which the window starts."""
    start_minute: int | None
    """The minute of the hour at which the window starts; None is 0."""
    end_hour: int
    """The hour of the day, in UTC, at which the window ends; before the start it is on the next day."""
    end_minute: int | None
    """The minute of the hour at which the window ends; None is 0."""

    def __post_init__(self) -> None:
        for name, value, limit in (
            ("start_hour", self.start_hour, 24),
            ("start_minute", self.start_minute, 60),
            ("end_hour", self.end_hour, 24),
            ("end_minute", self.end_minute, 60),
        ):
            if value is not None and not 0 <= value < limit:
                raise ConfigError(f"tide window: {name} must be from 0 to {limit - 1}, got {value}")

    def contains(self, now: float) -> bool:
        """Whether `now`, in Unix seconds, is inside the window."""
        minute = int(now // 60) % _MINUTES_PER_DAY
        start = self.start_hour * 60 + (self.start_minute or 0)
        end = self.end_hour * 60 + (self.end_minute or 0)
        if start == end:
            return True
        if start < end:
            return start <= minute < end
        return minute >= start or minute < end

    def __str__(self) -> str:
        return (
            f"{self.start_hour:02}:{self.start_minute or 0:02}"
            f"-{self.end_hour:02}:{self.end_minute or 0:02} UTC"
        )


class TideStoppingHook(Hook):
    """Ends the run once its window is over; the save hook then writes the final checkpoint.

    Args:
        window: None never stops.
        clock: Unix seconds.
    """

    def __init__(self, window: TideWindow | None, *, clock: Callable[[], float] = time.time) -> None:
        self._window = window
        self._clock = clock

    def before_step(self, run: Run) -> None:
        stop_outside(run, self._window, self._clock())


def stop_outside(run: Run, window: TideWindow | None, now: float) -> bool:
    """Ask the run to stop if `now` is outside of its window; return whether it is."""
    if window is None or window.contains(now):
        return False
    _log.info("outside the tide window %s: stopping at step %d", window, run.step)
    run.request_stop(f"outside the tide window {window}")
    return True
