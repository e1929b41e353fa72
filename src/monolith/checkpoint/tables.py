"""The tables of a model in a checkpoint: rows with their optimizer state, and the filters.

    model.ckpt-100.assets/item.manifest ...     a dump of the table, whole or of its changes
    model.ckpt-100.assets/hash_filter_item-...  what its filter has counted

A cut holds all tables at one moment; see `monolith.table.cuts`. Restoring goes into tables
of any capacity and, with `shard`, into one of several that share the rows.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from monolith import filesystem
from monolith.checkpoint.part import Entry, RestoreOptions, SavedPart
from monolith.checkpoint.report import RestoreReport
from monolith.errors import RestoreError
from monolith.feature import MAX_SLOTS_V2, slot_of
from monolith.observe import Progress
from monolith.table import (
    AdmissionFilter,
    DumpableTable,
    LoadReport,
    Scan,
    TableConfig,
    TableCut,
    dump_changes,
    dump_cut,
    load,
    load_changes,
    table_basename,
)

_MOST_SLOTS = 1024
"""Where rows are of more slots than any model has, their ids are plain hashes, and slots say nothing."""


class TablesPart:
    """Tables that are saved at one moment, with their filters.

    Args:
        tables: By name, which is also the name of their files.
        filters: By the name of the table that asks them.
        num_shards: Files per table; by default one per million rows, up to 4.
        shard: Which of how many shares of the ids these tables hold, on restore; by default all.
        incremental: Whether tables keep track of changes, so that a checkpoint may be an increment.
        workers: Files to read at once.
        write_workers: Files to write at once; fewer where training goes on beside it.
        progress: Advanced by rows that are read.
        write_progress: Advanced by rows that are written, by the thread that writes them.
    """

    name = "tables"

    def __init__(
        self,
        tables: Mapping[str, DumpableTable],
        filters: Mapping[str, AdmissionFilter] | None = None,
        *,
        num_shards: int | None = None,
        shard: tuple[int, int] | None = None,
        incremental: bool = False,
        workers: int = 4,
        write_workers: int = 4,
        progress: Progress | None = None,
        write_progress: Progress | None = None,
    ) -> None:
        self._tables = dict(tables)
        self._filters = dict(filters or {})
        self._num_shards = num_shards
        self._shard = shard
        self._incremental = incremental
        self._workers = workers
        self._write_workers = write_workers
        self._progress = progress
        self._write_progress = write_progress
        self._track()

    def cut(self, step: int) -> TablesCut:  # noqa: ARG002
        with contextlib.ExitStack() as held, contextlib.ExitStack() as undo:
            for table in self._tables.values():
                held.enter_context(table.frozen())
            cuts: dict[str, TableCut] = {}
            for name, table in self._tables.items():
                cuts[name] = cut = table.cut()
                undo.callback(cut.close, saved=False)
            filters = {name: one.copy() for name, one in self._filters.items()}
            undo.pop_all()
        return TablesCut(cuts, filters, self._num_shards, self._write_workers, self._write_progress)

    def restore(self, chain: Sequence[SavedPart], options: RestoreOptions) -> RestoreReport:
        known = {name for saved in chain for name in saved.entry["tables"]}
        names = {
            name: next((old for old in (name, *table.config.extra_restore_names) if old in known), None)
            for name, table in self._tables.items()
        }
        missing = [name for name, found in names.items() if found is None]
        if missing and chain and options.strict:
            raise RestoreError(
                f"cannot restore table {missing[0]!r}: the checkpoint {chain[-1].prefix} does not have it; "
                f"it has {', '.join(sorted(known)) or 'none'}. If the table was renamed, list its old name "
                "in extra_restore_names; if it is new, restore with strict=False."
            )
        reports = [
            RestoreReport(
                missing=tuple(f"table {name}" for name in missing),
                unused=tuple(f"table {name}" for name in sorted(known - set(names.values()))),
            )
        ]
        for name, old in names.items():
            if old is None:
                self._tables[name].clear()
            else:
                reports.append(self._restore(name, old, self._tables[name], chain, options))
        self._track()
        return RestoreReport().merge(*reports)

    def _track(self) -> None:
        if self._incremental:
            for table in self._tables.values():
                table.track_changes()

    def _restore(
        self, name: str, old: str, table: DumpableTable, chain: Sequence[SavedPart], options: RestoreOptions
    ) -> RestoreReport:
        label = f"table {name}"
        state, why = _state_for(table.config, old, chain, options)
        rows = removed = 0
        # A table that holds something is not touched before every byte is known to be good.
        verify_first = len(table) > 0
        if not chain or old not in chain[0].entry["tables"]:
            table.clear()
        for saved in chain:
            entry = saved.entry["tables"].get(old)
            if entry is None:
                continue
            basename = table_basename(assets_folder(saved.prefix), old)
            if entry["kind"] == "full":
                done = load(
                    table,
                    basename,
                    keep=self._shard,
                    optimizer_state=state,
                    workers=self._workers,
                    verify_first=verify_first,
                    progress=self._progress,
                )
            else:
                done = load_changes(
                    table,
                    basename,
                    cleared=entry["cleared"],
                    keep=self._shard,
                    optimizer_state=state,
                    workers=self._workers,
                    progress=self._progress,
                )
                removed += entry["removed"]
            _check_room(name, done)
            rows += done.rows
        newest = _last_with_filter(chain, old)
        if name in self._filters and newest is not None:
            self._filters[name].restore(filter_basename(newest.prefix, old))
        words = f"{len(table):,} rows"
        if len(chain) > 1:
            words += f" ({rows:,} read and {removed:,} removed, from {len(chain)} checkpoints)"
        return RestoreReport(
            loaded={label: words},
            reset={label: why} if why else {},
            renamed={label: f"table {old}"} if old != name else {},
        )


class TablesCut:
    """The tables of one moment, to be written."""

    def __init__(
        self,
        cuts: Mapping[str, TableCut],
        filters: Mapping[str, AdmissionFilter],
        num_shards: int | None,
        workers: int,
        progress: Progress | None,
    ) -> None:
        self._cuts = dict(cuts)
        self._filters = dict(filters)
        self._num_shards = num_shards
        self._workers = workers
        self._progress = progress
        self._stamp = secrets.token_hex(8)  # a second attempt keeps the files of the first

    def write(self, prefix: str, *, full: bool) -> Entry:
        tables: dict[str, Entry] = {}
        slots = np.zeros(MAX_SLOTS_V2, np.int64)
        filesystem.make_dirs(assets_folder(prefix))
        for name, cut in self._cuts.items():
            basename = table_basename(assets_folder(prefix), name)
            tables[name] = (
                self._write_full(cut, basename, slots) if full else self._write_changes(cut, basename)
            )
        for name, one in self._filters.items():
            one.save(filter_basename(prefix, name))
        entry: Entry = {"tables": tables, "filters": sorted(self._filters)}
        met = np.flatnonzero(slots)
        if full and len(met) <= _MOST_SLOTS:
            entry["slots"] = {str(slot): int(slots[slot]) for slot in met.tolist()}
        return entry

    def _write_full(self, cut: TableCut, basename: str, slots: NDArray[np.int64]) -> Entry:
        done = dump_cut(
            _Counted(cut, slots),
            basename,
            num_shards=self._num_shards,
            workers=self._workers,
            stamp=self._stamp,
            resume=True,
            progress=self._progress,
        )
        return {
            "kind": "full",
            "rows": done.rows,
            "bytes": done.bytes,
            "expired": done.expired,
            "layout": _layout(cut.config),
        }

    def _write_changes(self, cut: TableCut, basename: str) -> Entry:
        done = dump_changes(
            cut, basename, workers=self._workers, stamp=self._stamp, resume=True, progress=self._progress
        )
        return {
            "kind": "changes",
            "rows": len(cut),
            "changed": done.changed.rows,
            "bytes": done.changed.bytes + done.removed_bytes,
            "removed": done.removed,
            "cleared": done.cleared,
            "layout": _layout(cut.config),
        }

    def close(self, *, saved: bool) -> None:
        for cut in self._cuts.values():
            cut.close(saved=saved)


class _Counted:
    """A cut that counts the slots of the ids that are read from it."""

    def __init__(self, cut: TableCut, slots: NDArray[np.int64]) -> None:
        self._cut = cut
        self._slots = slots
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cut, name)

    def __len__(self) -> int:
        return len(self._cut)

    def scan(self, cursor: int | None = None, **how: Any) -> Scan:
        found = self._cut.scan(cursor, **how)
        # No sorting: it would keep whoever trains from running Python.
        counts = np.bincount(slot_of(found.rows.ids).numpy(), minlength=MAX_SLOTS_V2)
        with self._lock:
            self._slots += counts
        return found


def _state_for(
    config: TableConfig, old: str, chain: Sequence[SavedPart], options: RestoreOptions
) -> tuple[Literal["keep", "reset"], str]:
    """Return what to do with optimizer state, and why where it starts anew."""
    if options.optimizer_state == "reset":
        return "reset", "optimizer state reset, as asked"
    if options.optimizer_state == "keep":
        return "keep", ""
    saved = {tuple(map(tuple, s.entry["tables"][old]["layout"])) for s in chain if old in s.entry["tables"]}
    mine = tuple(map(tuple, _layout(config)))
    if saved <= {mine}:
        return "keep", ""
    return "reset", "optimizer state reset, because the optimizer changed"


def _layout(config: TableConfig) -> list[list[Any]]:
    return [[s.dim, s.optimizer.rule.kind, 0 if config.serving else s.state_dim] for s in config.segments]


def _check_room(name: str, done: LoadReport) -> None:
    if done.refused:
        raise RestoreError(
            f"cannot restore table {name!r}: {done.refused:,} of its rows found no room within "
            "capacity_bytes. Raise capacity_bytes, or let the oldest rows expire (when_full='expire_oldest')."
        )


def _last_with_filter(chain: Sequence[SavedPart], table: str) -> SavedPart | None:
    return next((saved for saved in reversed(chain) if table in saved.entry["filters"]), None)


def assets_folder(prefix: str) -> str:
    """Return the folder of a checkpoint's tables and filters."""
    return f"{prefix}.assets"


def filter_basename(prefix: str, table: str) -> str:
    """Return where the filter of a table lies."""
    return table_basename(assets_folder(prefix), f"hash_filter_{table}")
