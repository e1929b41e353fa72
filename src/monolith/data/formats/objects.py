"""Objects by key, of JSON or of Python, as records: each value of its column's declared type.

A value is a number, a text, a bool, or a list of these; a key that is missing, None and [] are no values.
Whole numbers and bools are int64, other numbers float32.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from monolith.data.records import Records
from monolith.errors import ConfigError
from monolith.tensors import RaggedTensor

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


def values_of(value: Any) -> Cell:
    """Return the values of one key: none, one or several."""
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        value = value.tolist()
    if value is None:
        return []
    return [one for one in value if one is not None] if isinstance(value, list | tuple) else [value]


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
        name: [_value(value, dtype, name) for value in values_of(found.get(name))]
        for name, dtype in wanted.items()
    }


def _value(value: Any, dtype: torch.dtype, name: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
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


def rows_as_records(rows: Sequence[Mapping[str, Cell]], types: Mapping[str, torch.dtype]) -> Records:
    """Lay rows side by side by column."""
    columns = {}
    for name, dtype in types.items():
        lengths = torch.tensor([len(row[name]) for row in rows], dtype=torch.int64)
        flat = [value for row in rows for value in row[name]]
        values: torch.Tensor | RaggedTensor
        if dtype is torch.uint8:
            text = torch.from_numpy(np.frombuffer(b"".join(flat), np.uint8).copy())
            values = RaggedTensor.from_row_lengths(text, torch.tensor([*map(len, flat)], dtype=torch.int64))
        else:
            values = torch.tensor(flat, dtype=dtype)
        columns[name] = RaggedTensor.from_row_lengths(values, lengths, validate=False)
    return Records(len(rows), columns)
