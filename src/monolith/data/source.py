"""The source seam: records in order, and a position that can be saved.

A trainer that is killed must go on with the very record it had not yet trained on.
So a source says at any time where it stands, and a new one of the same kind, restored to
that position, yields exactly the records that were left, whatever the number of threads
or the size of buffers.

Whoever trains with several workers has each read one share of the data. A source that can be
shared out says so by a method `read_share(share)`, which is called before anything else, or not at
all: then it reads everything. So a constructor looks at no file, broker or queue yet; the first
read, position or restore does. Every implementation passes `tests/contracts/test_source.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

from monolith.data.format import BadRecord
from monolith.data.records import Records
from monolith.data.share import Share

Item_co = TypeVar("Item_co", covariant=True)

Position = dict[str, Any]
"""Where a source stands: plain values that survive JSON, for a source of the same kind to go on from."""


class Stream(Protocol[Item_co]):
    """A source of anything: what a stage may stand on."""

    def __iter__(self) -> Iterator[Item_co]: ...
    def position(self) -> Position: ...
    def restore(self, position: Position) -> None: ...
    def commit(self, position: Position) -> None: ...
    def close(self) -> None: ...


class Source(Protocol):
    """Yields records. One thread reads it at a time. One that can be shared out is a `SharedSource`."""

    def __iter__(self) -> Iterator[Records]:
        """Yield records from where the source stands to the end of the data, if it has one.

        Iterating again goes on from there. A consumer that stops early has taken what was yielded.
        """

    def position(self) -> Position:
        """Return the place before the first record that was not yielded yet.

        Asked for after every batch, whether or not a checkpoint is saved there: so it is cheap, writes no
        file, and changes nothing. What it takes to go on from it is on disk, or in it, when it is returned.
        """

    def restore(self, position: Position) -> None:
        """Go to a position of a source of the same kind and settings. Only before, or between, iterations.

        Raises:
            RestoreError: The position is of another kind, or names data that is not there or not of this
                source. A position may come from another process: a source opens no file that it would not
                have found by itself.
        """

    def commit(self, position: Position) -> None:
        """Hear that a checkpoint holds a position, so that nothing before it need come again.

        Only now may a queue of files finish them, a joiner drop older snapshots, a broker note offsets. Who
        reads without checkpoints commits by itself. Again, with the same position, it does nothing more.
        Any thread may call it, while another one reads. A source that stands on others passes it on.
        """

    def close(self) -> None:
        """Let go of files, threads and connections. Closing again does nothing."""


class SharedSource(Source, Protocol):
    """A source of which several workers can each read a share."""

    def read_share(self, share: Share) -> None:
        """Read one share from now on: those of all workers together are the whole, and no record is in two.

        Arguments of the source that name a share win over it. A source that stands on others passes it on,
        by `share_out`.

        Raises:
            ConfigError: There is no such share; or the source was read, restored or asked for its position.
            NotShareableError: It stands on a source that cannot be shared out.
        """


def repeats_order(source: object) -> bool:
    """Return whether a source, restored, yields the records after a position in the very order it did before.

    One that does says so by `repeats`: files of a list, tables, generators. Partitions of a topic, files of a
    queue and splits of a data service may come in another order, each of them in its own.
    """
    return bool(getattr(source, "repeats", False))


def commit_to(source: object, position: Position) -> None:
    """Tell a source what is safe. One of a user's own that has nothing to forget may be without `commit`."""
    commit = getattr(source, "commit", None)
    if commit is not None:
        commit(position)


def set_bad_aside(source: object, bad: Sequence[BadRecord]) -> None:
    """Hand bad records to a source, if it keeps them; see `FileSource.set_aside`."""
    set_aside = getattr(source, "set_aside", None)
    if set_aside is not None:
        set_aside(bad)
