"""What a stream stands on: its stages from the top to the source, for whoever wants to know more of it.

A stage names what is `below` it. So one can ask how many records there will be, where somebody knows, or
which part of the input is done; have raw columns of the records kept beside the batches that are made of
them; and learn which records were left out, and why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from monolith.data.bad_values import BadTally
from monolith.data.source import Position


@runtime_checkable
class KeepsColumns(Protocol):
    """A stage that makes batches of records, and may keep some of their columns as they are."""

    def keep_columns(self, names: Sequence[str]) -> None:
        """Have every batch carry these columns of its records, in `Batch.raw`."""


@runtime_checkable
class NeedsLabels(Protocol):
    """A stage that makes batches of records, and takes those without a label for bad ones."""

    def need_no_labels(self) -> None:
        """Have records without a label stay, as those to predict may be."""


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


def need_no_labels(stream: object) -> None:
    """Have records without a label stay in the batches of a stream, if a stage would leave them out."""
    for layer in layers(stream):
        if isinstance(layer, NeedsLabels):
            layer.need_no_labels()


def is_live(stream: object, *, unsaid: bool = True) -> bool:
    """Return whether a stream has events as they happen: it can be behind the clock, and its next batch may
    be far off.

    A source says so by its attribute `live`: topics and watched files are, a list of files or a table is not.

    Args:
        unsaid: What a source counts as that does not say.
    """
    for layer in layers(stream):
        live = getattr(layer, "live", None)
        if live is not None:
            return bool(live)
    return unsaid


def first_empty(stream: object, column: str) -> str | None:
    """Return where the first empty cell of a column is, such as `line 7 of clicks.csv`; None where nobody
    knows. A source of files does, by its method `first_empty(column)`: it reads some of them again."""
    for layer in layers(stream):
        find = getattr(layer, "first_empty", None)
        if callable(find):
            found = find(column)
            return None if found is None else str(found)
    return None


def data_trouble(stream: object) -> str:
    """Return what the sources of a stream cannot do now and retry, for a person; empty if nothing. From any
    thread."""
    found = (getattr(layer, "trouble", "") for layer in layers(stream))
    return "; ".join(text for text in found if isinstance(text, str) and text)


def bad_records(stream: object) -> dict[str, int]:
    """Return why records were left out of the batches of a stream since it was opened, each cause once, with
    its number of records; see `BadTally`. Sources and stages count each their own."""
    found: Counter[str] = Counter()
    for layer in layers(stream):
        told = getattr(layer, "left_out", None)
        if isinstance(told, BadTally):
            found.update(told.described())
    return dict(found)
