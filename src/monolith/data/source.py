"""The source seam: records in order, and a position that can be saved.

A trainer that is killed must go on with the very record it had not yet trained on.
So a source says at any time where it stands, and a new one of the same kind, restored to
that position, yields exactly the records that were left, whatever the number of threads
or the size of buffers. Every implementation passes `tests/contracts/test_source.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from monolith.data.records import Records

Position = dict[str, Any]
"""Where a source stands: plain values that survive JSON, for a source of the same kind to go on from."""


class Source(Protocol):
    """Yields records. One thread reads it at a time."""

    def __iter__(self) -> Iterator[Records]:
        """Yield records from where the source stands to the end of the data, if it has one.

        Iterating again goes on from there. A consumer that stops early has taken what was yielded.
        """

    def position(self) -> Position:
        """Return the place before the first record that was not yielded yet."""

    def restore(self, position: Position) -> None:
        """Go to a position of a source of the same kind and settings. Only before, or between, iterations.

        Raises:
            RestoreError: The position is of another kind, or names data that is not there.
        """

    # A source may also have `commit(position)`, by which a consumer says that everything before a position is
    # safe: a queue of files then never hands it out again. Pipelines pass it on.

    def close(self) -> None:
        """Let go of files, threads and connections. Closing again does nothing."""
