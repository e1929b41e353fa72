"""When to save: every so many seconds or steps, and at another pace outside the tide."""

from __future__ import annotations

import time
from collections.abc import Callable

from monolith.errors import ConfigError
from monolith.train.hooks.control.tide import TideWindow


class SaveTimer:
    """Says when the next save is due. Not thread-safe; `enabled` may be set from any thread.

    Outside the tide window, if there is one, only `tide_every_secs` counts.

    Args:
        clock: Unix seconds, for the hours of the tide window alone: it may be set, ahead or back.
        timer: Seconds that only grow, for every interval.
    """

    def __init__(
        self,
        *,
        every_secs: float | None = None,
        every_steps: int | None = None,
        tide: TideWindow | None = None,
        tide_every_secs: float | None = None,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        if (every_secs is None) == (every_steps is None):
            found = "neither" if every_secs is None else "both"
            raise ConfigError(f"save timer: give exactly one of every_secs and every_steps, got {found}")
        for name, value in (
            ("every_secs", every_secs),
            ("every_steps", every_steps),
            ("tide_every_secs", tide_every_secs),
        ):
            if value is not None and value <= 0:
                raise ConfigError(f"save timer: {name} must be above 0, got {value}")
        self.enabled = True
        """While false nothing is due, whatever the time."""
        self._every_secs = every_secs
        self._every_steps = every_steps
        self._tide = tide
        self._tide_every_secs = tide_every_secs
        self._clock, self._timer = clock, timer
        self._last: tuple[float, int] | None = None
        self._retry_at: float | None = None
        self._retry_only = False

    @property
    def last_step(self) -> int | None:
        """The step last stamped; None before the first, and after `reset`."""
        return None if self._last is None else self._last[1]

    def should_trigger(self, step: int) -> bool:
        """Whether a save is due at this step. Due at once when there was none, and at no step twice unless
        the first one failed."""
        if not self.enabled:
            return False
        if self._last is None:
            return True
        then, last_step = self._last
        if step == last_step and self._retry_at is None:
            return False
        now = self._timer()
        if self._retry_at is not None and now >= self._retry_at:
            return True
        if self._retry_only or step == last_step:
            return False
        pace = self._tide_every_secs
        if self._tide is not None and pace is not None and not self._tide.contains(self._clock()):
            return now >= then + pace
        if self._every_secs is not None:
            return now >= then + self._every_secs
        assert self._every_steps is not None  # the constructor saw to one of them
        return step >= last_step + self._every_steps

    @property
    def backs_off(self) -> bool:
        """Whether a save failed, and no other is to be tried yet."""
        return self._retry_only and self._retry_at is not None and self._timer() < self._retry_at

    @property
    def retry_due(self) -> bool:
        """Whether it is time to try a save again that failed."""
        return self._retry_only and not self.backs_off

    def stamp(self, step: int) -> tuple[float, int] | None:
        """Count from here on. Return the seconds and steps since the last stamp; None for the first."""
        now, last = self._timer(), self._last
        self._last = now, step
        self._retry_at, self._retry_only = None, False
        return None if last is None else (now - last[0], step - last[1])

    def rearm(self, backoff: float, *, not_sooner: bool = False) -> None:
        """Be due again in `backoff` seconds: the save that was stamped came to nothing.

        Args:
            not_sooner: Whether the usual interval does not count until then.
        """
        self._retry_at, self._retry_only = self._timer() + backoff, not_sooner

    def reset(self) -> None:
        """Forget the past, so that a save is due at once."""
        self._last = None
        self._retry_at, self._retry_only = None, False
