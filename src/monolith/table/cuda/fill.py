"""Fill: how full a device table is, as far as the host knows without asking.

A batch makes at most as many rows as it has ids. The host adds those up, and now and then has the true number
copied to it, which it looks at once it has arrived; only who must know waits.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from monolith.cuda.device import Device, DeviceEvent
from monolith.errors import TableArgumentError
from monolith.table.arguments import MAX_EVENT_TIME
from monolith.table.cuda.memory import BAD_TIMES, MARKS, NEWEST, USED

_ASKED_FROM = 0.5  # of the limit: below that it does not matter


@dataclass(frozen=True, slots=True)
class Counted:
    """The counters as they were read."""

    counters: list[int]

    @property
    def rows(self) -> int:
        return self.counters[USED] - self.counters[MARKS]


class Fill:
    """The counters of one table. Not thread-safe.

    Args:
        device: The one of the counters.

    Attributes:
        counters: int64 on the device.
        written: How many ids batches have had so far.
    """

    def __init__(self, name: str, counters: Tensor, device: Device) -> None:
        self.counters = counters
        self._name = name
        self._bound = 0
        self._device = device
        self._copy = device.pinned(tuple(counters.shape), counters.dtype)
        self._arrives: DeviceEvent | None = None
        self._asked_at = 0  # what was written when the copy on its way was made
        self._complained_at = -1
        self.written = 0

    def bound(self) -> int:
        """Return a number of places that are not exceeded."""
        if self._arrives is not None and self._arrives.query():
            self._arrives = None
            self.learn(self._copy.tolist(), self._asked_at)
        return self._bound

    def learn(self, counters: list[int], written: int) -> None:
        """Take note of the counters as they were when `written` was what is given here."""
        if written > self._complained_at:  # what came before was complained of
            self._checked(counters)
        self._bound = min(self._bound, counters[USED] + self.written - written)

    def wrote(self, ids: int) -> int:
        """Take note of a batch that was written; return the bound after it."""
        self._bound += ids
        self.written += ids
        return self._bound

    def grew(self, ids: int, limit: int) -> None:
        """Take note of a batch that was written, and ask for the number where it comes to matter."""
        self.wrote(ids)
        if self._arrives is None and self._bound > _ASKED_FROM * limit:
            self._copy.copy_(self.counters, non_blocking=True)
            self._arrives = self._device.current_stream().record()
            self._asked_at = self.written

    def holds(self, places: int) -> None:
        """Take note that no more places are in use, from what is launched next on."""
        self._bound = places
        self._arrives = None

    def read(self) -> Counted:
        """Return the counters, waiting for the device."""
        seen = Counted(self.counters.tolist())
        self.holds(seen.counters[USED])
        return self._checked(seen.counters)

    def clear(self) -> None:
        """Take note that there are no rows any more, and what time it was is forgotten."""
        self.counters[USED] = self.counters[MARKS] = self.counters[NEWEST] = 0
        self.holds(0)

    def _checked(self, counters: list[int]) -> Counted:
        if wrong := counters[BAD_TIMES]:
            self.counters[BAD_TIMES] = 0
            self._complained_at = self.written
            raise TableArgumentError(
                f"table {self._name!r}: event_time: {wrong:,} on the device, handed over by an earlier call, "
                f"were not Unix seconds from 0 to {MAX_EVENT_TIME}; those rows were written with time 0"
            )
        return Counted(counters)
