"""The demo's live stream: clicks at the pace of the clock, and what is staged in them.

Event time is wall time. Record n happens n / rate seconds after the stream began and cannot be read before;
who is behind, as a process that was killed and came back, reads on without waiting until it has caught up.

    drift       users and items come and go, within a minute instead of a day
    new item    from some second on, every few records show an item that nobody has seen, and it is clicked
    poison      for a while the labels are turned around: whoever learns from them ranks the wrong way round
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from monolith.data import DriftConfig, DriftingStream, Position, Records
from monolith.data.records import LABEL, LINE_ID
from monolith.tensors import RaggedTensor

NEW_ITEM = 4_242_424_242
"""The id of the item that appears."""
_NEW_ITEM_EVERY = 20
"""Records from one that shows the new item to the next."""
_PIECES_PER_SECOND = 20
_ITEM_COLUMNS = ("item", LINE_ID + "item_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveScript:
    """What happens in the stream, in seconds since it began."""

    began: int
    """Unix seconds."""
    rate: int = 5_000
    """Records per second."""
    new_item: int = 25
    """When the brand-new item appears."""
    poison: int = 60
    """When labels begin to be wrong."""
    cured: int = 64
    """When they are right again."""
    seed: int = 0

    def drift(self) -> DriftConfig:
        """Return the world: a user comes some 120 times and an item some 600 times, as in `fast_drift`."""
        return DriftConfig(
            start_time=self.began,
            examples_per_second=self.rate,
            batch_size=max(1, self.rate // _PIECES_PER_SECOND),
            cohort=timedelta(seconds=2),
            new_users=max(1, self.rate // 60),
            new_items=max(1, self.rate // 300),
            user_life=timedelta(seconds=60),
            item_life=timedelta(seconds=40),
            turn=timedelta(seconds=60),
            seed=self.seed,
        )

    def record_at(self, seconds: float) -> int:
        """Return the number of the first record from so many seconds after the beginning on."""
        return round(seconds * self.rate)

    def time_of(self, number: int) -> float:
        """Return the Unix time at which a record happens."""
        return self.began + number / self.rate


class LiveClicks:
    """A source of what happens, as it happens. Its position is the number of the next record.

    Args:
        clock: Returns Unix seconds.
        sleep: Waits so many seconds.
    """

    repeats = True

    def __init__(
        self,
        script: LiveScript,
        *,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._script = script
        self._stream = DriftingStream(script.drift())
        self._clock = clock
        self._sleep = sleep

    def __iter__(self) -> Iterator[Records]:
        for records in self._stream:
            end = int(self._stream.position()["next"])
            ahead = self._script.time_of(end) - self._clock()
            if ahead > 0:
                self._sleep(ahead)
            yield self._staged(records, end - len(records))

    def records(self, first: int, size: int) -> Records:
        """Return records [first, first + size), whether they happened yet or not."""
        return self._staged(self._stream.records(first, size), first)

    def position(self) -> Position:
        return self._stream.position()

    def restore(self, position: Position) -> None:
        self._stream.restore(position)

    def commit(self, position: Position) -> None:
        """Do nothing: any stretch can be had again."""

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def _staged(self, records: Records, first: int) -> Records:
        """Return records, of which the first has this number, with what is staged in them."""
        script, numbers = self._script, torch.arange(first, first + len(records))
        columns = {name: column.flat_values for name, column in records.columns.items()}
        poisoned = (numbers >= script.record_at(script.poison)) & (numbers < script.record_at(script.cured))
        columns[LABEL] = torch.where(poisoned, 1 - columns[LABEL], columns[LABEL])
        shows_new = (numbers >= script.record_at(script.new_item)) & (numbers % _NEW_ITEM_EVERY == 0)
        columns[LABEL] = torch.where(shows_new & ~poisoned, torch.ones(()), columns[LABEL])
        for name in _ITEM_COLUMNS:
            columns[name] = torch.where(shows_new, torch.tensor(NEW_ITEM), columns[name])
        return Records(len(records), {name: _plain(column) for name, column in columns.items()})


def _plain(column: Tensor) -> RaggedTensor:
    """Return a column with one value in each record."""
    return RaggedTensor(column, torch.arange(len(column) + 1), validate=False)
