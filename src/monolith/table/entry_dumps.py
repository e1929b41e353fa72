"""Entry dumps: the original system's table files, to import its models and to export ours.

`<basename>-ddddd-of-ddddd`, each a TFRecord file of EntryDump messages, one row a
message: id, values, optimizer state, event time. Native code converts between
those bytes and columns. A file of several tables is a snappy stream of such records,
one table after another; its companion `<basename>.meta-ddddd-of-ddddd` has the name
and the number of rows of each:

    snappy stream   = block*
    block           = compressed length: u32, big-endian; one snappy block

Files of a single table have no header and no count, so one that was cut between two records
looks whole. Our own dumps (`dumps.py`) notice; keep those, and export for the original system to read.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith import filesystem, native
from monolith.errors import CorruptFileError, RestoreError, ServingTableError, TableArgumentError
from monolith.table.arguments import MAX_EVENT_TIME
from monolith.table.config import TableConfig
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
from monolith.table.shard_files import RowLayout
from monolith.table.sharded_files import (
    StopTogether,
    find_sharded,
    has_shards,
    in_parallel,
    replace_sharded,
    sharded_names,
    tfrecord,
)
from monolith.table.sharded_files import records as tfrecord_payloads
from monolith.table.table import Rows, Table, iterate

if TYPE_CHECKING:
    from monolith.observe import Progress

ScanRows: TypeAlias = Callable[[int, int], Iterator[Rows]]
"""Given a shard and a number of rows, yields the rows of that shard, so many at a time."""

_CHUNK_BYTES = 4 << 20
_CHUNK_ROWS = 8192
_SNAPPY_BLOCK = 64 << 10
"""Bytes in a block that is written: TensorFlow reads blocks of up to 256 KiB, and a literal holds 64."""
_HEADER = struct.Struct("<8sI")
"""Of a TFRecord: its length, and the checksum of that."""
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
    table: Table,
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
    scan: ScanRows,
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
    codec = _codec_of(layout, basename)
    return _write(
        codec, basename, scan, live=lambda rows: rows, total=num_shards, workers=workers, progress=progress
    )


def _write(
    codec: native.EntryDumpCodec,
    basename: str,
    scan: ScanRows,
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

    If there are none at `basename`, the table's old names are tried in the same folder, in order.
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
        with _Records(path) as records:
            for _ in stop.chunks(records.rows(codec, config)):
                pass

    def restore(path: str, stop: StopTogether) -> tuple[int, int, int]:
        taken = skipped = 0
        with _Records(path) as records:
            for rows, state_missing in stop.chunks(records.rows(codec, config)):
                mask = torch.ones(len(rows), dtype=torch.bool) if chosen is None else chosen(rows.ids)
                _restore(table, rows.keep(mask), state_missing[mask])
                taken += int(mask.sum())
                skipped += len(rows) - int(mask.sum())
                if progress is not None:
                    progress.advance(len(rows))
            return taken, skipped, records.at

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


# Several tables in one file


def is_multi_table(basename: str) -> bool:
    """Whether the dump at `basename` has several tables, whose names are in a companion."""
    return has_shards(f"{basename}.meta")


def tables_of_multi_dump(basename: str) -> dict[str, int]:
    """Return the rows of each table of a multi-table dump, by name.

    Raises:
        RestoreError: A file is missing.
        CorruptFileError: A companion file is damaged.
    """
    rows: dict[str, int] = {}
    for _, path in _multi_shards(basename):
        for name, count in _read_meta(path):
            rows[name] = rows.get(name, 0) + count
    return rows


def import_multi_entry_dumps(
    tables: Mapping[str, Table],
    basename: str,
    *,
    clear: bool = True,
    workers: int = 4,
    progress: Progress | None = None,
) -> dict[str, LoadReport]:
    """Read a multi-table dump into tables by their names in the dump; return what each of them took.

    Tables that only the dump has are skipped; those that only the mapping has stay as they are.

    Args:
        clear: Whether tables that the dump has are cleared first, and again if reading fails.

    Raises:
        RestoreError: A file is missing, has fewer or more rows than its companion says, or a record is of
            other dims or optimizers than the table.
        CorruptFileError: A file is damaged; says where.
    """
    shards = _multi_shards(basename)
    there = tables_of_multi_dump(basename)
    wanted = {name: table for name, table in tables.items() if name in there}
    codecs = {name: _codec(table.config) for name, table in wanted.items()}

    def restore(item: tuple[str, str], stop: StopTogether) -> tuple[dict[str, int], int]:
        path, meta = item
        taken: dict[str, int] = {}
        with _Records(path) as records:
            for name, count in _read_meta(meta):
                found = 0
                if (table := wanted.get(name)) is None:
                    found = records.skip(count)
                else:
                    for rows, state_missing in stop.chunks(records.rows(codecs[name], table.config, count)):
                        _restore(table, rows, state_missing)
                        found += len(rows)
                        if progress is not None:
                            progress.advance(len(rows))
                    taken[name] = taken.get(name, 0) + found
                if found != count:
                    raise RestoreError(
                        f"{path} ends after {found:,} of the {count:,} rows that {meta} lists for table "
                        f"{name!r}"
                    )
            if not records.at_end:
                raise RestoreError(f"{path} has more rows than {meta} lists. Are the two of one dump?")
            return taken, records.at

    before = {name: table.stats().refused for name, table in wanted.items()}
    with contextlib.ExitStack() as slates:
        for table in wanted.values():
            slates.enter_context(clean_slate(table, clear))
        read = in_parallel(restore, shards, workers)
    return {
        name: LoadReport(
            rows=sum(taken.get(name, 0) for taken, _ in read),
            bytes=0,
            files=tuple(path for path, _ in shards),
            skipped=0,
            refused=table.stats().refused - before[name],
        )
        for name, table in wanted.items()
    }


def export_multi_rows(
    tables: Mapping[str, tuple[RowLayout, ScanRows]],
    basename: str,
    *,
    num_shards: int,
    workers: int = 4,
    progress: Progress | None = None,
) -> dict[str, DumpReport]:
    """Write the rows of several tables as one multi-table dump; return the row counts of each.

    Args:
        tables: By the name in the dump, the layout of a row and what `export_rows` calls `scan`.

    Raises:
        FilesystemError: A file could not be written.
        ServingTableError: Rows have no optimizer state to write.
    """
    names = sorted(tables)
    codecs = {name: _codec_of(tables[name][0], basename) for name in names}

    def write(item: tuple[int, tuple[BinaryIO, BinaryIO]], stop: StopTogether) -> dict[str, tuple[int, int]]:
        shard, (file, meta) = item
        stream = _SnappyWriter(file)
        done: dict[str, tuple[int, int]] = {}
        for name in names:
            rows = size = 0
            for chunk in stop.chunks(tables[name][1](shard, _CHUNK_ROWS)):
                size += stream.write(codecs[name].encode(chunk.ids.contiguous().numpy(), *_columns(chunk)))
                rows += len(chunk)
                if progress is not None:
                    progress.advance(len(chunk))
            meta.write(tfrecord(_metadata(name, rows)))
            done[name] = rows, size
        return done

    with (
        replace_sharded(basename, num_shards) as files,
        replace_sharded(f"{basename}.meta", num_shards) as metas,
    ):
        written = in_parallel(write, list(enumerate(zip(files, metas, strict=True))), workers)
    return {
        name: DumpReport(
            rows=sum(one[name][0] for one in written),
            bytes=sum(one[name][1] for one in written),
            expired=0,
            files=(*sharded_names(basename, num_shards), *sharded_names(f"{basename}.meta", num_shards)),
            skipped=0,
        )
        for name in names
    }


def _multi_shards(basename: str) -> list[tuple[str, str]]:
    """Return each data file with its companion."""
    data, metas = find_sharded(basename), find_sharded(f"{basename}.meta")
    if len(data) != len(metas):
        raise RestoreError(
            f"{basename}: {len(data)} data files and {len(metas)} .meta files are not one dump"
        )
    return list(zip(data, metas, strict=True))


def _metadata(name: str, rows: int) -> bytes:
    """Return a MultiHashTableMetadata message: the name is field 1, the number of entries field 2."""
    text = name.encode()
    return b"\x0a" + _varint(len(text)) + text + b"\x10" + _varint(rows)


def _read_meta(path: str) -> list[tuple[str, int]]:
    """Return the name and the rows of each table of one shard, in the order of the data."""
    found = []
    with filesystem.open_read(path) as file:
        for at, payload in tfrecord_payloads(file, path):
            name: str | None = None
            rows = place = 0
            try:
                while place < len(payload):
                    tag, place = _read_varint(payload, place)
                    value, place = _read_varint(payload, place)  # of a text: its length
                    if tag == 0x0A:
                        if value > len(payload) - place:
                            raise ValueError("a name is longer than its record")
                        name, place = payload[place : place + value].decode(), place + value
                    elif tag == 0x10:
                        rows = value
                    elif tag & 7:
                        raise ValueError(f"unknown field {tag >> 3}")
            except (ValueError, IndexError) as cause:
                raise CorruptFileError(path, at, f"this is not a MultiHashTableMetadata: {cause}") from cause
            if name is None:
                raise CorruptFileError(path, at, "a table has no name")
            found.append((name, rows))
    return found


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("a number has more than 64 bits")


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


class _Records:
    """The records of one file in order, plain or in a snappy stream, as rows of the tables they belong to."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.at = 0
        """The byte of the next record; in a snappy stream, of what it decompresses to."""
        self._file = filesystem.open_read(path)
        self._rest = b""
        self._ended = False
        head = self._file.read(_HEADER.size)
        self._file.seek(0)
        # A plain file begins with a length and its checksum; anything else of that size is a snappy stream.
        length, crc = _HEADER.unpack(head) if len(head) == _HEADER.size else (b"", 0)
        self.compressed = len(head) == _HEADER.size and native.masked_crc32c(length) != crc
        self._source = _SnappyReader(self._file, path) if self.compressed else self._file

    def __enter__(self) -> _Records:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def at_end(self) -> bool:
        """Whether there is no further record."""
        self._fill()
        return not self._rest

    def rows(
        self, codec: native.EntryDumpCodec, config: TableConfig, limit: int | None = None
    ) -> Iterator[tuple[Rows, Tensor]]:
        """Yield the next rows, and a mask of those without all their state; `limit` of them, or all."""
        while (limit is None or limit > 0) and not self.at_end:
            entries = codec.decode(self._rest, limit)
            failure = entries.failure
            if failure is not None and not (entries.truncated and not self._ended):
                offset, reason = failure
                if reason.startswith(_MISFIT):
                    raise RestoreError(
                        f"cannot restore table {config.name!r} from {self.path}: the record at byte "
                        f"{self.at + offset} does not fit: {reason}. Configure the dims and optimizers "
                        "it was trained with."
                    )
                raise self._corrupt(offset, reason)
            self._consume(entries.consumed)
            if len(entries.ids):
                limit = None if limit is None else limit - len(entries.ids)
                yield _rows(entries, self.path, self.at), torch.from_numpy(entries.state_missing) != 0

    def skip(self, count: int) -> int:
        """Pass over so many records, checksums checked; return how many there were."""
        skipped = 0
        while skipped < count and not self.at_end:
            found = native.split_tfrecords(self._rest)
            if found.failure and not (found.truncated and not self._ended):
                raise self._corrupt(found.consumed, found.failure)
            here = min(len(found.starts), count - skipped)
            more = here < len(found.starts)
            self._consume(int(found.starts[here]) if more else found.consumed)
            skipped += here
        return skipped

    def _consume(self, size: int) -> None:
        self._rest = self._rest[size:]
        self.at += size
        if not size:
            self._fill(again=True)

    def _fill(self, again: bool = False) -> None:
        if self._ended or (self._rest and not again):
            return
        # A record longer than the buffer: read twice as much, as long as the file has it.
        chunk = self._source.read(max(_CHUNK_BYTES, 2 * len(self._rest)))
        self._ended = not chunk
        self._rest += chunk

    def _corrupt(self, offset: int, reason: str) -> CorruptFileError:
        where = " (counted in the decompressed stream)" if self.compressed else ""
        return CorruptFileError(self.path, self.at + offset, reason + where)


class _SnappyReader:
    """Reads a snappy stream as the bytes that it holds."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._file = file
        self._path = path
        self._at = 0

    def read(self, size: int) -> bytes:
        """Return at least one block and about `size` bytes; nothing at the end."""
        blocks: list[bytes] = []
        while size > 0 and (head := self._file.read(4)):
            length = int.from_bytes(head, "big")
            block = self._file.read(length) if len(head) == 4 else b""
            if len(head) < 4 or len(block) < length:
                raise CorruptFileError(self._path, self._at, "the file ends inside a snappy block")
            try:
                blocks.append(native.snappy_decode(block))
            except ValueError as cause:
                raise CorruptFileError(
                    self._path, self._at, f"neither a TFRecord nor a snappy stream: {cause}"
                ) from cause
            self._at += 4 + length
            size -= len(blocks[-1])
        return b"".join(blocks)


class _SnappyWriter:
    """Writes a snappy stream whose blocks hold literals: rows of floats hardly compress."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        """Write all of it; return the bytes that the file grew by."""
        written = 0
        for start in range(0, len(data), _SNAPPY_BLOCK):
            piece = data[start : start + _SNAPPY_BLOCK]
            # Tag 61: a literal whose length, less one, is in the two bytes that follow.
            head = _varint(len(piece)) + bytes([61 << 2]) + (len(piece) - 1).to_bytes(2, "little")
            block = head + piece
            written += self._file.write(len(block).to_bytes(4, "big") + block)
        return written


def _restore(table: Table, rows: Rows, state_missing: Tensor) -> None:
    for part in (rows.keep(~state_missing), without_state(rows.keep(state_missing))):
        if len(part):
            table.restore(part)


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
    segments = [(segment.optimizer.rule.kind, segment.dim) for segment in config.segments]
    try:
        return native.EntryDumpCodec(segments)
    except ValueError as cause:  # an optimizer that the original does not have
        raise TableArgumentError(f"table {config.name!r}: {cause}") from None


def _codec_of(layout: RowLayout, basename: str) -> native.EntryDumpCodec:
    codec = native.EntryDumpCodec([(segment.optimizer, segment.dim) for segment in layout.segments])
    if codec.state_dim != layout.state_dim:
        raise ServingTableError(
            f"cannot write {basename}: its rows have {layout}, and EntryDumps need {codec.state_dim} state. "
            "Rows of a serving table have none; export the table that trains it."
        )
    return codec


def _columns(rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
    times, values, state = (c.contiguous().numpy() for c in (rows.event_times, rows.values, rows.state))
    return times, values, state


def _check_has_state(config: TableConfig, call: str) -> None:
    if config.serving:
        raise ServingTableError(
            f"table {config.name!r}: {call} writes optimizer state, and a serving table keeps none; "
            "dump it with `dump`, or export the table that trains it"
        )
