"""The memory of a device table: an index, its rows, and the counters on the device.

    place      0 ... 15 | 16 ... 31 | ...      | P, P + 1        P places in buckets of 16, and 2 extra ones
    keys       hash, FREE or MARK              | FREE or HELD    int64; see places.cuh
    times      event time of the row                             int32 (the bits of a uint32)
    values     the embedding, float32, bfloat16 or compressed    (places, row_bytes / 4) int32
    states     optimizer state                                   (places, state_dim) float32

A row is stored at the place of its key. A batch of n ids is written in two launches and a sort between them:

    claim      find or create the place of each id               places (n,), made (n,)
    sort       positions by place, so that equal ids follow one another: a run is one row
    work       put, add, reset or train, one tile of threads per run: no two threads write one float

Every call launches on the current stream and returns; only methods that return a number wait for the device.
Callers make sure that calls follow one another: nothing here locks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from monolith.cuda.device import Device, DeviceStream
from monolith.cuda.kernels import THREADS, Kernels, blocks_for
from monolith.cuda.transfers import Parts, cut
from monolith.errors import AcceleratorError, DeviceFullError
from monolith.table.cuda.layout import DeviceRowLayout, index_kernels

KEYS = 16
"""Keys of a bucket of the index."""
EXTRA_PLACES = 2
"""Places behind the buckets, for the two ids whose hashes mean FREE and MARK as keys."""
NONE = (1 << 31) - 1
"""The place of an id that has none."""
MAX_PLACES = NONE - EXTRA_PLACES
RECENCY_BYTES = 4
"""More for a place of a table that remembers when its rows were written."""

USED, MARKS, INSERTED, NON_FINITE, NEWEST, FOUND, BAD_TIMES, FILTERED = range(8)
"""Positions of the counters on the device. USED counts places that are not free, MARKS those of them that are
marked: a table has USED - MARKS rows."""

TAKEN, CHANGED, BEFORE = 1, 2, 4
"""Flags of a place: see index.cu."""

UNUSABLE, TURNED_AWAY, ELSEWHERE = 1, 2, 4
"""Why a position of a batch is skipped. ELSEWHERE: another part of the batch writes this id."""

COUNTERS = 8
"""Of a table."""
LOOKUP_BLOCKS = 8
"""Of a launch that looks up, for each multiprocessor: measured."""
LONG_RUN, STRETCH = 512, 256
"""As in train.cu."""

_MOST_PER_TILE = 8
_WARPS = 64  # that a multiprocessor holds
_UINT64 = (1 << 64) - 1
_PULLS = 2  # after those few marks are left
SIGN = -(1 << 63)
"""The highest bit of a hash: turned, hashes are in order as signed numbers."""
NEVER_IDLE = (1 << 31) - 1
"""In place of the stamp of a row that must not be spilled."""


class _Table(ctypes.Structure):
    _fields_ = [
        ("keys", ctypes.c_void_p),
        ("buckets", ctypes.c_uint64),
        ("times", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("states", ctypes.c_void_p),
        ("counters", ctypes.c_void_p),
    ]


class _Wanted(ctypes.Structure):
    _fields_ = [
        ("first", ctypes.c_uint64),
        ("last", ctypes.c_uint64),
        ("latest", ctypes.c_uint32),
        ("aged", ctypes.c_int),
        ("now", ctypes.c_int64),
        ("to_live", ctypes.c_int64),
        ("to_live_by_slot", ctypes.c_void_p),
        ("flags", ctypes.c_void_p),
        ("with_", ctypes.c_uint32),
        ("without", ctypes.c_uint32),
    ]


class _Widths(ctypes.Structure):
    _fields_ = [("values", ctypes.c_int), ("states", ctypes.c_int)]


class _Writes(ctypes.Structure):
    _fields_ = [
        ("places", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("made", ctypes.c_void_p),
        ("times", ctypes.c_void_p),
        ("time", ctypes.c_uint32),
    ]


@dataclass(frozen=True, slots=True)
class Times:
    """Event times of a batch: one for each position, as the int32 of their bits, or one for all."""

    each: Tensor | None
    all: int

    def latest(self, skip: Tensor | None) -> int:
        """Return the newest of those that are not skipped, waiting for the device."""
        if self.each is None:
            return self.all
        seconds = self.each.to(torch.int64) & 0xFFFF_FFFF
        if skip is not None:
            seconds = seconds[skip == 0]
        return int(seconds.max()) if len(seconds) else 0


@dataclass(frozen=True, slots=True)
class Claimed:
    """The places of a batch's ids, and the batch in their order."""

    places: Tensor
    """int32 of shape (n,): NONE for a position that is skipped."""
    sorted_places: Tensor
    order: Tensor
    """int64 of shape (n,): positions by place, equal ones as they came."""
    made: Tensor
    """uint8 of shape (n,): whether the id got its place here; of equal ids any one."""
    times: Times

    def writes(self) -> _Writes:
        each = self.times.each
        return _Writes(
            self.sorted_places.data_ptr(),
            self.order.data_ptr(),
            len(self.places),
            self.made.data_ptr(),
            None if each is None else each.data_ptr(),
            self.times.all,
        )


@dataclass(frozen=True, slots=True)
class Ages:
    """Asks for rows whose age at a moment reached their time to live."""

    now: int
    to_live: int
    by_slot: Tensor | None
    """int64 on the device, one per slot, in place of `to_live`."""


@dataclass(frozen=True, slots=True)
class RowArrays:
    """Arrays of rows in device memory, by position."""

    times: Tensor
    values: Tensor
    states: Tensor

    @staticmethod
    def of(layout: DeviceRowLayout, rows: int, device: torch.device) -> RowArrays:
        """Return arrays for so many rows, not filled."""
        return RowArrays(
            torch.empty(rows, dtype=torch.int32, device=device),
            torch.empty((rows, layout.row_bytes // 4), dtype=torch.int32, device=device),
            torch.empty((rows, layout.state_dim), dtype=torch.float32, device=device),
        )


class Recency:
    """The last batch that used each place, for spilling. Waits for nothing. Not thread-safe.

    A row that a captured step made has stamp 0, until a batch uses it again or rows are spilled: it counts as
    used by then.

    Args:
        places: All there are, those behind the buckets too.

    Attributes:
        stamps: int32 by place, and one more: ids that have no place write there, so that a batch needs no
            filtering.
        batch: The number of the last batch.
        staged_from: Asked for the number of the oldest batch that is staged and not trained yet; rows with
            its stamp, or a later one, stay. None if none is staged.
    """

    def __init__(self, places: int, device: torch.device) -> None:
        self.stamps = torch.zeros(places + 1, dtype=torch.int32, device=device)
        self.batch = 0
        self.staged_from: Callable[[], int | None] = lambda: None

    def note(self, places: Tensor) -> None:
        """Take note of a batch that writes to places, int32; those beyond the last count for nothing."""
        self.batch += 1
        self.stamps.index_fill_(0, self.inside(places), self.batch)

    def forget(self, places: Tensor) -> None:
        """Take note that the rows at int64 places were dropped."""
        self.stamps.index_fill_(0, places, 0)

    def moved(self, before: Tensor, after: Tensor, places: int) -> Recency:
        """Return the same for rows that went to other places, both int64, of a memory of another size."""
        new = Recency(places, self.stamps.device)
        new.batch, new.staged_from = self.batch, self.staged_from
        new.stamps[after] = self.stamps[before]
        return new

    def inside(self, places: Tensor) -> Tensor:
        """Return places as int64; the one behind the last for those beyond it."""
        return places.clamp(max=len(self.stamps) - 1).to(torch.int64)


class DeviceMemory:
    """An index with rows at the places of their keys. Not thread-safe.

    Args:
        counters: int64, kept by the table over all the memories it has in its life.
        places: How many rows would fill it wholly; a multiple of KEYS.
        device: The one of the counters.
        stream: The handle of the current stream, to which kernels go.

    Attributes:
        stream: The table sets it when a call comes on another stream.
        recency: Called with every batch that claims places; None if no spilling table needs it.
    """

    def __init__(
        self, layout: DeviceRowLayout, counters: Tensor, places: int, *, device: Device, stream: int
    ) -> None:
        if not KEYS <= places <= MAX_PLACES:
            raise AcceleratorError(
                f"a table on a GPU can have {KEYS:,} to {MAX_PLACES:,} places, not {places:,}; spread larger "
                "ones over several tables or devices"
            )
        self.layout = layout
        self.places = places
        self.stream = stream
        self.counters = counters
        self._owner = device
        self._device = where = device.torch_device
        self.recency: Recency | None = None
        total = places + EXTRA_PLACES
        try:
            self._keys = torch.zeros(total, dtype=torch.int64, device=where)
            self._at = RowArrays.of(layout, total, where)
        except torch.OutOfMemoryError as cause:
            raise DeviceFullError(
                f"the device has no room for the {self.bytes_index + self.bytes_rows:,} bytes of a table of "
                f"{places:,} places; give rows a part of its memory (train.device_memory_bytes), or the "
                "table a capacity_bytes"
            ) from cause
        self._times, self._values, self._states = self._at.times, self._at.values, self._at.states
        self._struct = _Table(*self.words())  # the arrays of a memory never move
        self._flags: Tensor | None = None
        self._index = index_kernels().on(device)
        self._rows = layout.rows.on(device)
        # Tiles that the device runs at once: with fewer positions than that, each tile takes one.
        self._tiles = device.processors * _WARPS * 32 // layout.lanes
        self._lookup_blocks = LOOKUP_BLOCKS * device.processors

    @property
    def bytes_index(self) -> int:
        return (8 + 4 + (0 if self.recency is None else RECENCY_BYTES)) * (self.places + EXTRA_PLACES)

    @property
    def bytes_rows(self) -> int:
        return (self.layout.row_bytes + 4 * self.layout.state_dim) * (self.places + EXTRA_PLACES)

    @property
    def flags(self) -> Tensor | None:
        """uint8 by place, if recency is tracked; a few more than there are places."""
        return self._flags

    def keep_for(self, stream: DeviceStream) -> None:
        """Keep the memory alive for kernels launched on another stream than it was allocated on."""
        for array in (*self._arrays(), self._flags):
            if array is not None:
                stream.keep(array)

    # Reading

    def find(self, ids: Tensor) -> Tensor:
        """Return the int32 place of each id, or NONE."""
        places = torch.empty(len(ids), dtype=torch.int32, device=self._device)
        n = len(ids)
        self._launch(self._index, "find_all", blocks_for(len(ids)), *self.index, ids, n, places)
        return places

    def lookup(self, ids: Tensor, scalars: ctypes.Structure, out: Tensor) -> None:
        """Fill `out` with what training or serving sees of each id."""
        blocks = min(self._lookup_blocks, blocks_for(len(ids), per_block=4 * 256 // KEYS))
        self._launch(self._rows, "lookup", blocks, self._table(), ids, len(ids), scalars, out)

    def read(self, places: Tensor, at: RowArrays | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return event times (int64), values and state of rows by their int32 places; zeros for NONE.

        Args:
            at: Other rows than those of this memory, by position.
        """
        n, device = len(places), self._device
        times = torch.empty(n, dtype=torch.int64, device=device)
        values = torch.empty((n, self.layout.dim), dtype=torch.float32, device=device)
        states = torch.empty((n, self.layout.state_dim), dtype=torch.float32, device=device)
        blocks = blocks_for(n, per_block=8)
        table = self._table(at)
        self._launch(self._rows, "read_rows", blocks, table, places, n, times, values, states)
        return times, values, states

    def listed(
        self,
        room: int,
        *,
        first: int = 0,
        last: int = _UINT64,
        latest: int = (1 << 32) - 1,
        ages: Ages | None = None,
        flags: int = 0,
        no_flags: int = 0,
        ordered: bool = True,
    ) -> tuple[Tensor, Tensor, int]:
        """Return hashes and places, int64, of rows in the order of their hashes, and how many there are.

        Args:
            room: No more than so many are returned, and then any.
            first, last: Hashes, both included.
            latest: Only rows that are not newer.
            ages: Only rows that have expired.
            flags, no_flags: Only rows that have these flags, and none of those.
            ordered: False for any order.
        """
        hashes = torch.empty(room, dtype=torch.int64, device=self._device)
        places = torch.empty(room, dtype=torch.int64, device=self._device)
        old = Ages(0, 0, None) if ages is None else ages
        by_slot = None if old.by_slot is None else old.by_slot.data_ptr()
        known = None if self._flags is None else self._flags.data_ptr()
        wanted = _Wanted(
            first, last, latest, ages is not None, old.now, old.to_live, by_slot, known, flags, no_flags
        )
        found = self._counted(
            "list_rows",
            blocks_for(self.places + EXTRA_PLACES),
            *self.index,
            self._times,
            wanted,
            hashes,
            places,
            room,
        )
        taken = min(found, room)
        if not ordered:
            return hashes[:taken], places[:taken], found
        # Hashes are unsigned and torch sorts signed numbers: with the highest bit flipped both orders agree.
        order = (hashes[:taken] ^ SIGN).argsort()
        return hashes[:taken][order], places[:taken][order], found

    def idle(self, count: int, excluded: Tensor) -> Tensor:
        """Return the hashes of the rows not written for longest, `count` at most, none of `excluded`."""
        places, stamps = self._idle(count, self.find(excluded))
        return self.hashes_at(places[stamps != NEVER_IDLE])

    def hashes_at(self, places: Tensor) -> Tensor:
        """Return the hashes of rows by their int64 places."""
        extra = places - self.places  # behind the buckets, the hash of a place is its number there: 0 or 1
        return torch.where(extra >= 0, extra, self._keys[places])

    def digests(self, into: Tensor, number: int, total: int, count: int) -> Tensor:
        """Return `count` sums of digests, int64: of each bucket of ids at the place that `into` has for it.

        Args:
            into: int32, one for each bucket; -1 for one that was not requested.
            number, total: Of the ids that are, as unsigned numbers, `number` modulo `total`.
        """
        sums = torch.zeros(count, dtype=torch.int64, device=self._device)
        blocks = blocks_for(self.places + EXTRA_PLACES)
        self._launch(self._rows, "digest_rows", blocks, self._table(), into, number, total, sums)
        return sums

    def times_at(self, places: Tensor) -> Tensor:
        """Return the event times of rows, int64."""
        return self._times[places].to(torch.int64) & 0xFFFF_FFFF

    # Writing

    def unusable(self, gradients: Tensor) -> Tensor:
        """Return a uint8 for each gradient, UNUSABLE where nothing is trained by it, and count those."""
        n = len(gradients)
        skip = torch.empty(n, dtype=torch.uint8, device=self._device)
        self._launch(self._rows, "find_unusable", self._blocks(n), gradients, n, skip, self.counters)
        return skip

    def claim(self, ids: Tensor, times: Times, skip: Tensor | None, *, clock: bool = True) -> Claimed:
        """Give a place to every id that is not skipped.

        There must be enough free places for all ids that have none, which `ResidentRows` makes sure of: the
        kernel cannot grow the table, and would leave an id without a row.

        Args:
            clock: Whether the times of the batch advance the table's clock; training does that by itself,
                since it knows which gradients are left out.
        """
        n = len(ids)
        places = torch.empty(n, dtype=torch.int32, device=self._device)
        made = torch.empty(n, dtype=torch.uint8, device=self._device)
        self._launch(
            self._index,
            "claim_all",
            blocks_for(n),
            *self.index,
            ids,
            n,
            skip,
            times.each if clock else None,
            times.all if clock else 0,
            places,
            made,
            self.counters,
        )
        if self.recency is not None:
            self.recency.note(places)
        # Stable: gradients of equal ids are added in the order of the batch, on every device the same.
        sorted_places, order = torch.sort(places, stable=True)
        return Claimed(places, sorted_places, order, made, times)

    def claim_absent(self, ids: Tensor) -> Tensor:
        """Give places, marked ones too, to ids that differ and have none; return them, int32."""
        n = len(ids)
        places = torch.empty(n, dtype=torch.int32, device=self._device)
        blocks = blocks_for(n)
        self._launch(self._index, "claim_absent", blocks, *self.index, ids, n, places, self.counters)
        return places

    def put(
        self,
        claimed: Claimed,
        values: Tensor,
        states: Tensor | None,
        *,
        whole: bool,
        scalars: ctypes.Structure,
    ) -> None:
        """Set values; `whole` rows with their own time, and their state or a new one."""
        self._write("put_rows", claimed, values, states, whole, scalars)

    def add(self, claimed: Claimed, values: Tensor, scalars: ctypes.Structure) -> None:
        self._write("add_rows", claimed, values, scalars)

    def reset(self, claimed: Claimed, status: Tensor) -> None:
        """Reset rows; `status`, int8, is 0 for the first position of a new one and 1 for others."""
        self._write("reset_rows", claimed, status)

    def train(
        self,
        claimed: Claimed,
        gradients: Tensor,
        latest: Tensor | None,
        *,
        scalars: ctypes.Structure,
        step: int,
        summed: bool,
        checked: bool,
    ) -> None:
        """Take steps; `checked` looks at each row before it is written.

        A gradient that is not usable is left out and counted, and a row that was made for it goes again.
        """
        n, device = len(claimed.places), self._device
        runs = sums = None
        # A batch this large may have a run that is too long for one tile. Its sum is computed by a launch
        # before, one block per stretch; blocks that find no long run return at once.
        if summed and n >= LONG_RUN:
            stretches = n // STRETCH
            runs = torch.empty((stretches, 2), dtype=torch.int64, device=device)
            sums = torch.empty((stretches, self.layout.dim), dtype=torch.float32, device=device)
            arguments = claimed.writes(), gradients, runs, sums
            self._launch(self._rows, "sum_long_runs", stretches, *arguments, threads=STRETCH)
        per_tile = self.per_tile(n)
        self._launch(
            self._rows,
            "train_rows_checked" if checked else "train_rows",
            blocks_for(blocks_for(n, per_block=per_tile) * self.layout.lanes),
            self._table(),
            claimed.writes(),
            gradients,
            latest,
            scalars,
            step,
            runs,
            sums,
            summed,
            per_tile,
        )

    def per_tile(self, positions: int) -> int:
        """Return how many positions of a batch a tile trains."""
        return max(1, min(self.layout.lanes, _MOST_PER_TILE, positions // self._tiles))

    # Keeping track

    def watch(self, *, on: bool) -> None:
        """Keep flags from now on, none of them set; or keep them no more."""
        rounded = -(-(self.places + EXTRA_PLACES) // 4) * 4  # kernels update whole words of four flags
        self._flags = torch.zeros(rounded, dtype=torch.uint8, device=self._device) if on else None

    def note_writes(self, claimed: Claimed) -> None:
        """Flag the rows of a batch that is about to be written."""
        n = len(claimed.places)
        arguments = claimed.places, claimed.made, n, self._flags
        self._launch(self._index, "note_writes", blocks_for(n), *arguments)

    def capture(
        self, places: Tensor, hashes: Tensor, rows: RowArrays, flags: Tensor, captured: Tensor
    ) -> None:
        """Copy the rows at int32 places aside that are not TAKEN yet, and count them in `captured`."""
        n = len(places)
        source = self._times, self._values, self._states, self._widths()
        target = hashes, rows.times, rows.values, rows.states, flags, captured
        blocks = blocks_for(n)
        self._launch(
            self._index,
            "capture_rows",
            blocks,
            *self.index,
            *source,
            places,
            n,
            self._flags,
            *target,
        )

    # Forgetting

    def spill_parts(self, count: int) -> Parts:
        """Return the columns that `spill_idle` fills: hashes, times, gone, values and states.

        Shapes: n positions. hashes, times: int64 (n,); gone: uint8 (n,), 0 for a position without a row;
        values and states: int32 and float32, n rows one after another.
        """
        n = min(count, self.places + EXTRA_PLACES)
        return (
            (n, torch.int64),
            (n, torch.int64),
            (n, torch.uint8),
            (n * self.layout.row_bytes // 4, torch.int32),
            (n * self.layout.state_dim, torch.float32),
        )

    def spill_idle(self, count: int, into: Tensor) -> None:
        """Move the rows out that were not used for longest, `count` at most; waits for nothing.

        Args:
            into: uint8 on the device: memory for the columns of `spill_parts`.
        """
        assert self.recency is not None
        places, stamps = self._idle(count, None)
        source = self._times, self._values, self._states, self._widths(), self.recency.stamps
        moved = places, stamps, len(places), *cut(into, self.spill_parts(count))
        blocks = blocks_for(len(places))
        self._launch(self._index, "spill_rows", blocks, *self.index, *source, *moved, self.counters)

    def drop(self, places: Tensor) -> int:
        """Drop the rows at int64 places; return how many there were."""
        if self.recency is not None:
            self.recency.forget(places)
        return self._counted("drop_places", blocks_for(len(places)), *self.index, places, len(places))

    def tidy(self) -> None:
        """Turn marks into free places, in place; rows move nearer to their home buckets. See index.cu.

        Waits for nothing.
        """
        buckets, blocks = self.places // KEYS, blocks_for(self.places)
        away = torch.empty(8 * blocks, dtype=torch.int32, device=self._device)
        stamps = None if self.recency is None else self.recency.stamps
        rows = self._times, self._values, self._states, self._flags, stamps, self._widths()

        def free() -> None:
            passed = torch.zeros(buckets, dtype=torch.uint8, device=self._device)
            self._launch(self._index, "note_away", blocks, *self.index, away, passed)
            self._launch(self._index, "free_marks", blocks, *self.index, passed, self.counters)

        free()
        for _ in range(_PULLS):
            self._launch(self._index, "pull_rows", blocks, *self.index, away, *rows)
            self._launch(self._index, "drop_copied", blocks, *self.index, stamps)
            free()

    def copied(self) -> DeviceMemory:
        """Return a memory with the same rows and flags, for reading. Waits for nothing."""
        new = self.empty(self.places)
        if self._flags is not None:
            new._flags = torch.empty_like(self._flags)
            new._flags.copy_(self._flags)
        for mine, its in zip(self._arrays(), new._arrays(), strict=True):
            its.copy_(mine)
        return new

    def empty(self, places: int) -> DeviceMemory:
        """Return a memory of another size for the same rows, without any."""
        return DeviceMemory(self.layout, self.counters, places, device=self._owner, stream=self.stream)

    def moved(self, new: DeviceMemory) -> DeviceMemory:
        """Move all rows to `new`, an empty memory, without marks, and return it.

        This memory stays as it was: its kernels may still run on other streams. The caller keeps it alive for
        them (`keep_for`) and drops it.
        """
        new.stream = self.stream
        if self._flags is not None:
            new.watch(on=True)
        self._launch(
            self._index,
            "move_rows",
            blocks_for(self.places + EXTRA_PLACES),
            *self.index,
            self._times,
            self._values,
            self._states,
            self._flags,
            self._widths(),
            *new.index,
            new._times,
            new._values,
            new._states,
            new._flags,
        )
        self.counters[USED] -= self.counters[MARKS]  # on the device: nothing is read back
        self.counters[MARKS] = 0
        if self.recency is not None:
            hashes, before, _ = self.listed(self.places + EXTRA_PLACES)
            new.recency = self.recency.moved(before, new._places_of(hashes), new.places + EXTRA_PLACES)
        return new

    # Inside

    def _idle(self, count: int, excluded: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the places that were not used for longest, `count` at most, and their stamps, in no order.

        A stamp of `NEVER_IDLE` says that the row at the place must stay, or that there is none.

        Args:
            excluded: Places that must stay, int32; those beyond the last count for nothing.
        """
        assert self.recency is not None
        recency, total = self.recency, self.places + EXTRA_PLACES
        first = recency.staged_from()
        idle = torch.empty(total + 1, dtype=torch.int32, device=self._device)  # one more, as stamps have
        staged = NEVER_IDLE if first is None else first
        arguments = recency.stamps, recency.batch, staged, idle
        self._launch(self._index, "idle_stamps", blocks_for(total), *self.index, *arguments)
        if excluded is not None:
            idle.index_fill_(0, recency.inside(excluded), NEVER_IDLE)
        oldest = torch.topk(idle[:total], min(count, total), largest=False, sorted=False)
        return oldest.indices, oldest.values

    def _places_of(self, hashes: Tensor) -> Tensor:
        """Return the int64 places of rows by their hashes; all must be there."""
        places = torch.empty(len(hashes), dtype=torch.int32, device=self._device)
        n = len(hashes)
        self._launch(self._index, "find_hashes", blocks_for(len(hashes)), *self.index, hashes, n, places)
        return places.to(torch.int64)

    def _arrays(self) -> tuple[Tensor, ...]:
        return self._keys, self._times, self._values, self._states

    def _launch(
        self, kernels: Kernels, kernel: str, blocks: int, *arguments: Any, threads: int = THREADS
    ) -> None:
        kernels.launch(kernel, blocks, *arguments, stream=self.stream, threads=threads)

    @property
    def index(self) -> tuple[Tensor, int]:
        """The keys, and the number of their buckets."""
        return self._keys, self.places // KEYS

    def _widths(self) -> _Widths:
        return _Widths(self.layout.row_bytes // 4, self.layout.state_dim)

    def words(self, at: RowArrays | None = None) -> list[int]:
        """Return the fields of `Arrays` (places.cuh), in order.

        Args:
            at: Other rows than those of this memory, by position.
        """
        rows = self._at if at is None else at
        return [
            self._keys.data_ptr(),
            self.places // KEYS,
            rows.times.data_ptr(),
            rows.values.data_ptr(),
            rows.states.data_ptr(),
            self.counters.data_ptr(),
        ]

    def _table(self, at: RowArrays | None = None) -> _Table:
        return self._struct if at is None else _Table(*self.words(at))

    def _blocks(self, rows: int) -> int:
        return blocks_for(rows * self.layout.lanes)

    def _write(self, kernel: str, claimed: Claimed, *arguments: Any) -> None:
        blocks = self._blocks(len(claimed.places))
        self._launch(self._rows, kernel, blocks, self._table(), claimed.writes(), *arguments)

    def _counted(self, kernel: str, blocks: int, *arguments: Any) -> int:
        self.counters[FOUND] = 0  # kernels add to it
        self._launch(self._index, kernel, blocks, *arguments, self.counters)
        return int(self.counters[FOUND].item())
