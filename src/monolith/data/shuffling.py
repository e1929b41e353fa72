"""Shuffling that can be taken up again: an order that follows from numbers alone.

A buffer from which records are drawn at random would have to be saved whole. Here a
stretch of records is put into an order that is a function of the seed and of where the
stretch begins, so that whoever knows these two reads on in the middle of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from monolith.errors import ConfigError
from monolith.table.hashing import mix, mix_one

_ALL_BITS = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(frozen=True, kw_only=True, slots=True)
class ShuffleConfig:
    """How records are put into another order than that of the data."""

    seed: int = 0
    buffer: int = 65_536
    """Records that are held and mixed with each other at a time."""
    files: bool = True
    """Whether a list of files is mixed over its whole length: pieces of all files are read in a random order,
    a new one in each epoch. False mixes `buffer` records at a time, in the order of the files."""
    piece_bytes: int = 128 << 10
    """Bytes of a text or TFRecord file that are one piece; of Parquet, a row group is."""

    def __post_init__(self) -> None:
        if self.buffer < 1:
            raise ConfigError(f"shuffle: buffer must be at least 1 record, got {self.buffer}")
        if self.piece_bytes < 1:
            raise ConfigError(f"shuffle: piece_bytes must be at least 1, got {self.piece_bytes}")
        if not 0 <= self.seed < 1 << 64:
            raise ConfigError(f"shuffle: seed must be from 0 to 2^64 - 1, got {self.seed}")


def permutation(count: int, *key: int) -> Tensor:
    """Return the numbers from 0 to `count` - 1 in an order that the key decides, for good: int64 (count,)."""
    state = 0
    for number in key:
        state = mix_one((state + number + 1) & _ALL_BITS)
    # `mix` is a bijection, so no two hashes tie; the low bits of nearby keys are far apart after it.
    hashes = mix(np.arange(count, dtype=np.uint64) ^ np.uint64(state))
    return torch.from_numpy(np.argsort(mix(hashes + np.uint64(state))))
