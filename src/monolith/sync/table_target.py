"""TableTarget: plain tables kept up to date, as a standby has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from monolith.checkpoint.shares import IdShare
from monolith.sync.messages import PublishState
from monolith.table import Rows, Table, in_share, iterate, iterate_buckets


@dataclass(frozen=True, slots=True)
class _Snapshot:
    share: IdShare
    buckets: Tensor | None
    seen: dict[str, list[Tensor]] = field(default_factory=dict)


class TableTarget:
    """A `DeltaTarget` that is tables of this process. Nobody else should write to them.

    Args:
        tables: By the names of the publisher's.
        swap: Called with all dense weights by name.
    """

    def __init__(
        self,
        tables: Mapping[str, Table],
        *,
        swap: Callable[[Mapping[str, Tensor]], None] | None = None,
    ) -> None:
        self._tables = dict(tables)
        self._swap = swap
        self._snapshot: _Snapshot | None = None
        self.dense: Mapping[str, Tensor] | None = None
        """The newest dense weights that came."""
        self.state = PublishState()
        """The newest publish state that came."""

    @property
    def tables(self) -> Mapping[str, int]:
        return {name: table.dim for name, table in self._tables.items()}

    @property
    def generation(self) -> int:
        return 0  # nothing is ever let go of

    def apply(self, rows: Mapping[str, Rows], removed: Mapping[str, Tensor]) -> None:
        for name, table in self._tables.items():
            if name in removed:
                table.remove(removed[name])
            if name in rows:
                table.restore(rows[name])

    def begin_snapshot(self, share: IdShare, buckets: Tensor | None) -> None:
        self._snapshot = _Snapshot(share, buckets)

    def snapshot_rows(self, table: str, rows: Rows) -> None:
        if self._snapshot is not None and table in self._tables:
            self._tables[table].restore(rows)
            self._snapshot.seen.setdefault(table, []).append(rows.ids)

    def end_snapshot(self) -> None:
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is None:
            return
        for name, table in self._tables.items():
            seen = torch.cat([torch.empty(0, dtype=torch.int64), *snapshot.seen.get(name, [])]).sort().values
            for ids in _ids_of(table, snapshot):
                table.remove(ids[~_among(ids, seen)])

    def drop_snapshot(self) -> None:
        self._snapshot = None

    def digests(self, table: str, share: IdShare, buckets: Tensor) -> Tensor:
        return self._tables[table].digests(buckets, share=share)

    def swap_dense(self, weights: Mapping[str, Tensor]) -> None:
        self.dense = weights
        if self._swap is not None:
            self._swap(weights)

    def follow(self, state: PublishState) -> None:
        self.state = state


def _ids_of(table: Table, snapshot: _Snapshot) -> Iterator[Tensor]:
    """Yield the ids that a table has of what a snapshot replaces."""
    buckets = snapshot.buckets
    for rows in iterate(table) if buckets is None else iterate_buckets(table, buckets):
        yield rows.ids[in_share(rows.ids, snapshot.share)]


def _among(ids: Tensor, ascending: Tensor) -> Tensor:
    """Return a bool per id: whether it is among those that are in order."""
    if not len(ascending):
        return torch.zeros(len(ids), dtype=torch.bool)
    places = torch.searchsorted(ascending, ids).clamp_(max=len(ascending) - 1)
    return ascending[places] == ids
