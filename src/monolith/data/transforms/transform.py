"""The transform seam: records in, records out.

A transform is its own config: a frozen dataclass that can be called. So a list of transforms is data, which a
run's config file can contain and print. A random choice depends on a seed and the number of the record in its
stream, never on the batches: a transform gives the same records for a whole stream as for its slices, and for
a replay as for the first time.

There are three kinds:

    Filter           selects records by their values
    Rewrite          changes records by their values
    any `Transform`  may also depend on the number of a record, or have state (`Stateful`)

A record is numbered by its place in the stream that is read. Once records were dropped or repeated, the place
no longer tells, so the numbers travel with the records in a column of their own, from the first transform to
the last."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith.data.records import Records
from monolith.errors import ConfigError, RestoreError
from monolith.table.hashing import draws, mix, mix_one
from monolith.tensors import RaggedTensor


class Transform(Protocol):
    """Makes records of records, in order."""

    def __call__(self, records: Records, *, first: int) -> Records:
        """Return the records transformed.

        Args:
            records: One after the other in a stream.
            first: The number of the first of them in the stream, from 0.

        Raises:
            DataError: A column is not of the type this transform needs.
        """


@runtime_checkable
class Stateful(Protocol):
    """A transform whose results depend on earlier records. Its state is saved with the position."""

    def state(self) -> dict[str, Any]:
        """Return the state: plain values that survive JSON."""

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state of another one with the same settings; RestoreError if it does not fit."""


class Filter(ABC):
    """Keeps some records, and changes none."""

    __slots__ = ()
    any_thread: ClassVar[bool] = False
    """Whether any thread may ask for a mask, several at a time. Then the threads that parse files do."""

    @abstractmethod
    def mask(self, records: Records) -> Tensor:
        """Return bool of shape (len(records),): True where the record is kept."""

    def __call__(self, records: Records, *, first: int) -> Records:  # noqa: ARG002
        return records.keep(self.mask(records.glance()))


class Rewrite(ABC):
    """Changes, drops or repeats records by their values."""

    __slots__ = ()

    @abstractmethod
    def rewrite(self, records: Records) -> Records:
        """Return the records as they should be."""

    def __call__(self, records: Records, *, first: int) -> Records:  # noqa: ARG002
        return self.rewrite(records)


class Compose:
    """Several transforms, one after the other. Also a transform.

    A record keeps its number through all of them, so the draws of a later one do not
    depend on how many records an earlier one dropped.
    """

    def __init__(self, transforms: Sequence[Transform]) -> None:
        for position, transform in enumerate(transforms):
            if not callable(transform):
                raise ConfigError(f"compose: number {position} is not a transform but {transform!r}")
        self.transforms = tuple(transforms)

    def __call__(self, records: Records, *, first: int) -> Records:
        inherited = NUMBER in records.columns
        result = records if inherited else numbered(records, first)
        for transform in self.transforms:
            result = transform(result, first=first)
        return result if inherited else result.select(name for name in result.columns if name != NUMBER)

    def state(self) -> dict[str, Any]:
        """Return the states of those that have one, by their place in the list."""
        return {str(place): transform.state() for place, transform in self._stateful().items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore all that have a state.

        Raises:
            RestoreError: The state is of another list of transforms.
        """
        stateful = self._stateful()
        if state.keys() != {str(place) for place in stateful}:
            raise RestoreError(
                f"cannot restore the transforms: the state is of those at {sorted(state)}, here those at "
                f"{sorted(map(str, stateful))} have one. Restore into the list it was saved from."
            )
        for place, transform in stateful.items():
            transform.restore(state[str(place)])

    def _stateful(self) -> dict[int, Stateful]:
        return {
            place: transform
            for place, transform in enumerate(self.transforms)
            if isinstance(transform, Stateful)
        }


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
