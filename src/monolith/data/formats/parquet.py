"""Parquet files, by row group.

    whole numbers, bools        int64; unsigned 64-bit ones keep their bits
    timestamps, dates           int64, Unix seconds
    floats, decimals            float32
    strings, binary             bytes
    lists of these              as many values as there are

A null is a record without values in that column, and a null in a list is left out. Other
types (structs, maps, lists of lists) cannot be read as a column; name the columns to read.

Files are written with a checksum per page, and those that have one are checked when they are
read; without, altered bytes may read as other values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from monolith.data.format import Chunk
from monolith.data.records import Records, concat
from monolith.errors import ConfigError, CorruptFileError, DataError, FilesystemError, MissingExtraError
from monolith.filesystem import atomic_write, open_read
from monolith.tensors import RaggedTensor


class _Arrow(NamedTuple):
    """The modules of pyarrow, which is imported when a file is opened and not before."""

    pa: Any
    compute: Any
    parquet: Any
    types: Any


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
        arrow = _arrow()
        with open_read(path) as handle:
            with _errors_of(path, arrow):
                file = arrow.parquet.ParquetFile(handle, page_checksum_verification=True)
                rows = int(file.metadata.num_rows)
                wanted, complete = _wanted(file, columns)
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
                        yield Chunk(_to_records(some, wanted, complete, path), begin + len(some))
                first = end

    def count(self, path: str) -> int:
        """Return how many records a file has, which its last bytes say."""
        arrow = _arrow()
        with open_read(path) as handle, _errors_of(path, arrow):
            return int(arrow.parquet.ParquetFile(handle).metadata.num_rows)

    @contextmanager
    def writer(self, path: str) -> Iterator[_Writer]:
        """Open a file to write; see `Format`."""
        _arrow()
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
        arrow = _arrow()
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


# Reading


def _wanted(file: Any, columns: Sequence[str] | None) -> tuple[list[str], bool]:
    """Return the columns to read, and whether these are all that are wanted and there."""
    types = _arrow().types
    schema = file.schema_arrow
    names = schema.names if columns is None else [name for name in columns if name in schema.names]
    # Nothing but nulls: a column without a type, which the next file may well have.
    typed = [name for name in names if not types.is_null(schema.field(name).type)]
    return typed, len(typed) == len(names)


def _to_records(table: Any, names: Sequence[str], complete: bool, path: str) -> Records:
    # The reader takes "a" for "a.b", too; so the names are gone through once more.
    columns = {}
    for name in names:
        column = table.column(name)
        array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        try:
            columns[name] = _to_ragged(array)
        except DataError as cause:
            raise DataError(
                f"{path}: column {name!r} has the type {array.type}, which cannot be read. "
                "Name the columns to read, and leave it out."
            ) from cause
    return Records(table.num_rows, columns, complete=complete)


def _to_ragged(array: Any) -> RaggedTensor:
    _, compute, _, types = _arrow()
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if types.is_list(array.type) or types.is_large_list(array.type) or types.is_fixed_size_list(array.type):
        lengths = _numpy(compute.fill_null(compute.list_value_length(array), 0)).astype(np.int64)
        values = array.drop_null().flatten()
        if types.is_dictionary(values.type):
            values = values.dictionary_decode()
        if values.null_count:
            valid = _numpy(values.is_valid())
            rows = np.repeat(np.arange(len(lengths)), lengths)
            lengths = np.bincount(rows[valid], minlength=len(lengths)).astype(np.int64)
            values = values.drop_null()
    else:
        lengths = _numpy(array.is_valid()).astype(np.int64)
        values = array.drop_null()
    return RaggedTensor.from_row_lengths(_values(values), torch.from_numpy(lengths), validate=False)


def _values(array: Any) -> torch.Tensor | RaggedTensor:
    """Return values without nulls in one of our types."""
    pa, _, _, types = _arrow()
    kind = array.type
    if types.is_uint64(kind):
        return torch.from_numpy(_numpy(array).view(np.int64))
    if types.is_integer(kind) or types.is_boolean(kind):
        return torch.from_numpy(_numpy(array.cast(pa.int64())))
    if types.is_timestamp(kind) or types.is_date(kind):
        seconds = array.cast(pa.timestamp("s"), safe=False)
        return torch.from_numpy(_numpy(seconds.cast(pa.int64())))
    if types.is_floating(kind) or types.is_decimal(kind):
        return torch.from_numpy(_numpy(array.cast(pa.float64()).cast(pa.float32(), safe=False)))
    if (
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_string_view(kind)
        or (
            types.is_binary(kind)
            or types.is_large_binary(kind)
            or types.is_fixed_size_binary(kind)
            or types.is_binary_view(kind)
        )
    ):
        return _strings(array.cast(pa.large_binary()))
    raise DataError(f"cannot read {kind}")


def _strings(array: Any) -> RaggedTensor:
    _, offsets, data = array.buffers()
    if not len(array):
        splits = np.zeros(1, np.int64)
    else:
        splits = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    text = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    text = text[splits[0] : splits[-1]].copy()
    return RaggedTensor(torch.from_numpy(text), torch.from_numpy(splits - splits[0]), validate=False)


def _numpy(array: Any) -> np.ndarray[Any, Any]:
    """Return a copy as numpy: torch wants memory that it may write to."""
    return np.array(array.to_numpy(zero_copy_only=False))


# Writing


def _to_array(column: RaggedTensor, name: str, single: bool) -> Any:
    pa = _arrow().pa
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


def _arrow() -> _Arrow:
    try:
        import pyarrow as pa  # type: ignore[import-untyped]
        from pyarrow import compute, parquet, types
    except ImportError as cause:
        raise MissingExtraError("pyarrow", "arrow", "reading and writing Parquet files") from cause
    return _Arrow(pa, compute, parquet, types)


@contextmanager
def _errors_of(path: str, arrow: _Arrow) -> Iterator[None]:
    """Tell of a damaged file in our own error.

    It does not say at which byte: who asks pyarrow where a damaged column begins ends the whole process.
    """
    try:
        yield
    except FilesystemError:
        raise
    except (arrow.pa.lib.ArrowException, OSError, UnicodeDecodeError) as cause:
        raise CorruptFileError(path, 0, f"not a Parquet file that can be read: {cause}") from cause
