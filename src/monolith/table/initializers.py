"""Initializers: what a new row's values are before its first gradient.

A row is often born on another thread, shard or machine than last time. Its first
value must not depend on that, so random values come from a hash of the table's
seed, the id and the column, not from a generator with a memory.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from monolith.errors import ConfigError
from monolith.table.hashing import draws
from monolith.table.labels import label


@dataclass(frozen=True, slots=True)
class Initializer(ABC):
    """The first values of one segment. Equal settings compare equal and print the same."""

    kind: ClassVar[str] = ""

    @abstractmethod
    def values(self, ids: NDArray[np.int64], columns: range, seed: int) -> NDArray[np.float32]:
        """Return float32 of shape (len(ids), len(columns)); `columns` counts over the whole entry."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Between what values are drawn; the two are equal where they are not random."""
        constant = float(self.values(np.zeros(1, np.int64), range(1), 0)[0, 0])
        return constant, constant

    def __str__(self) -> str:
        return label(self.kind, self)


@dataclass(frozen=True, slots=True)
class Constant(Initializer):
    """Every value is `value`."""

    kind: ClassVar[str] = "constant"
    value: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ConfigError(f"constant initializer: value must be finite, got {self.value!r}")

    def values(self, ids: NDArray[np.int64], columns: range, seed: int) -> NDArray[np.float32]:  # noqa: ARG002
        return np.full((len(ids), len(columns)), self.value, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Zeros(Initializer):
    """Every value is 0."""

    kind: ClassVar[str] = "zeros"

    def values(self, ids: NDArray[np.int64], columns: range, seed: int) -> NDArray[np.float32]:
        return Constant(0.0).values(ids, columns, seed)


@dataclass(frozen=True, slots=True)
class Ones(Initializer):
    """Every value is 1."""

    kind: ClassVar[str] = "ones"

    def values(self, ids: NDArray[np.int64], columns: range, seed: int) -> NDArray[np.float32]:
        return Constant(1.0).values(ids, columns, seed)


@dataclass(frozen=True, slots=True)
class BatchSoftmaxInit(Initializer):
    """The interval, in steps, that `BatchSoftmax` assumes for an id it has not seen."""

    kind: ClassVar[str] = "batch_softmax"
    init_step_interval: float

    def __post_init__(self) -> None:
        if not 1 <= self.init_step_interval < math.inf:
            raise ConfigError(
                "batch_softmax initializer: init_step_interval must be at least 1, "
                f"got {self.init_step_interval!r}"
            )

    def values(self, ids: NDArray[np.int64], columns: range, seed: int) -> NDArray[np.float32]:
        return Constant(self.init_step_interval).values(ids, columns, seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomUniform(Initializer):
    """Values drawn evenly from [low, high), each fixed by (seed, id, column).

    With u from `hashing.draws`, a value is `low + (high - low) * u`, every
    operation and both bounds rounded to float32 and none of them fused. All
    implementations give the same bits.
    """

    kind: ClassVar[str] = "random_uniform"
    low: float = -0.05
    high: float = 0.05

    def __post_init__(self) -> None:
        if not -math.inf < self.low <= self.high < math.inf:
            raise ConfigError(
                f"random_uniform initializer: needs finite low <= high, got {self.low!r} and {self.high!r}"
            )

    @property
    def bounds(self) -> tuple[float, float]:
        return self.low, self.high

    def values(self, ids: NDArray[np.int64], columns: range, seed: int) -> NDArray[np.float32]:
        low, high = np.float32(self.low), np.float32(self.high)
        return low + (high - low) * draws(seed, ids, columns)


INITIALIZERS: dict[str, type[Initializer]] = {
    "zeros": Zeros,
    "ones": Ones,
    "constant": Constant,
    "random_uniform": RandomUniform,
    "batch_softmax": BatchSoftmaxInit,
}
