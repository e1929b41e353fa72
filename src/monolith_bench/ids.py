"""Ids to ask a table for: how often each comes, and what it looks like.

A *position* counts rows from 0 and is what a plain array takes. An *id* is any
int64 and is what a table takes. Each position has one id, so that a table and an
array can be asked for the same rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ZIPF = 1.05
"""The exponent: the k-th most frequent row comes k**-1.05 as often as the first."""

_SPREAD = np.uint64(0xD1342543DE82EF95)  # odd, so multiplication is a bijection


def id_of(positions: NDArray[np.integer]) -> Tensor:
    """Return the int64 id of each position: spread over all of int64, half of them negative."""
    return torch.from_numpy((positions.astype(np.uint64) * _SPREAD).view(np.int64))


def uniform(rows: int, count: int, random: np.random.Generator) -> NDArray[np.uint32]:
    """Return positions that are all equally likely."""
    return random.integers(0, rows, count, dtype=np.uint32)


def zipf(rows: int, count: int, random: np.random.Generator) -> NDArray[np.uint32]:
    """Return positions of which few come often and most come rarely.

    The frequent ones lie far apart: in a row they would share cache lines and pages.
    """
    weight = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -ZIPF)
    ranks = np.searchsorted(weight, random.random(count) * weight[-1]).astype(np.uint64)
    stride = next(n for n in range(int(rows * 0.618) | 1, 2 * rows + 2) if math.gcd(n, rows) == 1)
    positions: NDArray[np.uint32] = (ranks * np.uint64(stride) % np.uint64(rows)).astype(np.uint32)
    return positions


DISTRIBUTIONS = {"uniform": uniform, "zipf": zipf}


@dataclass(frozen=True, slots=True)
class IdBatches:
    """The same requests in each contender's own terms, made before any clock runs."""

    ids: tuple[Tensor, ...]
    """int64, for a table."""
    positions: tuple[NDArray[np.uint32], ...]
    """For raw rows."""
    indices: tuple[Tensor, ...]
    """int64 positions, for torch."""

    @classmethod
    def of(cls, positions: NDArray[np.uint32], batch: int) -> Self:
        pieces = tuple(positions[i : i + batch] for i in range(0, len(positions), batch))
        return cls(
            ids=tuple(map(id_of, pieces)),
            positions=pieces,
            indices=tuple(torch.from_numpy(piece.astype(np.int64)) for piece in pieces),
        )

    def __len__(self) -> int:
        return len(self.ids)
