"""Numbers of records, and what is drawn for them.

A record is numbered by its place in the stream that is read. Where records were dropped
or repeated in between, the place no longer tells, so the numbers travel with the records
in a column of their own, from the first transform to the last.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch
from numpy.typing import NDArray

from monolith.data.records import Records
from monolith.errors import ConfigError
from monolith.table.hashing import draws, mix, mix_one
from monolith.tensors import RaggedTensor

NUMBER = "record_number"
"""The column that holds the numbers, int64, one per record, while records pass through transforms."""

_ALL_BITS = (1 << 64) - 1


def numbered(records: Records, first: int) -> Records:
    """Return the records with their numbers in a column: those they have, or `first` and on."""
    if NUMBER in records.columns:
        return records
    return records.with_columns({NUMBER: one_each(torch.arange(first, first + len(records)))})


def numbers_of(records: Records, first: int) -> NDArray[np.int64]:
    """Return the number of each record: from its column, or `first` and on."""
    if NUMBER in records.columns:
        return records[NUMBER].flat_values.numpy()
    return np.arange(first, first + len(records), dtype=np.int64)


def renumbered(records: Records, copies: torch.Tensor) -> Records:
    """Give records that were made of one record numbers of their own.

    Args:
        records: Where they have no numbers, nothing is done.
        copies: int64 of shape (len(records),). 0 keeps the number; what has the same number and
            another copy gets one that no other record is likely to have.
    """
    if NUMBER not in records.columns or not bool(copies.any()):
        return records
    numbers = records[NUMBER].flat_values.numpy()
    copy = copies.numpy()
    # Of the sum alone, copy 1 of record 7 would be copy 0 of record 8. The sign keeps them apart from places.
    others = mix(mix(numbers) + copy.astype(np.uint64)).view(np.int64) | np.int64(-(1 << 63))
    return records.with_columns({NUMBER: one_each(torch.from_numpy(np.where(copy == 0, numbers, others)))})


def draw(
    purpose: str, seed: int, records: Records, first: int, columns: int | range = 1
) -> NDArray[np.float32]:
    """Return numbers in [0, 1), of shape (len(records), columns): the same whenever they are drawn.

    Args:
        purpose: What for. Different purposes draw differently from the same seed.
        seed: Two transforms of one kind and seed draw alike.
        columns: How many per record, or which.
    """
    key = (mix_one(seed) + zlib.crc32(purpose.encode())) & _ALL_BITS
    wanted = columns if isinstance(columns, range) else range(columns)
    return draws(key, numbers_of(records, first), wanted)


def check_seed(purpose: str, seed: int) -> None:
    """Raise ConfigError for a seed that is no uint64."""
    if not 0 <= seed <= _ALL_BITS:
        raise ConfigError(f"{purpose}: seed must be from 0 to 2^64 - 1, got {seed}")


def one_each(values: torch.Tensor) -> RaggedTensor:
    """Return a column of exactly one value per record."""
    return RaggedTensor(values, torch.arange(len(values) + 1), validate=False)
