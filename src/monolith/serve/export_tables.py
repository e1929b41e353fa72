"""Tables for serving: the newest rows of a checkpoint, without optimizer state.

The rows of a checkpoint are read as one stream, whether one process, servers or ranks wrote it and however
long its chain of increments is, and written to the file. Expired rows are left out only if training evicts
them, by the same clock and within the same bound, so that a server has every row that the trainer has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from monolith.checkpoint.offline.reading import SavedTables
from monolith.checkpoint.saved_tables import SavedHistory, describe_table, dumps_of
from monolith.errors import ExportError
from monolith.serve.manifest import Coding, ServableFile, ServableTable
from monolith.table import Expiry, FrozenInfo, FrozenSegment, Rows, TableConfig, open_frozen_writer
from monolith.table.row_streams import newest_rows
from monolith.table.update_rules import caught_up, decays_lazily

Advance = Callable[[int], object]
"""Called with the number of rows that were read."""
Gone = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.bool_]]
"""Returns a mask of the expired rows, given IDs and their event times."""
MOST_FROZEN_ROWS = (1 << 32) - 1
"""Largest number of rows in one file; a larger table needs shards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpiredRows:
    """Decides which rows have expired, as the run that evicts them does."""

    now: int
    """Unix seconds, by the event clock of the run."""
    max_share: float = 1.0
    """Fraction of a table that may be left out; if more rows have expired, all are written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableCodings:
    """The coding of the floats of each table."""

    default: Coding = "fp32"
    tables: Mapping[str, Coding] = field(default_factory=dict)

    def of(self, table: str) -> Coding:
        return self.tables.get(table, self.default)


def saved_history(saved: SavedTables, config: TableConfig) -> SavedHistory | None:
    """Return a model's table in a checkpoint, under its name or a former one; None if it has none.

    Raises:
        ExportError: Its rows have another width.
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
    paths: Mapping[int, str],
    file: str,
    *,
    coding: Coding,
    shares: int = 1,
    expired: ExpiredRows | None = None,
    advance: Advance = lambda _: None,
) -> dict[int, tuple[ServableTable, ServableFile]]:
    """Write one table, or its shards for several servers, reading its rows once.

    Example: with `shares=2` and `paths={1: ...}`, rows of odd IDs are written and rows of even IDs are
    skipped.

    Args:
        history: The table in the checkpoint; None for a table without rows.
        paths: Shard -> the file to write. Shard k has the IDs whose unsigned value is k modulo `shares`; rows
            of shards without a path are skipped.
        file: The path of the file in manifests.
        expired: Which rows to leave out; None writes all.

    Returns:
        Shard -> the entries of the table and of its file in the manifest.
    """
    gone = None
    if expired is not None and history is not None and _expires(config.expiry):
        gone = _expired(history, config.expiry, expired)
    segments = [FrozenSegment(segment.dim, coding) for segment in config.segments]
    saved = 0 if history is None else int(history[-1].entry["rows"])
    most = saved if shares == 1 else min(saved, MOST_FROZEN_ROWS)
    left_out = np.zeros(shares, np.int64)
    values_of = _values_of(history, config)
    with ExitStack() as opened:
        writers = {
            share: opened.enter_context(open_frozen_writer(path, segments, rows=most, name=config.name))
            for share, path in paths.items()
        }
        for block in newest_rows(dumps_of(history)) if history is not None else ():
            advance(len(block))
            ids, values = block.ids.numpy(), values_of(block)
            owners = (ids.view(np.uint64) % np.uint64(shares)).astype(np.int64)
            if gone is not None:
                old = gone(ids, block.event_times.numpy())
                left_out += np.bincount(owners[old], minlength=shares)
                ids, values, owners = ids[~old], values[~old], owners[~old]
            if shares > 1:  # the rows of each shard together, in their order
                order = np.argsort(owners, kind="stable")
                ids, values = ids[order], values[order]
            begins = np.cumsum([0, *np.bincount(owners, minlength=shares)])
            for share, writer in writers.items():
                mine = slice(begins[share], begins[share + 1])
                if len(ids[mine]):
                    writer.add(np.ascontiguousarray(ids[mine]), np.ascontiguousarray(values[mine]))
    return {
        share: _described(writer.info, file, coding, int(left_out[share]))
        for share, writer in writers.items()
    }


def _described(
    made: FrozenInfo, file: str, coding: Coding, expired: int
) -> tuple[ServableTable, ServableFile]:
    table = ServableTable(
        file=file,
        rows=made.rows,
        dim=made.dim,
        coding=coding,
        largest_error=made.largest_error,
        mean_error=made.mean_error,
        expired=expired,
    )
    return table, ServableFile(bytes=made.bytes, crc=made.crc)


def _values_of(history: SavedHistory | None, config: TableConfig) -> Callable[[Rows], NDArray[np.float32]]:
    """Return a function from saved rows to their values: unchanged, or decayed by the steps without them."""
    if history is None or not decays_lazily(config):
        return lambda rows: rows.values.numpy()
    saved = [(one.optimizer, one.dim) for one in describe_table(history).layout.segments]
    if saved != [(one.optimizer.rule.kind, one.dim) for one in config.segments]:
        return lambda rows: rows.values.numpy()  # trained by another optimizer, which did not count steps
    return caught_up(config, newest_rows(dumps_of(history)))


def _expires(expiry: Expiry) -> bool:
    forever = Expiry().default
    return expiry.default < forever or any(ttl < forever for ttl in expiry.per_slot.values())


def _expired(history: SavedHistory, expiry: Expiry, by: ExpiredRows) -> Gone | None:
    """Return the function that finds expired rows; None if so many have expired that the clock must be
    wrong."""

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
