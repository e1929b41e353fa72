"""Aside: rows of an open cut as they were, copied before they changed.

They are copied on the device, which is all that whoever writes waits for: into a buffer that becomes a piece,
in the order of hashes, when it may not hold what comes or somebody reads. Pieces go to host memory beside
training, by whoever reads the cut; only where more of them wait than the device has room for does a writer
do it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from monolith.cuda.device import Device, DeviceEvent
from monolith.table.cuda.memory import BEFORE, SIGN, DeviceMemory, RowArrays
from monolith.table.cuda.scans import HashedRows

_LEAST_BYTES = 64 << 20
_MOST_BYTES = 1 << 30
_FREE_SHARE = 16  # of the device's free memory one is taken for a buffer, and as much for pieces
_LEAST_ROWS = 1024


@dataclass(frozen=True, slots=True)
class _Piece:
    rows: HashedRows
    changed: Tensor
    """bool: whether a row had changed since the cut before."""
    ready: DeviceEvent | None
    """When it is on the device as a whole; None on the host."""

    def between(self, first: int, last: int, *, changed_only: bool) -> HashedRows:
        ordered = self.rows.hashes ^ SIGN
        begin = int(torch.searchsorted(ordered, first + SIGN))
        end = int(torch.searchsorted(ordered, last + SIGN, right=True))
        rows = self.rows.at(slice(begin, end))
        return rows.at(self.changed[begin:end]) if changed_only else rows


class Aside:
    """The copies of one cut. Called with the lock of its table held, but for `offload`.

    Args:
        rows: How many the cut has: more are never copied.
    """

    def __init__(self, memory: DeviceMemory, device: Device, rows: int) -> None:
        layout = memory.layout
        where = device.torch_device
        self._row_bytes = 8 + 4 + 1 + layout.row_bytes + 4 * layout.state_dim
        room = max(_LEAST_BYTES, min(_MOST_BYTES, device.free_bytes // _FREE_SHARE)) // self._row_bytes
        self._room = max(_LEAST_ROWS, min(rows, room))
        self._device = device
        self._hashes = torch.empty(self._room, dtype=torch.int64, device=where)
        self._rows = RowArrays.of(layout, self._room, where)
        self._flags = torch.empty(self._room, dtype=torch.uint8, device=where)
        self._captured = torch.zeros((), dtype=torch.int64, device=where)
        self._bound = 0
        self._lock = threading.Lock()  # guards what follows, whose entries are replaced and never taken out
        self._pieces: list[_Piece] = []

    def capture(self, memory: DeviceMemory, places: Tensor) -> None:
        """Copy the rows at int32 places that were not copied yet."""
        for begin in range(0, len(places), self._room):
            some = places[begin : begin + self._room]
            if self._bound + len(some) > self._room:
                self._bound = int(self._captured.item())
                if self._bound + len(some) > self._room:
                    self.seal(memory)
            memory.capture(some, self._hashes, self._rows, self._flags, self._captured)
            self._bound += len(some)

    def seal(self, memory: DeviceMemory) -> None:
        """Make a piece of what was copied."""
        found = int(self._captured.item()) if self._bound else 0
        self._bound = 0
        if not found:
            return
        order = (self._hashes[:found] ^ SIGN).argsort()
        rows = HashedRows(self._hashes[order], *memory.read(order.to(torch.int32), self._rows))
        changed = self._flags[order] & BEFORE != 0
        self._captured.zero_()
        with self._lock:
            self._pieces.append(_Piece(rows, changed, self._device.current_stream().record()))
            waiting = sum(len(piece.rows) for piece in self._pieces if piece.ready is not None)
        if waiting > self._room:
            self.offload()

    def between(self, first: int, last: int, *, changed_only: bool) -> list[HashedRows]:
        """Return copies by their hashes, both included, on the device or the host."""
        with self._lock:
            pieces = list(self._pieces)
        found = (piece.between(first, last, changed_only=changed_only) for piece in pieces)
        return [rows for rows in found if len(rows)]

    def offload(self) -> None:
        """Bring pieces to the host, waiting for the device. Any thread may call it."""
        with self._lock:
            pieces = list(self._pieces)
        stream = self._device.current_stream()
        for number, piece in enumerate(pieces):
            if piece.ready is not None:
                stream.wait_for_event(piece.ready)
                there = _Piece(piece.rows.moved_to("cpu"), piece.changed.cpu(), None)
                with self._lock:
                    self._pieces[number] = there

    @property
    def captured_bytes(self) -> int:
        """Memory of the copies, as far as the host knows of them."""
        with self._lock:
            sealed = sum(len(piece.rows) for piece in self._pieces)
        return self._row_bytes * (sealed + self._bound)

    def keep_for_current(self) -> None:
        """Have the buffer outlive what stands on the current stream."""
        stream = self._device.current_stream()
        for array in (self._hashes, self._rows.times, self._rows.values, self._rows.states, self._flags):
            stream.keep(array)
