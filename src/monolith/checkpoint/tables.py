"""The tables of a model in a checkpoint: rows with their optimizer state, and the filters.

    model.ckpt-100.assets/item.manifest ...     a dump of the table, whole or of its changes
    model.ckpt-100.assets/hash_filter_item-...  what its filter has counted

A cut holds all tables at one moment; see `monolith.table.table`. Restoring goes into tables
of any capacity and, with `share`, into one of several that each hold a share of the rows. Several may
also write one checkpoint together; see `shares`.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor

from monolith import filesystem, native
from monolith.checkpoint.fitting import Changes, aligned
from monolith.checkpoint.part import Entry, RestoreOptions, SavedPart
from monolith.checkpoint.report import RestoreReport
from monolith.checkpoint.shares import (
    WHOLE,
    IdShard,
    SavedTable,
    check_share,
    filter_basename,
    filter_shares,
    share_folder,
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
"""Where rows are of more slots than any model has, their ids are plain hashes, and slots say nothing."""


class TablesPart:
    """Tables that are saved at one moment, with their filters.

    Args:
        tables: By name, which is also the name of their files.
        filters: By the name of the table that asks them.
        num_shards: Files per table; by default one per million rows, up to 4.
        share: The ids these tables hold, where they are one of several parameter servers: (k, n) for those
            that are k modulo n; by default all. Each writes its share of a checkpoint into a folder of its
            own, and what all return goes through `merge_entries` into the manifest.
        incremental: Whether tables keep track of changes, so that a checkpoint may be an increment.
        workers: Files to read at once.
        write_workers: Files to write at once; fewer where training goes on beside it.
        progress: Advanced by rows that are read.
        write_progress: Advanced by rows that are written, by the thread that writes them.
        restoring: Made around every restore, for whoever must not look at tables that are half restored.

    Raises:
        ConfigError: There is no such share.
    """

    name = "tables"

    def __init__(
        self,
        tables: Mapping[str, Table],
        filters: Mapping[str, AdmissionFilter] | None = None,
        *,
        num_shards: int | None = None,
        share: IdShard = WHOLE,
        incremental: bool = False,
        workers: int = 4,
        write_workers: int = 4,
        progress: Progress | None = None,
        write_progress: Progress | None = None,
        restoring: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        check_share("the share of a checkpoint's tables", share)
        self._tables = dict(tables)
        self._filters = dict(filters or {})
        self._num_shards = num_shards
        self._share = share
        self._incremental = incremental
        self._workers = workers
        self._write_workers = write_workers
        self._progress = progress
        self._write_progress = write_progress
        self._restoring = restoring
        self._track()

    def cut(self, step: int) -> TablesCut:  # noqa: ARG002
        with contextlib.ExitStack() as held, contextlib.ExitStack() as undo:
            for table in self._tables.values():
                held.enter_context(table.frozen())
            cuts: dict[str, TableSnapshot] = {}
            for name, table in self._tables.items():
                cuts[name] = cut = table.snapshot()
                undo.callback(cut.close, saved=False)
            filters = {name: one.copy() for name, one in self._filters.items()}
            undo.pop_all()
        return TablesCut(
            cuts,
            filters,
            num_shards=self._num_shards,
            workers=self._write_workers,
            progress=self._write_progress,
            share=self._share,
        )

    def restore(self, chain: Sequence[SavedPart], options: RestoreOptions) -> RestoreReport:
        """Go back to what was saved, by however many writers; see `Part.restore`.

        Reads the shares that may hold ids of this one: its own alone where there were as many writers
        as there are now. If any table holds rows, all that is to be read of the whole chain, all
        tables and filters, is read once and found good before the first table is touched. Tables that
        are empty are read once, each block checked before it goes in. A table whose restore fails even
        so is left empty.
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
        """Return the tables of a changed model whose saved rows are of no use, and why."""
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
        """Refuse what is missing, and, if there is something to lose, what is damaged."""
        verify = any(len(table) for table in self._tables.values())
        read = {one.name for found in sources.values() for one in found}
        for name in sorted(read):
            for saved in _history(chain, name):
                mine = saved.shares_for(self._share)
                files = [saved.inspect(share, verify=verify, workers=self._workers) for share in mine]
                for share in mine:
                    saved.inspect_removed(share, verify=verify)
                if len(mine) == saved.shares:
                    saved.check_rows(sum(file.rows for each in files for file in each))
        for name, admission in self._filters.items():
            found = sources.get(name, ())
            whole = len(found) == 1 and found[0].slot is None
            source = _filter_source(admission, chain, found[0].name, self._share)[0] if whole else None
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
                    self._forget_cleared(table, saved, source)
                    for share in saved.shares_for(self._share):
                        done = self._load(
                            table, saved, share, state, source, clear=not touched, refit=bool(narrower)
                        )
                        touched = True
                        _check_room(name, done)
                        rows += done.rows
                        scales.append(table.scales)
                    # They only ever grow.
                    table.set_scales([max(each) for each in zip(*scales, strict=True)])
                    removed += saved.entry.get("removed", 0)
        except BaseException:
            if touched:  # half a table looks whole
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
        share: int,
        state: Literal["keep", "reset"],
        source: _Source,
        *,
        clear: bool,
        refit: bool,
    ) -> LoadReport:
        """Read one share; a whole one also clears the table before, if it is the first."""
        own = (share, saved.shares)
        keep = own if self._share == WHOLE else self._share
        how: dict[str, Any] = {
            "keep": source.keep(keep),
            "optimizer_state": state,
            "workers": self._workers,
            "progress": self._progress,
            "refit": refit,
        }
        if saved.changes:
            done = load_changes(table, saved.basename(share), **how)
        else:
            done = load(table, saved.basename(share), clear=clear, verify_first=False, **how)
        if keep == own and done.skipped and source.slot is None:
            raise RestoreError(
                f"cannot restore table {table.config.name!r}: {done.skipped:,} rows in {saved.called(share)} "
                "have ids of other shares. Put the files back where each server wrote them."
            )
        return done

    def _forget_cleared(self, table: Table, saved: SavedTable, source: _Source) -> None:
        """Remove what the shares held that were cleared before the changes of one checkpoint."""
        mine = saved.shares_for(self._share)
        gone = [share for share in mine if saved.changes and saved.cleared[share]]
        if not gone:
            return
        if gone == mine and source.slot is None:
            table.clear()
            return
        lost: list[Tensor] = []
        for share in gone:
            in_share = kept_ids((share, saved.shares))
            assert in_share is not None
            for rows in iterate(table):
                held = in_share(rows.ids)
                if source.slot is not None:  # rows of other slots came from elsewhere
                    held &= slot_of(rows.ids).eq(source.slot)
                lost.append(rows.ids[held])
        for ids in lost:
            table.remove(ids)

    def _restore_filter(
        self, name: str, sources: Sequence[_Source], chain: Sequence[SavedPart]
    ) -> dict[str, str]:
        """Take over what a filter has counted; return what to say where it begins anew."""
        admission = self._filters.get(name)
        if admission is None:
            return {}
        source: str | None
        if len(sources) == 1 and sources[0].slot is None:
            source, why = _filter_source(admission, chain, sources[0].name, self._share)
        else:
            counted = any(_last_with_filter(chain, one.name) for one in sources)
            source, why = None, _OTHER_TABLES if counted and isinstance(admission, SlidingFilter) else ""
        if source is not None:
            admission.restore(source)
        elif why and isinstance(admission, SlidingFilter):
            _forget_counts(admission)
        return {f"filter of {name}": why} if why else {}


class TablesCut:
    """The tables of one moment, to be written."""

    def __init__(
        self,
        cuts: Mapping[str, TableSnapshot],
        filters: Mapping[str, AdmissionFilter],
        *,
        num_shards: int | None,
        workers: int,
        progress: Progress | None,
        share: IdShard,
    ) -> None:
        self._cuts = dict(cuts)
        self._filters = dict(filters)
        self._num_shards = num_shards
        self._workers = workers
        self._progress = progress
        self._share = share
        self._stamp = secrets.token_hex(8)  # a second attempt keeps the files of the first

    def write(self, prefix: str, *, full: bool) -> Entry:
        """As `PartCut.write`.

        Raises:
            SaveError: A table holds ids that are not of this share; a restore would not find them.
        """
        share = self._share
        folder = share_folder(prefix, share)
        tables: dict[str, Entry] = {}
        slots = _Slots()
        filesystem.make_dirs(folder)
        for name, cut in self._cuts.items():
            basename = table_basename(folder, name)
            watchers = [] if share == WHOLE else [_only(name, share)]
            if full:
                tables[name] = self._write_full(_Watched(cut, *watchers), basename, slots)
            else:
                tables[name] = self._write_changes(_Watched(cut, *watchers), basename)
        for name, one in self._filters.items():
            one.save(filter_basename(prefix, name, share))
        entry: Entry = {"tables": tables, "filters": sorted(self._filters), "pieces": 1}
        if share != WHOLE:
            entry["piece"] = list(share)
        met = slots.met()
        if full and len(met) <= _MOST_SLOTS:
            entry["slots"] = met
        return entry

    def _write_full(self, cut: TableSnapshot, basename: str, slots: _Slots) -> Entry:
        done = dump_snapshot(
            cut,
            basename,
            num_shards=self._num_shards,
            workers=self._workers,
            stamp=self._stamp,
            resume=True,
            progress=self._progress,
            written=slots,
        )
        return {
            "kind": "full",
            "rows": done.rows,
            "bytes": done.bytes,
            "expired": done.expired,
            "layout": _layout(cut.config),
            **_merged(cut.config),
        }

    def _write_changes(self, cut: TableSnapshot, basename: str) -> Entry:
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
            **_merged(cut.config),
        }

    def close(self, *, saved: bool) -> None:
        for cut in self._cuts.values():
            cut.close(saved=saved)


class _Watched:
    """A cut that shows the ids that are read from it to somebody, in several threads at once."""

    def __init__(self, cut: TableSnapshot, *watchers: Callable[[Tensor], None]) -> None:
        self._cut = cut
        self._watchers = watchers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cut, name)

    def __len__(self) -> int:
        return len(self._cut)

    def scan(self, cursor: int | None = None, **how: Any) -> Scan:
        found = self._cut.scan(cursor, **how)
        for watch in self._watchers:
            watch(found.rows.ids)
        return found


class _Slots:
    """Counts the slots of ids."""

    def __init__(self) -> None:
        self._counts = np.zeros(MAX_SLOTS_V2, np.int64)
        self._lock = threading.Lock()

    def __call__(self, ids: Tensor) -> None:
        # No sorting: it would keep whoever trains from running Python.
        counts = np.bincount(slot_of(ids).numpy(), minlength=MAX_SLOTS_V2)
        with self._lock:
            self._counts += counts

    def met(self) -> dict[str, int]:
        return {str(slot): int(self._counts[slot]) for slot in np.flatnonzero(self._counts).tolist()}


def _only(table: str, share: IdShard) -> Callable[[Tensor], None]:
    """Return what refuses ids of another share."""
    in_share = kept_ids(share)
    assert in_share is not None

    def check(ids: Tensor) -> None:
        mine = in_share(ids)
        if not bool(mine.all()):
            number, total = share
            raise SaveError(
                f"cannot save table {table!r} as share {number} of {total}: it holds ids of other shares, "
                f"such as {int(ids[~mine][0])}. This one is for the ids that are {number} modulo {total}, as "
                "unsigned numbers; send every id to its own server."
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

    def keep(self, share: IdShard) -> Keep | None:
        """Return which ids are those of a share and of the slot; None for all."""
        slot = self.slot
        if slot is None:
            return None if share == WHOLE else share
        in_share = kept_ids(None if share == WHOLE else share)

        def chosen(ids: Tensor) -> Tensor:
            mine = slot_of(ids).eq(slot)
            if self.name == self.of and not bool(mine.all()):
                raise RestoreError(
                    f"cannot merge table {self.name!r} with others: it is of slot {slot}, and has ids "
                    f"of other slots, such as {int(ids[~mine][0])}. Only ids that are fids tell their slots "
                    "apart; set train.tables.merge_equal_slots to false"
                )
            return mine if in_share is None else mine & in_share(ids)

        return chosen


_OTHER_TABLES = "starts counting from zero, because its slots were counted in other tables"


def _sources(config: TableConfig, chain: Sequence[SavedPart], known: Collection[str]) -> list[_Source]:
    """Return where the rows of a table are in a checkpoint: in that of its name, or in others.

    Slots that share a merged table may have had tables of their own, or have shared another one; a table of
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
    """Return what to do with optimizer state, and why where it starts anew."""
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
    """Return which tables were merged into this one: a run that does not merge them finds its rows by it."""
    return {"merged": [list(slot) for slot in config.merged]} if config.merged else {}


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


def _filter_source(
    admission: AdmissionFilter, chain: Sequence[SavedPart], table: str, share: IdShard
) -> tuple[str | None, str]:
    """Return where to read what a filter has counted; None if nowhere, and why where it was saved.

    A filter keeps no ids, only cells that their hashes lead to, so its counts can be neither divided
    nor put together. A share that lies within one that was saved takes over all of it: the counts of
    ids it never meets fade.
    """
    newest = _last_with_filter(chain, table)
    if newest is None:
        return None, ""
    shares = filter_shares(newest.entry, table)
    number, total = share
    source = filter_basename(newest.prefix, table, (number % shares, shares))
    if not isinstance(admission, SlidingFilter) or shares == total:  # others remember no ids
        return source, ""
    if total % shares:
        whom = "one process" if total == 1 else f"{total} servers"
        why = f"what {shares} servers counted cannot be put together for {whom}"
        return None, f"starts counting from zero, because {why}"
    saved = filter_files.inspect(source)[0]
    core = admission.core
    if (saved.sliding["split_num"], saved.split["total_size"]) != (
        core.split_num,
        core.split_meta(0).total_size,
    ):
        return None, "starts counting from zero, because it was saved with another capacity or split_num"
    return source, ""


def _forget_counts(admission: SlidingFilter) -> None:
    now = admission.core.meta()
    admission.core.restore(
        native.SlidingFilterMeta(
            split_num=now.split_num,
            max_forward_step=now.max_forward_step,
            max_backward_step=now.max_backward_step,
            max_step=now.max_step,
            head=0,
            head_increment=0,
            failure_count=0,
        )
    )
