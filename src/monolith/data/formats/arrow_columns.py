"""Arrow's columns as ours: those of Parquet files, and of tables in memory.

    whole numbers, bools        int64; unsigned 64-bit ones keep their bits
    timestamps, dates           int64, Unix seconds
    floats, decimals            float32
    strings, binary             bytes
    lists of these              as many values as there are

A null is a record without values in that column. A null in a list of floats keeps its place, as NaN, and in
another list it is left out. Doubles that float32 would spoil are int64 where that holds them: whole numbers
beyond 2^24 of a table that is in memory, and whatever is declared as int64 or as a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from monolith.data.formats.objects import are_whole
from monolith.data.records import Records, empty_rows
from monolith.errors import DataError, MissingExtraError
from monolith.feature import ColumnKind
from monolith.feature.spec.times import TIME
from monolith.tensors import RaggedTensor


class ArrowModules(NamedTuple):
    """The modules of pyarrow, which is imported when a file is opened and not before."""

    pa: Any
    compute: Any
    parquet: Any
    types: Any


def import_arrow(what: str = "reading and writing Parquet files") -> ArrowModules:
    """Return the modules, which not everybody has; `what` needs them."""
    try:
        import pyarrow as pa  # type: ignore[import-untyped]
        from pyarrow import compute, parquet, types
    except ImportError as cause:
        raise MissingExtraError("pyarrow", "arrow", what) from cause
    return ArrowModules(pa, compute, parquet, types)


def columns_of(schema: Any, columns: Sequence[str] | None) -> list[str]:
    """Return the columns to read of a schema: those that are wanted and there."""
    return list(schema.names) if columns is None else [name for name in columns if name in schema.names]


def declared_by(table: Any) -> dict[str, torch.dtype]:
    """Return what the columns of doubles of a whole table should be read as, where float32 would spoil them;
    see `are_whole`."""
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
    for name in names:
        column = table.column(name)
        array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        try:
            columns[name] = _to_ragged(array, (declared or {}).get(name))
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


def _to_ragged(array: Any, declared: torch.dtype | None) -> RaggedTensor:
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
    else:
        lengths = _numpy(array.is_valid()).astype(np.int64)
        values = array.drop_null()
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
