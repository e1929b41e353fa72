"""The format seam: files of records, read in chunks and written.

A chunk is as many records as are best parsed together. What a chunk's place in its
file is counted in (bytes, rows, row groups) is the format's own business: a reader is
only ever given places that came from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, Self, runtime_checkable

from monolith.data.records import Records


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that could not be read, and was left out."""

    place: int
    """Where it begins in its file: the byte or the row, as `reason` says."""
    reason: str
    payload: bytes = b""
    """Its bytes, for a quarantine; empty where the format has none."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Records that were read together."""

    records: Records
    next: int
    """The place to go on from after this chunk."""
    bad: Sequence[BadRecord] = field(default_factory=tuple)
    """Malformed records among these, which are not in `records`."""
    reached: int | None = None
    """Bytes of the file, as it is on disk, that lie before its end; None where the format does not say."""


class RecordWriter(Protocol):
    """Writes records to one file."""

    def write(self, records: Records) -> None: ...


class Format(Protocol):
    """One way to keep records in files."""

    name: str
    """What people call it: "tf_example", "parquet"."""

    def chunks(self, path: str, *, start: int = 0, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        """Yield the records of a file from a place on.

        Args:
            start: 0, or `next` of a chunk of the same file. The chunk that begins there has the same records
                whether reading came from before or begins with it.
            columns: To read; None for all. Those that a file does not have are ignored.

        Raises:
            CorruptFileError: The file cannot be read any further: torn, truncated, or not of this format.
                A single malformed record is not that; it is in `bad`.
        """

    def writer(self, path: str) -> AbstractContextManager[RecordWriter]:
        """Open a file to write. It appears under its name when the block ends well, and not otherwise."""


@runtime_checkable
class SplittableFormat(Format, Protocol):
    """A format whose files can be read from the middle, without all that comes before.

    Shuffling reads such files in pieces, in any order. A file of any other format is read from its beginning
    to its end.
    """

    def in_pieces(self, piece_bytes: int) -> Self:
        """Return the same format with chunks that are pieces: about so many bytes, or a row group."""

    def bounds(self, path: str) -> list[int] | None:
        """Return the places at which the pieces of a file begin and, last, at which the file ends.

        `chunks(path, start=one)` yields chunks of which one ends at the next place. A file without records
        has fewer than two places. None for a file that must be read from its beginning, since it is
        compressed.

        Raises:
            CorruptFileError: The file cannot be read to its end.
        """
