"""Arrow's columns as ours: those of Parquet files, and of tables in memory.

    whole numbers, bools        int64; unsigned 64-bit ones keep their bits
    timestamps, dates           int64, Unix seconds
    floats, decimals            float32
    strings, binary             bytes
    lists of these              as many values as there are

A null is a record without values in that column, and a null in a list is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from monolith.data.records import Records
from monolith.errors import DataError, MissingExtraError
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


def columns_of(schema: Any, columns: Sequence[str] | None) -> tuple[list[str], bool]:
    """Return the columns to read of a schema, and whether these are all that are wanted and there."""
    types = import_arrow().types
    names = schema.names if columns is None else [name for name in columns if name in schema.names]
    # Nothing but nulls: a column without a type, which the next file may well have.
    typed = [name for name in names if not types.is_null(schema.field(name).type)]
    return typed, len(typed) == len(names)


def arrow_records(table: Any, names: Sequence[str], complete: bool, path: str) -> Records:
    """Return columns of a table as records; `path` is where it came from, for messages."""
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
    _, compute, _, types = import_arrow()
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
