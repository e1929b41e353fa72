"""Splitting: which records of a set are trained on, evaluated on and predicted.

A record's part follows from its values: their hash, as a number from 0 to 1, falls into a share. So it needs
no state, no second pass and no order, and a copy of a record is never on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith import native
from monolith.data.config import DataSplit, Part
from monolith.data.records import Records
from monolith.errors import DataError
from monolith.feature.spec.fitting import mixed
from monolith.tensors import RaggedTensor


def types_for(split: DataSplit | None, types: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
    """Return the types of what is read, those of the columns that a split names included."""
    named = {} if split is None else dict.fromkeys(split.columns, torch.uint8)
    if split is not None and split.time is not None:
        named[split.time] = torch.int64
    return {**named, **types}


def kept_for(
    part: Part, split: DataSplit, columns: Sequence[str] | None = None
) -> Callable[[Records], Tensor]:
    """Return what says of each record whether it is in this part.

    Args:
        columns: Those that decide where the split names none; None means all there are.
    """
    if split.time is not None:
        return lambda records: _by_time(part, split, records)
    deciding = split.by or columns

    def by_chance(records: Records) -> Tensor:
        low, high = _range(part, split)
        drawn = fractions(records, list(records.columns) if deciding is None else deciding, split.seed)
        return torch.from_numpy((drawn >= low) & (drawn < high))

    return by_chance


def fractions(records: Records, columns: Sequence[str], seed: int = 0) -> NDArray[np.float64]:
    """Return a number for each record, even over 0 to below 1, that follows from its values in some columns.

    Raises:
        DataError: None of these columns is there.
    """
    there = [name for name in sorted(columns) if name in records.columns]
    if not there:
        raise DataError(f"cannot split: the data has none of the columns {', '.join(columns)}")
    total = mixed(np.full(len(records), seed % (1 << 64), dtype=np.uint64))
    for name in there:
        total = mixed(total ^ _row_hashes(records[name]))
    return (total >> np.uint64(11)).astype(np.float64) / float(1 << 53)


def _range(part: Part, split: DataSplit) -> tuple[float, float]:
    """Return which fractions are in a part: what is evaluated on comes first, then what is predicted."""
    held = split.evaluate + split.predict
    bounds = {"evaluate": (0.0, split.evaluate), "predict": (split.evaluate, held), "train": (held, 1.0)}
    return bounds[part]


def _by_time(part: Part, split: DataSplit, records: Records) -> Tensor:
    assert split.time is not None
    column = records[split.time]
    if not bool((column.row_lengths() == 1).all()):
        raise DataError(f"cannot split by time: a record has no single number in column {split.time!r}")
    if column.dtype is torch.uint8:
        raise DataError(f"cannot split by time: column {split.time!r} holds texts, not numbers")
    moments = column.flat_values.double()
    end = float("inf")
    predicted = end if split.predict_from is None else split.predict_from
    evaluated = predicted if split.evaluate_from is None else split.evaluate_from
    bounds = {"train": (-end, evaluated), "evaluate": (evaluated, predicted), "predict": (predicted, end)}
    low, high = bounds[part]
    return (moments >= low) & (moments < high)


def _row_hashes(column: RaggedTensor) -> NDArray[np.uint64]:
    """Return a hash of the values of each row, in their order."""
    values = _value_hashes(column)
    splits = column.row_splits.numpy()
    lengths = np.diff(splits)
    places = np.arange(len(values), dtype=np.uint64) - np.repeat(splits[:-1], lengths).astype(np.uint64)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed(values + mixed(places)), dtype=np.uint64)])
    return mixed(sums[splits[1:]] - sums[splits[:-1]] + lengths.astype(np.uint64))


def _value_hashes(column: RaggedTensor) -> NDArray[np.uint64]:
    values = column.values
    if isinstance(values, RaggedTensor):
        text = values.flat_values.numpy().tobytes()
        return native.hash_strings(text, values.row_splits.numpy(), None, 2).view(np.uint64)
    numbers = values.numpy()
    if numbers.dtype == np.float32:
        return numbers.view(np.uint32).astype(np.uint64)
    return numbers.astype(np.int64).view(np.uint64)
