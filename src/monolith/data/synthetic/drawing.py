"""Drawing: how made-up data is drawn, from a seed and without a state.

A draw is a hash of the seed, of what the draw is for and of whom it is about. So it is the
same whenever it is made, and any stretch of a made-up log can be read without what came
before it.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from monolith.table.hashing import mix, mix_one

_GOLDEN, _ALL_BITS = 0x9E3779B97F4A7C15, 0xFFFF_FFFF_FFFF_FFFF

Numbers = NDArray[np.uint64] | NDArray[np.int64]


class Draws:
    """Draws of one seed. Each is about numbers (of examples, of ids) and has a purpose, itself a number."""

    def __init__(self, seed: int) -> None:
        self._key = mix_one(seed)

    def hash(self, of: Numbers, purpose: int) -> NDArray[np.uint64]:
        """Return 64 bits for each; no two of one purpose are the same."""
        # The golden ratio keeps the stretches of different purposes far apart.
        return mix(of.view(np.uint64) + np.uint64(self._key + _GOLDEN * purpose & _ALL_BITS))

    def uniform(self, of: Numbers, purpose: int) -> NDArray[np.float64]:
        """Return draws from [0, 1), with all the bits that a double has."""
        return (self.hash(of, purpose) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def even(self, of: Numbers, purpose: int) -> NDArray[np.float64]:
        """Return draws of mean 0 and variance 1, spread evenly."""
        return (self.uniform(of, purpose) - 0.5) * math.sqrt(12)

    def vectors(self, of: Numbers, purpose: int, dim: int) -> NDArray[np.float32]:
        """Return hidden vectors of shape (dim, n). Two of them have a dot product of variance 1."""
        # A hash gives 64 bits, enough for four columns: sixteen bits are plenty for a hidden taste.
        columns = np.empty((dim, len(of)), dtype=np.float32)
        scale = np.float32(math.sqrt(12 / math.sqrt(dim)) / (1 << 16))
        for column in range(dim):
            if column % 4 == 0:
                bits = self.hash(of, purpose + column)
            columns[column] = (bits >> np.uint64(16 * (column % 4))).astype(np.uint16)
        columns -= np.float32((1 << 16) - 1) / 2
        columns *= scale
        return columns


def ranks(draws: NDArray[np.float64], many: int, skew: float) -> NDArray[np.int64]:
    """Turn draws from [0, 1) into ranks from 1 to `many`: the k-th comes in proportion to k^-skew."""
    # The area under x^-skew from 1 to many + 1, turned round: exact enough, and no table of ranks.
    if skew == 1:
        found = np.exp(draws * math.log(many + 1))
    else:
        power = 1 - skew
        found = (1 + draws * ((many + 1) ** power - 1)) ** (1 / power)
    return np.minimum(found.astype(np.int64), many)


def sigmoid(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return probabilities."""
    return 1 / (1 + np.exp(-logits))
