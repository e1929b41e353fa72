"""Tables for serving: the newest rows of a checkpoint, without optimizer state.

Whatever wrote a checkpoint, one process, servers or ranks, and however long its chain of increments: its rows
come as one stream, and go from it to the file. Rows that have expired are left out only where training drops
them, by the same clock and within the same bound, so that a server does not forget what the trainer knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from monolith.checkpoint.offline.reading import SavedTables
from monolith.checkpoint.offline.table_rows import SavedHistory, describe_table, dumps_of
from monolith.errors import ExportError
from monolith.serve.servable.manifest import Coding, ServableFile, ServableTable
from monolith.table import Expiry, FrozenSegment, Rows, TableConfig, write_frozen_table
from monolith.table.dumps import kept_ids
from monolith.table.lazy_decay import caught_up, decays_lazily
from monolith.table.row_streams import newest_rows

Advance = Callable[[int], object]
"""Told how many rows were read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpiredRows:
    """Which rows have expired, as a run that drops them sees it."""

    now: int
    """Unix seconds, by the run's clock of events."""
    max_share: float = 1.0
    """The share of a table that may go at once; where more have expired, all are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableCodings:
    """How the numbers of tables are written."""

    default: Coding = "fp32"
    tables: Mapping[str, Coding] = field(default_factory=dict)

    def of(self, table: str) -> Coding:
        return self.tables.get(table, self.default)


def saved_history(saved: SavedTables, config: TableConfig) -> SavedHistory | None:
    """Return a model's table in a checkpoint, under its name or one it had; None where it is not there.

    Raises:
        ExportError: Its rows are of another width.
    """
    name = next((one for one in (config.name, *config.extra_restore_names) if one in saved.names), None)
    if name is None:
        return None
    history = saved.history(name)
    found = sum(segment.dim for segment in describe_table(history).layout.segments)
    if found != config.dim:
        raise ExportError(
            f"table {config.name!r}: the checkpoint has {found} floats per row, the model reads "
            f"{config.dim}; export with the model that was trained"
        )
    return history


def export_table(
    history: SavedHistory | None,
    config: TableConfig,
    path: str,
    file: str,
    *,
    coding: Coding,
    share: tuple[int, int] = (0, 1),
    expired: ExpiredRows | None = None,
    advance: Advance = lambda _: None,
) -> tuple[ServableTable, ServableFile]:
    """Write one table, or the share of one server; return what the manifest says of it and of its file.

    Args:
        history: Of the table in the checkpoint; None for one that has no rows yet.
        path: Where to write it.
        file: How the manifest calls that.
        share: (k, n): the ids that are, as unsigned numbers, k modulo n.
        expired: Which rows to leave out; None keeps all.
    """
    gone = None
    if expired is not None and history is not None and _expires(config.expiry):
        gone = _expired(history, config.expiry, expired)
    left_out = 0
    values_of = _values_of(history, config)

    def chunks() -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        nonlocal left_out
        mine = kept_ids(None if share[1] == 1 else share)
        for block in newest_rows(dumps_of(history)) if history is not None else ():
            advance(len(block))
            rows = block if mine is None else block.keep(mine(block.ids))
            ids, values = rows.ids.numpy(), values_of(rows)
            if gone is not None:
                old = gone(ids, rows.event_times.numpy())
                left_out += int(old.sum())
                ids, values = ids[~old], values[~old]
            if len(ids):
                yield np.ascontiguousarray(ids), np.ascontiguousarray(values, dtype=np.float32)

    segments = [FrozenSegment(segment.dim, coding) for segment in config.segments]
    most = 0 if history is None else int(history[-1].entry["rows"])
    made = write_frozen_table(path, segments, chunks(), rows=most, name=config.name)
    table = ServableTable(
        file=file,
        rows=made.rows,
        dim=made.dim,
        coding=coding,
        largest_error=made.largest_error,
        mean_error=made.mean_error,
        expired=left_out,
    )
    return table, ServableFile(bytes=made.bytes, crc=made.crc)


def _values_of(history: SavedHistory | None, config: TableConfig) -> Callable[[Rows], NDArray[np.float32]]:
    """Return what gives the values of saved rows: as they are, or decayed by the steps they were not in."""
    if history is None or not decays_lazily(config):
        return lambda rows: rows.values.numpy()
    saved = [(one.optimizer, one.dim) for one in describe_table(history).layout.segments]
    if saved != [(one.optimizer.rule.kind, one.dim) for one in config.segments]:
        return lambda rows: rows.values.numpy()  # trained by another optimizer: nobody counted steps
    return caught_up(config, newest_rows(dumps_of(history)))


def _expires(expiry: Expiry) -> bool:
    forever = Expiry().default
    return expiry.default < forever or any(ttl < forever for ttl in expiry.per_slot.values())


def _expired(
    history: SavedHistory, expiry: Expiry, by: ExpiredRows
) -> Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.bool_]] | None:
    """Return what tells expired rows; None where too many have expired for it to be believed."""

    def gone(ids: NDArray[np.int64], times: NDArray[np.int64]) -> NDArray[np.bool_]:
        return expiry.expired(ids, times, by.now)

    total = old = 0
    if by.max_share < 1:
        for rows in newest_rows(dumps_of(history)):
            total += len(rows)
            old += int(gone(rows.ids.numpy(), rows.event_times.numpy()).sum())
        if old > by.max_share * total:
            return None
    return gone
