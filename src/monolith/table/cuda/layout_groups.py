"""Layout groups: tables with rows of one layout, read and trained by the same launches.

A batch over many tables is one array of ids, table after table; the ids of one table (in one batch) are a
cell. A launch gets the position of each cell (`cells.cuh`), so that the number of launches does not depend on
the number of tables. The parameters of a launch are 4 KB at most, hence up to MAX_CELLS cells.

    ids      | table 0 ........ | table 1 .. | table 2 ............. |
    cells      start 0, size 17   start 17     start 25                 + where its floats start
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from monolith.cuda.device import Device
from monolith.cuda.kernels import THREADS, Kernels, blocks_for
from monolith.table.compressors import OneBit
from monolith.table.cuda.cuda_table import CudaTable
from monolith.table.cuda.layout import DeviceRowLayout
from monolith.table.cuda.memory import KEYS, LONG_RUN, LOOKUP_BLOCKS, STRETCH

MAX_CELLS = 96
"""Of one launch, as in cells.cuh: its parameters are 4 KB at most."""

_CELL = np.dtype([("shift", "<i8"), ("ids", "<i4"), ("size", "<i4"), ("begin", "<i4"), ("table", "<i4")])

Ints = NDArray[np.int64]


class Cells(ctypes.Structure):
    """The cells of a launch: struct Cells in cells.cuh."""

    _fields_ = [
        ("count", ctypes.c_int),
        ("units", ctypes.c_int),
        ("at", ctypes.c_byte * (MAX_CELLS * _CELL.itemsize)),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """The cells of a call: one per table, or one per table and batch."""

    tables: Ints
    """By cell, the number of its table; -1 for cells that a launch skips."""
    ids: Ints
    """By cell, the position of its first id."""
    sizes: Ints
    floats: Ints
    """By cell, the position of its first float."""

    @classmethod
    def of(cls, sizes: Ints, widths: Ints) -> Spans:
        """Return the cells of one batch, given the ids of each table and the floats per id."""
        ids, floats = np.cumsum(sizes), np.cumsum(sizes * widths)
        return cls(np.arange(len(sizes)), ids - sizes, sizes, floats - sizes * widths)

    def some(self, which: Ints) -> Spans:
        return Spans(self.tables[which], self.ids[which], self.sizes[which], self.floats[which])

    def parts(self, most: int) -> Iterator[Ints]:
        """Yield the cells of each launch, `most` at a time; empty cells are left out."""
        there = np.flatnonzero(self.sizes)
        for first in range(0, len(there), most):
            yield there[first : first + most]

    def cells(self, units: Ints, shifts: Ints) -> Cells:
        """Return these cells, MAX_CELLS at most, for a launch; `units` is the work of each."""
        ends = np.cumsum(units)
        made = Cells(len(units), int(ends[-1]))
        at = np.frombuffer(memoryview(made).cast("B"), _CELL, len(units), offset=Cells.at.offset)
        at["shift"], at["ids"], at["size"], at["table"] = shifts, self.ids, self.sizes, self.tables
        at["begin"] = ends - units  # the first unit of each cell: threads search for theirs here
        return made


_SCALAR_BYTES = 1024  # of a launch's parameters, for rates and scales: as in fused_rows.cuh
_TOGETHER = 4  # ids that a tile looks up at once: as in rows.cu

Floats = NDArray[np.float32]
Packed = ctypes.Array[ctypes.c_char]


@dataclass(frozen=True, slots=True, eq=False)
class PlannedLaunch:
    """A launch over cells."""

    tables: Ints
    """By cell, the number of its table."""
    cells: Cells
    blocks: int


@dataclass(frozen=True, slots=True, eq=False)
class PlannedSteps:
    """The launches that train tables of one layout."""

    group: LayoutGroup
    numbers: list[int]
    """The tables, by number."""
    per_tile: int
    sums: list[PlannedLaunch]
    """Launches that sum long runs first, if there may be any."""
    steps: list[PlannedLaunch]


class LayoutGroup:
    """Tables of one layout, and the launches that look up and train their rows.

    Args:
        numbers: The positions of these tables among all tables of a call.
        rates_at: By table, the position of its first rate among the rates of all tables.
    """

    def __init__(
        self, tables: Sequence[CudaTable], numbers: Sequence[int], rates_at: Ints, device: Device
    ) -> None:
        segments = tables[0].config.segments
        self.layout: DeviceRowLayout = tables[0]._layout
        self.numbers = np.array(numbers, np.int64)
        self.scalars_vary = self.layout.lazy or any(isinstance(one.compressor, OneBit) for one in segments)
        """Whether lookups depend on the step: rows decay lazily, or a one_bit segment gets steeper."""
        self.max_cells = max_cells(tables[0])
        self.kernels: Kernels = self.layout.fused_rows.on(device)
        self.tables = tables
        self.rates_at = rates_at[:, None] + np.arange(len(segments))
        self._scalar_bytes = ctypes.sizeof(tables[0]._scalars.scalars())
        self._unscaled: Packed = (ctypes.c_char * (self.max_cells * self._scalar_bytes))()
        self._kept: tuple[bytes, Packed] = b"", self._unscaled

    def lookups(self, spans: Spans, device: Device) -> Iterator[PlannedLaunch]:
        """Yield the launches that look up the cells of these tables."""
        most_blocks = LOOKUP_BLOCKS * device.processors
        for part in spans.parts(self.max_cells):
            own = spans.some(part)
            # A unit is _TOGETHER ids, looked up by a tile of KEYS threads.
            cells = own.cells(-(-own.sizes // _TOGETHER), own.floats)
            blocks = min(most_blocks, blocks_for(cells.units, per_block=THREADS // KEYS))
            yield PlannedLaunch(own.tables, cells, blocks)

    def steps(self, spans: Spans, *, summed: bool) -> PlannedSteps:
        """Return the launches that train the cells of these tables, one cell per table."""
        per_tile = self.tables[0]._memory.per_tile(int(spans.sizes.sum()))
        long = summed and int(spans.sizes.max()) >= LONG_RUN
        planned = PlannedSteps(self, spans.tables.tolist(), per_tile, [], [])
        for part in spans.parts(self.max_cells):
            own = spans.some(part)
            # Kernels address the gradient of position p as shift + p * dim, with p counted over all tables,
            # although tables before this one may be wider or narrower.
            shifts = own.floats - own.ids * self.layout.dim
            if long:
                cells = own.cells(own.sizes // STRETCH, shifts)
                planned.sums.append(PlannedLaunch(own.tables, cells, cells.units))
            cells = own.cells(-(-own.sizes // per_tile), shifts)
            planned.steps.append(
                PlannedLaunch(own.tables, cells, blocks_for(cells.units * self.layout.lanes))
            )
        return planned

    def scalars(self, tables: Ints, rates: Floats | None) -> Packed:
        """Return the scalars of each cell of a launch: its rates, if any are given, and scales.

        Args:
            tables: By cell, the number of its table.
            rates: Of all segments of all tables.
        """
        # Packing costs more than a launch, and rates seldom change from step to step: keep the last result.
        if rates is None and not self.scalars_vary:
            return self._unscaled
        key = b"" if rates is None else tables.tobytes() + rates.tobytes()
        if key == self._kept[0] and not self.scalars_vary:
            return self._kept[1]
        which = np.searchsorted(self.numbers, tables)
        own = None if rates is None else rates[self.rates_at[which]]
        size = self._scalar_bytes
        made: Packed = (ctypes.c_char * (self.max_cells * size))()
        data = memoryview(made).cast("B")
        if self.scalars_vary:
            for cell, number in enumerate(which.tolist()):
                packed = self.tables[number]._scalars.scalars(None if own is None else own[cell].tolist())
                data[cell * size : (cell + 1) * size] = bytes(packed)
        elif own is not None:
            filled = np.frombuffer(data, np.float32).reshape(self.max_cells, -1)
            filled[: len(which), : own.shape[1]] = own
            self._kept = key, made
        return made


def max_cells(table: CudaTable) -> int:
    """Return how many cells of such tables fit into a launch, by their rates and scales; may be 0."""
    return min(MAX_CELLS, _SCALAR_BYTES // ctypes.sizeof(table._scalars.scalars()))
