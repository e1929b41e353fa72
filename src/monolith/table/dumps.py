"""Dumps: a whole table in several files, there whole or not there.

A dump at the basename `runs/item` is one manifest and the shards it speaks of:

    runs/item.manifest                              which dump is the current one
    runs/item.4f0c9b1e2a7d3358-00000-of-00002       its rows, in the format of `shard_files`
    runs/item.4f0c9b1e2a7d3358-00001-of-00002

Every dump gets a name of its own at random, which its files and their headers carry.
So a new dump never touches the files of the old one: it writes its shards next to
them, renames the manifest into place, and only then removes the old shards. Whatever
fails or is killed before that rename leaves the old dump to be loaded; after it, the
new one. A shard of another dump under the right name is refused.

One dump at a time may write to a basename.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict, Unpack

import numpy as np

from monolith import filesystem, native
from monolith.errors import CorruptFileError, FilesystemError, RestoreError, TableArgumentError
from monolith.front_door import module_when_used
from monolith.table.compressors import inexact
from monolith.table.config import TableConfig
from monolith.table.shard_files import (
    Description,
    RowLayout,
    SegmentLayout,
    ShardInfo,
    ShardReader,
    rows_per_block,
    write_shard,
)
from monolith.table.sharded_files import StopTogether, find_sharded, in_parallel, parse, sharded_names
from monolith.table.table import Rows, Table, TableSnapshot, iterate

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from monolith.observe import Progress
else:
    torch = module_when_used("torch")

Keep: TypeAlias = "Callable[[Tensor], Tensor] | tuple[int, int]"
"""Which ids to load: a function from int64 ids to a bool mask, or (shard, num_shards): ids that are,
as unsigned numbers, `shard` modulo `num_shards`."""

_ROWS_PER_SHARD = 1_000_000
_IDS_ONLY = RowLayout((SegmentLayout(dim=0, state_dim=0, optimizer="none", compressor="none"),))
_MANIFEST_VERSION = 1
_MANIFEST_LIMIT = 64 << 20
_GENERATION = re.compile(r"\.([0-9a-f]{16})(?=-\d{5}-of-\d{5}(-tmp-[0-9a-f]{12})?$)")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DumpReport:
    """What a dump wrote."""

    rows: int
    """In all its files, those kept by `resume` included."""
    bytes: int
    expired: int
    """Rows left out because they had expired; unknown for files of an older dump."""
    files: tuple[str, ...]
    skipped: int
    """Files that `resume` found complete and kept."""


@dataclass(frozen=True, slots=True)
class ChangesReport:
    """What a dump of changes wrote."""

    changed: DumpReport
    removed: int
    removed_bytes: int
    cleared: bool
    """Whether the table was cleared in between; `load_changes` must be told."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load read."""

    rows: int
    """Handed to the table."""
    bytes: int
    files: tuple[str, ...]
    skipped: int
    """Rows that were not to be kept."""
    refused: int
    """Rows refused because the table had no free memory."""


@dataclass(frozen=True, slots=True)
class DumpManifest:
    """Which shards make up the dump at a basename."""

    table: str
    dump: str
    stamp: str | int
    rows: tuple[int, ...]
    """Of each shard."""
    bytes: tuple[int, ...]
    version: int = _MANIFEST_VERSION


def default_num_shards(rows: int) -> int:
    """Return one shard per million rows, at least 1 and at most 4."""
    return min(4, max(1, rows // _ROWS_PER_SHARD))


def table_basename(folder: str, name: str) -> str:
    """Return the basename of the dump of table `name` in a folder: `:` and `/` become `-`."""
    return filesystem.join(folder, name.replace(":", "-").replace("/", "-"))


class TableDumpOptions(TypedDict, total=False):
    """The keyword arguments of `dump` and `dump_snapshot`."""

    num_shards: int | None
    """Files to write; by default one per million rows, up to 4."""
    workers: int
    """Files to write at once; 4 by default."""
    expire_at: int | None
    """Unix seconds: rows that have expired by then are left out. By default all are written."""
    stamp: str | int
    """A name for the moment that is dumped, such as the checkpoint's; "" by default."""
    resume: bool
    """Whether to reuse the shards that an earlier dump of the same stamp, layout and number of shards
    completed, after checking every byte of them; False by default."""
    progress: Progress | None
    """Advanced by rows."""


def dump(
    table: Table, basename: str, *, consistent: bool = True, **options: Unpack[TableDumpOptions]
) -> DumpReport:
    """Write all rows of a table to `basename`; its folder is made.

    Args:
        consistent: Whether writers wait until the files are written, so that the dump is
            the table at one moment. Otherwise each row is whole, of whatever moment.

    Raises:
        FilesystemError: A file could not be written. The dump that was at `basename` is
            still there. Shards completed so far stay if there is a stamp to resume by.
    """
    num_shards, stamp = options.get("num_shards"), options.get("stamp", "")
    resume = options.get("resume", False)
    if resume and stamp == "":
        raise TableArgumentError("dump: resume needs a stamp, to know that the table is still the same")
    if num_shards is not None:
        sharded_names(basename, num_shards)  # refuses a number that cannot be
    with table.frozen() if consistent else contextlib.nullcontext():
        stats = table.stats()
        total = default_num_shards(stats.rows) if num_shards is None else num_shards
        wanted = _description(table.config, RowLayout.of(table.config), total, stamp, table.scales)
        return _write(
            basename,
            wanted,
            lambda shard, limit: iterate(table, limit=limit, shard=shard, num_shards=total),
            live=_unexpired(table.config, options.get("expire_at")),
            workers=options.get("workers", 4),
            resume=resume,
            progress=options.get("progress"),
        )


def dump_snapshot(
    snapshot: TableSnapshot,
    basename: str,
    *,
    written: Callable[[Tensor], None] | None = None,
    **options: Unpack[TableDumpOptions],
) -> DumpReport:
    """Write all rows of a snapshot to `basename`, as `dump` does those of a table.

    Args:
        written: Called with the ids of all rows of the dump, including those of reused files; by several
            threads at once.
    """
    num_shards = options.get("num_shards")
    total = default_num_shards(len(snapshot)) if num_shards is None else num_shards
    return _write(
        basename,
        _description(
            snapshot.config,
            RowLayout.of(snapshot.config),
            total,
            options.get("stamp", ""),
            snapshot.scales,
        ),
        lambda shard, limit: _scanned(snapshot, shard, total, limit, changed_only=False),
        live=_unexpired(snapshot.config, options.get("expire_at")),
        workers=options.get("workers", 4),
        resume=options.get("resume", False),
        progress=options.get("progress"),
        written=written,
    )


def dump_changes(
    snapshot: TableSnapshot,
    basename: str,
    *,
    workers: int = 4,
    stamp: str | int = "",
    resume: bool = False,
    progress: Progress | None = None,
) -> ChangesReport:
    """Write the changes since the snapshot before: rows to `basename`, removed ids to `.removed` next to it.

    Expired rows are written, too: a row that is left out would come back as it was in the previous dump.

    Raises:
        TableArgumentError: The table does not keep track of changes.
    """
    if not snapshot.tracked:
        raise TableArgumentError(
            f"cannot dump the changes of table {snapshot.config.name!r}: it does not keep track of them; "
            "call track_changes() before the snapshot they count from"
        )
    config = snapshot.config
    changed = _write(
        basename,
        _description(config, RowLayout.of(config), 1, stamp, snapshot.scales),
        lambda shard, limit: _scanned(snapshot, shard, 1, limit, changed_only=True),
        live=None,
        workers=workers,
        resume=resume,
        progress=progress,
    )
    removed = snapshot.removed()
    none = torch.empty(len(removed), 0)
    gone_rows = Rows(removed, torch.zeros_like(removed), none, none)

    def ids(_shard: int, limit: int) -> Iterator[Rows]:
        for at in range(0, len(removed), limit):
            yield gone_rows.slice(at, at + limit)

    gone = _write(
        removed_basename(basename),
        _description(config, _IDS_ONLY, 1, stamp, ()),
        ids,
        live=None,
        workers=1,
        resume=resume,
        progress=None,
    )
    return ChangesReport(changed, gone.rows, gone.bytes, snapshot.cleared)


def dump_rows(
    basename: str,
    like: Description,
    scan: Callable[[int, int], Iterator[Rows]],
    *,
    num_shards: int,
    workers: int = 4,
    progress: Progress | None = None,
) -> DumpReport:
    """Write rows that no table holds to `basename`, as `dump` does those of a table.

    Args:
        like: A dump of the same table: its name, layout and scales.
        scan: Given a shard and a number of rows, yields the rows of that shard in the order of their
            hashes, so many at a time. Called from several threads.
    """
    return _write(
        basename,
        replace(like, shard=0, num_shards=num_shards, dump=secrets.token_hex(8), stamp=""),
        scan,
        live=None,
        workers=workers,
        resume=False,
        progress=progress,
    )


def _description(
    config: TableConfig, layout: RowLayout, num_shards: int, stamp: str | int, scales: Sequence[float]
) -> Description:
    return Description(
        table=config.name,
        layout=layout,
        shard=0,
        num_shards=num_shards,
        dump=secrets.token_hex(8),
        stamp=stamp,
        scales=tuple(scales),
    )


def _scanned(
    snapshot: TableSnapshot, shard: int, num_shards: int, limit: int, *, changed_only: bool
) -> Iterator[Rows]:
    cursor: int | None = None
    while True:
        scan = snapshot.scan(
            cursor, limit=limit, shard=shard, num_shards=num_shards, changed_only=changed_only
        )
        if len(scan.rows):
            yield scan.rows
        if scan.cursor is None:
            return
        cursor = scan.cursor


def _unexpired(config: TableConfig, now: int | None) -> Callable[[Rows], Rows] | None:
    return None if now is None else lambda rows: without_expired(rows, config, now)


def _write(
    basename: str,
    wanted: Description,
    scan: Callable[[int, int], Iterator[Rows]],
    *,
    live: Callable[[Rows], Rows] | None,
    workers: int,
    resume: bool,
    progress: Progress | None,
    written: Callable[[Tensor], None] | None = None,
) -> DumpReport:
    """Write a dump of `wanted.num_shards` shards; `scan(shard, limit)` yields the rows of one."""
    if resume and wanted.stamp == "":
        raise TableArgumentError("dump: resume needs a stamp, to know that the table is still the same")
    total = wanted.num_shards
    sharded_names(basename, total)  # refuses a number that cannot be
    filesystem.make_dirs(filesystem.parent(basename) or ".")
    # Shards that an interrupted dump of the same moment completed are reused, and the new ones get its name:
    # a manifest lists shards of one name only.
    kept = _resumable(basename, wanted, workers) if resume else {}
    if kept:
        wanted = replace(wanted, dump=next(iter(kept.values())).description.dump)
    if written is not None:
        for shard in kept.values():
            with ShardReader(shard.path) as reader:
                for rows in reader:
                    written(rows.ids)
    paths = sharded_names(f"{basename}.{wanted.dump}", total)
    expired = [0] * total

    def live_rows(shard: int) -> Iterator[Rows]:
        for rows in scan(shard, rows_per_block(wanted.layout)):
            kept_rows = rows if live is None else live(rows)
            expired[shard] += len(rows) - len(kept_rows)
            if len(kept_rows):
                if written is not None:
                    written(kept_rows.ids)
                yield kept_rows
            if progress is not None:
                progress.advance(len(rows))

    def write(shard: int, stop: StopTogether) -> ShardInfo:
        return write_shard(paths[shard], replace(wanted, shard=shard), stop.chunks(live_rows(shard)))

    missing = [shard for shard in range(total) if shard not in kept]
    try:
        done = kept | dict(zip(missing, in_parallel(write, missing, workers), strict=True))
        shards = [done[shard] for shard in range(total)]
        manifest = DumpManifest(
            table=wanted.table,
            dump=wanted.dump,
            stamp=wanted.stamp,
            rows=tuple(shard.rows for shard in shards),
            bytes=tuple(shard.bytes for shard in shards),
        )
        # The commit point: before this rename the old dump is the current one, after it the new one.
        _write_manifest(basename, manifest)
    except BaseException:
        # With a stamp the complete shards stay, for a later call to resume; without one they are useless.
        if wanted.stamp == "":
            _remove_generations(basename, lambda name: name == wanted.dump)
        raise
    # Only now: a crash in between leaves files that no manifest lists, which the next dump removes.
    _remove_generations(basename, lambda name: name != wanted.dump)
    return DumpReport(
        rows=sum(manifest.rows),
        bytes=sum(manifest.bytes),
        expired=sum(expired),
        files=tuple(paths),
        skipped=len(kept),
    )


class TableLoadOptions(TypedDict, total=False):
    """The keyword arguments of `load` and `load_changes`."""

    keep: Keep | None
    """Which ids to load; all by default."""
    optimizer_state: Literal["keep", "reset"]
    """"reset" starts all rows with fresh state, for a model whose optimizers changed; "keep" by default."""
    workers: int
    """Files to read at once; 4 by default."""
    progress: Progress | None
    """Advanced by rows."""
    refit: bool
    """Whether rows may have another width: of each segment the leading columns are taken, and the other
    columns start as in a new row. Optimizer state starts fresh then. False by default."""


def load(
    table: Table,
    basename: str,
    *,
    clear: bool = True,
    verify_first: bool = True,
    **options: Unpack[TableLoadOptions],
) -> LoadReport:
    """Read a dump into a table, whatever the number of shards it has.

    The files are found complete, of one dump and fitting, and all their checksums are
    right, before the table is touched. If it fails even so, a table that was
    cleared is left empty.

    Args:
        basename: Where the dump is. If there is none, the table's `extra_restore_names`
            are tried in the same folder, in order.
        clear: Whether the table's present rows are dropped first; False writes over them.
        verify_first: False reads every file once instead of twice, which pays if
            reading is slow; a damaged block is then found when the table is cleared already.

    Raises:
        RestoreError: There is no dump, a shard is missing, or rows do not fit the table.
        CorruptFileError: A file is damaged; nothing was touched if `verify_first`.
    """
    return _load(
        table, basename, lambda rows: clean_slate(table, clear, rows), verify_first=verify_first, **options
    )


def _load(
    table: Table,
    basename: str,
    ready: Callable[[int], AbstractContextManager[None]],
    *,
    verify_first: bool,
    **options: Unpack[TableLoadOptions],
) -> LoadReport:
    """Check a dump, and restore its rows within `ready(how many)`."""
    keep, workers, progress = options.get("keep"), options.get("workers", 4), options.get("progress")
    optimizer_state, refit = options.get("optimizer_state", "keep"), options.get("refit", False)
    if optimizer_state not in ("keep", "reset"):
        raise TableArgumentError(f"optimizer_state must be 'keep' or 'reset', got {optimizer_state!r}")
    config = table.config
    basename, manifest = _find(basename, config)
    paths = _shard_paths(basename, manifest)

    def check(shard: int, stop: StopTogether) -> ShardInfo:
        with ShardReader(paths[shard]) as reader:
            _check_belongs(reader.info, manifest, shard)
            if verify_first:
                for _ in stop.chunks(reader):
                    pass
            return reader.info

    # First pass: nothing of the table has changed yet, so every error found here costs nothing.
    shards = in_parallel(check, range(len(paths)), workers)
    dims = [segment.dim for segment in config.segments]
    other = refit and any(
        [segment.dim for segment in shard.description.layout.segments] != dims for shard in shards
    )
    with_state = not other and all(_takes_state(shard, config, optimizer_state) for shard in shards)
    chosen = kept_ids(keep)
    skipped, rounded = [0] * len(paths), [0] * len(paths)

    # Second pass. Files are checked again as they are read: they may have been replaced since.
    def restore(shard: int, stop: StopTogether) -> None:
        with ShardReader(paths[shard]) as reader:
            _check_belongs(reader.info, manifest, shard)
            for rows in stop.chunks(reader):
                mine = rows if chosen is None else rows.keep(chosen(rows.ids))
                skipped[shard] += len(rows) - len(mine)
                if len(mine) and other:
                    mine = _refitted(mine, reader.info.description.layout, config)
                if config.stores_narrow:
                    rounded[shard] += int(inexact(mine.values.numpy(), config.embedding_dtype, dims).sum())
                if len(mine):
                    table.restore(mine if with_state else without_state(mine))
                if progress is not None:
                    progress.advance(len(rows))

    before = table.stats().refused
    with ready(sum(manifest.rows) // (keep[1] if isinstance(keep, tuple) else 1)):
        _restore_scales(table, shards[0].description)
        in_parallel(restore, range(len(paths)), workers)
    if sum(rounded):
        _log.warning(
            "table %r stores embeddings as %s: of %s restored rows, %s had float32 values that were "
            "rounded to the nearest",
            config.name,
            config.embedding_dtype,
            f"{sum(manifest.rows) - sum(skipped):,}",
            f"{sum(rounded):,}",
        )
    return LoadReport(
        rows=sum(manifest.rows) - sum(skipped),
        bytes=sum(manifest.bytes),
        files=tuple(paths),
        skipped=sum(skipped),
        refused=table.stats().refused - before,
    )


def load_changes(
    table: Table, basename: str, *, cleared: bool = False, **options: Unpack[TableLoadOptions]
) -> LoadReport:
    """Apply a dump of changes to a table that is in the state before them.

    All files are checked before the table is touched.

    Args:
        cleared: As `dump_changes` reported: all rows before these are dropped.

    Raises:
        RestoreError: There is no such dump, or rows do not fit the table.
        CorruptFileError: A file is damaged; nothing was touched.
    """
    gone = list(_removed_ids(basename))

    @contextlib.contextmanager
    def ready(_rows: int) -> Iterator[None]:
        if cleared:
            table.clear()
        for ids in gone:
            table.remove(ids)
        yield

    return _load(table, basename, ready, verify_first=True, **options)


def inspect_dump(
    basename: str, *, verify: bool = False, workers: int = 4, progress: Progress | None = None
) -> list[ShardInfo]:
    """Return the shards of a dump, in order, if they are complete and of one dump.

    Args:
        verify: Whether every byte is read, and not only what the files say of themselves.
        progress: Advanced by rows, where they are read.

    Raises:
        FileMissingError: There is no dump.
        RestoreError: A shard is missing, or is of another dump.
        CorruptFileError: A file is damaged.
    """
    manifest = read_dump_manifest(basename)
    paths = _shard_paths(basename, manifest)

    def check(shard: int, stop: StopTogether) -> ShardInfo:
        with ShardReader(paths[shard]) as reader:
            _check_belongs(reader.info, manifest, shard)
            for rows in stop.chunks(reader) if verify else ():
                if progress is not None:
                    progress.advance(len(rows))
            return reader.info

    return in_parallel(check, range(len(paths)), workers)


def remove_dump(basename: str) -> None:
    """Remove a dump, its manifest first; there may be none."""
    filesystem.remove(_manifest_path(basename))
    _remove_generations(basename, lambda _: True)


def removed_basename(basename: str) -> str:
    """Return the path of the removed ids that belong to a dump of changes at `basename`."""
    return f"{basename}.removed"


def removed_ids(basename: str) -> Tensor:
    """Return the ids that a dump of changes removes, int64; an id may come twice."""
    return torch.cat([torch.empty(0, dtype=torch.int64), *_removed_ids(basename)])


def _removed_ids(basename: str) -> Iterator[Tensor]:
    removed = removed_basename(basename)
    manifest = read_dump_manifest(removed)
    for path in _shard_paths(removed, manifest):
        with ShardReader(path) as reader:
            for rows in reader:
                yield rows.ids


def _shard_paths(basename: str, manifest: DumpManifest) -> list[str]:
    paths = find_sharded(f"{basename}.{manifest.dump}")
    if len(paths) != len(manifest.rows):
        raise RestoreError(
            f"{basename}.manifest lists {len(manifest.rows)} shards, there are {len(paths)}. "
            "Restore the files as they were written, or use another dump."
        )
    return paths


def read_dump_manifest(basename: str) -> DumpManifest:
    """Return what the manifest at a basename says.

    Raises:
        FileMissingError: There is none.
        CorruptFileError: It is damaged.
    """
    path = _manifest_path(basename)
    with filesystem.open_read(path) as file:
        text = file.read(_MANIFEST_LIMIT)
    body, newline, crc = text.removesuffix(b"\n").rpartition(b"\n")
    if not newline or not text.endswith(b"\n") or crc != b"%08x" % native.crc32c(body):
        raise CorruptFileError(path, len(body), "the checksum in its last line does not match its content")
    try:
        found = json.loads(body)
        if found["version"] != _MANIFEST_VERSION:
            raise ValueError(f"version {found['version']}, this program reads {_MANIFEST_VERSION}")
        return DumpManifest(**(found | {"rows": tuple(found["rows"]), "bytes": tuple(found["bytes"])}))
    except (ValueError, TypeError, KeyError) as cause:
        raise CorruptFileError(path, 0, f"the manifest is malformed: {cause}") from cause


@contextlib.contextmanager
def clean_slate(table: Table, clear: bool, expect_rows: int = 0) -> Iterator[None]:
    """Clear a table before rows are restored, and again if that fails: half a table looks whole."""
    if clear:
        table.clear(expect_rows=expect_rows)
    try:
        yield
    except BaseException:
        if clear:
            table.clear()
        raise


def without_state(rows: Rows) -> Rows:
    """Return rows that start with fresh optimizer state where they are restored."""
    return replace(rows, state=torch.empty(len(rows), 0))


def without_expired(rows: Rows, config: TableConfig, now: int) -> Rows:
    """Return the rows that have not expired by `now`."""
    expired = config.expiry.expired(rows.ids.numpy(), rows.event_times.numpy(), now)
    return rows.keep(torch.from_numpy(~expired))


def basenames(basename: str, config: TableConfig) -> list[str]:
    """Return where to look for the dump of a table, in order: here, then under its old names."""
    folder = filesystem.parent(basename)
    return [basename, *(table_basename(folder, name) for name in config.extra_restore_names)]


def _find(basename: str, config: TableConfig) -> tuple[str, DumpManifest]:
    names = basenames(basename, config)
    for name in names:
        if filesystem.exists(_manifest_path(name)):
            return name, read_dump_manifest(name)
    unfinished = " A dump was begun there and never completed." if _generations(basename) else ""
    raise RestoreError(
        f"cannot restore table {config.name!r}: there is no {' nor '.join(map(_manifest_path, names))}."
        f"{unfinished} Check the path; if the table was renamed, list its old name in extra_restore_names."
    )


def _check_belongs(found: ShardInfo, manifest: DumpManifest, shard: int) -> None:
    description = found.description
    seen = (description.dump, description.shard, description.num_shards, found.rows, found.bytes)
    expected = (manifest.dump, shard, len(manifest.rows), manifest.rows[shard], manifest.bytes[shard])
    if seen != expected:
        raise RestoreError(
            f"{found.path} is not the file that was dumped: (dump, shard, shards, rows, bytes) are {seen}, "
            f"the manifest says {expected}. Restore the files as they were written, or use another dump."
        )


def _takes_state(found: ShardInfo, config: TableConfig, optimizer_state: str) -> bool:
    """Whether the rows' optimizer state goes into the table; refuses rows that do not fit."""
    has, needs = found.description.layout, RowLayout.of(config)
    what = (
        f"cannot restore table {config.name!r} from {found.path}: "
        f"the checkpoint has {has}, this model needs {needs}."
    )
    if has.dim != needs.dim:
        raise RestoreError(f"{what} Embeddings of another width cannot be restored.")
    if optimizer_state == "reset" or config.serving:
        return False
    differ = [(s.dim, s.optimizer, s.state_dim) for s in has.segments] != [
        (s.dim, s.optimizer, s.state_dim) for s in needs.segments
    ]
    if differ and (has.state_dim or needs.state_dim):
        raise RestoreError(f"{what} If the optimizer changed, restore with optimizer_state='reset'.")
    return needs.state_dim > 0


def _refitted(rows: Rows, has: RowLayout, config: TableConfig) -> Rows:
    """Return rows of another layout with the segments of a table, the last ones being the same.

    Columns that the rows do not have begin as those of a new row would.
    """
    ids, parts, at = rows.ids.numpy(), [], 0
    starts = np.cumsum([0, *(segment.dim for segment in has.segments)])
    # Segments are matched from the last one backwards: a model may gain or lose leading ones, such as a bias.
    shift = len(has.segments) - len(config.segments)
    for number, segment in enumerate(config.segments):
        first = segment.initializer.values(ids, range(at, at + segment.dim), config.seed)
        at += segment.dim
        old = number + shift
        if 0 <= old < len(has.segments):
            kept = min(segment.dim, has.segments[old].dim)
            first[:, :kept] = rows.values[:, starts[old] : starts[old] + kept].numpy()
        parts.append(torch.from_numpy(first))
    return replace(rows, values=torch.cat(parts, 1))


def _restore_scales(table: Table, description: Description) -> None:
    """Take over the scales if they are of the same segments; a one_bit segment that is new starts over."""
    mine = [segment.compressor.kind for segment in table.config.segments]
    if [segment.compressor for segment in description.layout.segments] == mine:
        table.set_scales(list(description.scales))


def kept_ids(keep: Keep | None) -> Callable[[Tensor], Tensor] | None:
    if not isinstance(keep, tuple):
        return keep
    number, total = keep
    if not 0 <= number < total:
        raise TableArgumentError(f"keep must be a share (k, n) with k from 0 to n - 1, got {keep}")

    def mine(ids: Tensor) -> Tensor:
        return torch.from_numpy(ids.numpy().view(np.uint64) % np.uint64(total) == np.uint64(number))

    return mine


def _write_manifest(basename: str, manifest: DumpManifest) -> None:
    body = json.dumps(asdict(manifest), sort_keys=True).encode()
    with filesystem.atomic_write(_manifest_path(basename)) as file:
        file.write(b"%s\n%08x\n" % (body, native.crc32c(body)))


def _manifest_path(basename: str) -> str:
    return f"{basename}.manifest"


def _resumable(basename: str, wanted: Description, workers: int) -> dict[int, ShardInfo]:
    """Return the good shards of the dump that got furthest of those with the wanted description."""
    best: list[tuple[int, str]] = []
    for dump_name, names in _generations(basename).items():
        found = []
        for path in names:
            place = parse(f"{basename}.{dump_name}", path)
            if place is None or place[1] != wanted.num_shards:
                continue
            expected = replace(wanted, dump=dump_name, shard=place[0])
            with contextlib.suppress(CorruptFileError), ShardReader(path) as reader:
                if reader.info.description == expected:
                    found.append((place[0], path))
        best = max(best, found, key=len)

    def check(item: tuple[int, str], stop: StopTogether) -> tuple[int, ShardInfo] | None:
        with contextlib.suppress(CorruptFileError), ShardReader(item[1]) as reader:
            for _ in stop.chunks(reader):
                pass
            return item[0], reader.info
        return None

    return dict(found for found in in_parallel(check, best, workers) if found is not None)


def _generations(basename: str) -> dict[str, list[str]]:
    """Return the files of every dump at `basename`, unfinished ones too, by the dump's name."""
    folder, stem = filesystem.parent(basename), filesystem.base_name(basename)
    found: dict[str, list[str]] = {}
    if folder and not filesystem.exists(folder):
        return found
    for path in filesystem.list_files(folder):
        name = filesystem.base_name(path)
        if name.startswith(stem) and (match := _GENERATION.match(name, len(stem))):
            found.setdefault(match[1], []).append(basename + name[len(stem) :])
    return found


def _remove_generations(basename: str, which: Callable[[str], bool]) -> None:
    """Remove dumps and unfinished files; a file that cannot be removed only costs disk space."""
    try:
        for name, paths in _generations(basename).items():
            for path in paths:
                if which(name) or filesystem.is_temporary(path):
                    filesystem.remove(path)
    except FilesystemError as cause:
        _log.warning("cannot clean up after a dump: %s", cause)
