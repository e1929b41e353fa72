"""Tables of one layout: what launches over them have in common, and where in a batch each of them lies."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from monolith.cuda.device import Device
from monolith.cuda.kernels import THREADS, Kernels, blocks_for
from monolith.table.compressors import OneBit
from monolith.table.cuda.cells import MOST_CELLS, Cells, Ints, Spans
from monolith.table.cuda.cuda_table import CudaTable
from monolith.table.cuda.layout import DeviceRowLayout, fused_row_source
from monolith.table.cuda.memory import KEYS, LONG_RUN, LOOKUP_BLOCKS, STRETCH

_PACE_BYTES = 1024  # of a launch's parameters, for rates and scales: as in fused_rows.cu
_TOGETHER = 4  # ids that a tile looks up at once: as in rows.cu

Floats = NDArray[np.float32]
Told = ctypes.Array[ctypes.c_char]


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

    alike: TablesAlike
    numbers: list[int]
    """Which tables."""
    per_tile: int
    sums: list[PlannedLaunch]
    """What sums long runs, where there may be some."""
    steps: list[PlannedLaunch]


class TablesAlike:
    """Tables of one layout.

    Args:
        numbers: Which they are.
        rates_at: Where the rates of each begin.
    """

    def __init__(
        self, tables: Sequence[CudaTable], numbers: Sequence[int], rates_at: Ints, device: Device
    ) -> None:
        segments = tables[0].config.segments
        self.layout: DeviceRowLayout = tables[0]._layout
        self.numbers = np.array(numbers, np.int64)
        self.paced = self.layout.lazy or any(isinstance(one.compressor, OneBit) for one in segments)
        """Whether rows are seen otherwise from step to step."""
        self.most = most_cells(tables[0])
        self.kernels: Kernels = device.kernels(fused_row_source(self.layout), "fused_rows")
        self.tables = tables
        self.rates_at = rates_at[:, None] + np.arange(len(segments))
        self._scalar_bytes = ctypes.sizeof(tables[0]._paces.scalars())
        self._unpaced: Told = (ctypes.c_char * (self.most * self._scalar_bytes))()
        self._kept: tuple[bytes, Told] = b"", self._unpaced

    def lookups(self, spans: Spans, device: Device) -> Iterator[PlannedLaunch]:
        """Yield what looks cells up that are of these tables."""
        most_blocks = LOOKUP_BLOCKS * device.processors
        for part in spans.parts(self.most):
            own = spans.some(part)
            cells = own.cells(-(-own.sizes // _TOGETHER), own.floats)
            blocks = min(most_blocks, blocks_for(cells.units, per_block=THREADS // KEYS))
            yield PlannedLaunch(own.tables, cells, blocks)

    def steps(self, spans: Spans, *, summed: bool) -> PlannedSteps:
        """Return what trains cells that are of these tables, each by its whole share of the batch."""
        per_tile = self.tables[0]._held.per_tile(int(spans.sizes.sum()))
        long = summed and int(spans.sizes.max()) >= LONG_RUN
        planned = PlannedSteps(self, spans.tables.tolist(), per_tile, [], [])
        for part in spans.parts(self.most):
            own = spans.some(part)
            shifts = own.floats - own.ids * self.layout.dim
            if long:
                cells = own.cells(own.sizes // STRETCH, shifts)
                planned.sums.append(PlannedLaunch(own.tables, cells, cells.units))
            cells = own.cells(-(-own.sizes // per_tile), shifts)
            planned.steps.append(
                PlannedLaunch(own.tables, cells, blocks_for(cells.units * self.layout.lanes))
            )
        return planned

    def paces(self, tables: Ints, rates: Floats | None) -> Told:
        """Return rates, where they matter, and scales as a launch takes them.

        Args:
            tables: By cell, the number of its table.
            rates: Of all segments of all tables.
        """
        if rates is None and not self.paced:
            return self._unpaced
        key = b"" if rates is None else tables.tobytes() + rates.tobytes()
        if key == self._kept[0] and not self.paced:
            return self._kept[1]
        which = np.searchsorted(self.numbers, tables)
        own = None if rates is None else rates[self.rates_at[which]]
        size = self._scalar_bytes
        made: Told = (ctypes.c_char * (self.most * size))()
        data = memoryview(made).cast("B")
        if self.paced:
            for cell, number in enumerate(which.tolist()):
                told = self.tables[number]._paces.scalars(None if own is None else own[cell].tolist())
                data[cell * size : (cell + 1) * size] = bytes(told)
        elif own is not None:
            filled = np.frombuffer(data, np.float32).reshape(self.most, -1)
            filled[: len(which), : own.shape[1]] = own
            self._kept = key, made
        return made


def most_cells(table: CudaTable) -> int:
    """Return how many such tables go into a launch, by their rates and scales; perhaps none."""
    return min(MOST_CELLS, _PACE_BYTES // ctypes.sizeof(table._paces.scalars()))
