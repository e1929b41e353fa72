"""Entry dumps: upstream's files of a single table, to bring models here and take them back.

`<basename>-ddddd-of-ddddd`, each a TFRecord file of EntryDump messages, one row a
message: id, values, optimizer state, event time. Native code goes straight between
those bytes and columns. What upstream writes for several tables in one file (snappy
streams with a `.meta` companion) is not read.

These files have no header and no count, so one that was cut between two records looks
whole. Our own dumps (`dumps.py`) notice; keep those, and export where upstream is to read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith import filesystem, native
from monolith.errors import CorruptFileError, RestoreError, ServingTableError
from monolith.table.arguments import MAX_EVENT_TIME
from monolith.table.config import TableConfig
from monolith.table.cuts import DumpableTable
from monolith.table.dumps import (
    DumpReport,
    Keep,
    LoadReport,
    basenames,
    clean_slate,
    default_num_shards,
    kept_ids,
    without_expired,
    without_state,
)
from monolith.table.numbered_files import find_sharded, has_shards, replace_sharded, sharded_names
from monolith.table.parallel import StopTogether, in_parallel
from monolith.table.shard_files import RowLayout
from monolith.table.table import Rows, Table, iterate

if TYPE_CHECKING:
    from monolith.observe import Progress

_CHUNK_BYTES = 4 << 20
_CHUNK_ROWS = 8192
_MISFIT = "wrong "
"""How the codec begins a complaint about a sound record that is not a row of this table."""


def encode_entry_dumps(rows: Rows, config: TableConfig) -> list[bytes]:
    """Return one EntryDump message per row, without framing."""
    messages: list[bytes] = _codec(config).encode_messages(rows.ids.numpy(), *_columns(rows))
    return messages


def entry_dumps_of(table: Table, ids: Tensor) -> list[bytes]:
    """Return one EntryDump message per id, without the id in it; empty where the table has no row."""
    _check_has_state(table.config, "entry_dumps_of")
    found, rows = table.lookup_rows(ids)
    messages = iter(_codec(table.config).encode_messages(None, *_columns(rows.keep(found))))
    return [next(messages) if there else b"" for there in found.tolist()]


def export_entry_dumps(
    table: DumpableTable,
    basename: str,
    *,
    num_shards: int | None = None,
    workers: int = 4,
    expire_at: int | None = None,
    consistent: bool = True,
    progress: Progress | None = None,
) -> DumpReport:
    """Write all rows of a table as upstream does; the arguments are those of `dump`.

    The files at `basename` are replaced when all new ones are complete.

    Raises:
        FilesystemError: A file could not be written; the old ones are still there.
        ServingTableError: A serving table has no optimizer state to write.
    """
    config = table.config
    _check_has_state(config, "export_entry_dumps")
    with table.frozen() if consistent else contextlib.nullcontext():
        total = default_num_shards(len(table)) if num_shards is None else num_shards
        return _write(
            _codec(config),
            basename,
            lambda shard, limit: iterate(table, limit=limit, shard=shard, num_shards=total),
            live=lambda rows: rows if expire_at is None else without_expired(rows, config, expire_at),
            total=total,
            workers=workers,
            progress=progress,
        )


def export_rows(
    layout: RowLayout,
    basename: str,
    scan: Callable[[int, int], Iterator[Rows]],
    *,
    num_shards: int,
    workers: int = 4,
    progress: Progress | None = None,
) -> DumpReport:
    """Write rows that no table holds as upstream does.

    Args:
        scan: Given a shard and a number of rows, yields the rows of that shard, so many at a time.
            Called from several threads.

    Raises:
        FilesystemError: A file could not be written; the old ones are still there.
        ServingTableError: The rows have no optimizer state to write.
    """
    codec = native.EntryDumpCodec([(segment.optimizer, segment.dim) for segment in layout.segments])
    if codec.state_dim != layout.state_dim:
        raise ServingTableError(
            f"cannot write {basename}: its rows have {layout}, and EntryDumps need {codec.state_dim} state. "
            "Rows of a serving table have none; export the table that trains it."
        )
    return _write(
        codec, basename, scan, live=lambda rows: rows, total=num_shards, workers=workers, progress=progress
    )


def _write(
    codec: native.EntryDumpCodec,
    basename: str,
    scan: Callable[[int, int], Iterator[Rows]],
    *,
    live: Callable[[Rows], Rows],
    total: int,
    workers: int,
    progress: Progress | None,
) -> DumpReport:
    def write(item: tuple[int, BinaryIO], stop: StopTogether) -> tuple[int, int, int]:
        shard, file = item
        rows = expired = size = 0
        for chunk in stop.chunks(scan(shard, _CHUNK_ROWS)):
            kept = live(chunk)
            size += file.write(codec.encode(kept.ids.contiguous().numpy(), *_columns(kept)))
            rows += len(kept)
            expired += len(chunk) - len(kept)
            if progress is not None:
                progress.advance(len(chunk))
        return rows, expired, size

    with replace_sharded(basename, total) as files:
        written = in_parallel(write, list(enumerate(files)), workers)
    return DumpReport(
        rows=sum(rows for rows, _, _ in written),
        bytes=sum(size for _, _, size in written),
        expired=sum(expired for _, expired, _ in written),
        files=tuple(sharded_names(basename, total)),
        skipped=0,
    )


def import_entry_dumps(
    table: Table,
    basename: str,
    *,
    clear: bool = True,
    keep: Keep | None = None,
    workers: int = 4,
    verify_first: bool = True,
    progress: Progress | None = None,
) -> LoadReport:
    """Read upstream's files into a table; the arguments are those of `load`.

    Where there are none at `basename`, the table's old names are tried beside it, in order.
    A row whose record lacks the state of a segment starts with fresh state; one that
    lacks its time has time 0. A serving table takes the values and the time.

    Raises:
        RestoreError: There are no files, a shard is missing, or a record is of other
            dims or optimizers than the table.
        CorruptFileError: A record is damaged; says where. Nothing was touched if `verify_first`.
    """
    config, chosen = table.config, kept_ids(keep)
    codec = _codec(config)
    paths = _find(basename, config)

    def check(path: str, stop: StopTogether) -> None:
        for _ in stop.chunks(_read(codec, path, config)):
            pass

    def restore(path: str, stop: StopTogether) -> tuple[int, int, int]:
        taken = skipped = size = 0
        for rows, state_missing, size in stop.chunks(_read(codec, path, config)):  # noqa: B007
            mask = torch.ones(len(rows), dtype=torch.bool) if chosen is None else chosen(rows.ids)
            for part in (
                rows.keep(mask & ~state_missing),
                without_state(rows.keep(mask & state_missing)),
            ):
                if len(part):
                    table.restore(part)
            taken += int(mask.sum())
            skipped += len(rows) - int(mask.sum())
            if progress is not None:
                progress.advance(len(rows))
        return taken, skipped, size

    if verify_first:
        in_parallel(check, paths, workers)
    before = table.stats().refused
    with clean_slate(table, clear):
        read = in_parallel(restore, paths, workers)
    return LoadReport(
        rows=sum(taken for taken, _, _ in read),
        bytes=sum(size for _, _, size in read),
        files=tuple(paths),
        skipped=sum(skipped for _, skipped, _ in read),
        refused=table.stats().refused - before,
    )


def _find(basename: str, config: TableConfig) -> list[str]:
    """Return the shards of a table under the first of its names that has any."""
    names = basenames(basename, config)
    found = next(filter(has_shards, names), None)
    if found is None:
        listed = " nor ".join(f"{name}-ddddd-of-ddddd" for name in names)
        raise RestoreError(
            f"cannot restore table {config.name!r}: there are no files {listed}. Check the path; a dump that "
            "was interrupted leaves only files ending in -tmp-<random>, which do not count. If the table was "
            "renamed, list its old name in extra_restore_names."
        )
    return find_sharded(found)


def _read(codec: native.EntryDumpCodec, path: str, config: TableConfig) -> Iterator[tuple[Rows, Tensor, int]]:
    """Yield rows, a mask of those without all their state, and how far into the file they end."""
    at = 0
    rest = b""
    wanted = _CHUNK_BYTES
    with filesystem.open_read(path) as file:
        while True:
            chunk = file.read(wanted)
            buffer = rest + chunk if rest else chunk
            if not buffer:
                return
            entries = codec.decode(buffer)
            failure = entries.failure
            if failure is not None and not (entries.truncated and chunk):
                offset, reason = failure
                if reason.startswith(_MISFIT):
                    raise RestoreError(
                        f"cannot restore table {config.name!r} from {path}: the record at byte {at + offset} "
                        f"does not fit: {reason}. Configure the dims and optimizers it was trained with."
                    )
                raise CorruptFileError(path, at + offset, reason)
            rest = buffer[entries.consumed :]
            # A record longer than what was read: read twice as much, as long as the file has it.
            wanted = _CHUNK_BYTES if entries.consumed else 2 * len(buffer)
            at += entries.consumed
            if len(entries.ids):
                yield _rows(entries, path, at), torch.from_numpy(entries.state_missing) != 0, at


def _rows(entries: native.DecodedEntries, path: str, end: int) -> Rows:
    columns = (entries.ids, entries.event_times, entries.values, entries.state)
    rows = Rows(*map(torch.from_numpy, columns))
    oldest, newest = int(rows.event_times.min()), int(rows.event_times.max())
    if oldest < 0 or newest > MAX_EVENT_TIME:
        raise RestoreError(
            f"{path}: before byte {end}, last_update_ts_sec goes from {oldest} to {newest}; "
            f"Unix seconds from 0 to {MAX_EVENT_TIME} were expected"
        )
    return rows


def _codec(config: TableConfig) -> native.EntryDumpCodec:
    return native.EntryDumpCodec([(segment.optimizer.rule.kind, segment.dim) for segment in config.segments])


def _columns(rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
    times, values, state = (c.contiguous().numpy() for c in (rows.event_times, rows.values, rows.state))
    return times, values, state


def _check_has_state(config: TableConfig, call: str) -> None:
    if config.serving:
        raise ServingTableError(
            f"table {config.name!r}: {call} writes optimizer state, and a serving table keeps none; "
            "dump it with `dump`, or export the table that trains it"
        )
