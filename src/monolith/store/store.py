"""The store seam: where the parameters of one model live.

A model's rows and dense weights may be in this process, on parameter servers, or
spread over the ranks that train together. A model never knows which: it looks up all
features of a batch by one call and hands back all gradients by another. Every
implementation passes `tests/contracts/test_store.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from monolith.table import SlotThresholds, TableConfig, TableStats


@dataclass(frozen=True, slots=True, eq=False)
class TableIds:
    """Ids of all tables of a store, in one tensor."""

    ids: Tensor
    """int64: batch after batch and, within a batch, table after table in the order of `Store.tables`.
    Where the store is on a device they may lie there."""
    sizes: Tensor
    """int64 of shape (batches * tables,), on the CPU: how many ids each table has in each batch."""
    counts: Tensor | None = None
    """int64, one per id: how many sightings it stands for; None for one each."""
    batches: int = 1
    """Batches laid end to end: more than one where gradients were accumulated."""
    distinct: bool = True
    """Whether ids of one table in one batch differ. Where they may not, they stand as they occur."""


def add_stats(found: Sequence[TableStats]) -> TableStats:
    """Return what the shares of one table hold together; `load` is their mean."""
    return TableStats(
        rows=sum(one.rows for one in found),
        bytes_total=sum(one.bytes_total for one in found),
        bytes_rows=sum(one.bytes_rows for one in found),
        bytes_index=sum(one.bytes_index for one in found),
        load=sum(one.load for one in found) / len(found),
        inserted=sum(one.inserted for one in found),
        filtered=sum(one.filtered for one in found),
        refused=sum(one.refused for one in found),
        evicted=sum(one.evicted for one in found),
        removed=sum(one.removed for one in found),
        max_event_time=max(one.max_event_time for one in found),
        non_finite=sum(one.non_finite for one in found),
    )


class Store(Protocol):
    """The tables and the dense variables of one model. Thread-safe where its tables are."""

    @property
    def tables(self) -> Mapping[str, int]:
        """Table to the width of its rows, sorted by name."""

    @property
    def device(self) -> torch.device:
        """Where rows lie: gradients are taken from there, and ids that lie there are answered there."""

    @property
    def delay_compensated(self) -> bool:
        """Whether gradients must come with the rows they were computed on."""

    def lookup(self, ids: TableIds) -> Tensor:
        """Return float32 of one dimension: a row for each id in order, zeros where there is none.

        Creates no rows. What is returned belongs to the caller.
        """

    def apply_gradients(
        self,
        ids: TableIds,
        gradients: Tensor,
        *,
        step: int = 0,
        event_time: int | Tensor = 0,
        latest_values: Tensor | None = None,
    ) -> None:
        """Take one optimizer step for every distinct id, with the sum of its gradients over the batches.

        Where ids are not `distinct` that is the sum over all places at which an id stands.

        Args:
            gradients: float32, laid out as the rows of `lookup`.
            step: The global step, for learning rates.
            event_time: Unix seconds: one for all, or int64 with one per id.
            latest_values: The rows that `lookup` gave, where `delay_compensated`.
        """

    def attach_dense(self, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """Take charge of the dense variables; from now on this store decides where they are updated.

        Raises:
            FeatureError: Variables were attached before.
        """

    def push_dense(self) -> None:
        """Apply the gradients the dense variables hold now, by their optimizer, and clear them."""

    def pull_dense(self) -> None:
        """Make the variables attached here hold the newest values this store promises."""

    def count_expired(self, now: int) -> dict[str, int]:
        """Return how many rows `evict` would drop, by table."""

    def evict(self, now: int | None = None, *, tables: Collection[str] | None = None) -> dict[str, int]:
        """Drop rows that expired by `now`; return how many, by table.

        Args:
            now: Unix seconds; by default each table's newest event time, which a single event from the
                future sets: see `Table.evict`.
            tables: From which to drop; by default all.
        """

    def stats(self) -> dict[str, TableStats]:
        """Return what each table holds."""

    def close(self) -> None:
        """Let go of everything. Closing again does nothing."""


class MakeStore(Protocol):
    """Makes the store of one collection of features, wherever whoever runs the model wants its rows."""

    def __call__(
        self,
        configs: Mapping[str, TableConfig],
        /,
        *,
        thresholds: Mapping[str, SlotThresholds] | None,
        threads: int | None,
    ) -> Store: ...
