"""The transform seam: records in, records out.

A transform is its own config: a frozen dataclass that can be called. So a list of
transforms is data, which a run's file can hold and print. A random choice depends on a
seed and the number of the record in its stream, never on how the stream was cut: a
transform gives the same records for a whole stretch as for its slices, and for a replay
as for the first time.

Three kinds, by what they need to know:

    Filter     keeps some records by what is in them
    Rewrite    changes records by what is in them
    others     also look at the number of a record (see `numbering`)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from monolith.data.records import Records
from monolith.data.transforms.numbering import NUMBER, numbered
from monolith.errors import ConfigError, RestoreError


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
    """A transform that remembers what it saw. Its state belongs with the position of the source."""

    def state(self) -> dict[str, Any]:
        """Return what it remembers: plain values that survive JSON."""

    def restore(self, state: dict[str, Any]) -> None:
        """Remember what another one of the same settings did; RestoreError where it does not fit."""


class Filter(ABC):
    """Keeps some records, and changes none."""

    __slots__ = ()

    @abstractmethod
    def mask(self, records: Records) -> Tensor:
        """Return bool of shape (len(records),): True where the record is kept."""

    def __call__(self, records: Records, *, first: int) -> Records:  # noqa: ARG002
        return records.keep(self.mask(records))


class Rewrite(ABC):
    """Changes, drops or repeats records by what is in them."""

    __slots__ = ()

    @abstractmethod
    def rewrite(self, records: Records) -> Records:
        """Return the records as they should be."""

    def __call__(self, records: Records, *, first: int) -> Records:  # noqa: ARG002
        return self.rewrite(records)


class Compose:
    """Several transforms, one after the other. Also a transform.

    A record keeps its number through all of them, so what a later one draws does not
    depend on how many records an earlier one dropped before it.
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
