"""Parquet files, by row group.

What becomes of which type is in `arrow_columns`. Others (structs, maps, lists of lists) cannot be read as
a column; name the columns to read.

Files are written with a checksum per page, and those that have one are checked when they are
read; without, altered bytes may read as other values.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from monolith.data.format import Chunk
from monolith.data.formats.arrow_columns import ArrowModules, arrow_records, columns_of, import_arrow
from monolith.data.records import Records, concat
from monolith.errors import ConfigError, CorruptFileError, DataError, FilesystemError
from monolith.filesystem import atomic_write, open_read
from monolith.tensors import RaggedTensor


class ParquetFormat:
    """Reads any Parquet file with flat columns and lists; writes one list column per column.

    Args:
        chunk_rows: Rows in a chunk at most; a row group is read at once and cut.
        row_group_rows: Rows in a row group of a file that is written.
        single: Columns to write as plain values instead of lists: one per record, or null.
        compression: Of files that are written: "zstd", "snappy", "gzip", "none".
    """

    name = "parquet"

    def __init__(
        self,
        *,
        chunk_rows: int = 65_536,
        row_group_rows: int = 65_536,
        single: Collection[str] = (),
        compression: str = "zstd",
    ) -> None:
        if chunk_rows < 1 or row_group_rows < 1:
            raise ConfigError(
                f"parquet: chunks and row groups need a row at least, got {chunk_rows} and {row_group_rows}"
            )
        self._chunk_rows = chunk_rows
        self._row_group_rows = row_group_rows
        self._single = frozenset(single)
        self._compression = compression

    def chunks(self, path: str, *, start: int = 0, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        """Yield the rows of a file from row `start` on; see `Format`."""
        arrow = import_arrow()
        with open_read(path) as handle:
            size = handle.seek(0, os.SEEK_END)
            with _errors_of(path, arrow):
                file = arrow.parquet.ParquetFile(handle, page_checksum_verification=True)
                rows = int(file.metadata.num_rows)
                wanted, complete = columns_of(file.schema_arrow, columns)
            if start > rows:
                raise CorruptFileError(
                    path, 0, f"has {rows} rows, but was to be read on from row {start}: it was replaced"
                )
            first = 0
            for group in range(file.metadata.num_row_groups):
                end = first + int(file.metadata.row_group(group).num_rows)
                if start < end:
                    with _errors_of(path, arrow):
                        table = file.read_row_group(group, columns=wanted)
                    for begin in range(max(start, first), end, self._chunk_rows):
                        some = table.slice(begin - first, min(self._chunk_rows, end - begin))
                        last = begin + len(some)
                        yield Chunk(
                            arrow_records(some, wanted, complete, path), last, reached=size * last // rows
                        )
                first = end

    def count(self, path: str) -> int:
        """Return how many records a file has, which its last bytes say."""
        arrow = import_arrow()
        with open_read(path) as handle, _errors_of(path, arrow):
            return int(arrow.parquet.ParquetFile(handle).metadata.num_rows)

    @contextmanager
    def writer(self, path: str) -> Iterator[_Writer]:
        """Open a file to write; see `Format`."""
        import_arrow()
        with atomic_write(path) as handle:
            writer = _Writer(handle, self._row_group_rows, self._single, self._compression)
            try:
                yield writer
                writer.finish()
            finally:
                writer.close()


class _Writer:
    """Gathers records until there are enough for a row group."""

    def __init__(self, handle: Any, rows: int, single: frozenset[str], compression: str) -> None:
        self._handle = handle
        self._rows = rows
        self._single = single
        self._compression = compression
        self._pending: list[Records] = []
        self._file: Any = None

    def write(self, records: Records) -> None:
        self._pending.append(records)
        while sum(map(len, self._pending)) >= self._rows:
            together = concat(self._pending)
            self._write(together.slice(0, self._rows))
            self._pending = [together.slice(self._rows, len(together))] if len(together) > self._rows else []

    def finish(self) -> None:
        """Write what is left and the footer."""
        rest = concat(self._pending) if self._pending else Records(0, {})
        if len(rest) or self._file is None:
            self._write(rest)
        self._file.close()

    def close(self) -> None:
        """Let go of the file, which is open only if something failed; that says more than this could."""
        if self._file is not None:
            with suppress(Exception):
                self._file.close()

    def _write(self, records: Records) -> None:
        arrow = import_arrow()
        arrays = {name: _to_array(records[name], name, name in self._single) for name in records.columns}
        table = arrow.pa.table(arrays)
        if self._file is None:
            self._file = arrow.parquet.ParquetWriter(
                self._handle, table.schema, compression=self._compression, write_page_checksum=True
            )
        if table.schema != self._file.schema:
            raise DataError(
                "parquet: all records of a file must have the same columns: "
                f"it has {', '.join(self._file.schema.names)}, these have {', '.join(table.schema.names)}"
            )
        # A table without columns has no rows for Parquet.
        if table.num_columns:
            self._file.write_table(table, row_group_size=self._rows)


# Writing


def _to_array(column: RaggedTensor, name: str, single: bool) -> Any:
    pa = import_arrow().pa
    values = column.values
    if isinstance(values, RaggedTensor):
        splits = pa.py_buffer(values.row_splits.numpy())
        text = pa.py_buffer(values.flat_values.numpy())
        array = pa.Array.from_buffers(pa.large_binary(), len(values), [None, splits, text]).cast(pa.binary())
    else:
        array = pa.array(values.numpy())
    if not single:
        return pa.ListArray.from_arrays(pa.array(column.row_splits.numpy(), pa.int32()), array)
    lengths = column.row_lengths()
    if bool((lengths > 1).any()):
        raise DataError(f"parquet: column {name!r} is to have one value per record at most; some have more")
    places = (lengths.cumsum(0) - 1).numpy()
    return array.take(pa.array(places, mask=(lengths == 0).numpy()))


# Around pyarrow


@contextmanager
def _errors_of(path: str, arrow: ArrowModules) -> Iterator[None]:
    """Tell of a damaged file in our own error.

    It does not say at which byte: who asks pyarrow where a damaged column begins ends the whole process.
    """
    try:
        yield
    except FilesystemError:
        raise
    except (arrow.pa.lib.ArrowException, OSError, UnicodeDecodeError) as cause:
        raise CorruptFileError(path, 0, f"not a Parquet file that can be read: {cause}") from cause
