"""Delta targets: the rows that a subscriber keeps up to date, those of a serving server or of a standby."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from monolith.checkpoint.saved_tables import IdShard
from monolith.sync.messages import PublishState
from monolith.table import Rows, Table, in_share, iterate, iterate_buckets


class DeltaTarget(Protocol):
    """Takes the rows that a subscriber reads. Called by one thread at a time.

    Snapshots are applied one after the other; between two calls of one, deltas of other shards are applied.
    A table that the target does not have is ignored.
    """

    @property
    def tables(self) -> Mapping[str, int]:
        """Table to floats per row."""

    @property
    def generation(self) -> int:
        """Rises whenever the target drops its rows: log positions reached before that no longer count."""

    def apply(self, rows: Mapping[str, Rows], removed: Mapping[str, Tensor]) -> None:
        """Replace the rows of the same ids, and drop the removed ids. Each row changes as a whole."""

    def begin_snapshot(self, shard: IdShard, buckets: Tensor | None) -> None:
        """Prepare for all rows of a shard, or those of some of its buckets."""

    def snapshot_rows(self, table: str, rows: Rows) -> None:
        """Store rows of the snapshot."""

    def end_snapshot(self) -> None:
        """Drop the rows of the shard, or of its buckets, that the snapshot did not have, in every table."""

    def abort_snapshot(self) -> None:
        """Forget a snapshot that broke off. The rows that arrived may stay."""

    def digests(self, table: str, shard: IdShard, buckets: Tensor) -> Tensor | None:
        """Return the checksums of `Table.digests`; None if the rows cannot be compared."""

    def swap_dense(self, weights: Mapping[str, Tensor]) -> None:
        """Replace all dense weights, between two batches."""

    def set_state(self, state: PublishState) -> None:
        """Take note of the newest publish state; if it names a version, roll back to it."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    shard: IdShard
    buckets: Tensor | None
    seen: dict[str, list[Tensor]] = field(default_factory=dict)


class TableTarget:
    """A `DeltaTarget` of plain tables in this process, as a standby has them. Only the subscriber writes to
    them.

    Args:
        tables: The tables, under the publisher's names.
        swap: Called with all dense weights by name.
    """

    def __init__(
        self, tables: Mapping[str, Table], *, swap: Callable[[Mapping[str, Tensor]], None] | None = None
    ) -> None:
        self._tables = dict(tables)
        self._swap = swap
        self._snapshot: _Snapshot | None = None
        self.dense: Mapping[str, Tensor] | None = None
        """The newest dense weights."""
        self.state = PublishState()
        """The newest publish state."""

    @property
    def tables(self) -> Mapping[str, int]:
        return {name: table.dim for name, table in self._tables.items()}

    @property
    def generation(self) -> int:
        return 0  # these rows are never dropped

    def apply(self, rows: Mapping[str, Rows], removed: Mapping[str, Tensor]) -> None:
        for name, table in self._tables.items():
            if name in removed:
                table.remove(removed[name])
            if name in rows:
                table.restore(rows[name])

    def begin_snapshot(self, shard: IdShard, buckets: Tensor | None) -> None:
        self._snapshot = _Snapshot(shard, buckets)

    def snapshot_rows(self, table: str, rows: Rows) -> None:
        if self._snapshot is not None and table in self._tables:
            self._tables[table].restore(rows)
            self._snapshot.seen.setdefault(table, []).append(rows.ids)

    def end_snapshot(self) -> None:
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is None:
            return
        for name, table in self._tables.items():
            # Sorted once: every chunk of the table is compared with all ids of the snapshot.
            seen = torch.cat([torch.empty(0, dtype=torch.int64), *snapshot.seen.get(name, [])]).sort().values
            buckets = snapshot.buckets
            for rows in iterate(table) if buckets is None else iterate_buckets(table, buckets):
                replaced = rows.ids[in_share(rows.ids, snapshot.shard)]
                table.remove(replaced[~_contains(seen, replaced)])

    def abort_snapshot(self) -> None:
        self._snapshot = None

    def digests(self, table: str, shard: IdShard, buckets: Tensor) -> Tensor | None:
        return self._tables[table].digests(buckets, share=shard)

    def swap_dense(self, weights: Mapping[str, Tensor]) -> None:
        self.dense = weights
        if self._swap is not None:
            self._swap(weights)

    def set_state(self, state: PublishState) -> None:
        self.state = state


def _contains(ascending: Tensor, ids: Tensor) -> Tensor:
    """Return a bool per id: whether it is in an ascending tensor."""
    if not len(ascending):
        return torch.zeros(len(ids), dtype=torch.bool)
    nearest = torch.searchsorted(ascending, ids).clamp_(max=len(ascending) - 1)
    return ascending[nearest] == ids
