"""What a stream stands on: its stages from the top to the source, for whoever wants to know more of it.

A stage names what is `below` it. So one can ask how many records there will be, where somebody knows, or
which part of the input is done; and have raw columns of the records kept beside the batches that are made of
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from monolith.data.source import Position


@runtime_checkable
class KeepsColumns(Protocol):
    """A stage that makes batches of records, and may keep some of their columns as they are."""

    def keep_columns(self, names: Sequence[str]) -> None:
        """Have every batch carry these columns of its records, in `Batch.raw`."""


def layers(stream: object) -> Iterator[object]:
    """Yield a stream and what it stands on, from the top to the source, as far as stages tell."""
    found: object | None = stream
    while found is not None:
        yield found
        found = getattr(found, "below", None)


def known_size(stream: object) -> int | None:
    """Return how many records a stream has from its beginning; None where nobody knows.

    A source knows by its method `size()`, as far as it costs little. A stage that makes other records of
    those below says so by a `size()` of its own.
    """
    for layer in layers(stream):
        size = getattr(layer, "size", None)
        if callable(size):
            found = size()
            return None if found is None else int(found)
    return None


def fraction_read(stream: object, position: Position, records: int = 0) -> float | None:
    """Return which part of its input, from 0 to 1, a stream has handed out at a position; None where nobody
    knows.

    It is the part of what is read, not of what comes out: a filter leaves out what it will. A source knows by
    its method `fraction(position, records)`, from any thread. So does a stage whose positions are not those
    of what is below it; others need not say anything.

    Args:
        position: One of this stream, of late.
        records: How many of those after the position were handed out as well.
    """
    for layer in layers(stream):
        fraction = getattr(layer, "fraction", None)
        if callable(fraction):
            found = fraction(position, records)
            return None if found is None else min(max(float(found), 0.0), 1.0)
    return None


def keep_columns(stream: object, names: Sequence[str]) -> bool:
    """Have the batches of a stream carry raw columns; return False where no stage makes them of records."""
    for layer in layers(stream):
        if isinstance(layer, KeepsColumns):
            layer.keep_columns(names)
            return True
    return False
