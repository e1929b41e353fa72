"""Expiry: how long a row may go without an update.

Ids die out: items are withdrawn, users leave. Each feature (slot) has its own
notion of how long that takes. Age is counted in event time, so that replaying an
old stream expires the rows that running it live would have expired.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
from numpy.typing import NDArray

from monolith.errors import ConfigError
from monolith.table.hashing import MAX_SLOTS, slot_of


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
