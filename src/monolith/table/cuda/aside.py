"""Aside: rows of an open cut as they were, copied before they changed.

They are copied on the device into a buffer of fixed size, so that whoever writes waits for no more than that,
and when the buffer may not hold what comes it is emptied into host memory. There they lie in the order of
their hashes, a run for each time the buffer was emptied.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from monolith.cuda.device import Device
from monolith.table.cuda.memory import BEFORE, SIGN, DeviceMemory, RowArrays
from monolith.table.cuda.scans import HashedRows

_BUFFER_BYTES = 256 << 20
_LEAST_ROWS = 1024


@dataclass(frozen=True, slots=True)
class _Kept:
    rows: HashedRows
    keys: np.ndarray[tuple[int], np.dtype[np.uint64]]
    changed: Tensor
    """bool: whether a row had changed since the cut before."""


class Aside:
    """The copies of one cut. Not thread-safe.

    Args:
        rows: How many the cut has: more are never copied.
    """

    def __init__(self, memory: DeviceMemory, device: Device, rows: int) -> None:
        layout = memory.layout
        where = device.torch_device
        row_bytes = 8 + 4 + 1 + layout.row_bytes + 4 * layout.state_dim
        self._room = max(_LEAST_ROWS, min(rows, _BUFFER_BYTES // row_bytes))
        self._row_bytes = row_bytes
        self._device = device
        self._hashes = torch.empty(self._room, dtype=torch.int64, device=where)
        self._rows = RowArrays.of(layout, self._room, where)
        self._flags = torch.empty(self._room, dtype=torch.uint8, device=where)
        self._captured = torch.zeros((), dtype=torch.int64, device=where)
        self._bound = 0
        self._kept: list[_Kept] = []

    def capture(self, memory: DeviceMemory, places: Tensor) -> None:
        """Copy the rows at int32 places that were not copied yet."""
        for begin in range(0, len(places), self._room):
            some = places[begin : begin + self._room]
            if self._bound + len(some) > self._room:
                self._bound = int(self._captured.item())
                if self._bound + len(some) > self._room:
                    self.empty(memory)
            memory.capture(some, self._hashes, self._rows, self._flags, self._captured)
            self._bound += len(some)

    def empty(self, memory: DeviceMemory) -> None:
        """Bring what was copied to host memory."""
        found = int(self._captured.item()) if self._bound else 0
        self._bound = 0
        if not found:
            return
        order = (self._hashes[:found] ^ SIGN).argsort()
        times, values, state = memory.read(order.to(torch.int32), self._rows)
        rows = HashedRows(self._hashes[order], times, values, state).moved_to("cpu")
        changed = (self._flags[order] & BEFORE != 0).cpu()
        self._kept.append(_Kept(rows, rows.hashes.numpy().view(np.uint64), changed))
        self._captured.zero_()

    def between(self, first: int, last: int, *, changed_only: bool) -> list[HashedRows]:
        """Return copies in host memory, by their hashes, both included."""
        found = []
        for kept in self._kept:
            begin = int(np.searchsorted(kept.keys, np.uint64(first), side="left"))
            end = int(np.searchsorted(kept.keys, np.uint64(last), side="right"))
            if begin < end:
                rows = kept.rows.at(slice(begin, end))
                found.append(rows.at(kept.changed[begin:end]) if changed_only else rows)
        return found

    @property
    def captured_bytes(self) -> int:
        """Memory of the copies, as far as the host knows of them."""
        return self._row_bytes * (sum(len(kept.rows) for kept in self._kept) + self._bound)

    def keep_for_current(self) -> None:
        """Have the buffer outlive what stands on the current stream."""
        stream = self._device.current_stream()
        for array in (self._hashes, self._rows.times, self._rows.values, self._rows.states, self._flags):
            stream.keep(array)
