"""Records as lists that one can see, and the same transform on slices of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st

from monolith.data import Records, concat
from monolith.data.transforms import Transform
from monolith.tensors import RaggedTensor

Row = dict[str, list[Any]]


def records_of(rows: Sequence[Row]) -> Records:
    """Return records, each given as column -> values; what a record does not have, it leaves out."""
    columns: dict[str, list[list[Any]]] = {}
    for name in {name: None for row in rows for name, values in row.items() if values}:
        columns[name] = [list(row.get(name, [])) for row in rows]
    return Records(len(rows), {name: _column(values) for name, values in columns.items()})


def rows_of(records: Records) -> list[Row]:
    """Return what each record has, without the columns in which it has nothing."""
    columns = {
        name: records.strings(name) if column.dtype is torch.uint8 else records[name].to_list()
        for name, column in records.columns.items()
    }
    return [{name: rows[i] for name, rows in sorted(columns.items()) if rows[i]} for i in range(len(records))]


def on_slices(transform: Transform, records: Records, cuts: Sequence[int], first: int = 0) -> list[Row]:
    """Return what a transform makes of the pieces between the cuts, end to end."""
    ends = sorted({0, len(records), *(cut % (len(records) + 1) for cut in cuts)})
    parts = [transform(records.slice(begin, end), first=first + begin) for begin, end in pairwise(ends)]
    return rows_of(concat(parts)) if parts else []


cuts = st.lists(st.integers(0, 40), max_size=4)


def per_record(rows: Sequence[Row], reference: Callable[[Row], Row | None]) -> list[Row]:
    """Return what a plain function of one record, None to drop it, makes of each."""
    made = [reference({name: list(values) for name, values in row.items()}) for row in rows]
    return [
        {name: values for name, values in sorted(row.items()) if values} for row in made if row is not None
    ]


def floats(*values: float) -> list[float]:
    """Return numbers as float32 has them."""
    return torch.tensor(values, dtype=torch.float32).tolist()


def _column(rows: list[list[Any]]) -> RaggedTensor:
    some = next((value for row in rows for value in row), 0)
    if isinstance(some, bytes):
        return RaggedTensor.from_list(
            [[list(text) for text in row] for row in rows], dtype=torch.uint8, ragged_rank=2
        )
    dtype = torch.float32 if isinstance(some, float) else torch.int64
    return RaggedTensor.from_list(rows, dtype=dtype, ragged_rank=1)
