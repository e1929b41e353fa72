"""The memory of a device table: an index, its rows, and what is counted on the device.

Everything here goes to the current stream, and little is waited for: what returns a number waits,
the rest does not. Callers see to it that calls follow one another.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from monolith.cuda.device import Device, DeviceStream
from monolith.cuda.kernels import THREADS, Kernels, blocks_for
from monolith.errors import AcceleratorError
from monolith.table.cuda.layout import DeviceRowLayout, index_source

KEYS = 16
"""Keys of a bucket of the index."""
BESIDE = 2
"""Places behind the buckets, for the ids whose hashes stand for something else as keys."""
NONE = (1 << 31) - 1
"""The place of an id that has none."""
MAX_PLACES = NONE - BESIDE

USED, MARKS, INSERTED, NON_FINITE, NEWEST, FOUND, BAD_TIMES = range(7)
"""What the device counts, by its place among the counters. Places in use, and of those the marked."""

UNUSABLE, TURNED_AWAY, ELSEWHERE = 1, 2, 4
"""Why a position of a batch is passed over; an id elsewhere is written by another part of its batch."""

COUNTERS = 8
"""Of a table."""
LOOKUP_BLOCKS = 8
"""Of a launch that looks up, for each multiprocessor: measured."""
LONG_RUN, STRETCH = 512, 256
"""As in train.cu."""

_MOST_PER_TILE = 8
_WARPS = 64  # that a multiprocessor holds
_UINT64 = (1 << 64) - 1
_SIGN = -(1 << 63)


class _Table(ctypes.Structure):
    _fields_ = [
        ("keys", ctypes.c_void_p),
        ("buckets", ctypes.c_uint64),
        ("times", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("states", ctypes.c_void_p),
        ("counters", ctypes.c_void_p),
    ]


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


@dataclass(frozen=True, slots=True)
class Claimed:
    """The places of a batch's ids, and the batch in their order."""

    places: Tensor
    """int32 of shape (n,): NONE where a position is passed over."""
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


class DeviceMemory:
    """An index with rows at the places of their keys. Not thread-safe.

    Args:
        counters: int64, kept by the table over all the memories it has in its life.
        places: How many rows would fill it wholly; a multiple of KEYS.
        device: The one of the counters.
        stream: The handle of the current stream, to which kernels go.

    Attributes:
        stream: Set anew whenever another is the current one.
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
        total = places + BESIDE
        self._keys = torch.zeros(total, dtype=torch.int64, device=where)
        self._times = torch.zeros(total, dtype=torch.int32, device=where)
        self._values = torch.empty((total, layout.row_bytes // 4), dtype=torch.int32, device=where)
        self._states = torch.empty((total, layout.state_dim), dtype=torch.float32, device=where)
        self._index = device.kernels(index_source(), "index")
        self._rows = device.kernels(layout.source, "rows")
        self._tiles = device.processors * _WARPS * 32 // layout.lanes
        self._lookup_blocks = LOOKUP_BLOCKS * device.processors

    @property
    def bytes_index(self) -> int:
        return (8 + 4) * (self.places + BESIDE)

    @property
    def bytes_rows(self) -> int:
        return (self.layout.row_bytes + 4 * self.layout.state_dim) * (self.places + BESIDE)

    def keep_for(self, stream: DeviceStream) -> None:
        """Have the memory outlive what was launched on another stream than it was taken on."""
        for array in (self._keys, self._times, self._values, self._states):
            stream.keep(array)

    # Reading

    def find(self, ids: Tensor) -> Tensor:
        """Return the int32 place of each id, or NONE."""
        places = torch.empty(len(ids), dtype=torch.int32, device=self._device)
        n = _i64(len(ids))
        self._launch(self._index, "find_all", blocks_for(len(ids)), *self._head(), ids, n, places)
        return places

    def lookup(self, ids: Tensor, scales: Sequence[float], out: Tensor) -> None:
        """Fill `out` with what training or serving sees of each id."""
        blocks = min(self._lookup_blocks, blocks_for(len(ids), per_block=4 * 256 // KEYS))
        scalars = _scalars([0.0] * len(scales), scales)
        self._launch(self._rows, "lookup", blocks, self._table(), ids, _i64(len(ids)), scalars, out)

    def read(self, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return event times (int64), values and state of the rows at these places; zeros for NONE."""
        n, device = len(places), self._device
        times = torch.empty(n, dtype=torch.int64, device=device)
        values = torch.empty((n, self.layout.dim), dtype=torch.float32, device=device)
        states = torch.empty((n, self.layout.state_dim), dtype=torch.float32, device=device)
        blocks = blocks_for(n, per_block=8)
        self._launch(self._rows, "read_rows", blocks, self._table(), places, _i64(n), times, values, states)
        return times, values, states

    def listed(
        self, room: int, *, first: int = 0, last: int = _UINT64, latest: int = (1 << 32) - 1
    ) -> tuple[Tensor, Tensor, int]:
        """Return hashes and places, int64, of rows in the order of their hashes, and how many there are.

        Args:
            room: No more than so many are returned, and then any.
            first, last: Hashes, both included.
            latest: Only rows that are not newer.
        """
        hashes = torch.empty(room, dtype=torch.int64, device=self._device)
        places = torch.empty(room, dtype=torch.int64, device=self._device)
        found = self._counted(
            "list_rows",
            blocks_for(self.places + BESIDE),
            *self._head(),
            self._times,
            ctypes.c_uint64(first),
            ctypes.c_uint64(last),
            ctypes.c_uint32(latest),
            hashes,
            places,
            ctypes.c_uint64(room),
        )
        taken = min(found, room)
        # Hashes are unsigned: with their highest bit turned they are in order as torch sees them.
        order = (hashes[:taken] ^ _SIGN).argsort()
        return hashes[:taken][order], places[:taken][order], found

    def times_at(self, places: Tensor) -> Tensor:
        """Return the event times of rows, int64."""
        return self._times[places].to(torch.int64) & 0xFFFF_FFFF

    # Writing

    def unusable(self, gradients: Tensor) -> Tensor:
        """Return a uint8 for each gradient, UNUSABLE where nothing is trained by it, and count those."""
        n = len(gradients)
        skip = torch.empty(n, dtype=torch.uint8, device=self._device)
        self._launch(self._rows, "find_unusable", self._blocks(n), gradients, _i64(n), skip, self.counters)
        return skip

    def claim(self, ids: Tensor, times: Times, skip: Tensor | None) -> Claimed:
        """Give a place to every id that is not passed over. There must be room for all."""
        n = len(ids)
        places = torch.empty(n, dtype=torch.int32, device=self._device)
        made = torch.empty(n, dtype=torch.uint8, device=self._device)
        self._launch(
            self._index,
            "claim_all",
            blocks_for(n),
            *self._head(),
            ids,
            _i64(n),
            skip,
            times.each,
            ctypes.c_uint32(times.all),
            places,
            made,
            self.counters,
        )
        sorted_places, order = torch.sort(places, stable=True)
        return Claimed(places, sorted_places, order, made, times)

    def claim_absent(self, ids: Tensor) -> Tensor:
        """Give places, marked ones too, to ids that differ and have none; return them, int32."""
        n = len(ids)
        places = torch.empty(n, dtype=torch.int32, device=self._device)
        blocks = blocks_for(n)
        self._launch(self._index, "claim_absent", blocks, *self._head(), ids, _i64(n), places, self.counters)
        return places

    def put(self, claimed: Claimed, values: Tensor, states: Tensor | None, *, whole: bool) -> None:
        """Set values; `whole` rows with their own time, and their state or a new one."""
        self._write("put_rows", claimed, values, states, ctypes.c_int(whole))

    def add(self, claimed: Claimed, values: Tensor) -> None:
        self._write("add_rows", claimed, values)

    def reset(self, claimed: Claimed, status: Tensor) -> None:
        """Start rows anew; `status`, int8, is 0 for the first position of a new one and 1 for others."""
        self._write("reset_rows", claimed, status)

    def train(
        self,
        claimed: Claimed,
        gradients: Tensor,
        latest: Tensor | None,
        *,
        rates: Sequence[float],
        scales: Sequence[float],
        step: int,
        summed: bool,
        checked: bool,
    ) -> None:
        """Take steps; `checked` looks at each row before it is written."""
        n, device = len(claimed.places), self._device
        runs = sums = None
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
            _scalars(rates, scales),
            _i64(step),
            runs,
            sums,
            ctypes.c_int(summed),
            ctypes.c_int(per_tile),
        )

    def per_tile(self, positions: int) -> int:
        """Return how many positions of a batch a tile trains."""
        return max(1, min(self.layout.lanes, _MOST_PER_TILE, positions // self._tiles))

    # Forgetting

    def remove(self, ids: Tensor) -> int:
        return self._counted("remove_all", blocks_for(len(ids)), *self._head(), ids, _i64(len(ids)))

    def drop(self, places: Tensor) -> int:
        """Drop the rows at int64 places; return how many there were."""
        return self._counted("drop_places", blocks_for(len(places)), *self._head(), places, _i64(len(places)))

    def expire(self, now: int, to_live: int, by_slot: Tensor | None, *, dropping: bool) -> int:
        """Return how many rows have reached their time to live, and drop them where told to."""
        ages = _i64(now), _i64(to_live), by_slot, ctypes.c_int(dropping)
        return self._counted("expire", blocks_for(self.places + BESIDE), *self._head(), self._times, *ages)

    def moved(self, places: int) -> DeviceMemory:
        """Return a memory of another size with the same rows, and without marks."""
        new = DeviceMemory(self.layout, self.counters, places, device=self._owner, stream=self.stream)
        self._launch(
            self._index,
            "move_rows",
            blocks_for(self.places + BESIDE),
            *self._head(),
            self._times,
            self._values,
            self._states,
            ctypes.c_int(self.layout.row_bytes // 4),
            ctypes.c_int(self.layout.state_dim),
            *new._head(),
            new._times,
            new._values,
            new._states,
        )
        self.counters[USED] -= self.counters[MARKS]
        self.counters[MARKS] = 0
        return new

    # Inside

    def _launch(
        self, kernels: Kernels, kernel: str, blocks: int, *arguments: Any, threads: int = THREADS
    ) -> None:
        kernels.launch(kernel, blocks, *arguments, stream=self.stream, threads=threads)

    def _head(self) -> tuple[Tensor, ctypes.c_uint64]:
        return self._keys, ctypes.c_uint64(self.places // KEYS)

    def words(self) -> list[int]:
        """Return what kernels are told of a table, in the order of `Arrays`."""
        return [
            self._keys.data_ptr(),
            self.places // KEYS,
            self._times.data_ptr(),
            self._values.data_ptr(),
            self._states.data_ptr(),
            self.counters.data_ptr(),
        ]

    def _table(self) -> _Table:
        return _Table(*self.words())

    def _blocks(self, rows: int) -> int:
        return blocks_for(rows * self.layout.lanes)

    def _write(self, kernel: str, claimed: Claimed, *arguments: Any) -> None:
        blocks = self._blocks(len(claimed.places))
        self._launch(self._rows, kernel, blocks, self._table(), claimed.writes(), *arguments)

    def _counted(self, kernel: str, blocks: int, *arguments: Any) -> int:
        self.counters[FOUND] = 0
        self._launch(self._index, kernel, blocks, *arguments, self.counters)
        return int(self.counters[FOUND].item())


def _i64(number: int) -> ctypes.c_int64:
    return ctypes.c_int64(number)


def _scalars(rates: Sequence[float], scales: Sequence[float]) -> ctypes.Array[ctypes.c_float]:
    return (ctypes.c_float * (2 * len(rates)))(*rates, *scales)
