"""CudaTableCut: a device table as it was at one moment, while it goes on being trained.

Rows that did not change since are read where they lie, those that did from the copies (`aside.py`). A chunk
is found and gathered while writers wait, on a stream of its own, and comes to the host after they went on.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from monolith.cuda.device import Device
from monolith.errors import TableArgumentError
from monolith.table import arguments
from monolith.table.config import TableConfig
from monolith.table.cuda.aside import Aside
from monolith.table.cuda.scans import LAST_HASH, HashedRows, joined
from monolith.table.cuda.watch import Gone
from monolith.table.table import Scan


@dataclass(frozen=True, slots=True)
class CutChunk:
    """Rows of a range of hashes, on the device and, of those that were copied, on the host."""

    in_place: HashedRows
    copied: list[HashedRows]
    following: int | None
    """The hash to go on from."""


class CutTable(Protocol):
    """What a cut asks of its table."""

    def read_cut(self, first: int, last: int, limit: int, *, changed_only: bool) -> CutChunk: ...

    def end_cut(self, unsaved: Gone | None) -> None: ...


@dataclass(frozen=True, slots=True)
class CutMoment:
    """What a table was when it was cut."""

    rows: int
    scales: list[float]
    max_event_time: int
    gone: Gone | None
    """Since the cut before, where that is known."""


class CudaTableCut:
    """A `TableCut` of a table on a device."""

    def __init__(
        self,
        table: CutTable,
        config: TableConfig,
        device: Device,
        moment: CutMoment,
        aside: Aside,
    ) -> None:
        self._table = table
        self._config = config
        self._device = device
        self._moment = moment
        self._aside = aside
        self._lock = threading.Lock()  # guards what follows
        self._open = True

    @property
    def config(self) -> TableConfig:
        return self._config

    @property
    def scales(self) -> list[float]:
        return list(self._moment.scales)

    @property
    def max_event_time(self) -> int:
        return self._moment.max_event_time

    @property
    def captured_bytes(self) -> int:
        return self._aside.captured_bytes

    @property
    def tracked(self) -> bool:
        return self._moment.gone is not None

    @property
    def cleared(self) -> bool:
        return self._moment.gone is not None and self._moment.gone.cleared

    def __len__(self) -> int:
        return self._moment.rows

    def removed(self) -> Tensor:
        gone = self._moment.gone
        return torch.cat([torch.empty(0, dtype=torch.int64), *([] if gone is None else gone.ids)])

    def scan(
        self,
        cursor: int | None = None,
        *,
        limit: int = 65536,
        shard: int = 0,
        num_shards: int = 1,
        changed_only: bool = False,
    ) -> Scan:
        begin, end = arguments.scan_range(cursor, limit, shard, num_shards)
        if not self._open:
            raise TableArgumentError("scan: the cut was closed")
        if changed_only and not self.tracked:
            raise TableArgumentError("scan: this table does not keep track of changes")
        with self._device.active():
            reading, copying = self._device.new_stream(), self._device.new_stream()
            with self._device.on(reading):
                last = min(end - 1, LAST_HASH)
                chunk = self._table.read_cut(begin, last, limit, changed_only=changed_only)
                ready = reading.record()
            copying.wait_for_event(ready)
            with self._device.on(copying):
                parts = [rows.moved_to("cpu") for rows in (chunk.in_place, *chunk.copied)]
                self._aside.offload()
        return joined(parts, limit, chunk.following)

    def close(self, *, saved: bool) -> None:
        with self._lock:
            was_open, self._open = self._open, False
        if was_open:
            self._table.end_cut(None if saved else self._moment.gone)
