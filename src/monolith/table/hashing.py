"""The one hash of the system, in numpy, and the random draws made from it.

The core and the kernels have the same functions in `src/monolith/native/include/hash.h`; both must agree to
the last bit. A draw is a function of what it is for (seed, id, column), not of
when or on which thread it is made: a row starts out the same in every
implementation, on every shard and after every restart.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MAX_SLOTS = 1 << 15
"""Slots a version-2 feature id can name."""

_MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)
_INVERSE = np.uint64(0xCFEE444D8B59A89B)  # of the multiplier, modulo 2^64
_HALF = np.uint64(32)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(ids: NDArray[np.int64] | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a bijective 64-bit hash of each element; int64 is taken as its two's complement bits."""
    h = ids.astype(np.uint64)
    h ^= h >> _HALF
    h *= _MULTIPLIER
    h ^= h >> _HALF
    h *= _MULTIPLIER
    h ^= h >> _HALF
    return h


def unmix(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the ids that have these hashes."""
    h = hashes
    for _ in range(2):
        h = (h ^ h >> _HALF) * _INVERSE
    return (h ^ h >> _HALF).view(np.int64)


def mix_one(number: int) -> int:
    """Return `mix` of a single number, which may be any int64 or uint64."""
    return int(mix(np.array([number & 0xFFFF_FFFF_FFFF_FFFF], dtype=np.uint64))[0])


def slot_of(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the slot of each version-2 feature id: bits 48 to 62."""
    return ids >> np.int64(48) & np.int64(MAX_SLOTS - 1)


def draws(
    seed: int,
    ids: NDArray[np.int64],
    columns: range,
    *,
    salt: NDArray[np.uint64] | None = None,
) -> NDArray[np.float32]:
    """Return one float32 in [0, 1), a multiple of 2^-24, per id and column.

    With all sums modulo 2^64:

        z = mix(mix(id) + mix(seed) + 0x9E3779B97F4A7C15 * (column + 1) + salt)
        draw = (z >> 40) * 2^-24

    Args:
        seed: The table's seed, 0 to 2^64 - 1.
        ids: Shape (n,).
        columns: Positions in the whole entry, not in one segment.
        salt: Shape (n, len(columns)), added in; 0 by default.
    """
    column = np.arange(columns.start, columns.stop, dtype=np.uint64) + np.uint64(1)
    key = mix(ids)[:, None] + np.uint64(mix_one(seed)) + _GOLDEN * column
    if salt is not None:
        key = key + salt
    return (mix(key) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
