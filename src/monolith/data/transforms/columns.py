"""Columns as transforms read and write them: the first value, whether one of these is there, one more.

A column that is not there reads as one where no record has a value: a batch of records
has only the columns that some record in it needed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith.data.records import (
    LABEL,
    LINE_ID,
    Records,
    concat_rows,
    empty_rows,
    known_columns,
    take_rows,
    text_rows,
)
from monolith.errors import ConfigError, DataError
from monolith.tensors import RaggedTensor

ACTIONS = LINE_ID + "actions"
PRE_ACTIONS = LINE_ID + "pre_actions"
CHANNEL = LINE_ID + "chnid"
SAMPLE_RATE = LINE_ID + "sample_rate"
SPECIAL_STRATEGIES = LINE_ID + "special_strategies"
DATA_SOURCE_KEY = "data_source_key"
DATA_SOURCE_NAME = LINE_ID + "data_source_name"

_NAMES = {torch.int64: "int64", torch.float32: "float32", torch.uint8: "strings"}


def read_column(records: Records, name: str, dtype: torch.dtype) -> RaggedTensor:
    """Return a column of this type, one row per record; without values if it is missing.

    Whole numbers are numbers, too: a 0/1 label of a CSV or Parquet file is read as float32.

    Raises:
        DataError: The column is of another type.
    """
    if not has_column(records, name, dtype):
        return empty_rows(dtype, len(records))
    column = records[name]
    return column if column.dtype is dtype else column.with_flat_values(column.flat_values.to(dtype))


def has_column(records: Records, name: str, dtype: torch.dtype) -> bool:
    """Return whether there is a column that reads as this type; see `read_column`.

    Raises:
        DataError: It is of another type.
    """
    if name not in records.columns:
        return False
    found = records.dtype_of(name)
    if found is not dtype and (found, dtype) != (torch.int64, torch.float32):
        raise DataError(f"column {name!r} must be {_NAMES[dtype]} for this, it is {_NAMES[found]}")
    return True


def read_labels(records: Records, who: str) -> RaggedTensor:
    """Return the labels that records are judged by; see `has_labels`."""
    has_labels(records, who)
    return read_column(records, LABEL, torch.float32)


def has_labels(records: Records, who: str) -> bool:
    """Return whether records have labels that they are judged by.

    Raises:
        DataError: The records are a table without a column of labels: every record would count as negative.
    """
    if records.complete and LABEL not in records.columns:
        raise DataError(
            f"{who}: the records have no column {LABEL!r} to tell positives by; "
            f"{known_columns(LABEL, records.columns)} Make one of another column with UseFieldAsLabel."
        )
    return has_column(records, LABEL, torch.float32)


def first_values(column: RaggedTensor, default: float) -> Tensor:
    """Return the first value of each row, of shape (nrows,); `default` if there is none."""
    return column.to_padded(1, default)[:, 0]


def rows_with_any(column: RaggedTensor, marked: Tensor) -> Tensor:
    """Return a mask of the rows in which a value is marked; `marked` is bool, one per value."""
    return rows_count(column, marked) > 0


def rows_count(column: RaggedTensor, marked: Tensor) -> Tensor:
    """Return how many values are marked in each row, int64."""
    sums = torch.zeros(len(marked) + 1, dtype=torch.int64)
    torch.cumsum(marked, 0, out=sums[1:])
    ends = sums[column.row_splits]
    return ends[1:] - ends[:-1]


def has_any(column: RaggedTensor, wanted: Collection[int]) -> Tensor:
    """Return a mask of the rows that have at least one of these int64 values."""
    return rows_with_any(column, torch.isin(column.flat_values, int64_tensor(wanted)))


def rank_of(column: RaggedTensor, priority: Sequence[int]) -> Tensor:
    """Return the place in `priority` of the row's value that comes first there.

    `len(priority)` for a row with values of which none is listed, one more for a row without.
    """
    ranks = torch.full((len(column.flat_values),), len(priority), dtype=torch.int64)
    for rank, value in enumerate(priority):
        ranks[column.flat_values == value] = rank
    best = torch.full((column.nrows,), len(priority) + 1, dtype=torch.int64)
    return best.scatter_reduce(0, column.value_rowids, ranks, "amin")


def append_values(column: RaggedTensor, values: Tensor, where: Tensor) -> RaggedTensor:
    """Return the column with one more value at the end of each row where the mask says so.

    Args:
        values: Of shape (nrows,); only those of the masked rows are used.
    """
    extra = RaggedTensor.from_row_lengths(values[where], where.to(torch.int64), validate=False)
    return join_rows(column, extra)


def join_rows(left: RaggedTensor, right: RaggedTensor) -> RaggedTensor:
    """Return the rows of `left`, each followed by that of `right`."""
    rows = torch.arange(left.nrows)
    order = torch.stack([rows, rows + left.nrows], dim=1).reshape(-1)
    values = take_rows(concat_rows([left, right]), order).flat_values
    return RaggedTensor.from_row_lengths(values, left.row_lengths() + right.row_lengths(), validate=False)


def set_rows(column: RaggedTensor, rows: RaggedTensor, where: Tensor) -> RaggedTensor:
    """Return the column with the rows of another one, of the same shape and type, where the mask says so."""
    index = torch.arange(column.nrows)
    return take_rows(concat_rows([column, rows]), torch.where(where, index + column.nrows, index))


def with_label_at(records: Records, position: int, values: Tensor, where: Tensor) -> Records:
    """Return the records with other labels at a position; records that have none there keep what they have.

    Args:
        values: float32 of shape (len(records),).
        where: Which records; bool of the same shape.
    """
    labels = read_column(records, LABEL, torch.float32)
    rows = torch.nonzero(where & (labels.row_lengths() > position)).squeeze(1)
    flat = labels.flat_values.clone()
    flat[labels.row_splits[rows] + position] = values[rows]
    return records.with_columns({LABEL: labels.with_values(flat)})


def text_column(texts: Sequence[str], which: Tensor) -> RaggedTensor:
    """Return a column with one string per record: `texts[which[i]]`."""
    table = text_rows([text.encode() for text in texts])
    return RaggedTensor(take_rows(table, which), torch.arange(len(which) + 1), validate=False)


def int64_tensor(numbers: Collection[int]) -> Tensor:
    """Return int64 numbers; those from 2^63 on, as ids of 64 bits may be, by their bits."""
    return torch.tensor([signed(number) for number in numbers], dtype=torch.int64)


def signed(number: int) -> int:
    """Return the int64 of the same 64 bits as a number from -2^63 to 2^64 - 1."""
    if not -(1 << 63) <= number < 1 << 64:
        raise ConfigError(f"{number} does not fit 64 bits")
    return number - (1 << 64) if number >> 63 > 0 else number


def unsigned(ids: Tensor) -> NDArray[np.uint64]:
    """Return int64 ids by their bits."""
    return ids.numpy().view(np.uint64)


def parse_integer_list(text: str) -> tuple[int, ...]:
    """Read numbers between commas; empty items are skipped, and of repeats the first stays.

    Raises:
        ConfigError: An item is no number.
    """
    numbers: dict[int, None] = {}
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        numbers[parse_integer(item)] = None
    return tuple(numbers)


def parse_integer(text: str) -> int:
    """Read a whole number; ConfigError `Invalid integer string: <text>` if it is none."""
    digits = text[1:] if text[:1] in ("+", "-") else text
    if not (digits.isascii() and digits.isdigit()):  # int() also takes "1_000" and other alphabets
        raise ConfigError(f"Invalid integer string: {text}")
    return int(text)


def parse_number(text: str, what: str) -> float:
    """Read a finite number; ConfigError that names `what` if it is none."""
    try:
        number = float(text)
    except ValueError as cause:
        raise ConfigError(f"{what}: expected a number, got {text!r}") from cause
    if not np.isfinite(number):
        raise ConfigError(f"{what}: expected a finite number, got {text!r}")
    return number
