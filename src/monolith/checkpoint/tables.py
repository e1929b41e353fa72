"""The tables of a model in a checkpoint: rows with their optimizer state, and the filters.

    model.ckpt-100.assets/item.manifest ...     a dump of the table, whole or of its changes
    model.ckpt-100.assets/hash_filter_item-...  the counts of its admission filter

A snapshot has all tables at one moment; see `monolith.table.table`. A checkpoint restores into tables of any
capacity and, with `shard`, into one of several processes that each have a shard of the rows. Several may also
write one checkpoint together; see `saved_tables`.

Shapes: a row is d floats in segments (an embedding, maybe with a bias before it), then s floats of optimizer
state, then its event time. Example:

    part = TablesPart({"item": table}, shard=(0, 2))     # this process has the ids that are 0 modulo 2
    part.snapshot(100).write(prefix, full=True)          # writes <prefix>.assets/ps-0-of-2/item.*
    TablesPart({"item": other}).restore(chain, options)  # one process reads the shards of both
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor

from monolith import concurrency, filesystem
from monolith.checkpoint.part import Changes, Entry, RestoreOptions, RestoreReport, SavedPart, aligned
from monolith.checkpoint.saved_tables import (
    WHOLE,
    IdShard,
    SavedTable,
    check_shard,
    filter_basename,
    filter_shards,
    shard_folder,
)
from monolith.errors import RestoreError, SaveError
from monolith.feature import MAX_SLOTS_V2, slot_of
from monolith.observe import Progress
from monolith.table import (
    AdmissionFilter,
    LoadReport,
    Scan,
    SlidingFilter,
    Table,
    TableConfig,
    TableSnapshot,
    dump_changes,
    dump_snapshot,
    filter_files,
    iterate,
    load,
    load_changes,
    table_basename,
)
from monolith.table.dumps import Keep, kept_ids

_MOST_SLOTS = 1024
"""If rows are of more slots than any model has, their ids are plain hashes, and slots mean nothing."""
_READ_WORKERS = 4
"""Files that a restore reads at once."""


class TablesPart:
    """Tables that are saved at one moment, with their filters.

    Args:
        tables: By name, which is also the name of their files.
        filters: Admission filters, by the name of their table.
        num_shards: Files per table; by default one per million rows, up to 4.
        shard: The ids of these tables if they are those of one of several parameter servers: (k, n) for ids
            that are k modulo n; by default all. Each server writes its shard of a checkpoint into a folder of
            its own, and `merge_entries` makes one entry of the manifest of all that they return.
        incremental: Whether tables track changes, so that a checkpoint may be incremental.
        write_workers: Files to write at once; fewer if training continues meanwhile.
        write_progress: Advanced by rows that are written, by the thread that writes them.
        restoring: Entered around every restore: publishing must not see tables that are half restored.

    Raises:
        ConfigError: There is no such shard.

    Examples:
        >>> import torch
        >>> from monolith import Checkpointer, NativeTable, Saver, Segment, TableConfig, TablesPart
        >>> from monolith import read_contents
        >>> table = NativeTable(TableConfig(name="item", segments=(Segment(dim=2),)))
        >>> table.assign(torch.tensor([7, 8]), torch.ones(2, 2))
        >>> prefix = Checkpointer(Saver("run"), [TablesPart({"item": table}, num_shards=2)]).save(100)
        >>> [(one.name, one.rows, one.shards) for one in read_contents(prefix).tables]
        [('item', 2, 2)]
    """

    name = "tables"

    def __init__(
        self,
        tables: Mapping[str, Table],
        filters: Mapping[str, AdmissionFilter] | None = None,
        *,
        num_shards: int | None = None,
        shard: IdShard = WHOLE,
        incremental: bool = False,
        write_workers: int = 4,
        write_progress: Progress | None = None,
        restoring: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        check_shard("the shard of a checkpoint's tables", shard)
        self._tables = dict(tables)
        self._filters = dict(filters or {})
        self._num_shards = num_shards
        self._shard = shard
        self._incremental = incremental
        self._write_workers = write_workers
        self._write_progress = write_progress
        self._restoring = restoring
        self._track()

    def snapshot(self, step: int) -> TablesSnapshot:  # noqa: ARG002
        with contextlib.ExitStack() as frozen, contextlib.ExitStack() as undo:
            # All tables are frozen before the first snapshot is opened, so that all are of one moment:
            # writers wait for the microseconds it takes to open them, not for the writing.
            for table in self._tables.values():
                frozen.enter_context(table.frozen())
            snapshots: dict[str, TableSnapshot] = {}
            for name, table in self._tables.items():
                snapshots[name] = one = table.snapshot()
                undo.callback(one.close, saved=False)
            filters = {name: one.copy() for name, one in self._filters.items()}
            undo.pop_all()
        return TablesSnapshot(
            snapshots,
            filters,
            num_shards=self._num_shards,
            workers=self._write_workers,
            progress=self._write_progress,
            shard=self._shard,
        )

    def restore(self, chain: Sequence[SavedPart], options: RestoreOptions) -> RestoreReport:
        """Load the saved rows, however many servers wrote them; see `Part.restore`.

        Reads the saved shards that may have ids of this one: only its own if there were as many servers as
        there are now. If any table has rows, every file of the chain is read and verified before the first
        table is changed. Empty tables have nothing to lose, so their files are read once, each block verified
        before it is loaded. A table whose restore fails all the same is left empty.
        """
        known = {name for saved in chain for name in saved.entry["tables"]}
        sources = {name: _sources(table.config, chain, known) for name, table in self._tables.items()}
        fresh = {} if options.changes is None else self._fresh(chain, sources, options.changes)
        left = {one.name for name in fresh for one in sources[name]}
        sources |= {name: [] for name in fresh}
        missing = [name for name, found in sources.items() if not found and name not in fresh]
        missing += [
            slot
            for name, found in sources.items()
            for slot, _ in self._tables[name].config.merged
            if found and found[0].slot is not None and slot not in {one.of for one in found}
        ]
        if missing and chain and options.strict:
            table = self._tables.get(missing[0])
            tried = () if table is None else table.config.extra_restore_names
            aliases = f", nor its old names {', '.join(map(repr, tried))}" if tried else ""
            raise RestoreError(
                f"cannot restore table {missing[0]!r}: the checkpoint {chain[-1].prefix} does not have it"
                f"{aliases}; it has {', '.join(sorted(known)) or 'none'}. If the table was renamed, list its "
                "old name in extra_restore_names; if it is new, restore with strict=False."
            )
        reports = [
            RestoreReport(
                missing=tuple(f"table {name}" for name in missing),
                unused=tuple(
                    f"table {name}"
                    for name in sorted(
                        known - left - {one.name for found in sources.values() for one in found}
                    )
                ),
                reset={f"table {name}": why for name, why in fresh.items()},
                sizes={
                    f"table {name}": f"{_history(chain, name)[-1].entry['rows']:,} rows"
                    for name in (known if options.changes is not None else ())
                    if name not in sources or name in fresh
                },
            )
        ]
        self._check(chain, sources)
        with self._restoring():
            for name, found in sources.items():
                if found:
                    reports.append(self._restore(name, found, chain, options))
                else:
                    self._tables[name].clear()
        self._track()
        return RestoreReport().merge(*reports)

    def _fresh(
        self, chain: Sequence[SavedPart], sources: Mapping[str, Sequence[_Source]], changes: Changes
    ) -> dict[str, str]:
        """Return the tables of a changed model whose saved rows mean something else now, and why."""
        fresh = {}
        for name, found in sources.items():
            if not found:
                continue
            slots = [slot for slot, _ in self._tables[name].config.merged] or [name]
            why = next((changes.fresh[slot] for slot in slots if slot in changes.fresh), None)
            mine = [segment.dim for segment in self._tables[name].config.segments]
            for one in found:
                saved = [dim for dim, *_ in _history(chain, one.name)[-1].entry["layout"]]
                if why is None and aligned(saved, mine) is None:
                    why = f"a row has {len(saved)} parts in the checkpoint and {len(mine)} in this model"
            if why is not None:
                fresh[name] = why
        return fresh

    def _track(self) -> None:
        if self._incremental:
            for table in self._tables.values():
                table.track_changes()

    def _check(self, chain: Sequence[SavedPart], sources: Mapping[str, Sequence[_Source]]) -> None:
        """Refuse missing files and, if a table has rows that would be lost, damaged ones."""
        verify = any(len(table) for table in self._tables.values())
        read = {one.name for found in sources.values() for one in found}
        for name in sorted(read):
            for saved in _history(chain, name):
                mine = saved.shards_for(self._shard)
                files = [saved.inspect(shard, verify=verify, workers=_READ_WORKERS) for shard in mine]
                for shard in mine:
                    saved.inspect_removed(shard, verify=verify)
                if len(mine) == saved.shards:
                    saved.check_rows(sum(file.rows for each in files for file in each))
        for name, admission in self._filters.items():
            found = sources.get(name, ())
            whole = len(found) == 1 and found[0].slot is None
            source = _filter_source(admission, chain, found[0].name, self._shard)[0] if whole else None
            if verify and source is not None and isinstance(admission, SlidingFilter):
                filter_files.inspect(source, verify=True)

    def _restore(
        self, name: str, sources: Sequence[_Source], chain: Sequence[SavedPart], options: RestoreOptions
    ) -> RestoreReport:
        label, table = f"table {name}", self._tables[name]
        histories = [_history(chain, source.name) for source in sources]
        saves = [saved for each in histories for saved in each]
        state, why = _state_for(table.config, saves, options)
        narrower = options.changes is not None and _width_text(table.config, saves)
        rows = removed = 0
        touched = histories[0][0].changes
        if touched:
            table.clear()
        try:
            for source, history in zip(sources, histories, strict=True):
                before = [table.scales] if touched else []
                for saved in history:
                    scales: list[list[float]] = list(before)
                    # A clear comes before the changes of the same checkpoint: the rows loaded from earlier
                    # checkpoints of the chain go first.
                    self._forget_cleared(table, saved, source)
                    for shard in saved.shards_for(self._shard):
                        done = self._load(
                            table, saved, shard, state, source, clear=not touched, refit=bool(narrower)
                        )
                        touched = True
                        _check_capacity(name, done)
                        rows += done.rows
                        scales.append(table.scales)
                    # Scales only grow, and each shard has its own: the largest is right for all.
                    table.set_scales([max(each) for each in zip(*scales, strict=True)])
                    removed += saved.entry.get("removed", 0)
        except BaseException:
            if touched:  # half a table would look complete
                table.clear()
            raise
        words = f"{len(table):,} rows"
        if len(chain) > 1:
            words += f" ({rows:,} read and {removed:,} removed, from {len(chain)} checkpoints)"
        return RestoreReport(
            loaded={label: words},
            partly={label: f"{words}, {narrower}"} if narrower else {},
            reset=({label: why} if why else {}) | self._restore_filter(name, sources, chain),
            renamed={} if sources[0].name == name else {label: " and ".join(map(str, sources))},
        )

    def _load(
        self,
        table: Table,
        saved: SavedTable,
        shard: int,
        state: Literal["keep", "reset"],
        source: _Source,
        *,
        clear: bool,
        refit: bool,
    ) -> LoadReport:
        """Read one shard; the first full one also clears the table."""
        own = (shard, saved.shards)
        keep = own if self._shard == WHOLE else self._shard
        how: dict[str, Any] = {
            "keep": source.keep(keep),
            "optimizer_state": state,
            "workers": _READ_WORKERS,
            "refit": refit,
        }
        if saved.changes:
            done = load_changes(table, saved.basename(shard), **how)
        else:
            done = load(table, saved.basename(shard), clear=clear, verify_first=False, **how)
        if keep == own and done.skipped and source.slot is None:
            raise RestoreError(
                f"cannot restore table {table.config.name!r}: {done.skipped:,} rows in {saved.called(shard)} "
                "have ids of other shards. Move each file back to the folder of the server that wrote it."
            )
        return done

    def _forget_cleared(self, table: Table, saved: SavedTable, source: _Source) -> None:
        """Remove the rows of shards that were cleared before the changes of one checkpoint."""
        mine = saved.shards_for(self._shard)
        gone = [shard for shard in mine if saved.changes and saved.cleared[shard]]
        if not gone:
            return
        if gone == mine and source.slot is None:
            table.clear()
            return
        lost: list[Tensor] = []
        for shard in gone:
            in_shard = kept_ids((shard, saved.shards))
            assert in_shard is not None
            for rows in iterate(table):
                mine_too = in_shard(rows.ids)
                if source.slot is not None:  # rows of other slots came from other tables
                    mine_too &= slot_of(rows.ids).eq(source.slot)
                lost.append(rows.ids[mine_too])
        for ids in lost:
            table.remove(ids)

    def _restore_filter(
        self, name: str, sources: Sequence[_Source], chain: Sequence[SavedPart]
    ) -> dict[str, str]:
        """Restore the counts of a filter; return the report of one that starts from zero."""
        admission = self._filters.get(name)
        if admission is None:
            return {}
        source: str | None
        if len(sources) == 1 and sources[0].slot is None:
            source, why = _filter_source(admission, chain, sources[0].name, self._shard)
        else:
            counted = any(_last_with_filter(chain, one.name) for one in sources)
            source, why = None, _OTHER_TABLES if counted and isinstance(admission, SlidingFilter) else ""
        if source is not None:
            admission.restore(source)
        elif why and isinstance(admission, SlidingFilter):
            admission.forget()
        return {f"filter of {name}": why} if why else {}


class TablesSnapshot:
    """The tables at one moment, to be written."""

    def __init__(
        self,
        snapshots: Mapping[str, TableSnapshot],
        filters: Mapping[str, AdmissionFilter],
        *,
        num_shards: int | None,
        workers: int,
        progress: Progress | None,
        shard: IdShard,
    ) -> None:
        self._snapshots = dict(snapshots)
        self._filters = dict(filters)
        self._num_shards = num_shards
        self._workers = workers
        self._progress = progress
        self._shard = shard
        self._stamp = concurrency.token_hex(8)  # a second attempt reuses the complete files of the first

    def write(self, prefix: str, *, full: bool) -> Entry:
        """Write all rows, or the changes; see `PartSnapshot.write`.

        Raises:
            SaveError: A table has ids of another shard; a restore would not find them.
        """
        shard = self._shard
        folder = shard_folder(prefix, shard)
        tables: dict[str, Entry] = {}
        slots = _Slots()
        filesystem.make_dirs(folder)
        for name, one in self._snapshots.items():
            basename = table_basename(folder, name)
            watchers = [] if shard == WHOLE else [_only(name, shard)]
            if full:
                tables[name] = self._write_full(one, basename, [slots, *watchers])
            else:
                tables[name] = self._write_changes(_Watched(one, *watchers), basename)
        for name, admission in self._filters.items():
            admission.save(filter_basename(prefix, name, shard))
        entry: Entry = {"tables": tables, "filters": sorted(self._filters), "pieces": 1}
        if shard != WHOLE:
            entry["piece"] = list(shard)
        met = slots.met()
        if full and len(met) <= _MOST_SLOTS:
            entry["slots"] = met
        return entry

    def _write_full(
        self, snapshot: TableSnapshot, basename: str, watchers: Sequence[Callable[[Tensor], None]]
    ) -> Entry:
        def written(ids: Tensor) -> None:
            for watch in watchers:
                watch(ids)

        done = dump_snapshot(
            snapshot,
            basename,
            num_shards=self._num_shards,
            workers=self._workers,
            stamp=self._stamp,
            resume=True,
            progress=self._progress,
            written=written,
        )
        return {
            "kind": "full",
            "rows": done.rows,
            "bytes": done.bytes,
            "expired": done.expired,
            "layout": _layout(snapshot.config),
            **_merged(snapshot.config),
        }

    def _write_changes(self, snapshot: TableSnapshot, basename: str) -> Entry:
        done = dump_changes(
            snapshot, basename, workers=self._workers, stamp=self._stamp, resume=True, progress=self._progress
        )
        return {
            "kind": "changes",
            "rows": len(snapshot),
            "changed": done.changed.rows,
            "bytes": done.changed.bytes + done.removed_bytes,
            "removed": done.removed,
            "cleared": done.cleared,
            "layout": _layout(snapshot.config),
            **_merged(snapshot.config),
        }

    def close(self, *, saved: bool) -> None:
        for one in self._snapshots.values():
            one.close(saved=saved)


class _Watched:
    """A snapshot that calls watchers with the ids that are read from it, in several threads at once."""

    def __init__(self, snapshot: TableSnapshot, *watchers: Callable[[Tensor], None]) -> None:
        self._snapshot = snapshot
        self._watchers = watchers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._snapshot, name)

    def __len__(self) -> int:
        return len(self._snapshot)

    def scan(self, cursor: int | None = None, **how: Any) -> Scan:
        found = self._snapshot.scan(cursor, **how)
        for watch in self._watchers:
            watch(found.rows.ids)
        return found


class _Slots:
    """Counts the slots of ids."""

    def __init__(self) -> None:
        self._counts = np.zeros(MAX_SLOTS_V2, np.int64)
        self._lock = concurrency.Lock()

    def __call__(self, ids: Tensor) -> None:
        # No sorting: it would hold the GIL, and block the training thread.
        counts = np.bincount(slot_of(ids).numpy(), minlength=MAX_SLOTS_V2)
        with self._lock:
            self._counts += counts

    def met(self) -> dict[str, int]:
        return {str(slot): int(self._counts[slot]) for slot in np.flatnonzero(self._counts).tolist()}


def _only(table: str, shard: IdShard) -> Callable[[Tensor], None]:
    """Return a watcher that refuses ids of another shard."""
    in_shard = kept_ids(shard)
    assert in_shard is not None

    def check(ids: Tensor) -> None:
        mine = in_shard(ids)
        if not bool(mine.all()):
            number, total = shard
            raise SaveError(
                f"cannot save table {table!r} as shard {number} of {total}: it has ids of other shards, "
                f"such as {int(ids[~mine][0])}. It is for ids that are, as unsigned numbers, {number} modulo "
                f"{total}; send every id to its own server."
            )

    return check


@dataclass(frozen=True, slots=True)
class _Source:
    """A table of a checkpoint that rows are read from."""

    name: str
    of: str
    """The table whose rows they are, before tables were merged."""
    slot: int | None = None
    """The slot of whose ids alone rows are read; None for all."""

    def __str__(self) -> str:
        return f"table {self.name}"

    def keep(self, shard: IdShard) -> Keep | None:
        """Return which ids are those of a shard and of the slot; None for all."""
        slot = self.slot
        if slot is None:
            return None if shard == WHOLE else shard
        in_shard = kept_ids(None if shard == WHOLE else shard)

        def chosen(ids: Tensor) -> Tensor:
            mine = slot_of(ids).eq(slot)
            if self.name == self.of and not bool(mine.all()):
                raise RestoreError(
                    f"cannot merge table {self.name!r} with others: it is of slot {slot}, and has ids "
                    f"of other slots, such as {int(ids[~mine][0])}. Only ids that are fids tell their slots "
                    "apart; set train.tables.merge_equal_slots to false"
                )
            return mine if in_shard is None else mine & in_shard(ids)

        return chosen


_OTHER_TABLES = "starts counting from zero, because its slots were counted in other tables"


def _sources(config: TableConfig, chain: Sequence[SavedPart], known: Collection[str]) -> list[_Source]:
    """Return where the rows of a table are in a checkpoint: in the table of its name, or in other tables.

    Slots that shard a merged table may have had tables of their own, or have shared another one; a table of
    one slot may have been merged into another. Ids carry the number of their slot there.
    """
    for old in (config.name, *config.extra_restore_names):
        if old in known:
            return [_Source(old, config.name)]
    merged = {
        slot: (name, number)
        for saved in chain
        for name, entry in saved.entry["tables"].items()
        for slot, number in entry.get("merged", ())
    }
    found = []
    for slot, number in config.merged or ((config.name, None),):
        if slot in known:
            found.append(_Source(slot, slot, number))
        elif slot in merged:
            found.append(_Source(merged[slot][0], slot, merged[slot][1]))
    return found


def _history(chain: Sequence[SavedPart], name: str) -> list[SavedTable]:
    found = (SavedTable.find(saved.prefix, saved.entry, name) for saved in chain)
    return [saved for saved in found if saved is not None]


def _state_for(
    config: TableConfig, history: Sequence[SavedTable], options: RestoreOptions
) -> tuple[Literal["keep", "reset"], str]:
    """Return what to do with optimizer state, and why if it is reset."""
    if options.optimizer_state == "reset":
        return "reset", "optimizer state reset, as asked"
    if options.optimizer_state == "keep":
        return "keep", ""
    saved = {tuple(map(tuple, one.entry["layout"])) for one in history}
    mine = tuple(map(tuple, _layout(config)))
    if saved <= {mine}:
        return "keep", ""
    if _width_text(config, history):
        return "reset", "optimizer state reset, because rows have other columns"
    return "reset", "optimizer state reset, because the optimizer changed"


def _width_text(config: TableConfig, history: Sequence[SavedTable]) -> str:
    """Return which columns of rows are loaded, in words; empty if a row is as wide as it was."""
    mine = [segment.dim for segment in config.segments]
    for one in history:
        saved = [dim for dim, *_ in one.entry["layout"]]
        if saved != mine:
            kept = sum(min(saved[old], mine[new]) for old, new in aligned(saved, mine) or ())
            return (
                f"{kept} of {sum(mine)} columns"
                if kept < sum(mine)
                else f"{kept} of {sum(saved)} saved columns"
            )
    return ""


def _merged(config: TableConfig) -> Entry:
    """Return which tables were merged into this one, for a run that does not merge them."""
    return {"merged": [list(slot) for slot in config.merged]} if config.merged else {}


def _layout(config: TableConfig) -> list[list[Any]]:
    return [[s.dim, s.optimizer.rule.kind, 0 if config.serving else s.state_dim] for s in config.segments]


def _check_capacity(name: str, done: LoadReport) -> None:
    if done.refused:
        raise RestoreError(
            f"cannot restore table {name!r}: {done.refused:,} of its rows do not fit into "
            "capacity_bytes. Raise capacity_bytes, or let the oldest rows expire (when_full='expire_oldest')."
        )


def _last_with_filter(chain: Sequence[SavedPart], table: str) -> SavedPart | None:
    return next((saved for saved in reversed(chain) if table in saved.entry["filters"]), None)


def _filter_source(
    admission: AdmissionFilter, chain: Sequence[SavedPart], table: str, shard: IdShard
) -> tuple[str | None, str]:
    """Return the files of a filter's counts; None if there are none that fit, and why.

    A filter has no ids, only counters that hashes of ids select, so its counts can be neither divided nor
    merged. A shard that is part of a saved one loads all its counts: those of ids that it never sees expire.
    """
    newest = _last_with_filter(chain, table)
    if newest is None:
        return None, ""
    shards = filter_shards(newest.entry, table)
    number, total = shard
    source = filter_basename(newest.prefix, table, (number % shards, shards))
    if not isinstance(admission, SlidingFilter) or shards == total:  # other filters count nothing
        return source, ""
    if total % shards:
        whom = "one process" if total == 1 else f"{total} servers"
        why = f"the counts of {shards} servers cannot be merged for {whom}"
        return None, f"starts counting from zero, because {why}"
    saved = filter_files.inspect(source)[0]
    if (saved.sliding["split_num"], saved.split["total_size"]) != (admission.split_num, admission.total_size):
        return None, "starts counting from zero, because it was saved with another capacity or split_num"
    return source, ""
