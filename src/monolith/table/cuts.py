"""Cuts: a table as it was at one moment, while it goes on being trained.

A checkpoint must be of one moment, and training must not wait for the disk. So a table
can be cut: from then on a row is copied aside before it changes for the first time, and
reading the cut takes the copy. Opening a cut costs next to nothing, whatever the size of
the table; memory grows with the rows that change until it is closed.

A table that keeps track of changes also says what happened since the cut before: which
rows changed and which ids went. That is all an incremental checkpoint writes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from monolith.table.config import TableConfig
from monolith.table.table import Scan, Table

if TYPE_CHECKING:
    from torch import Tensor


class TableCut(Protocol):
    """What a table held when the cut was opened. Thread-safe; one at a time per table."""

    @property
    def config(self) -> TableConfig: ...

    @property
    def scales(self) -> list[float]:
        """One per segment: how steep a one_bit segment was."""

    @property
    def max_event_time(self) -> int:
        """The newest event time that the table had been told by then."""

    @property
    def captured_bytes(self) -> int:
        """Memory of the rows copied so far because they changed."""

    @property
    def tracked(self) -> bool:
        """Whether it knows what changed since the cut before."""

    @property
    def cleared(self) -> bool:
        """Whether the table was cleared since the cut before: all that it held then is gone."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def removed(self) -> Tensor:
        """Return the ids removed since the cut before, int64; some may have come back as changed rows."""

    def scan(
        self,
        cursor: int | None = None,
        *,
        limit: int = 65536,
        shard: int = 0,
        num_shards: int = 1,
        changed_only: bool = False,
    ) -> Scan:
        """As `Table.scan`; with `changed_only`, the rows that changed since the cut before."""

    def close(self, *, saved: bool) -> None:
        """Let the copies go.

        Args:
            saved: Whether what changed up to the cut is safe now. If not, it counts as changed again, and
                the next cut will tell. Closing again does nothing.
        """


class DumpableTable(Table, Protocol):
    """A table in this process, which can be held still and cut."""

    def frozen(self) -> AbstractContextManager[None]:
        """Hold writers off while the block runs; readers go on. Nests."""

    def cut(self) -> TableCut:
        """Hold this moment fast. Writers wait while it is opened, not longer. In a `frozen` block it is
        opened at once, so that many tables can be cut at one moment.

        Raises:
            TableArgumentError: Another cut is open.
        """

    def track_changes(self, on: bool = True) -> None:
        """Remember from now on which rows change, for cuts to tell; what was remembered is forgotten."""

    @property
    def scales(self) -> list[float]:
        """One per segment: how steep a one_bit segment has become."""

    def set_scales(self, scales: list[float]) -> None: ...
