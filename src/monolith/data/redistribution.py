"""Redistribution: what several workers have left to read, for another number of workers.

A checkpoint has one position per worker, each of a share of the data. Where the next run has more workers or
fewer, a source that can makes as many positions of them as there are workers now: those together have
exactly the records that were left to the old ones together.

    old positions, of 3 workers ──redistributed──► new positions, of 2; each is restored as any other

What is left is moved in the units a source can name: files from where they were left, partitions. A stage
that holds records back, to shuffle them or to fill a batch, has its position in the middle of such a unit.
What it held is read again by one of the new workers before anything else, and the rest is shared out. To read
it, its source adopts the position of a worker that is no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from monolith.data.source import Position, SharedSource
from monolith.errors import RestoreError


class Redistributable(SharedSource, Protocol):
    """A source whose positions can be made into those of another number of workers."""

    def redistribute(self, positions: Sequence[Position], workers: int) -> list[Position]:
        """Return what was left to the old workers together, as positions of so many.

        It may read data, and leaves the source anywhere: restore it afterwards.

        Args:
            positions: One of each old worker, in order.
            workers: How many there are now; this source reads the share of one of them.

        Raises:
            RestoreError: It cannot, and why.
        """

    def adopt(self, position: Position, end: Position | None = None) -> Position:
        """Return a position from which this source, whoever's share it reads, yields what another would have.

        Args:
            end: A later one of the same worker. The records between the two come, in whatever order, before
                any that is not between them.

        Raises:
            RestoreError: It cannot, and why.
        """


def redistributed(source: object, positions: Sequence[Position], workers: int) -> list[Position]:
    """Have a source, or a stage on top of one, redistribute positions; see `Redistributable`.

    Raises:
        RestoreError: It cannot, and why.
    """
    redistribute = getattr(source, "redistribute", None)
    if redistribute is None:
        raise _cannot(source)
    found: list[Position] = redistribute(positions, workers)
    return found


def adopted(source: object, position: Position, end: Position | None = None) -> Position:
    """Have a source, or a stage on top of one, adopt a position; see `Redistributable`.

    Raises:
        RestoreError: It cannot, and why.
    """
    adopt = getattr(source, "adopt", None)
    if adopt is None:
        raise _cannot(source)
    found: Position = adopt(position, end)
    return found


def _cannot(source: object) -> RestoreError:
    return RestoreError(
        f"{type(source).__name__.lstrip('_')} cannot redistribute positions among another number of workers"
    )
