"""The far halves of tables, as one: `HotRows` finds, takes and puts the rows of all of them by one call.

    native.TableGroup    tables in host memory
    FarTables            tables of which some keep cold rows in files

Tables are asked side by side, so that the reads of all of them are under way together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from monolith import native
from monolith.table.hashing import unmix
from monolith.table.native_table import NativeTable
from monolith.table.table import Rows, Table
from monolith.table.tiered_table import SideBySide

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float32]
Columns: TypeAlias = tuple[Ints, Ints, NDArray[np.uint8], Floats, Floats]
"""Hashes, times, whether there is a row, values and states."""

_Result = TypeVar("_Result")


class FarFound(Protocol):
    """The far rows of one batch."""

    @property
    def rows(self) -> Sequence[int]:
        """By table: distinct ids that have a far row."""

    @property
    def distinct(self) -> Sequence[int]:
        """By table: distinct ids."""

    @property
    def sightings(self) -> Sequence[int]:
        """By table: positions of the batch whose id has a far row."""


class FarGroup(Protocol):
    """Far halves as one; `native.TableGroup` says what the calls do."""

    def find(self, ids: Ints, sizes: Ints, /) -> Any: ...
    def take(self, found: Any, ids: Ints, times: Ints, values: Floats, state: Floats, /) -> None: ...
    def put(self, rows: Sequence[Columns], /) -> list[int]: ...


class FoundFar:
    """The far rows of one batch, read already."""

    def __init__(self, found: Sequence[tuple[Rows, int, int]]) -> None:
        self.parts = [rows for rows, _, _ in found]
        self.rows = [len(rows) for rows in self.parts]
        self.distinct = [distinct for _, distinct, _ in found]
        self.sightings = [sightings for _, _, sightings in found]


class FarTables:
    """Does for any tables what `native.TableGroup` does for tables in host memory.

    Args:
        tables: In the order of calls.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = list(tables)
        self._side_by_side = SideBySide(len(self._tables))

    def find(self, ids: Ints, sizes: Ints) -> FoundFar:
        """Find which ids of one batch, table after table, have a row, and read these rows."""
        parts = np.split(ids, np.cumsum(sizes)[:-1])

        def find(number: int) -> tuple[Rows, int, int]:
            once, counts = np.unique(parts[number], return_counts=True)
            there, rows = self._tables[number].lookup_rows(torch.from_numpy(once))
            return rows.keep(there), len(once), int(counts[there.numpy()].sum())

        return FoundFar(self._each(find))

    def take(self, found: FoundFar, ids: Ints, times: Ints, values: Floats, states: Floats) -> None:
        """Move found rows out of the tables into these columns, table after table."""
        for name, column in (("ids", ids), ("event_times", times), ("values", values), ("state", states)):
            parts = [getattr(rows, name).numpy().reshape(-1) for rows in found.parts]
            np.concatenate(parts, out=column)
        self._each(lambda number: self._tables[number].remove(found.parts[number].ids))

    def put(self, columns: Sequence[Columns]) -> list[int]:
        """Restore rows, table after table; return how many each table was given."""

        def put(number: int) -> int:
            table, (hashes, times, there, values, states) = self._tables[number], columns[number]
            count = int(np.count_nonzero(there))
            if count:
                n, ids = len(hashes), unmix(hashes.view(np.uint64))
                parts = ids, times, values.reshape(n, table.dim), states.reshape(n, table.state_dim)
                table.restore(Rows(*map(torch.from_numpy, parts)).keep(torch.from_numpy(there != 0)))
            return count

        return self._each(put)

    def _each(self, work: Callable[[int], _Result]) -> list[_Result]:
        return self._side_by_side.each([partial(work, number) for number in range(len(self._tables))])


def far_tables(tables: Sequence[Table], workers: native.Workers | None) -> FarGroup:
    """Return far halves as one."""
    natives = [table.core for table in tables if isinstance(table, NativeTable)]
    return native.TableGroup(natives, workers) if len(natives) == len(tables) else FarTables(tables)
