"""Parquet files, by row group.

What becomes of which type is in `arrow_columns`. Others (structs, maps, lists of lists) cannot be read as
a column; name the columns to read.

Files are written with a checksum per page, and those that have one are checked when they are
read; without, altered bytes may read as other values.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import Any

import torch

from monolith.data.format import Chunk
from monolith.data.formats.arrow_columns import ArrowModules, arrow_records, columns_of, import_arrow
from monolith.data.records import Records, as_read, concat
from monolith.errors import ConfigError, CorruptFileError, DataError, FilesystemError
from monolith.feature import ColumnKind
from monolith.filesystem import atomic_write, open_read
from monolith.tensors import RaggedTensor


class ParquetFormat:
    """Reads any Parquet file with flat columns and lists.

    Columns are written as the data that they were read from holds them: texts as texts, one value as a plain
    value, a list as a list. A column of which nothing says that is written as a list.

    Args:
        chunk_rows: Rows in a chunk at most; a row group is read at once and cut.
        row_group_rows: Rows in a row group of a file that is written.
        single: Columns to write as plain values instead of lists: one per record, or null.
        compression: Of files that are written: "zstd", "snappy", "gzip", "none".
        types: Column to type, as `FeatureSpec.columns`. Whole numbers that a file has as doubles, as pandas
            writes them where one is missing, are read as what they are; so are times.
    """

    name = "parquet"

    def __init__(
        self,
        *,
        chunk_rows: int = 65_536,
        row_group_rows: int = 65_536,
        single: Collection[str] = (),
        compression: str = "zstd",
        types: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        if chunk_rows < 1 or row_group_rows < 1:
            raise ConfigError(
                f"parquet: chunks and row groups need a row at least, got {chunk_rows} and {row_group_rows}"
            )
        self._chunk_rows = chunk_rows
        self._row_group_rows = row_group_rows
        self._single = frozenset(single)
        self._compression = compression
        self._types = dict(types or {})

    def chunks(self, path: str, *, start: int = 0, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        """Yield the rows of a file from row `start` on; see `Format`."""
        arrow = import_arrow()
        with open_read(path) as handle:
            size = handle.seek(0, os.SEEK_END)
            with _errors_of(path, arrow):
                file = arrow.parquet.ParquetFile(handle, page_checksum_verification=True)
                rows = int(file.metadata.num_rows)
                wanted = columns_of(file.schema_arrow, columns)
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
                            arrow_records(some, wanted, path, self._types),
                            last,
                            reached=size * last // rows,
                        )
                first = end

    def times(self, path: str) -> frozenset[str]:
        """Return the columns of a file that hold timestamps or dates, which are read as Unix seconds."""
        arrow = import_arrow()
        with open_read(path) as handle, _errors_of(path, arrow):
            schema = arrow.parquet.ParquetFile(handle).schema_arrow
        kinds = arrow.types
        return frozenset(
            one.name for one in schema if kinds.is_timestamp(one.type) or kinds.is_date(one.type)
        )

    def in_pieces(self, piece_bytes: int) -> ParquetFormat:  # noqa: ARG002  a row group is decoded as a whole
        """Return the same, whose chunks are row groups; see `SplittableFormat`."""
        other = copy.copy(self)
        other._chunk_rows = sys.maxsize
        return other

    def bounds(self, path: str) -> list[int]:
        """Return the rows at which the row groups of a file begin, and the last row's end."""
        arrow = import_arrow()
        with open_read(path) as handle, _errors_of(path, arrow):
            metadata = arrow.parquet.ParquetFile(handle).metadata
            sizes = [int(metadata.row_group(group).num_rows) for group in range(metadata.num_row_groups)]
        return list(accumulate((size for size in sizes if size), initial=0))

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
        self._kinds: Mapping[str, ColumnKind] | None = None
        """Of the first records: a file has one schema, whatever files the next ones were read from."""
        self._file: Any = None

    def write(self, records: Records) -> None:
        if self._kinds is None:
            self._kinds = records.kinds
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
        kinds = self._kinds or {}
        arrays = {
            name: _to_array(records[name], name, name in self._single, kinds.get(name))
            for name in records.columns
        }
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


def _to_array(column: RaggedTensor, name: str, single: bool, kind: ColumnKind | None) -> Any:
    pa = import_arrow().pa
    values = column.values
    single = single or (kind is not None and kind.single)
    if isinstance(values, RaggedTensor):
        splits = pa.py_buffer(values.row_splits.numpy())
        text = pa.py_buffer(values.flat_values.numpy())
        array = pa.Array.from_buffers(pa.large_binary(), len(values), [None, splits, text]).cast(pa.binary())
    else:
        array = pa.array(as_read(values, kind))
    if kind is not None:
        try:
            array = array.cast(pa.type_for_alias(kind.type))
        except (pa.lib.ArrowException, ValueError) as cause:
            raise DataError(
                f"parquet: column {name!r} was {kind.type} in the first records that were written, and these "
                f"are not: {cause}. Write to a file that ends in .jsonl, whose records each have a type."
            ) from cause
    if not single:
        return pa.ListArray.from_arrays(pa.array(column.row_splits.numpy(), pa.int32()), array)
    lengths = column.row_lengths()
    if bool((lengths > 1).any()):
        raise DataError(
            f"parquet: column {name!r} is to have one value per record at most; some have more. Write to a "
            "file that ends in .jsonl, where a record may have one value and the next a list."
        )
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
