"""Cells: where the ids of each table lie in a batch over many tables, as a launch is told (`cells.cuh`)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST_CELLS = 96
"""Of one launch, as in cells.cuh: its parameters are 4 KB at most."""

_CELL = np.dtype([("shift", "<i8"), ("ids", "<i4"), ("size", "<i4"), ("begin", "<i4"), ("table", "<i4")])

Ints = NDArray[np.int64]


class Cells(ctypes.Structure):
    """Cells as a launch takes them."""

    _fields_ = [
        ("count", ctypes.c_int),
        ("units", ctypes.c_int),
        ("at", ctypes.c_byte * (MOST_CELLS * _CELL.itemsize)),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """The cells of a batch: tables, or tables in batches."""

    tables: Ints
    """Their numbers, -1 for cells that a launch passes over."""
    ids: Ints
    """What the ids of each begin at."""
    sizes: Ints
    floats: Ints
    """What the floats of each begin at."""

    @classmethod
    def of(cls, sizes: Ints, widths: Ints) -> Spans:
        """Return the cells of one batch: as many ids of each table, and as many floats for each id."""
        ids, floats = np.cumsum(sizes), np.cumsum(sizes * widths)
        return cls(np.arange(len(sizes)), ids - sizes, sizes, floats - sizes * widths)

    def some(self, which: Ints) -> Spans:
        return Spans(self.tables[which], self.ids[which], self.sizes[which], self.floats[which])

    def parts(self, most: int) -> Iterator[Ints]:
        """Yield which of them go into one launch after the other: those that are not empty."""
        there = np.flatnonzero(self.sizes)
        for first in range(0, len(there), most):
            yield there[first : first + most]

    def cells(self, units: Ints, shifts: Ints) -> Cells:
        """Return up to MOST_CELLS of them for a launch, each of so many units of its work."""
        ends = np.cumsum(units)
        made = Cells(len(units), int(ends[-1]))
        at = np.frombuffer(memoryview(made).cast("B"), _CELL, len(units), offset=Cells.at.offset)
        at["shift"], at["ids"], at["size"], at["table"] = shifts, self.ids, self.sizes, self.tables
        at["begin"] = ends - units
        return made
