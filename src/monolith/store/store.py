"""The store seam: where the parameters of one model live.

A model's rows and dense weights may be in this process, on parameter servers, or
sharded over the ranks that train together. A model never knows which: it looks up all
features of a batch by one call and applies all gradients by another. Every
implementation passes `tests/contracts/test_store.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from monolith.table import SlotThresholds, TableConfig, TableStats


@dataclass(frozen=True, slots=True, eq=False)
class TableIds:
    """The IDs of all tables of a store for one call, in one tensor.

    Examples:
        >>> import torch
        >>> from monolith.store import TableIds
        >>> ids = TableIds(ids=torch.tensor([7, 4, 5]), sizes=torch.tensor([2, 1]))  # items 7 and 4, user 5
        >>> [part.tolist() for part in ids.ids.split(ids.sizes.tolist())]
        [[7, 4], [5]]
    """

    ids: Tensor
    """int64 of shape (n,): batch after batch and, within a batch, table after table in the order of
    `Store.tables`. On the CPU, or on the store's device."""
    sizes: Tensor
    """int64 of shape (batches * tables,), on the CPU: how many IDs each table has in each batch."""
    counts: Tensor | None = None
    """int64 of shape (n,): how many sightings each ID stands for; None for one each."""
    batches: int = 1
    """How many batches follow each other: more than one if gradients were accumulated."""
    distinct: bool = True
    """Whether the IDs of one table in one batch are distinct."""

    @classmethod
    def none(cls, tables: int) -> TableIds:
        """Return no IDs of so many tables: what a rank sends that only takes part in a call."""
        return cls(torch.zeros(0, dtype=torch.int64), torch.zeros(tables, dtype=torch.int64))


def add_stats(found: Sequence[TableStats]) -> TableStats:
    """Return the statistics of a table from those of its shards; `load` is their mean."""
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
        device_rows=sum(one.device_rows for one in found),
        device_bytes=sum(one.device_bytes for one in found),
        tiered_ids=sum(one.tiered_ids for one in found),
        cold_rows=sum(one.cold_rows for one in found),
        cold_bytes=sum(one.cold_bytes for one in found),
        cold_found=sum(one.cold_found for one in found),
        cold_found_in_memory=sum(one.cold_found_in_memory for one in found),
        cold_reads=sum(one.cold_reads for one in found),
        cold_bytes_read=sum(one.cold_bytes_read for one in found),
        cold_bytes_written=sum(one.cold_bytes_written for one in found),
        compactions=sum(one.compactions for one in found),
    )


def add_tiered(found: Iterable[TableStats]) -> TableStats | None:
    """Return the statistics of all tiered tables together; None if there are none."""
    tiered = [one for one in found if one.is_tiered]
    return add_stats(tiered) if tiered else None


class Store(Protocol):
    """The tables and the dense variables of one model. Thread-safe if its tables are.

    Shapes: n IDs of all tables in one call, in one int64 tensor of shape (n,). Rows are float32 of one
    dimension: as many floats for each ID as its table is wide, in the order of the IDs.

    Examples:
        >>> import torch
        >>> from monolith import LocalStore, Segment, TableConfig
        >>> from monolith.store import TableIds
        >>> def table(name, dim):
        ...     return TableConfig(name=name, segments=(Segment(dim=dim, learning_rate=1.0),))
        >>> store = LocalStore.from_configs({"item": table("item", 2), "user": table("user", 1)})
        >>> ids = TableIds(torch.tensor([7, 4, 5]), sizes=torch.tensor([2, 1]))  # items 7 and 4, user 5
        >>> store.apply_gradients(ids, torch.arange(5.0), step=1)
        >>> store.lookup(ids)  # 2 + 2 + 1 floats
        tensor([ 0., -1., -2., -3., -4.])
    """

    @property
    def tables(self) -> Mapping[str, int]:
        """The width of each table's rows, sorted by name."""

    @property
    def device(self) -> torch.device:
        """The device of the rows: gradients are read there, and IDs on it are answered on it."""

    @property
    def delay_compensated(self) -> bool:
        """Whether gradients must come with the rows they were computed on."""

    def lookup(self, ids: TableIds) -> Tensor:
        """Return float32 of one dimension: the row of each ID in order, zeros for an ID without a row.

        Creates no rows. The result belongs to the caller.
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
        """Take one optimizer step for every distinct ID, with the sum of its gradients over the batches.

        If IDs are not `distinct`, that is the sum over all occurrences of an ID.

        Args:
            gradients: float32, in the layout of `lookup`'s result.
            step: The global step, for learning rates.
            event_time: Unix seconds: one for all, or int64 with one per ID.
            latest_values: The rows that `lookup` returned, if `delay_compensated`.
        """

    def attach_dense(self, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """Take charge of the dense variables: from now on `push_dense` updates them.

        Raises:
            FeatureError: Variables were attached before.
        """

    def push_dense(self) -> None:
        """Apply the current gradients of the dense variables by their optimizer, and clear them."""

    def pull_dense(self) -> None:
        """Copy the newest values that this store guarantees into the attached variables."""

    def count_expired(self, now: int) -> dict[str, int]:
        """Return how many rows `evict` would drop, by table."""

    def evict(self, now: int | None = None, *, tables: Collection[str] | None = None) -> dict[str, int]:
        """Drop rows that expired by `now`; return how many, by table.

        Args:
            now: Unix seconds; by default each table's newest event time, which a single event from the
                future sets: see `Table.evict`.
            tables: The tables to evict from; by default all.
        """

    def stats(self) -> dict[str, TableStats]:
        """Return the statistics of each table."""

    def close(self) -> None:
        """Close the store. Closing again does nothing."""


class MakeStore(Protocol):
    """Makes the store of one collection of features: local, on parameter servers, or across ranks."""

    def __call__(
        self,
        configs: Mapping[str, TableConfig],
        /,
        *,
        thresholds: Mapping[str, SlotThresholds] | None,
        threads: int | None,
    ) -> Store: ...
