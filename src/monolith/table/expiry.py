"""Expiry: how long a row may go without an update, and which time it is.

Ids die out: items are withdrawn, users leave. Each feature (slot) has its own notion of how long that takes.
Age is counted in event time, so that replaying an old stream expires the rows that running it live would have
expired.

The newest event is not a clock: a single record with a wrong date would expire all rows at once. Nor is the
wall clock: training on last month's data is not a month of silence. So the time is what nearly all recent
events have reached. A few records cannot move it, whatever their dates, and it moves back when older data is
trained on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from monolith.errors import ConfigError
from monolith.table.hashing import MAX_SLOTS, slot_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Expiry:
    """Time to live by slot, in whole seconds."""

    default: timedelta = timedelta(days=36500)
    """For slots that have none of their own. A century, as upstream: nothing expires."""
    per_slot: Mapping[int, timedelta] = field(default_factory=dict, hash=False)
    """Slot (0 to 32767) to its own time to live; copied, in slot order."""

    def __post_init__(self) -> None:
        for slot in self.per_slot:
            if not 0 <= slot < MAX_SLOTS:
                raise ConfigError(f"expiry: slot must be from 0 to {MAX_SLOTS - 1}, got {slot!r}")
        for name, ttl in [("default", self.default), *((f"slot {s}", t) for s, t in self.per_slot.items())]:
            if ttl < timedelta(0) or ttl.microseconds:
                raise ConfigError(f"expiry: {name} must be whole seconds, at least 0, got {ttl!r}")
        object.__setattr__(self, "per_slot", dict(sorted(self.per_slot.items())))

    @classmethod
    def days(cls, default: float = 36500, per_slot: Mapping[int, float] | None = None) -> Expiry:
        """Return an expiry with times to live in days."""
        return cls(
            default=timedelta(days=default),
            per_slot={slot: timedelta(days=days) for slot, days in (per_slot or {}).items()},
        )

    def seconds_by_slot(self) -> NDArray[np.int64]:
        """Return the time to live of every slot, int64 of shape (32768,)."""
        seconds = np.full(MAX_SLOTS, _seconds(self.default), dtype=np.int64)
        for slot, ttl in self.per_slot.items():
            seconds[slot] = _seconds(ttl)
        return seconds

    def expired(self, ids: NDArray[np.int64], event_times: NDArray[np.int64], now: int) -> NDArray[np.bool_]:
        """Return a mask of the rows whose age at `now` has reached their time to live.

        Equality expires, so a time to live of 0 expires all that is not newer than `now`.
        """
        age = np.int64(now) - event_times
        if not self.per_slot:
            return age >= _seconds(self.default)
        return age >= self.seconds_by_slot()[slot_of(ids)]

    def __str__(self) -> str:
        slots = ", ".join(f"{slot}: {_seconds(ttl)}s" for slot, ttl in self.per_slot.items())
        return f"expiry(default={_seconds(self.default)}s, per_slot={{{slots}}})"


def _seconds(ttl: timedelta) -> int:
    return ttl.days * 86400 + ttl.seconds


BATCHES = 64
"""How many batches are remembered."""
SAMPLES = 16
"""How many event times are remembered of each: these stand for the whole batch, evenly from old to new."""
SHARE = 0.9
"""The share of the remembered event times that are not newer than now."""
LEAST = 64
"""Event times below which the clock tells no time."""

_LARGEST_SAMPLE = 256
_NEVER = (1 << 63) - 1


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
        self._forget()

    def _forget(self) -> None:
        # A row for each batch that is remembered, and how many times are in it; the rest of the row, and rows
        # of no batch, are later than all times. The next batch goes to row `_next`.
        self._times = np.full((BATCHES, SAMPLES), _NEVER, np.int64)
        self._counts = [0] * BATCHES
        self._next = 0

    def observe(self, event_times: Tensor | int, examples: int = 0) -> None:
        """Record a batch: Unix seconds of its events, int64 of shape (n,), or one for so many examples.

        0 says nothing.
        """
        if isinstance(event_times, int):
            times = np.full(min(examples, SAMPLES) if event_times > 0 else 0, event_times, np.int64)
        else:
            times = event_times.numpy()
            if len(times) > _LARGEST_SAMPLE:
                times = times[:: math.ceil(len(times) / _LARGEST_SAMPLE)]
            times = np.sort(times[times > 0])
            if len(times) > SAMPLES:
                times = times[(2 * np.arange(SAMPLES) + 1) * len(times) // (2 * SAMPLES)]
        if len(times):
            self._remember(times)

    def _remember(self, times: NDArray[np.int64]) -> None:
        row = self._times[self._next]
        row[: len(times)] = times
        row[len(times) :] = _NEVER
        self._counts[self._next] = len(times)
        self._next = (self._next + 1) % BATCHES

    def now(self) -> int | None:
        """Return Unix seconds; None as long as there are too few events to tell."""
        # Asked in every step, so it is one partition of one array; a sort takes ten times as long.
        count = sum(self._counts)
        if count < LEAST:
            return None
        at = math.ceil(SHARE * count) - 1
        reached = int(np.partition(self._times, at, axis=None)[at])
        return min(reached, int(self._wall() + self._max_ahead.total_seconds()))

    def state(self) -> list[list[int]]:
        """Return what it remembers, for a checkpoint: batch by batch, the oldest first."""
        rows = [(self._next + number) % BATCHES for number in range(BATCHES)]
        return [self._times[row, :many].tolist() for row in rows if (many := self._counts[row])]

    def restore(self, state: Sequence[Sequence[int]]) -> None:
        """Resume with the state of a checkpoint."""
        self._forget()
        for batch in state[-BATCHES:]:
            self._remember(np.array(batch[-SAMPLES:], np.int64))
