"""Snapshots of device tables: the rows of one moment, while training continues.

If half of the device's free memory is enough, a snapshot is a copy of the table's arrays within the device
(`WholeCopy`). That takes a millisecond for some gigabytes, and training is not affected by it afterwards.

Otherwise unchanged rows are read in the table, and changed ones from copies (`CopiedRows`), and steps cannot
be replayed as CUDA graphs meanwhile. A chunk is found and gathered while writers wait, on a stream of its
own, and copied to the host after they have continued.

    writer (holds the table's lock)      capture(places): copy rows not TAKEN yet -> buffer on the device
                                         buffer full: seal -> a piece, sorted by hash
    reader (snapshot.scan)               seal; list rows without TAKEN + pieces of the same range of hashes
                                         unlock; copy both to the host; offload older pieces

A chunk is a range of hashes, in the table as well as in the pieces, so that both are merged without a search.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from monolith.cuda.device import Device, DeviceEvent
from monolith.errors import AcceleratorError, TableArgumentError
from monolith.table import arguments
from monolith.table.cold_files import ColdRows
from monolith.table.config import TableConfig
from monolith.table.cuda.memory import BEFORE, SIGN, DeviceMemory, RowArrays
from monolith.table.hashing import unmix
from monolith.table.table import Rows, Scan, Table, TableSnapshot, joined_scan

LAST_HASH = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class HashedRows:
    """Rows by the order of their hashes, column by column, all in one place."""

    hashes: Tensor
    """int64 of shape (n,): the bits of unsigned numbers."""
    times: Tensor
    values: Tensor
    state: Tensor

    def __len__(self) -> int:
        return len(self.hashes)

    def at(self, which: Tensor | slice) -> HashedRows:
        return HashedRows(self.hashes[which], self.times[which], self.values[which], self.state[which])

    def moved_to(self, device: torch.device | str) -> HashedRows:
        columns = self.hashes, self.times, self.values, self.state
        return HashedRows(*(column.to(device) for column in columns))

    @staticmethod
    def merged(several: list[HashedRows]) -> HashedRows:
        """Bring rows together whose hashes differ; there must be some, of none to many rows."""
        if len(several) == 1:
            return several[0]
        hashes = torch.cat([rows.hashes for rows in several])
        order = (hashes ^ SIGN).argsort()
        columns = (
            torch.cat([getattr(rows, name) for rows in several])[order]
            for name in ("times", "values", "state")
        )
        return HashedRows(hashes[order], *columns)


def first_rows(
    memory: DeviceMemory,
    rows: int,
    limit: int,
    *,
    first: int,
    last: int,
    flags: int = 0,
    no_flags: int = 0,
) -> tuple[HashedRows, int | None]:
    """Return the first rows of a range of hashes, on the device, and the hash to continue from.

    Args:
        rows: How many the table has.
        first, last: Hashes, both included.
        flags, no_flags: Only rows that have these flags, and none of those.
    """

    def read(hashes: Tensor, places: Tensor) -> HashedRows:
        return HashedRows(hashes, *memory.read(places.to(torch.int32)))

    # The kernel lists rows in any order, so a range of hashes is needed that holds about `limit` rows. Hashes
    # are spread evenly: the range is chosen to hold `limit` and some standard deviations more, and is halved
    # or doubled if that was wrong (a filter by flags, or a small table).
    wanted = limit + 4 * int(limit**0.5) + 16
    room = min(rows, 2 * wanted)
    width = last - first if rows <= wanted else wanted * (LAST_HASH // rows)
    while True:
        until = min(last, first + width)
        hashes, places, found = memory.listed(room, first=first, last=until, flags=flags, no_flags=no_flags)
        if found > room:
            width //= 2
        elif found > limit:
            following = int(hashes[limit - 1].item()) & LAST_HASH
            return read(hashes[:limit], places[:limit]), following + 1
        elif until == last:
            return read(hashes, places), None
        elif found:
            return read(hashes, places), until + 1
        else:
            first, width = until + 1, 2 * width + 1


def merged_scan(several: list[HashedRows], limit: int, following: int | None) -> Scan:
    """Return rows on the host as a chunk of a scan: up to `limit`; the next chunk continues behind those."""
    rows = HashedRows.merged(several)
    if len(rows) > limit:
        rows = rows.at(slice(limit))
        following = (int(rows.hashes[-1]) & LAST_HASH) + 1
    ids = torch.from_numpy(unmix(rows.hashes.numpy().view(np.uint64)))
    return Scan(Rows(ids, rows.times, rows.values, rows.state), following)


_LEAST_BYTES = 64 << 20
_MOST_BYTES = 1 << 30
_FREE_SHARE = 16  # of the device's free memory one is taken for a buffer, and as much for pieces
_LEAST_ROWS = 1024


@dataclass(frozen=True, slots=True)
class _Piece:
    rows: HashedRows
    changed: Tensor
    """bool: whether a row had changed since the snapshot before."""
    ready: DeviceEvent | None
    """When it is on the device as a whole; None on the host."""

    def between(self, first: int, last: int, *, changed_only: bool) -> HashedRows:
        # Pieces are sorted by hash, so a range is a slice; see SIGN for the order of unsigned hashes.
        ordered = self.rows.hashes ^ SIGN
        begin = int(torch.searchsorted(ordered, first + SIGN))
        end = int(torch.searchsorted(ordered, last + SIGN, right=True))
        rows = self.rows.at(slice(begin, end))
        return rows.at(self.changed[begin:end]) if changed_only else rows


class CopiedRows:
    """The copies of one snapshot. Called with the lock of its table held, but for `offload`.

    Args:
        rows: How many the snapshot has: more are never copied.
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
        self._captured = torch.zeros((), dtype=torch.int64, device=where)  # rows in the buffer
        self._bound = 0  # an upper bound of that, known without asking the device
        # Guards the pieces. Entries are replaced (device by host) and never removed, so a position stays
        # valid while `offload` copies without the lock.
        self._lock = threading.Lock()
        self._pieces: list[_Piece] = []

    def capture(self, memory: DeviceMemory, places: Tensor) -> None:
        """Copy the rows at int32 places that were not copied yet.

        The device knows how many rows were copied; the host keeps an upper bound, and asks only when the
        bound says that the buffer may overflow. Most batches change rows that were copied before.
        """
        for begin in range(0, len(places), self._room):
            some = places[begin : begin + self._room]
            if self._bound + len(some) > self._room:
                self._bound = int(self._captured.item())
                if self._bound + len(some) > self._room:
                    self.seal(memory)
            memory.capture(some, self._hashes, self._rows, self._flags, self._captured)
            self._bound += len(some)

    def seal(self, memory: DeviceMemory) -> None:
        """Turn the buffer into a piece, sorted by hash; waits for the device."""
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
            self.offload()  # no more than a buffer's worth of pieces stays on the device

    def between(self, first: int, last: int, *, changed_only: bool) -> list[HashedRows]:
        """Return copies by their hashes, both included, on the device or the host."""
        with self._lock:
            pieces = list(self._pieces)
        found = (piece.between(first, last, changed_only=changed_only) for piece in pieces)
        return [rows for rows in found if len(rows)]

    def offload(self) -> None:
        """Copy pieces to the host, waiting for the device. Any thread may call it."""
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
        """Keep the memory of the buffer until the work on the current stream is done."""
        stream = self._device.current_stream()
        for array in (self._hashes, self._rows.times, self._rows.values, self._rows.states, self._flags):
            stream.keep(array)


@dataclass(frozen=True, slots=True)
class SnapshotChunk:
    """Rows of a range of hashes, on the device and, of those that were copied, on the host."""

    in_place: HashedRows
    copied: list[HashedRows]
    following: int | None
    """The first hash of the next chunk; None at the end."""


ReadChunk: TypeAlias = Callable[[int, int, int, bool], SnapshotChunk]
"""Reads rows of the open snapshot: first hash, last hash, most rows, whether only changed ones."""


@dataclass(slots=True)
class Removed:
    """The ids that a table lost since some moment."""

    ids: list[Tensor] = field(default_factory=list)
    cleared: bool = False
    """Whether all rows from before were dropped."""


@dataclass(frozen=True, slots=True)
class SnapshotMoment:
    """The state of a table when its snapshot was opened."""

    rows: int
    scales: list[float]
    max_event_time: int
    gone: Removed | None
    """Since the snapshot before; None if the table does not track changes."""


_WHOLE_SHARE = 0.5  # of the device's free memory, for copies of whole tables: they may grow meanwhile


class WholeCopy:
    """A copy of a whole table on its device. Thread-safe."""

    def __init__(self, memory: DeviceMemory, rows: int, ready: DeviceEvent, device: Device) -> None:
        self._memory: DeviceMemory | None = memory
        self._rows = rows
        self._ready = ready
        self._device = device
        self._lock = threading.Lock()  # guards the memory: its stream is that of the call which reads

    @classmethod
    def of(cls, memory: DeviceMemory, device: Device, rows: int) -> WholeCopy | None:
        """Start to copy a table on the current stream; None if the device has no room."""
        if _bytes_of(memory) > _WHOLE_SHARE * device.free_bytes:
            return None
        try:
            copied = memory.copied()
        except AcceleratorError:  # free memory may be in pieces
            return None
        return cls(copied, rows, device.current_stream().record(), device)

    def read(self, first: int, last: int, limit: int, changed_only: bool) -> SnapshotChunk:
        """Return a chunk, on the device. Work is put on the current stream."""
        with self._lock:
            if self._memory is None:
                raise TableArgumentError("scan: the snapshot was closed")
            stream = self._device.current_stream()
            stream.wait_for_event(self._ready)
            self._memory.stream = stream.handle
            flags = BEFORE if changed_only else 0
            rows, following = first_rows(self._memory, self._rows, limit, first=first, last=last, flags=flags)
        return SnapshotChunk(rows, [], following)

    def offload(self) -> None:
        """Do nothing: the copy stays on the device until it is closed."""

    def close(self) -> None:
        """Free the memory. The copies of all chunks to the host are done: `scan` has waited for them."""
        with self._lock:
            self._memory = None

    @property
    def captured_bytes(self) -> int:
        with self._lock:
            return 0 if self._memory is None else _bytes_of(self._memory)


def _bytes_of(memory: DeviceMemory) -> int:
    return memory.bytes_index + memory.bytes_rows + memory.places


class CudaTableSnapshot:
    """A `TableSnapshot` of a table on a device."""

    cold: None = None

    def __init__(
        self,
        config: TableConfig,
        device: Device,
        moment: SnapshotMoment,
        copies: WholeCopy | CopiedRows,
        *,
        read: ReadChunk,
        end: Callable[[Removed | None], None],
    ) -> None:
        self._read, self._end = read, end
        self._config = config
        self._device = device
        self._moment = moment
        self._copies = copies
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
        return self._copies.captured_bytes

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
            raise TableArgumentError("scan: the snapshot was closed")
        if changed_only and not self.tracked:
            raise TableArgumentError("scan: this table does not keep track of changes")
        with self._device.active():
            # Two streams, so that writers wait for as little as possible. The next write waits, on the
            # device, for the stream of this call (`reading`): that only gathers rows within the device. The
            # copy to the host takes longest, and runs on `copying`, which no writer waits for.
            reading, copying = self._device.new_stream(), self._device.new_stream()
            with self._device.on(reading):
                last = min(end - 1, LAST_HASH)
                chunk = self._read(begin, last, limit, changed_only)
                ready = reading.record()
            copying.wait_for_event(ready)
            with self._device.on(copying):
                parts = [rows.moved_to("cpu") for rows in (chunk.in_place, *chunk.copied)]
                self._copies.offload()
        return merged_scan(parts, limit, chunk.following)

    def close(self, *, saved: bool) -> None:
        with self._lock:
            was_open, self._open = self._open, False
        if was_open:  # outside the lock: the table takes its own
            if isinstance(self._copies, WholeCopy):
                self._copies.close()
            self._end(None if saved else self._moment.gone)


class JoinedSnapshot:
    """A `TableSnapshot` of two tables that together have the rows of one, both of one moment.

    A row that moves from one to the other afterwards stays where it was, in the snapshots. A row that moved
    since the snapshot before counts as changed, although its values are the same.

    Args:
        tables: Tables that no thread writes to until this is made.
    """

    def __init__(self, config: TableConfig, tables: Sequence[Table]) -> None:
        self._config = config
        self._parts: list[TableSnapshot] = []
        try:
            for table in tables:
                self._parts.append(table.snapshot())
        except BaseException:
            self.close(saved=False)  # a snapshot that stays open would have the first table copy rows forever
            raise

    @property
    def config(self) -> TableConfig:
        return self._config

    @property
    def scales(self) -> list[float]:
        return self._parts[0].scales

    @property
    def max_event_time(self) -> int:
        return max(part.max_event_time for part in self._parts)

    @property
    def captured_bytes(self) -> int:
        return sum(part.captured_bytes for part in self._parts)

    @property
    def tracked(self) -> bool:
        return all(part.tracked for part in self._parts)

    @property
    def cleared(self) -> bool:
        return all(part.cleared for part in self._parts)

    @property
    def cold(self) -> ColdRows | None:
        found = [part.cold for part in self._parts]
        files = [file for cold in found if cold is not None for file in cold.files]
        if not files:
            return None
        scans = [
            part.scan if cold is None else cold.scan_others
            for part, cold in zip(self._parts, found, strict=True)
        ]

        def scan_others(
            cursor: int | None = None, *, limit: int = 65536, shard: int = 0, num_shards: int = 1
        ) -> Scan:
            found = [scan(cursor, limit=limit, shard=shard, num_shards=num_shards) for scan in scans]
            return joined_scan(found, limit)

        return ColdRows(files, scan_others)

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def removed(self) -> Tensor:
        return torch.cat([part.removed() for part in self._parts])

    def scan(
        self,
        cursor: int | None = None,
        *,
        limit: int = 65536,
        shard: int = 0,
        num_shards: int = 1,
        changed_only: bool = False,
    ) -> Scan:
        how = {"limit": limit, "shard": shard, "num_shards": num_shards}
        if limit < 1:
            raise TableArgumentError(f"scan: limit must be at least 1, got {limit}")
        return joined_scan(
            [part.scan(cursor, **how, changed_only=changed_only) for part in self._parts], limit
        )

    def close(self, *, saved: bool) -> None:
        for part in self._parts:
            part.close(saved=saved)
