"""The demo's live stream: clicks at the pace of the clock, and what is staged in them.

Event time is wall time. Record n happens n / rate seconds after the stream began and cannot be read before;
a reader that is behind, such as a restarted process, reads without waiting until it has caught up.

    drift       users and items come and go, within a minute instead of a day
    new item    from some record on, every hundredth shows an item never seen before, and it is clicked
    poison      for a while the labels are inverted: a model that learns from them ranks the wrong way round

The demo command writes the cues to a file, each before its record happens. So a scene can wait for processes
that take long to start, and a record is the same for every process that reads it again.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor

from monolith.data import DriftConfig, DriftingStream, Position, Records, Source
from monolith.data.records import LABEL, LINE_ID, make_batch
from monolith.data.synthetic.drift import SPEC
from monolith.feature import Batch
from monolith.tensors import RaggedTensor

NEW_ITEM = 4_242_424_242
"""The id of the item that appears."""
_NEW_ITEM_EVERY = 100
"""Records from one that shows the new item to the next."""
_USER_VISITS, _ITEM_VISITS = 120, 600
"""Of each in its life, as in `fast_drift`: enough to learn them by."""
_ITEM_COLUMNS = ("item", LINE_ID + "item_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveScript:
    """The world of one demo, and how fast its records come."""

    began: int
    """Unix seconds of the first record."""
    rate: int = 2_000
    """Records per second."""
    batch: int = 200
    """Records that are read together."""
    length: float = 90.0
    """Seconds of the demo: the world turns in two thirds of it."""
    seed: int = 0

    def drift(self) -> DriftConfig:
        cohort = max(1, round(self.length / 45))
        turn = timedelta(seconds=max(1.0, self.length * 2 / 3))
        return DriftConfig(
            start_time=self.began,
            examples_per_second=self.rate,
            batch_size=self.batch,
            cohort=timedelta(seconds=cohort),
            new_users=max(1, self.rate * cohort // _USER_VISITS),
            new_items=max(1, self.rate * cohort // _ITEM_VISITS),
            user_life=turn,
            item_life=turn * 2 / 3,
            turn=turn,
            seed=self.seed,
        )

    def record_at(self, now: float) -> int:
        """Return the number of the first record from a Unix time on."""
        return max(0, math.ceil(round((now - self.began) * self.rate, 3)))

    def time_of(self, number: int) -> float:
        """Return the Unix time at which a record happens."""
        return self.began + number / self.rate


@dataclass(frozen=True, kw_only=True, slots=True)
class Cues:
    """From which record on something is staged; None for what is not staged yet."""

    new_item: int | None = None
    """The brand-new item appears."""
    poison: int | None = None
    """Labels begin to be wrong."""
    cured: int | None = None
    """They are right again."""


class CueSheet:
    """Cues in a file, written by one process and read by others. Used by one thread in each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: int | None = None
        self._cues = Cues()

    def write(self, cues: Cues) -> None:
        aside = self._path.with_suffix(".part")
        aside.write_text(json.dumps(asdict(cues)))
        aside.replace(self._path)

    def read(self) -> Cues:
        """Return the cues that were given until now."""
        try:
            changed = os.stat(self._path).st_mtime_ns  # noqa: PTH116  twenty times a second
        except FileNotFoundError:
            return self._cues
        if changed != self._seen:
            self._cues, self._seen = Cues(**json.loads(self._path.read_text())), changed
        return self._cues


class LiveClicks(Source):
    """A source of what happens, as it happens. Its position is the number of the next record.

    Args:
        cues: Returns what is staged by now.
        clock: Returns Unix seconds.
        sleep: Waits so many seconds.
    """

    repeats_order = True

    def __init__(
        self,
        script: LiveScript,
        cues: Callable[[], Cues],
        *,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._script = script
        self._cues = cues
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

    def batch(self, first: int, size: int) -> Batch:
        """Return records [first, first + size) as a model reads them, whether they happened yet or not."""
        return make_batch(self._staged(self._stream.records(first, size), first), SPEC)

    def position(self) -> Position:
        return self._stream.position()

    def restore(self, position: Position) -> None:
        self._stream.restore(position)

    def _staged(self, records: Records, first: int) -> Records:
        """Return records, of which the first has this number, with what is staged in them."""
        cues, numbers = self._cues(), torch.arange(first, first + len(records))
        columns = {name: column.flat_values for name, column in records.columns.items()}
        poisoned = _between(numbers, cues.poison, cues.cured)
        columns[LABEL] = torch.where(poisoned, 1 - columns[LABEL], columns[LABEL])
        shows_new = _between(numbers, cues.new_item, None) & (numbers % _NEW_ITEM_EVERY == 0)
        columns[LABEL] = torch.where(shows_new & ~poisoned, torch.ones(()), columns[LABEL])
        for name in _ITEM_COLUMNS:
            columns[name] = torch.where(shows_new, torch.tensor(NEW_ITEM), columns[name])
        return Records(len(records), {name: _plain(column) for name, column in columns.items()})


def _between(numbers: Tensor, first: int | None, end: int | None) -> Tensor:
    """Return which numbers are in a stretch: nowhere without its first, for good without its end."""
    if first is None:
        return torch.zeros_like(numbers, dtype=torch.bool)
    return (numbers >= first) & (numbers < (end if end is not None else torch.iinfo(torch.int64).max))


def _plain(column: Tensor) -> RaggedTensor:
    """Return a column with one value in each record."""
    return RaggedTensor(column, torch.arange(len(column) + 1), validate=False)
