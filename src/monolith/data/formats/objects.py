"""Objects by key, of JSON or of Python, as records: each value of its column's declared type.

A value is a number, a text, a bool, a datetime, or a list of these; a key that is missing, None, NaN and []
are no values. Whole numbers and bools are int64, other numbers float32, and datetimes Unix seconds. In a
list of numbers what is missing keeps its place, as NaN; in others it is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, time
from math import floor, nan
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from monolith.data.records import Records
from monolith.errors import ConfigError
from monolith.feature import ColumnKind
from monolith.feature.spec.times import TIME
from monolith.tensors import RaggedTensor

_EXACT = 1 << 24
"""Whole numbers up to here are the same as float32."""

Cell = list[Any]
ColumnType = torch.dtype | type[int] | type[float] | type[str] | str
"""What a column holds: int, float or str; "int64", "float32" or "text"; or the dtype that records have."""

TYPES: dict[ColumnType, torch.dtype] = {
    int: torch.int64,
    float: torch.float32,
    str: torch.uint8,
    "int64": torch.int64,
    "float32": torch.float32,
    "text": torch.uint8,
    torch.int64: torch.int64,
    torch.float32: torch.float32,
    torch.uint8: torch.uint8,
    TIME: TIME,
}


def column_types(columns: Mapping[str, ColumnType], who: str) -> dict[str, torch.dtype]:
    """Return the dtype of each column; ConfigError that begins with `who` for a type that there is not."""
    if wrong := {name: kind for name, kind in columns.items() if kind not in TYPES}:
        name, kind = next(iter(wrong.items()))
        raise ConfigError(f"{who}: column {name!r} must be int, float or str, got {kind!r}")
    return {name: TYPES[kind] for name, kind in columns.items()}


def json_object(text: bytes) -> dict[str, Any]:
    """Return the object that a JSON text is; ValueError where it is none."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"expected an object, got a {type(found).__name__}")
    return found


def are_whole(values: NDArray[np.float64]) -> bool:
    """Whether doubles are better held by int64 than by float32, as ids of which some are missing and Unix
    times with fractions are: beyond 2^24, where float32 has no fractions and not all whole numbers, are
    some, and the others are whole. NaN is passed over."""
    there = values[~np.isnan(values)]
    sizes = np.abs(there)
    if not len(there) or not _EXACT < sizes.max() < 2.0**63:
        return False
    return bool(((np.floor(there) == there) | (sizes > _EXACT)).all())


def is_missing(value: Any) -> bool:
    """Whether a value is none: None, NaN, or the NaT and NA of pandas, which need not be installed."""
    if value is None:
        return True
    if isinstance(value, float | np.floating | np.datetime64):
        return bool(value != value)  # noqa: PLR0124  as NaN and NaT are
    return type(value).__name__ in ("NAType", "NaTType")


def values_of(value: Any) -> Cell:
    """Return the values of one key: none, one or several. What is missing in a list is None there."""
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind == "M":
        value = seconds_of(value)
    elif isinstance(value, np.ndarray | np.generic | torch.Tensor):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [None if is_missing(one) else _second(one) for one in value]
    return [] if is_missing(value) else [_second(value)]


def seconds_of(times: Any) -> Any:
    """Return datetimes of numpy as Unix seconds, None where they are NaT: a list, or one of them."""
    seconds = times.astype("M8[s]").astype(np.int64)
    plain = seconds.tolist()
    if not times.ndim:
        return None if np.isnat(times) else plain
    return [None if gone else one for gone, one in zip(np.isnat(times).tolist(), plain, strict=True)]


def _second(value: Any) -> Any:
    """Return the Unix second of a datetime or a date, which are UTC without a zone; others as they are."""
    if isinstance(value, np.datetime64):
        return seconds_of(value)
    if not isinstance(value, date):
        return value
    moment = value if isinstance(value, datetime) else datetime.combine(value, time())
    return floor((moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp())


def wider(known: torch.dtype | None, values: Cell) -> Any:
    """Return the narrowest type for what there was so far and these values; None while there are none."""
    for value in values:
        if isinstance(value, str | bytes):
            return torch.uint8
        if isinstance(value, float) and known is not torch.uint8:
            known = torch.float32
        elif isinstance(value, int):
            known = known or torch.int64
    return known


def read_row(
    found: Mapping[str, Any], types: Mapping[str, torch.dtype], wanted: Mapping[str, torch.dtype]
) -> dict[str, Cell]:
    """Return the cells of a record that are wanted, each value of its column's type.

    Raises:
        ValueError: A key has no type, or a value is of another.
    """
    if unknown := [name for name in found if name not in types]:
        raise ValueError(f"key {unknown[0]!r} is not among those of the first records; give its type")
    return cells_of(found, wanted)


def cells_of(found: Mapping[str, Any], wanted: Mapping[str, torch.dtype]) -> dict[str, Cell]:
    """Return the cells of an object that are wanted; other keys are passed over.

    Raises:
        ValueError: A value is not of its column's type.
    """
    return {
        name: [
            nan if value is None else _value(value, dtype, name)
            for value in values_of(found.get(name))
            if value is not None or dtype is torch.float32
        ]
        for name, dtype in wanted.items()
    }


def _value(value: Any, dtype: torch.dtype, name: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if dtype is TIME and isinstance(value, int | float):
        return repr(value).encode()  # as exact as it came
    if dtype is TIME:
        dtype = torch.uint8
    if dtype is torch.uint8 and isinstance(value, bytes):
        return value
    if dtype is torch.uint8 and isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    if dtype is torch.float32 and isinstance(value, int | float):
        return float(value)
    if dtype is torch.int64 and isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise ValueError(f"key {name!r}: {value} does not fit into 64 bits")
        return value - (1 << 64) if value >= 1 << 63 else value  # an unsigned id keeps its bits
    kind = {torch.uint8: "a text", torch.float32: "a number", torch.int64: "a whole number"}[dtype]
    raise ValueError(f"key {name!r}: {value!r:.40} is not {kind}")


def kind_of_cells(cells: Iterable[Any], dtype: torch.dtype) -> ColumnKind:
    """Return how a column of such cells, each a value, a list of values or None, is written again."""
    cells = list(cells)
    single = not any(isinstance(cell, list | tuple | np.ndarray | torch.Tensor) for cell in cells)
    values = [value for cell in cells for value in values_of(cell)]
    if dtype is TIME:  # as exact as it came: see `_value`
        dtype = wider(None, values) or torch.int64
    if dtype is torch.uint8:
        is_bytes = any(isinstance(value, bytes) for value in values)
        return ColumnKind("binary" if is_bytes else "string", single)
    if dtype is torch.float32:
        return ColumnKind("double", single)
    if values and all(isinstance(value, bool) for value in values):
        return ColumnKind("bool", single)
    is_unsigned = any(isinstance(value, int) and value >= 1 << 63 for value in values)
    return ColumnKind("uint64" if is_unsigned else "int64", single)


def rows_as_records(
    rows: Sequence[Mapping[str, Cell]],
    types: Mapping[str, torch.dtype],
    kinds: Mapping[str, ColumnKind] | None = None,
) -> Records:
    """Lay rows side by side by column."""
    columns = {}
    for name, dtype in types.items():
        lengths = torch.tensor([len(row[name]) for row in rows], dtype=torch.int64)
        flat = [value for row in rows for value in row[name]]
        values: torch.Tensor | RaggedTensor
        if dtype in (torch.uint8, TIME):
            text = torch.from_numpy(np.frombuffer(b"".join(flat), np.uint8).copy())
            values = RaggedTensor.from_row_lengths(text, torch.tensor([*map(len, flat)], dtype=torch.int64))
        else:
            values = torch.tensor(flat, dtype=dtype)
        columns[name] = RaggedTensor.from_row_lengths(values, lengths, validate=False)
    return Records(len(rows), columns, kinds=kinds or {})
