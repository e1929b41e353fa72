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

Rows of a tiered table that are in files are not written: the dump has links to these files, see `cold_files`.

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
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from monolith import filesystem, native
from monolith.errors import (
    CorruptFileError,
    FileMissingError,
    FilesystemError,
    RestoreError,
    TableArgumentError,
)
from monolith.front_door import module_when_used
from monolith.table.cold_files import (
    ColdFile,
    LinkableFile,
    LinkedRows,
    link_names,
    write_link,
)
from monolith.table.compressors import inexact
from monolith.table.config import EmbeddingDtype, TableConfig
from monolith.table.hashing import unmix
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
from monolith.table.table import Rows, Scan, Table, TableSnapshot, iterate

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from monolith.observe import Progress
    from monolith.table.tiered_table import TieredTable
else:
    torch = module_when_used("torch")

Keep: TypeAlias = "Callable[[Tensor], Tensor] | tuple[int, int]"
"""Which ids to load: a function from int64 ids to a bool mask, or (shard, num_shards): ids that are,
as unsigned numbers, `shard` modulo `num_shards`."""

_ROWS_PER_SHARD = 1_000_000
_IDS_ONLY = RowLayout((SegmentLayout(dim=0, state_dim=0, optimizer="none", compressor="none"),))
_MANIFEST_VERSION = 1
_LINKING_VERSION = 2  # of a manifest of a dump with linked files, which earlier programs must refuse
_MANIFEST_LIMIT = 64 << 20
_GENERATION = re.compile(r"\.([0-9a-f]{16})(?=(\.cold|\.alive)?-\d{5}-of-\d{5}(-tmp-[0-9a-f]{12})?$)")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DumpReport:
    """What a dump wrote."""

    rows: int
    """In all its files, those kept by `resume` included."""
    bytes: int
    """Of all its files. A link takes none as long as the table has the file, too."""
    expired: int
    """Rows left out because they had expired; unknown for files of an older dump."""
    files: tuple[str, ...]
    skipped: int
    """Files that `resume` found complete and kept."""
    linked_rows: int = 0
    """Of the rows, those in files that were linked, or copied where there can be no link."""


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
    adopted: int = 0
    """Rows that a tiered table took over with the files that they are in, without reading them."""


@dataclass(frozen=True, slots=True)
class DumpManifest:
    """Which files make up the dump at a basename."""

    table: str
    dump: str
    stamp: str | int
    rows: tuple[int, ...]
    """Of each shard."""
    bytes: tuple[int, ...]
    version: int = _MANIFEST_VERSION
    linked_rows: tuple[int, ...] = ()
    """Of each linked file, those of the dump."""
    linked_bytes: tuple[int, ...] = ()
    """Of each linked file, with the file that says which rows are of the dump."""


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
            _Source(lambda shard, limit: iterate(table, limit=limit, shard=shard, num_shards=total)),
            expired=_expired_at(table.config, options.get("expire_at")),
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

    Files with rows of a tiered table are linked, and these rows are not read; where there can be no link, on
    another filesystem, the files are copied.

    Args:
        written: Called with the ids of all rows of the dump, including those of reused files; by several
            threads at once.
    """
    num_shards, cold = options.get("num_shards"), snapshot.cold
    files = () if cold is None else cold.files
    others = len(snapshot) - sum(file.alive_rows for file in files)
    total = default_num_shards(others) if num_shards is None else num_shards
    scan = snapshot.scan if cold is None else cold.scan_others
    wanted = _description(
        snapshot.config, RowLayout.of(snapshot.config), total, options.get("stamp", ""), snapshot.scales
    )
    return _write(
        basename,
        replace(wanted, linked=_checksum(files)),
        _Source(
            lambda shard, limit: _scanned(scan, limit, shard=shard, num_shards=total),
            files,
            snapshot.config.embedding_dtype,
        ),
        expired=_expired_at(snapshot.config, options.get("expire_at")),
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
        _Source(lambda _shard, limit: _scanned(snapshot.scan, limit, changed_only=True)),
        expired=None,
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
        _Source(ids),
        expired=None,
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
        replace(like, shard=0, num_shards=num_shards, dump=secrets.token_hex(8), stamp="", linked=""),
        _Source(scan),
        expired=None,
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


class _Source(NamedTuple):
    """Where the rows of a dump come from."""

    scan: Callable[[int, int], Iterator[Rows]]
    """Given a shard and a number of rows, yields the rows of that shard in the order of their hashes."""
    files: Sequence[LinkableFile] = ()
    """Files with all other rows."""
    values: EmbeddingDtype = "float32"


def _scanned(scan: Callable[..., Scan], limit: int, **which: int) -> Iterator[Rows]:
    cursor: int | None = None
    while True:
        found = scan(cursor, limit=limit, **which)
        if len(found.rows):
            yield found.rows
        if found.cursor is None:
            return
        cursor = found.cursor


_Expired: TypeAlias = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.bool_]]
"""Which ids have expired, given their event times."""


def _expired_at(config: TableConfig, now: int | None) -> _Expired | None:
    return None if now is None else lambda ids, times: config.expiry.expired(ids, times, now)


def _checksum(files: Sequence[LinkableFile]) -> str:
    """Return a checksum of which rows of which files are linked; empty if none are."""
    crc = 0
    for file in files:
        crc = native.crc32c(file.alive, native.crc32c(file.path.encode(), crc))
    return f"{crc:08x}" if files else ""


def _write(
    basename: str,
    wanted: Description,
    source: _Source,
    *,
    expired: _Expired | None,
    workers: int,
    resume: bool,
    progress: Progress | None,
    written: Callable[[Tensor], None] | None = None,
) -> DumpReport:
    """Write a dump of `wanted.num_shards` shards, and link to files with the other rows."""
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
    links = link_names(f"{basename}.{wanted.dump}", len(source.files))
    left_out = [0] * (total + len(links))

    def live_rows(shard: int) -> Iterator[Rows]:
        for rows in source.scan(shard, rows_per_block(wanted.layout)):
            kept_rows = rows
            if expired is not None:
                kept_rows = rows.keep(torch.from_numpy(~expired(rows.ids.numpy(), rows.event_times.numpy())))
            left_out[shard] += len(rows) - len(kept_rows)
            if len(kept_rows):
                if written is not None:
                    written(kept_rows.ids)
                yield kept_rows
            if progress is not None:
                progress.advance(len(rows))

    def write(shard: int, stop: StopTogether) -> ShardInfo:
        return write_shard(paths[shard], replace(wanted, shard=shard), stop.chunks(live_rows(shard)))

    def link(number: int, stop: StopTogether) -> tuple[int, int]:
        """Link to a file, and return the rows and bytes of that."""
        (path, alive_path), linkable = links[number], source.files[number]
        file = ColdFile(linkable.path)
        alive = np.unpackbits(linkable.alive, count=file.rows, bitorder="little").view(np.bool_)
        newest = 0
        for first, hashes, times in stop.chunks(file.heads()):
            mine, ids = alive[first : first + len(hashes)], unmix(hashes)
            if expired is not None:
                mine &= ~expired(ids, times.astype(np.int64))
            if written is not None:
                written(torch.from_numpy(ids[mine]))
            newest = max(newest, int(times[mine].max(initial=0)))
        rows = int(alive.sum())
        left_out[total + number] = linkable.alive_rows - rows
        # A dump's name is its own: with it, a file of this size is whole. Copies need not be made twice.
        if not (kept and filesystem.exists(path) and filesystem.file_size(path) == file.bytes):
            filesystem.link_or_copy(linkable.path, path)
        described = replace(wanted, shard=number, num_shards=len(links))
        bits = np.packbits(alive, bitorder="little")
        size = write_link(alive_path, described, source.values, file, bits, newest)
        if progress is not None:
            progress.advance(linkable.alive_rows)
        return rows, file.bytes + size

    missing = [shard for shard in range(total) if shard not in kept]
    try:
        linked = in_parallel(link, range(len(links)), workers)
        done = kept | dict(zip(missing, in_parallel(write, missing, workers), strict=True))
        shards = [done[shard] for shard in range(total)]
        manifest = DumpManifest(
            table=wanted.table,
            dump=wanted.dump,
            stamp=wanted.stamp,
            rows=tuple(shard.rows for shard in shards),
            bytes=tuple(shard.bytes for shard in shards),
            version=_LINKING_VERSION if links else _MANIFEST_VERSION,
            linked_rows=tuple(rows for rows, _ in linked),
            linked_bytes=tuple(size for _, size in linked),
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
        rows=sum(manifest.rows + manifest.linked_rows),
        bytes=sum(manifest.bytes + manifest.linked_bytes),
        expired=sum(left_out),
        files=(*paths, *(path for pair in links for path in pair)),
        skipped=len(kept),
        linked_rows=sum(manifest.linked_rows),
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
    names = link_names(f"{basename}.{manifest.dump}", len(manifest.linked_rows))

    def check(shard: int, stop: StopTogether) -> ShardInfo:
        with ShardReader(paths[shard]) as reader:
            _check_belongs(reader.info, manifest, shard)
            if verify_first:
                for _ in stop.chunks(reader):
                    pass
            return reader.info

    def check_link(number: int, stop: StopTogether) -> LinkedRows:
        found = _linked(names[number], manifest, number)
        if verify_first:
            for _ in stop.chunks(found.verified()):
                pass
        return found

    # First pass: nothing of the table has changed yet, so every error found here costs nothing.
    shards = in_parallel(check, range(len(paths)), workers)
    links = in_parallel(check_link, range(len(names)), workers)
    dims = [segment.dim for segment in config.segments]
    other = refit and any(
        [segment.dim for segment in shard.description.layout.segments] != dims for shard in shards
    )
    with_state = not other and all(_takes_state(shard, config, optimizer_state) for shard in shards)
    chosen = kept_ids(keep)
    files = len(paths) + len(links)
    skipped, rounded = [0] * files, [0] * files
    has = shards[0].description.layout

    def adopt(cold: TieredTable, number: int) -> int:
        """Have the table take over a linked file; 0 if fewer than half of its rows are to be loaded."""
        link = links[number]
        alive, rows = link.alive, link.info.rows
        if chosen is not None:
            wanted = np.zeros(link.file.rows, np.bool_)
            for first, ids, mine in link.ids():
                wanted[first : first + len(ids)] = mine & chosen(torch.from_numpy(ids)).numpy()
            alive, rows = np.packbits(wanted, bitorder="little"), int(wanted.sum())
        if not rows or 2 * rows < link.file.rows:
            return 0
        cold.adopt(link.info.path, alive)
        skipped[len(paths) + number] = link.info.rows - rows
        if progress is not None:
            progress.advance(link.info.rows)
        return rows

    # Second pass. Files are checked again as they are read: they may have been replaced since.
    def restore(number: int, stop: StopTogether) -> None:
        if number >= len(paths):
            restore_rows(number, stop.chunks(links[number - len(paths)]))
            return
        with ShardReader(paths[number]) as reader:
            _check_belongs(reader.info, manifest, number)
            restore_rows(number, stop.chunks(reader))

    def restore_rows(number: int, found: Iterator[Rows]) -> None:
        for rows in found:
            mine = rows if chosen is None else rows.keep(chosen(rows.ids))
            skipped[number] += len(rows) - len(mine)
            if len(mine) and other:
                mine = _refitted(mine, has, config)
            if config.stores_narrow:
                rounded[number] += int(inexact(mine.values.numpy(), config.embedding_dtype, dims).sum())
            if len(mine):
                table.restore(mine if with_state else without_state(mine))
            if progress is not None:
                progress.advance(len(rows))

    before = table.stats().refused
    with ready(sum(manifest.rows + manifest.linked_rows) // (keep[1] if isinstance(keep, tuple) else 1)):
        _restore_scales(table, shards[0].description)
        # A file is taken over as it is, if the table has no row yet that could be in it.
        cold = table.cold if len(table) == 0 and (with_state or has.state_dim == 0) and not other else None
        adopted = {
            len(paths) + number: adopt(cold, number)
            for number, link in enumerate(links)
            if cold is not None and link.values == cold.stored_values
        }
        in_parallel(restore, [number for number in range(files) if not adopted.get(number)], workers)
    if sum(rounded):
        _log.warning(
            "table %r stores embeddings as %s: of %s restored rows, %s had float32 values that were "
            "rounded to the nearest",
            config.name,
            config.embedding_dtype,
            f"{sum(manifest.rows + manifest.linked_rows) - sum(skipped):,}",
            f"{sum(rounded):,}",
        )
    return LoadReport(
        rows=sum(manifest.rows + manifest.linked_rows) - sum(skipped),
        bytes=sum(manifest.bytes + manifest.linked_bytes),
        files=(*paths, *(path for pair in names for path in pair)),
        skipped=sum(skipped),
        refused=table.stats().refused - before,
        adopted=sum(adopted.values()),
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
    """Return the shards of a dump, in order, then its linked files, if they are complete and of one dump.

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
    names = link_names(f"{basename}.{manifest.dump}", len(manifest.linked_rows))

    def check(shard: int, stop: StopTogether) -> ShardInfo:
        with ShardReader(paths[shard]) as reader:
            _check_belongs(reader.info, manifest, shard)
            read(stop.chunks(reader))
            return reader.info

    def check_link(number: int, stop: StopTogether) -> ShardInfo:
        found = _linked(names[number], manifest, number)
        read(stop.chunks(found.verified()))
        return found.info

    def read(source: Iterator[Rows]) -> None:
        for rows in source if verify else ():
            if progress is not None:
                progress.advance(len(rows))

    shards = in_parallel(check, range(len(paths)), workers)
    return shards + in_parallel(check_link, range(len(names)), workers)


def linked_rows(basename: str) -> list[LinkedRows]:
    """Return the linked files of a dump; raises as `inspect_dump` does."""
    manifest = read_dump_manifest(basename)
    names = link_names(f"{basename}.{manifest.dump}", len(manifest.linked_rows))
    return [_linked(pair, manifest, number) for number, pair in enumerate(names)]


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
        if found["version"] not in (_MANIFEST_VERSION, _LINKING_VERSION):
            raise ValueError(f"version {found['version']}, this program reads {_LINKING_VERSION}")
        lists = {
            name: tuple(found.get(name, ())) for name in ("rows", "bytes", "linked_rows", "linked_bytes")
        }
        return DumpManifest(**(found | lists))
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
    rows, size = manifest.rows, manifest.bytes
    if found.linked:
        rows, size = manifest.linked_rows, manifest.linked_bytes
    seen = (description.dump, description.shard, description.num_shards, found.rows, found.bytes)
    expected = (manifest.dump, shard, len(rows), rows[shard], size[shard])
    if seen != expected:
        raise RestoreError(
            f"{found.path} is not the file that was dumped: (dump, shard, shards, rows, bytes) are {seen}, "
            f"the manifest says {expected}. Restore the files as they were written, or use another dump."
        )


def _linked(names: tuple[str, str], manifest: DumpManifest, number: int) -> LinkedRows:
    try:
        found = LinkedRows(*names)
    except FileMissingError as cause:
        raise RestoreError(
            f"a file of a dump is missing: {cause} Copy it here, or restore from another dump."
        ) from cause
    _check_belongs(found.info, manifest, number)
    return found


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
    found = asdict(manifest)
    if not manifest.linked_rows:  # as before there were any
        del found["linked_rows"], found["linked_bytes"]
    body = json.dumps(found, sort_keys=True).encode()
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
