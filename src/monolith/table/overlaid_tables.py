"""Overlaid tables: rows that changed after they were written to files, over those files.

    overlay = RowOverlay({"item": 17})
    tables = OverlaidTables(FrozenTables({"item": FrozenTable("item.rows")}), overlay)
    overlay.put("item", ids, values)
    tables.lookup(ids)

A server maps the exported rows and receives those that changed since. The overlay is above the files: a row
in it wins over the file, and a removed id has a row of zeros there, marked by its event time. A lookup is one
native call that sees each row whole, and never waits for a writer.

An overlay may cover several files: while a newer export replaces an older one, both are read for a moment.
The rows of the overlay are then at least as new as the newer file, so all of them stay valid; `settle`
removes those that the file contains as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith import native
from monolith.errors import TableArgumentError, TableClosedError
from monolith.table import arguments
from monolith.table.config import Segment, TableConfig
from monolith.table.digests import in_share
from monolith.table.frozen_table import (
    FrozenTable,
    FrozenTables,
    frozen_errors,
    fused_lookup,
    processors,
)
from monolith.table.native_table import NativeTable

_PRESENT = 0
"""The event time of a row that is there; one that has gone has the age of the overlay at that time."""
_SPANS = 64
"""Ranges of hashes that all rows are gone through in."""
_LAST_HASH = (1 << 64) - 1
_CHUNK = 65536


class RowOverlay:
    """Rows that came, and ids that went, by table. Thread-safe: each row changes as a whole.

    Args:
        widths: Table to floats per row.
    """

    def __init__(self, widths: Mapping[str, int]) -> None:
        self._widths = {name: widths[name] for name in sorted(widths)}
        self._tables = {
            name: NativeTable(TableConfig(name=name, segments=(Segment(dim=dim),)))
            for name, dim in self._widths.items()
        }
        self._age = _PRESENT + 1

    @property
    def widths(self) -> Mapping[str, int]:
        """Table to floats per row, sorted by name."""
        return MappingProxyType(self._widths)

    def __len__(self) -> int:
        return sum(map(len, self._tables.values()))

    @property
    def bytes(self) -> int:
        """Of memory."""
        return sum(table.stats().bytes_total for table in self._tables.values())

    def table(self, name: str) -> NativeTable:
        """Return the rows of a table, those of ids that have gone among them.

        Raises:
            TableArgumentError: There is no such table.
        """
        try:
            return self._tables[name]
        except KeyError:
            known = ", ".join(self._tables) or "none"
            raise TableArgumentError(f"there is no table {name!r} to follow; the model has {known}") from None

    def put(self, name: str, ids: Tensor, values: Tensor) -> None:
        """Let rows be these from now on.

        Args:
            ids: int64 of shape (n,), no id twice.
            values: float32 of shape (n, dim).
        """
        self._set(name, ids, values, _PRESENT)

    def bury(self, name: str, ids: Tensor) -> None:
        """Let ids have no row from now on, whatever a file has for them."""
        self._set(name, ids, torch.zeros(len(ids), self.table(name).dim), self._age)

    def _set(self, name: str, ids: Tensor, values: Tensor, time: int) -> None:
        """Write whole rows: unlike an assignment, their event time may decrease."""
        keys = arguments.id_array(ids)
        table = self.table(name)
        new = arguments.float_array(values, (len(keys), table.dim), "values")
        no_state = np.empty((len(keys), 0), np.float32)
        table.core.restore(keys, np.full(len(keys), time, np.uint32), new, no_state, None)

    def grow_older(self) -> int:
        """Return the age until now; what is buried from now on is younger."""
        self._age += 1
        return self._age - 1


class OverlaidTables:
    """Frozen tables under an overlay, and one native call for all of them. Thread-safe.

    Shapes: the ids of t tables, int64 (n,) with sizes int64 (t,), give float32 (sum of ids x width,).

    Args:
        below: The exported tables; the caller still has to close them.
        above: Of the same tables and widths.
        threads: That share the part of a large call that is read from files; see `FrozenTables`.

    Raises:
        TableArgumentError: The tables are not the same, or of other widths.

    Examples:
        >>> import numpy as np
        >>> import torch
        >>> from monolith.table.frozen_table import FrozenSegment, FrozenTable, FrozenTables
        >>> from monolith.table.frozen_table import write_frozen_table
        >>> from monolith.table.overlaid_tables import OverlaidTables, RowOverlay
        >>> chunk = (np.array([7, 8]), np.ones((2, 1), np.float32))
        >>> _ = write_frozen_table("item.rows", [FrozenSegment(1, "fp32")], [chunk], rows=2)
        >>> overlay = RowOverlay({"item": 1})
        >>> tables = OverlaidTables(FrozenTables({"item": FrozenTable("item.rows")}), overlay)
        >>> overlay.put("item", torch.tensor([7]), torch.tensor([[5.0]]))
        >>> tables.lookup(torch.tensor([7, 8]), torch.tensor([2]))
        tensor([5., 1.])
    """

    def __init__(self, below: FrozenTables, above: RowOverlay, *, threads: int | None = None) -> None:
        if dict(below.tables) != dict(above.widths):
            raise TableArgumentError(
                f"an overlay of {dict(above.widths)} cannot cover tables of {dict(below.tables)}"
            )
        self._below, self._above = below, above
        self._dims = np.array(list(below.tables.values()), np.int64)
        count = processors() if threads is None else threads
        with frozen_errors():
            self._group: native.OverlaidGroup | None = native.OverlaidGroup(
                [table.core for table in below.members.values()],
                [above.table(name).core for name in below.tables],
                native.Workers(count) if count > 1 else None,
            )

    @property
    def tables(self) -> Mapping[str, int]:
        """Table to the width of its rows, sorted by name."""
        return self._below.tables

    @property
    def below(self) -> FrozenTables:
        return self._below

    @property
    def above(self) -> RowOverlay:
        return self._above

    def lookup(self, ids: Tensor, sizes: Tensor) -> Tensor:
        """Return the rows of all ids, as `FrozenTables.lookup` does."""
        return fused_lookup(self.group, ids, sizes, self._dims)

    @property
    def group(self) -> native.OverlaidGroup:
        """The tables for the core.

        Raises:
            TableClosedError: They were closed.
        """
        if self._group is None:
            raise TableClosedError("these tables were closed")
        return self._group

    def is_exact(self, name: str) -> bool:
        """Whether the file of a table has its values as they were given, and not as halves or bytes."""
        return all(segment.coding == "fp32" for segment in self._member(name).segments)

    def put_changed(self, name: str, ids: Tensor, values: Tensor) -> int:
        """Put rows into the overlay unless the file contains the same values; return how many were put."""
        keys = arguments.id_array(ids)
        new = arguments.float_array(values, (len(keys), self.tables[name]), "values")
        same = np.empty(len(keys), np.uint8)
        with frozen_errors():
            self._member(name).core.matches(keys, new, same)
        known = torch.from_numpy(same.view(np.bool_))
        if bool(known.any()):
            self._above.put(name, ids[~known], values[~known])
            # An older row of the overlay would hide the file, which is right again.
            self._above.table(name).remove(ids[known])
        else:
            self._above.put(name, ids, values)
        return len(keys) - int(known.sum())

    def present(self, name: str, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return the rows whose ids hash to `first` to `last`, both included, as lookups find them.

        Returns:
            Ids, int64 of shape (n,), in no order, and values, float32 of shape (n, dim).
        """
        dim = self.tables[name]
        above = self._above.table(name)
        with frozen_errors():
            ids, values = self._member(name).core.scan(first, last)
        # Rows of the file, except those that the overlay replaces or has removed; then the rows of the
        # overlay.
        covered = np.empty(len(ids), np.uint8)
        above.core.contains(ids, covered)
        kept = covered == 0
        parts = [(ids[kept], values.reshape(-1, dim)[kept])]
        for over_ids, times, over_values in _scanned(above, first, last):
            there = times == _PRESENT
            parts.append((over_ids[there], over_values[there]))
        return (
            torch.from_numpy(np.concatenate([one[0] for one in parts])),
            torch.from_numpy(np.concatenate([one[1] for one in parts])),
        )

    def present_ids(self, name: str, first: int, last: int) -> Tensor:
        """Return the ids of `present`."""
        return self.present(name, first, last)[0]

    def bury_others(self, name: str, kept: Tensor, share: tuple[int, int], spans: Iterable[range]) -> int:
        """Mark ids as removed: those of a share, in ranges of hashes, except the kept ones; return how many.

        Args:
            kept: int64, in ascending order.
            share: (k, n): the ids that are, as unsigned numbers, k modulo n.
            spans: Each from its first hash to beyond its last one.
        """
        stay = torch.cat([kept, kept[-1:]])  # searchsorted may return len(kept)
        buried = 0
        for span in spans:
            ids = self.present(name, span.start, span.stop - 1)[0]
            ids = ids[in_share(ids, share)].sort().values
            if len(kept):
                ids = ids[stay[torch.searchsorted(kept, ids)] != ids]
            self._above.bury(name, ids)
            buried += len(ids)
        return buried

    def settle(self, turn: AbstractContextManager[object] | None = None) -> int:
        """Remove rows from the overlay that the files contain as well; return how many.

        The mark of a removed id is dropped if the files lack the id and it was removed before the last call:
        a file that is being written now may still contain it.

        Args:
            turn: Entered for each chunk of rows; no thread may write to the overlay meanwhile.
        """
        age = self._above.grow_older()
        return sum(self._settle(name, age, turn or nullcontext()) for name in self.tables)

    def _settle(self, name: str, age: int, turn: AbstractContextManager[object]) -> int:
        above, core = self._above.table(name), self._member(name).core
        removed = 0
        cursor: int | None = 0
        while cursor is not None:
            with turn, frozen_errors():
                ids, times, values, _, cursor = above.core.scan(cursor, _LAST_HASH, _CHUNK)
                same, below = np.empty(len(ids), np.uint8), np.empty(len(ids), np.uint8)
                core.matches(ids, values, same)
                core.contains(ids, below)
                # Event times of the overlay's table are used as marks: _PRESENT for a row, else the age of a
                # removal.
                gone = times != _PRESENT
                useless = np.where(gone, (below == 0) & (times < age), same != 0)
                removed += above.remove(torch.from_numpy(ids[useless]))
        return removed

    def _member(self, name: str) -> FrozenTable:
        self._above.table(name)  # says which there are
        return self._below.members[name]

    def close(self) -> None:
        """Close files and overlay once the calls under way have ended. A second call does nothing."""
        self._group = None


def hash_spans() -> Iterator[range]:
    """Yield all hashes, in ranges that are gone through one after the other."""
    step = (1 << 64) // _SPANS
    for number in range(_SPANS):
        yield range(number * step, (number + 1) * step)


def _scanned(
    table: NativeTable, first: int, last: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]]:
    cursor: int | None = first
    while cursor is not None:
        ids, times, values, _, cursor = table.core.scan(cursor, last, _CHUNK)
        yield ids, times, values
