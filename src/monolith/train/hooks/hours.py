"""Daily hours: the window in which cheap borrowed machines are available, and the slow start of workers.

A run on such machines may only train inside its window. Outside of it the run stops, with
a final checkpoint, and the operator or a scheduler restarts it the next day.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from monolith import concurrency
from monolith.errors import ConfigError
from monolith.train.hook import Hook, TrainingRun

_log = logging.getLogger(__name__)

_MINUTES_PER_DAY = 24 * 60


def before(hour1: int, minute1: int | None, hour2: int, minute2: int | None) -> bool:
    """Whether the first time of day is strictly earlier than the second; no minute is minute 0."""
    return (hour1, minute1 or 0) < (hour2, minute2 or 0)


@dataclass(frozen=True, slots=True)
class DailyHours:
    """Hours of the day in UTC, from the start on and up to the end, which is not among them.

    An end earlier than the start is on the next day. Start and end alike mean all day.
    """

    start_hour: int
    """The hour in which the window begins, 0 to 23, UTC."""
    start_minute: int | None
    """The minute in which the window begins; None means 0."""
    end_hour: int
    """The hour in which the window ends, 0 to 23, UTC."""
    end_minute: int | None
    """The minute in which the window ends; None means 0."""

    def __post_init__(self) -> None:
        for name, value, limit in (
            ("start_hour", self.start_hour, 24),
            ("start_minute", self.start_minute, 60),
            ("end_hour", self.end_hour, 24),
            ("end_minute", self.end_minute, 60),
        ):
            if value is not None and not 0 <= value < limit:
                raise ConfigError(f"daily window: {name} must be from 0 to {limit - 1}, got {value}")

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


class StopOutsideHoursHook(Hook):
    """Ends the run once its window is over; the save hook then writes the final checkpoint.

    Args:
        window: None never stops.
        clock: Unix seconds.
    """

    def __init__(self, window: DailyHours | None, *, clock: Callable[[], float] = concurrency.time) -> None:
        self._window = window
        self._clock = clock

    def before_step(self, run: TrainingRun) -> None:
        stop_outside(run, self._window, self._clock())


def stop_outside(run: TrainingRun, window: DailyHours | None, now: float) -> bool:
    """Ask the run to stop if `now` is outside of its window; return whether it is."""
    if window is None or window.contains(now):
        return False
    _log.info("outside the daily window %s: stopping at step %d", window, run.step)
    run.request_stop(f"outside the daily window {window}")
    return True


# Slow start: workers join a young model one after another.
#
# Many workers on fresh parameters push gradients that contradict each other. So worker i takes
# its first step only when the other workers have brought the model to a step that grows with i, or
# when it has waited long enough.


POLL_SECONDS = 0.5
_LOG_EVERY_SECONDS = 60.0
_JITTER_SECONDS = 600.0


def slow_start_target(slow_start_steps: int, worker: int) -> int:
    """Return the global step at which a worker may begin; worker 0 never waits."""
    return int(slow_start_steps * math.log(1 + worker))


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowStart:
    """How long a worker delays its first step."""

    target_step: int
    """The step of the model to wait for, see `slow_start_target`; 0 or less does not wait."""
    max_wait: timedelta = timedelta(minutes=10)
    """The longest wait once the model moves, plus up to 10 random minutes, so that the workers that give up
    do not all start at once."""
    grace: timedelta = timedelta(minutes=30)
    """How long the model may take to start to move before `max_wait` counts anyway."""


class SlowStartHook(Hook):
    """Delays a worker's first step until the model has reached a step.

    Args:
        global_step: Reads the step of the whole model, which other workers move.
        idle: Called with the run again and again during the wait, to keep this worker in step with the other
            workers, which may save meanwhile.
        hours: Outside of this window the run is asked to stop instead.
    """

    def __init__(
        self,
        start: SlowStart,
        *,
        global_step: Callable[[], int],
        idle: Sequence[Callable[[TrainingRun], None]] = (),
        hours: DailyHours | None = None,
        clocks: concurrency.Clocks | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._start = start
        self._global_step = global_step
        self._idle = tuple(idle)
        self._hours = hours
        self._clocks = clocks or concurrency.Clocks()
        self._rng = rng or random.Random(concurrency.token_hex(16))
        self._started = False

    def before_step(self, run: TrainingRun) -> None:
        if self._started:
            return
        now = self._clocks.timer()
        # The model may never move: its chief may be gone. Then the count begins by itself.
        counts_from = now + self._start.grace.total_seconds()
        patience = self._start.max_wait.total_seconds() + self._rng.uniform(0, _JITTER_SECONDS)
        next_log = now
        while run.stop_reason is None:
            now = self._clocks.timer()
            if stop_outside(run, self._hours, self._clocks.wall()):
                return
            if self._start.target_step <= 0:
                break
            step = self._global_step()
            if step >= self._start.target_step:
                break
            if step > 1:
                counts_from = min(counts_from, now)
            if now - counts_from >= patience:
                _log.warning(
                    "slow start: waited %.0f s for step %d, the model is at step %d; starting anyway",
                    now - counts_from,
                    self._start.target_step,
                    step,
                )
                break
            if now >= next_log:
                _log.info(
                    "slow start: waiting for step %d, the model is at step %d", self._start.target_step, step
                )
                next_log = now + _LOG_EVERY_SECONDS
            self._clocks.sleep(POLL_SECONDS)
            for call in self._idle:
                call(run)
        self._started = True
