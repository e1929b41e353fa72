"""Arrow columns as ours: Parquet files by row group, and tables in memory.

    whole numbers, bools        int64; unsigned 64-bit ones keep their bits
    timestamps, dates           int64, Unix seconds
    floats, decimals            float32
    strings, binary             bytes
    lists of these              as many values as there are

A null is a record without values in that column. A null in a list of floats stays, as NaN; in any other list
it is dropped. Doubles that float32 would round are int64 if that is exact: whole numbers beyond 2^24 of a
table in memory, and columns declared as int64 or as a time. Other types (structs, maps, lists of lists)
cannot be read as a column; name the columns to read.

Files are written with a checksum per page, which is verified on reading. Without one, altered bytes may read
as other values."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from monolith.data.format import Chunk, Format, Part
from monolith.data.formats.memory import are_whole
from monolith.data.records import Records, as_read, concat, empty_rows
from monolith.errors import ConfigError, CorruptFileError, DataError, FilesystemError, optional_package
from monolith.feature import ColumnKind
from monolith.feature.spec.times import TIME
from monolith.filesystem import atomic_write, open_read
from monolith.tensors import RaggedTensor


class ArrowModules(NamedTuple):
    """The modules of pyarrow, which is imported when a file is opened and not before."""

    pa: Any
    compute: Any
    parquet: Any
    types: Any


def import_arrow(what: str = "reading and writing Parquet files") -> ArrowModules:
    """Return the modules of an optional extra; `what` needs them."""
    with optional_package("pyarrow", "arrow", what):
        import pyarrow as pa  # type: ignore[import-untyped]
        from pyarrow import compute, parquet, types
    return ArrowModules(pa, compute, parquet, types)


def columns_of(schema: Any, columns: Sequence[str] | None) -> list[str]:
    """Return the columns to read of a schema: those that are wanted and there."""
    return list(schema.names) if columns is None else [name for name in columns if name in schema.names]


def declared_by(table: Any) -> dict[str, torch.dtype]:
    """Return the types to read columns of doubles as, if float32 would round them; see `are_whole`."""
    types = import_arrow().types
    found: dict[str, torch.dtype] = {}
    for name in table.column_names:
        if not types.is_float64(table.schema.field(name).type):
            continue
        if are_whole(table.column(name).to_numpy(zero_copy_only=False)):
            found[name] = TIME
    return found


def arrow_records(
    table: Any,
    names: Sequence[str],
    path: str,
    declared: Mapping[str, torch.dtype] | None = None,
) -> Records:
    """Return columns of a table as records.

    Args:
        path: Where it came from, for messages.
        declared: Types of columns; see `ParquetFormat`.
    """
    # The reader takes "a" for "a.b", too; so the names are gone through once more.
    columns, kinds = {}, {}
    one_each = torch.arange(table.num_rows + 1)
    for name in names:
        column = table.column(name)
        array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        try:
            columns[name] = _to_ragged(array, (declared or {}).get(name), one_each)
        except DataError as cause:
            raise DataError(
                f"{path}: column {name!r} has the type {array.type}, which cannot be read. "
                "Name the columns to read, and leave it out."
            ) from cause
        except ValueError as cause:
            raise DataError(f"{path}: column {name!r} {cause}") from cause
        if (kind := kind_of(array.type)) is not None:
            kinds[name] = kind
    return Records(table.num_rows, columns, complete=True, kinds=kinds)


def kind_of(kind: Any) -> ColumnKind | None:
    """Return how a column of an Arrow type is written again; None for moments, which stay Unix seconds."""
    types = import_arrow().types
    single = not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))
    if not single:
        kind = kind.value_type
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_string_view(kind):
        return ColumnKind("string", single)
    if types.is_binary_view(kind) or types.is_fixed_size_binary(kind):
        return ColumnKind("binary", single)
    if types.is_decimal(kind) or types.is_float16(kind):
        return ColumnKind("double", single)
    if types.is_timestamp(kind) or types.is_date(kind):
        return ColumnKind("int64", single)
    return ColumnKind(str(kind), single)


def _to_ragged(array: Any, declared: torch.dtype | None, one_each: torch.Tensor) -> RaggedTensor:
    """Return a column of Arrow as ours.

    Args:
        one_each: The splits of a column with one value in each row, which all such columns share.
    """
    pa, compute, _, types = import_arrow()
    if types.is_null(array.type):  # nothing but nulls: without a type, which the next file may well have
        return empty_rows(torch.float32 if declared in (None, TIME) else declared, len(array))
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if types.is_list(array.type) or types.is_large_list(array.type) or types.is_fixed_size_list(array.type):
        lengths = _numpy(compute.fill_null(compute.list_value_length(array), 0)).astype(np.int64)
        values = array.drop_null().flatten()
        if types.is_dictionary(values.type):
            values = values.dictionary_decode()
        if values.null_count and types.is_floating(values.type):
            values = compute.fill_null(values, pa.scalar(float("nan"), values.type))
        if values.null_count:
            valid = _numpy(values.is_valid())
            rows = np.repeat(np.arange(len(lengths)), lengths)
            lengths = np.bincount(rows[valid], minlength=len(lengths)).astype(np.int64)
            values = values.drop_null()
    elif array.null_count:
        lengths = _numpy(array.is_valid()).astype(np.int64)
        values = array.drop_null()
    elif types.is_floating(array.type) and declared in (torch.int64, TIME):
        lengths, values = np.ones(len(array), np.int64), array
    else:
        return RaggedTensor(_values(array), one_each, validate=False)
    if types.is_floating(values.type) and declared in (torch.int64, TIME):
        return _whole(_numpy(values), lengths, declared)
    return RaggedTensor.from_row_lengths(_values(values), torch.from_numpy(lengths), validate=False)


def _whole(
    values: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any], declared: torch.dtype
) -> RaggedTensor:
    """Return floats as the whole numbers that they are, without those that are missing."""
    there = ~np.isnan(values)
    if not there.all():
        lengths = np.bincount(np.repeat(np.arange(len(lengths)), lengths)[there], minlength=len(lengths))
        values = values[there]
    whole = np.floor(values)
    wrong = (whole != values) & (declared is not TIME) | (np.abs(values) >= 2.0**63)
    if wrong.any():
        raise ValueError(
            f"must hold whole numbers, as ids, got {values[wrong][0]:g}. Read numbers with "
            "FloatFeature, or make ids of them with BucketFeature."
        )
    return RaggedTensor.from_row_lengths(
        torch.from_numpy(whole.astype(np.int64)), torch.from_numpy(lengths.astype(np.int64)), validate=False
    )


def _values(array: Any) -> torch.Tensor | RaggedTensor:
    """Return values without nulls in one of our types."""
    pa, _, _, types = import_arrow()
    kind = array.type
    if types.is_uint64(kind):
        return torch.from_numpy(_numpy(array).view(np.int64))
    if types.is_int64(kind) or types.is_float32(kind):
        return torch.utils.dlpack.from_dlpack(array)  # Arrow's own memory: records are never written to
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


class ParquetFormat(Format):
    """Reads any Parquet file with flat columns and lists.

    Columns are written as they were in the data that they were read from: texts as texts, one value as a
    plain value, a list as a list. A column of which nothing says that is written as a list.

    Args:
        chunk_rows: Rows in a chunk at most; a row group is read at once and cut.
        row_group_rows: Rows in a row group of a file that is written.
        single: Columns to write as plain values instead of lists: one per record, or null.
        compression: Of files that are written: "zstd", "snappy", "gzip", "none".
        types: Column to type, as `FeatureSpec.columns`. Whole numbers that a file has as doubles, as pandas
            writes them if one is missing, are read as whole numbers; so are times.
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
            self._check_start(path, start, rows)
            for group, first, last in _groups(file.metadata):
                if start < last:
                    with _errors_of(path, arrow):
                        table = file.read_row_group(group, columns=wanted)
                    yield from self._cut(table, path, wanted, max(start - first, 0), first, size, rows)

    def parts(self, path: str, *, start: int = 0, columns: Sequence[str] | None = None) -> Iterator[Part]:
        """Yield the row groups of a file from row `start` on, each read when it is parsed; see `Format`."""
        arrow = import_arrow()
        with open_read(path) as handle:
            size = handle.seek(0, os.SEEK_END)
            with _errors_of(path, arrow):
                file = arrow.parquet.ParquetFile(handle, page_checksum_verification=True)
                metadata, wanted = file.metadata, columns_of(file.schema_arrow, columns)
        self._check_start(path, start, int(metadata.num_rows))

        def parse(group: int, first: int) -> list[Chunk]:
            with open_read(path) as handle, _errors_of(path, arrow):
                # A reader of its own, as one is not for several threads; but the footer is read once.
                file = arrow.parquet.ParquetFile(handle, metadata=metadata, page_checksum_verification=True)
                table = file.read_row_group(group, columns=wanted)
            begin = max(start - first, 0)
            return list(self._cut(table, path, wanted, begin, first, size, int(metadata.num_rows)))

        for group, first, last in _groups(metadata):
            if start < last:
                yield partial(parse, group, first)

    def _check_start(self, path: str, start: int, rows: int) -> None:
        if start > rows:
            raise CorruptFileError(
                path, 0, f"has {rows} rows, but was to be read on from row {start}: it was replaced"
            )

    def _cut(
        self, table: Any, path: str, names: Sequence[str], begin: int, first: int, size: int, rows: int
    ) -> Iterator[Chunk]:
        """Yield the rows of a row group from row `begin` on.

        Args:
            first: The rows of the file before it.
            size: Bytes of the file, which has `rows`.
        """
        for at in range(begin, len(table), self._chunk_rows):
            some = table.slice(at, min(self._chunk_rows, len(table) - at))
            last = first + at + len(some)
            records = arrow_records(some, names, path, self._types)
            yield Chunk(records, last, reached=size * last // rows)

    def times(self, path: str) -> frozenset[str]:
        arrow = import_arrow()
        with open_read(path) as handle, _errors_of(path, arrow):
            schema = arrow.parquet.ParquetFile(handle).schema_arrow
        kinds = arrow.types
        return frozenset(
            one.name for one in schema if kinds.is_timestamp(one.type) or kinds.is_date(one.type)
        )

    def in_pieces(self, piece_bytes: int) -> Self:  # noqa: ARG002  a row group is decoded as a whole
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
        """Return how many records a file has, which its footer says."""
        arrow = import_arrow()
        with open_read(path) as handle, _errors_of(path, arrow):
            return int(arrow.parquet.ParquetFile(handle).metadata.num_rows)

    @contextmanager
    def writer(self, path: str) -> Iterator[_Writer]:
        import_arrow()
        with atomic_write(path) as handle:
            writer = _Writer(handle, self._row_group_rows, self._single, self._compression)
            try:
                yield writer
                writer.finish()
            finally:
                writer.close()


def _groups(metadata: Any) -> Iterator[tuple[int, int, int]]:
    """Yield the number of each row group, and its rows: from the first to before the last."""
    first = 0
    for group in range(metadata.num_row_groups):
        last = first + int(metadata.row_group(group).num_rows)
        yield group, first, last
        first = last


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
        """Write the remaining records and the footer."""
        rest = concat(self._pending) if self._pending else Records(0, {})
        if len(rest) or self._file is None:
            self._write(rest)
        self._file.close()

    def close(self) -> None:
        """Close the file, which is open only if writing failed; that error says more than one of closing."""
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

    It does not say at which byte: asking pyarrow where a damaged column begins kills the process.
    """
    try:
        yield
    except FilesystemError:
        raise
    except (arrow.pa.lib.ArrowException, OSError, UnicodeDecodeError) as cause:
        raise CorruptFileError(path, 0, f"not a Parquet file that can be read: {cause}") from cause
