"""Who watches: those who keep track of the rows of a device table, and what they are told.

Sets of touched keys are told the ids whose rows changed or went. What they are to be told waits on the device
until somebody looks into one of them: a step waits for nothing. A cut has rows copied aside before they
change, and a table that tracks changes remembers which rows changed since the last cut and which ids went.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from monolith.cuda.device import Device
from monolith.errors import TableArgumentError
from monolith.table.cuda.aside import Aside
from monolith.table.cuda.memory import BEFORE, CHANGED, NONE, Claimed, DeviceMemory
from monolith.table.hashing import unmix
from monolith.table.touched_keys import TouchedKeySet

_MOST_UNTOLD = 1 << 22  # ids of batches that may wait on the device


@dataclass(slots=True)
class Gone:
    """What a table lost since some moment."""

    ids: list[Tensor] = field(default_factory=list)
    cleared: bool = False
    """Everything from before is gone."""


class RowWatch:
    """Who watches one table. Not thread-safe.

    Args:
        tell: Tells touched sets what waits; they call it before they are looked into, from any thread.
    """

    def __init__(self, device: Device, tell: Callable[[], None]) -> None:
        self._device = device
        self._tell = tell
        self._touched: list[TouchedKeySet] = []
        self._untold: list[tuple[Tensor, Tensor]] = []
        self._untold_ids = 0
        self._gone: Gone | None = None  # None tracks nothing
        self._aside: Aside | None = None  # None while no cut is open

    @property
    def idle(self) -> bool:
        """Whether nobody watches: then rows may be written past this table's calls."""
        return not self._touched and not self._keeps_flags

    # Touched sets

    def touch(self, touched: TouchedKeySet) -> None:
        self.tell_touched()
        self._touched.append(touched)
        touched.ask_before(self._tell)

    def untouch(self, touched: TouchedKeySet) -> None:
        self.tell_touched()
        self._touched = [other for other in self._touched if other is not touched]
        touched.ask_no_more(self._tell)

    def tell_touched(self) -> None:
        """Tell sets what waits for them, waiting for the device."""
        untold, self._untold, self._untold_ids = self._untold, [], 0
        if untold:
            ids = torch.cat([ids for ids, _ in untold])
            places = torch.cat([places for _, places in untold])
            self._insert(torch.unique(ids[places != NONE]).cpu())

    # Cuts and changes

    def track(self, memory: DeviceMemory, *, on: bool) -> None:
        """Forget what changed; remember it from now on, or not."""
        self._gone = Gone() if on else None
        self._set_flags(memory)
        if memory.flags is not None:
            memory.flags.bitwise_and_(0xFF ^ CHANGED)

    def open_cut(self, memory: DeviceMemory, rows: int) -> Gone | None:
        """Have rows copied before they change; return what went since the cut before, where that is known.

        Raises:
            TableArgumentError: Another cut is open.
        """
        if self._aside is not None:
            raise TableArgumentError("table: a cut is open already; close it first")
        self._aside = Aside(memory, self._device, rows)
        self._set_flags(memory)
        assert memory.flags is not None
        memory.flags.bitwise_and_(CHANGED).mul_(BEFORE // CHANGED)
        before = self._gone
        self._gone = None if before is None else Gone()
        return before

    @property
    def aside(self) -> Aside | None:
        """The copies of the open cut."""
        return self._aside

    def close_cut(self, memory: DeviceMemory | None, unsaved: Gone | None) -> None:
        """Let the copies go; what went and changed up to the cut counts again, where it is not saved."""
        aside, self._aside = self._aside, None
        if aside is not None:
            aside.keep_for_current()
        flags = None if memory is None else memory.flags
        if memory is None or flags is None:
            return
        again = unsaved is not None and self._gone is not None and not self._gone.cleared
        flags.bitwise_and_(CHANGED | BEFORE if again else CHANGED).ne_(0).mul_(CHANGED)
        if unsaved is not None and self._gone is not None and again:
            self._gone.ids = unsaved.ids + self._gone.ids
            self._gone.cleared = unsaved.cleared
        self._set_flags(memory)

    # What happens to rows

    def writing(self, memory: DeviceMemory, claimed: Claimed) -> None:
        """Rows of a batch are about to be written."""
        if self._keeps_flags:
            memory.note_writes(claimed)
        if self._aside is not None:
            self._aside.capture(memory, claimed.places)

    def wrote(self, ids: Tensor, places: Tensor) -> None:
        """Rows of a batch were written, at these places. Nobody else writes into either."""
        if not self._touched or not len(ids):
            return
        self._untold.append((ids, places))
        self._untold_ids += len(ids)
        if self._untold_ids > _MOST_UNTOLD:
            self.tell_touched()

    def dropping(self, memory: DeviceMemory, places: Tensor) -> None:
        """Rows at int64 places are about to go."""
        if self._aside is not None:
            self._aside.capture(memory, places.to(torch.int32))
        if self._touched or self._gone is not None:
            ids = _ids(memory.hashes_at(places))
            self._insert(ids)
            if self._gone is not None:
                self._gone.ids.append(ids)

    def clearing(self, memory: DeviceMemory, rows: int) -> None:
        """All rows are about to go.

        Raises:
            TableArgumentError: A cut is open.
        """
        if self._aside is not None:
            raise TableArgumentError("clear: a cut of this table is open; close it first")
        self.tell_touched()
        if self._touched:
            # So many at most: the set is full then, loses them by the last, and says so.
            most = 2 + max(touched.capacity for touched in self._touched)
            ids = _ids(memory.listed(min(rows, most), ordered=False)[0])
            self._insert(ids[:-1])
            self._insert(ids[-1:])
        if self._gone is not None:
            self._gone = Gone(cleared=True)

    def follow(self, memory: DeviceMemory) -> None:
        """A table without rows got another memory."""
        self._set_flags(memory)

    # Inside

    @property
    def _keeps_flags(self) -> bool:
        return self._gone is not None or self._aside is not None

    def _set_flags(self, memory: DeviceMemory) -> None:
        if self._keeps_flags != (memory.flags is not None):
            memory.watch(on=self._keeps_flags)

    def _insert(self, ids: Tensor) -> None:
        if len(ids):
            for touched in self._touched:
                touched.insert(ids)


def _ids(hashes: Tensor) -> Tensor:
    return torch.from_numpy(unmix(hashes.cpu().numpy().view(np.uint64)))
