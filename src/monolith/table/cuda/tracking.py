"""Tracking: what publishers, snapshots and checkpoints learn about changed rows of a device table.

Touched sets get the ids whose rows changed or were removed. Those ids stay on the device until a set is read,
so that a training step waits for nothing. A snapshot copies the whole table within the device if there is
room, or else each row before it changes. A table that tracks changes remembers which rows changed since the
last snapshot (flags on the device) and which ids were removed (a list on the host).

    flags of a place    TAKEN: the open snapshot does not read the row in the table
                        CHANGED: changed since the last snapshot       BEFORE: changed before the open one
    open_snapshot       CHANGED becomes BEFORE, TAKEN is cleared
    close_snapshot      saved: BEFORE is forgotten; not saved: BEFORE becomes CHANGED again
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from monolith.cuda.device import Device
from monolith.errors import TableArgumentError
from monolith.table.cuda.memory import BEFORE, CHANGED, NONE, Claimed, DeviceMemory
from monolith.table.cuda.snapshots import CopiedRows, Removed, WholeCopy
from monolith.table.hashing import unmix
from monolith.table.touched_keys import TouchedKeySet

_MOST_UNTOLD = 1 << 22  # ids of batches that may wait on the device


class ChangeTracker:
    """Tells touched sets, snapshots and change tracking about the rows of one table. Not thread-safe.

    Args:
        tell: Tells touched sets what waits; they call it before they are looked into, from any thread.
    """

    def __init__(self, device: Device, tell: Callable[[], None]) -> None:
        self._device = device
        self._tell = tell
        self._touched: list[TouchedKeySet] = []
        self._untold: list[tuple[Tensor, Tensor]] = []  # ids and places of batches, on the device
        self._untold_ids = 0
        self._removed: Removed | None = None  # None tracks nothing
        self._snapshot_open = False
        self._copies: CopiedRows | None = None  # of the open snapshot, if rows are copied before they change

    @property
    def idle(self) -> bool:
        """Whether nothing tracks this table: then rows may be written without telling the tracker."""
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
        """Insert the waiting ids into the touched sets; waits for the device."""
        untold, self._untold, self._untold_ids = self._untold, [], 0
        if untold:
            ids = torch.cat([ids for ids, _ in untold])
            places = torch.cat([places for _, places in untold])
            self._insert(torch.unique(ids[places != NONE]).cpu())

    # Snapshots and changes

    def track(self, memory: DeviceMemory, *, on: bool) -> None:
        """Forget what changed; remember it from now on, or not."""
        self._removed = Removed() if on else None
        self._set_flags(memory)
        if memory.flags is not None:
            memory.flags.bitwise_and_(0xFF ^ CHANGED)

    def open_snapshot(self, memory: DeviceMemory, rows: int) -> tuple[WholeCopy | CopiedRows, Removed | None]:
        """Return where the snapshot finds its rows, and the ids removed since the snapshot before.

        Raises:
            TableArgumentError: Another snapshot is open.
        """
        if self._snapshot_open:
            raise TableArgumentError("table: a snapshot is open already; close it first")
        if memory.flags is not None:
            memory.flags.bitwise_and_(CHANGED).mul_(BEFORE // CHANGED)  # CHANGED becomes BEFORE, the rest 0
        copied: WholeCopy | CopiedRows | None = WholeCopy.of(memory, self._device, rows)
        if copied is None:
            copied = self._copies = CopiedRows(memory, self._device, rows)
            self._set_flags(memory)
        self._snapshot_open = True
        before = self._removed
        self._removed = None if before is None else Removed()
        return copied, before

    @property
    def copies(self) -> CopiedRows | None:
        """The copies of the open snapshot; None if it copied the whole table."""
        return self._copies

    def close_snapshot(self, memory: DeviceMemory | None, unsaved: Removed | None) -> None:
        """Free the copies. Unless they were saved, changes up to the snapshot count as changes again.

        Args:
            memory: None if the table was closed.
            unsaved: The ids removed before the snapshot, if it was not saved; None if it was.
        """
        copies, self._copies = self._copies, None
        self._snapshot_open = False
        if copies is not None:
            copies.keep_for_current()
        flags = None if memory is None else memory.flags
        if memory is None or flags is None:
            return
        again = unsaved is not None and self._removed is not None and not self._removed.cleared
        flags.bitwise_and_(CHANGED | BEFORE if again else CHANGED).ne_(0).mul_(CHANGED)
        if unsaved is not None and self._removed is not None and again:
            self._removed.ids = unsaved.ids + self._removed.ids
            self._removed.cleared = unsaved.cleared
        self._set_flags(memory)

    # What happens to rows

    def writing(self, memory: DeviceMemory, claimed: Claimed) -> None:
        """Note that rows of a batch are about to be written; call it before the write is launched."""
        if self._keeps_flags:
            memory.note_writes(claimed)
        if self._copies is not None:
            self._copies.capture(memory, claimed.places)

    def wrote(self, ids: Tensor, places: Tensor) -> None:
        """Note that rows of a batch were written, at these places. Neither tensor may change afterwards."""
        if not self._touched or not len(ids):
            return
        self._untold.append((ids, places))
        self._untold_ids += len(ids)
        if self._untold_ids > _MOST_UNTOLD:
            self.tell_touched()

    def dropping(self, memory: DeviceMemory, places: Tensor) -> None:
        """Note that the rows at int64 places are about to be dropped."""
        if self._copies is not None:
            self._copies.capture(memory, places.to(torch.int32))
        if self._touched or self._removed is not None:
            ids = ids_of(memory.hashes_at(places))
            self._insert(ids)
            if self._removed is not None:
                self._removed.ids.append(ids)

    def clearing(self, memory: DeviceMemory, rows: int) -> None:
        """Note that all rows are about to be dropped.

        Raises:
            TableArgumentError: A snapshot is open.
        """
        if self._snapshot_open:
            raise TableArgumentError("clear: a snapshot of this table is open; close it first")
        self.tell_touched()
        if self._touched:
            # A set that overflows drops everything and counts the loss. So no more ids than its capacity and
            # two are listed, and the last is inserted by itself: it finds the set full, which then counts
            # them all.
            most = 2 + max(touched.capacity for touched in self._touched)
            ids = ids_of(memory.listed(min(rows, most), ordered=False)[0])
            self._insert(ids[:-1])
            self._insert(ids[-1:])
        if self._removed is not None:
            self._removed = Removed(cleared=True)

    def follow(self, memory: DeviceMemory) -> None:
        """Note that a table without rows got another memory."""
        self._set_flags(memory)

    # Inside

    @property
    def _keeps_flags(self) -> bool:
        return self._removed is not None or self._copies is not None

    def _set_flags(self, memory: DeviceMemory) -> None:
        if self._keeps_flags != (memory.flags is not None):
            memory.watch(on=self._keeps_flags)

    def _insert(self, ids: Tensor) -> None:
        if len(ids):
            for touched in self._touched:
                touched.insert(ids)


def ids_of(hashes: Tensor) -> Tensor:
    """Return the ids that have these hashes, on the CPU; waits for the device."""
    return torch.from_numpy(unmix(hashes.cpu().numpy().view(np.uint64)))
