"""Blocks: records with the places between them, put together again as stretches and as batches.

A source reads what it finds, chunks of files or batches of another source, and yields
batches of one size, maybe in another order. What it holds back meanwhile must not be lost,
nor come twice. So each block knows the place before any of its records, and whoever cuts
or joins blocks knows the place it has come to:

    blocks -> Shuffler -> stretches, each in an order of its own
    blocks -> Batcher  -> batches of one size, and the place after each

What a place is, the source decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from monolith.data.records import Records, concat
from monolith.errors import DataError

Place = TypeVar("Place")


@dataclass(frozen=True, slots=True)
class Block(Generic[Place]):
    """Records that are yielded before any after them."""

    records: Records
    place: Callable[[int], Place]
    """Returns the place before the record of a number; of the number after the last, that after the block.
    Asked while the source stands there."""
    first: int = 0
    """Of `records`; those before it were yielded earlier."""
    length: int = 0
    """Of the stretch that begins at `first`, where it was begun before a restart; 0 for none."""
    taken: int = 0
    """Records of that stretch that were yielded before the restart."""


@dataclass(frozen=True, slots=True)
class Stretch(Generic[Place]):
    """Records that were put into another order together."""

    begin: Place
    end: Place
    records: Records
    first: int
    """Of `records`; those before it were yielded earlier."""


class Shuffler(Generic[Place]):
    """Puts stretches of records into another order, which follows from numbers alone; see `permutation`.

    A stretch that was begun before a restart has the length it had then, however much is there now.

    Args:
        buffer: Records of a stretch; one is shorter only where the source ends it.
        order: Returns the order of so many records from a place on.
        called: Returns what to call the data at a place in a message.
    """

    def __init__(
        self, buffer: int, order: Callable[[Place, int], Tensor], called: Callable[[Place], str]
    ) -> None:
        self._buffer = buffer
        self._order = order
        self._called = called
        self._held: list[Records] = []
        self._begin: Place | None = None
        self._missing = self._resumed = self._taken = 0

    @property
    def begin(self) -> Place | None:
        """Where the stretch begins that is being filled; None when there is none."""
        return self._begin

    def add(self, block: Block[Place]) -> Iterator[Stretch[Place]]:
        """Yield the stretches that a block fills, and hold the rest of it."""
        here, size = block.first, len(block.records)
        while here < size:
            if self._begin is None:
                self._resumed = block.length if here == block.first else 0
                self._taken = block.taken if self._resumed else 0
                self._missing = self._resumed or self._buffer
                self._begin = block.place(here)
            before, here = here, min(here + self._missing, size)
            self._held.append(block.records.slice(before, here))
            self._missing -= here - before
            if not self._missing:
                yield self._stretch(self._begin, block.place(here))

    def end(self, place: Place) -> Stretch[Place] | None:
        """Return the stretch that is being filled, short as it is; None where there is none.

        Raises:
            DataError: It was longer before a restart.
        """
        begin = self._begin
        if begin is None:
            return None
        if self._resumed:
            raise DataError(
                f"{self._called(begin)} has fewer records than when its position was saved: the data was "
                "replaced since. Restore the data, or start from the beginning."
            )
        return self._stretch(begin, place)

    def _stretch(self, begin: Place, end: Place) -> Stretch[Place]:
        records = concat(self._held)
        self._held, self._begin = [], None
        return Stretch(begin, end, records.take(self._order(begin, len(records))), self._taken)


class Batcher(Generic[Place]):
    """Makes batches of one size out of blocks, across their ends."""

    def __init__(self, size: int) -> None:
        self._size = self._missing = size
        self._held: list[Records] = []

    def add(self, block: Block[Place]) -> Iterator[tuple[Records, Place]]:
        """Yield the batches that a block fills, each with the place after it, and hold the rest of it."""
        done = block.first
        while done < len(block.records):
            end = min(done + self._missing, len(block.records))
            self._held.append(block.records.slice(done, end))
            self._missing -= end - done
            done = end
            if not self._missing:
                yield self._taken(), block.place(done)

    def rest(self) -> Records | None:
        """Return what is held, which is less than a batch; None when nothing is."""
        return self._taken() if self._held else None

    @property
    def holds_some(self) -> bool:
        return bool(self._held)

    def _taken(self) -> Records:
        batch = concat(self._held)
        self._held, self._missing = [], self._size
        return batch
