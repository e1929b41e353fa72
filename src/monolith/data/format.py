"""The format seam: files of records, read in chunks and written.

A chunk is as many records as are best parsed together. A place in a file is a number of bytes, rows or row
groups, as the format counts: a reader only passes places that came from the same format.

    form = format_of("clicks.csv")
    for chunk in form.chunks("clicks.csv"): ...            # chunk.records, chunk.bad, chunk.next
    form.chunks("clicks.csv", start=chunk.next)            # resumes after that chunk

Derive a format of your own from `Format` and implement `chunks` and `writer`. All other methods are optional
abilities with a default: files of a format that does not override `bounds`, for example, are always read
from their beginning to their end.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from monolith.data.records import Records

T = TypeVar("T")

Part = Callable[[], "Sequence[Chunk]"]
"""A part of a file that was read and not parsed yet: parses it, once and in any thread."""


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that could not be read, and was dropped."""

    place: int
    """The place in its file at which it begins: the byte or the row, as `reason` says."""
    reason: str
    payload: bytes = b""
    """The bytes of the record, for a quarantine; empty if the format has none."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Records that were read together."""

    records: Records
    next: int
    """The place to resume from after this chunk."""
    bad: Sequence[BadRecord] = field(default_factory=tuple)
    """Malformed records among these, which are not in `records`."""
    reached: int | None = None
    """Bytes of the file, as it is on disk, up to the end of this chunk; None if the format does not know."""


class OddColumn(NamedTuple):
    """A column that is text because of a few values."""

    text: str
    """Names the first such value, and says what to do."""
    is_slip: bool
    """Whether they are so few that they must be mistakes."""


class RecordWriter(Protocol):
    """Writes records to one file."""

    def write(self, records: Records) -> None: ...


class Format(ABC):
    """One way to store records in files."""

    name: str
    """What people call it: "tf_example", "parquet"."""

    @abstractmethod
    def chunks(self, path: str, *, start: int = 0, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        """Yield the records of a file from a place on.

        Args:
            start: 0, or `next` of a chunk of the same file. The chunk that begins there has the same records
                whether reading came from before or starts with it: a restored position depends on that.
            columns: To read; None for all. Those that a file does not have are ignored.

        Raises:
            CorruptFileError: The file cannot be read any further: torn, truncated, or not of this format.
                A single malformed record is not that; it is in `bad`.
        """

    @abstractmethod
    def writer(self, path: str) -> AbstractContextManager[RecordWriter]:
        """Open a file to write. It appears under its name when the block ends well, and not otherwise."""

    # Optional abilities

    def parts(self, path: str, *, start: int = 0, columns: Sequence[str] | None = None) -> Iterator[Part]:
        """Yield the same chunks as `chunks`, in parts that several threads may parse at the same time.

        One thread iterates, and what that does is little: it reads the bytes, and finds where a part ends.
        By default all work is done there.
        """
        for chunk in self.chunks(path, start=start, columns=columns):
            yield partial(_one, chunk)

    def in_pieces(self, piece_bytes: int) -> Self:
        """Return the same format with chunks that are pieces: about so many bytes, or a row group."""
        del piece_bytes
        return self

    def bounds(self, path: str) -> list[int] | None:
        """Return the places at which the pieces of a file begin and, last, at which the file ends.

        Shuffling reads such files in pieces, in any order. `chunks(path, start=one)` yields chunks of which
        one ends at the next place. A file without records has fewer than two places. None for a file that
        must be read from its beginning: its format has no pieces, or it is compressed.

        Raises:
            CorruptFileError: The file cannot be read to its end.
        """
        del path
        return None

    def count(self, path: str) -> int | None:
        """Return how many records a file has; None if that is unknown without reading them."""
        del path
        return None

    def times(self, path: str) -> frozenset[str]:
        """Return the columns of a file that hold timestamps or dates, which are read as Unix seconds."""
        del path
        return frozenset()

    def inferring(self, records: int) -> Self:
        """Return the same format that infers the types of columns from so many records, if it infers any."""
        del records
        return self

    def odd_values(self, path: str) -> Sequence[OddColumn]:
        """Return the columns of a file that are text only because a few values are no numbers."""
        del path
        return ()

    @property
    def text(self) -> TextFormat | None:
        """This format, if its files are lines of text; None otherwise."""
        return None


def _one(chunk: Chunk) -> Sequence[Chunk]:
    return (chunk,)


class TextFormat(Format):
    """A format of lines, whose places are bytes. Its files may be read while another process appends to them.

    The head of a file (names, types) is read again for every chunk reader. That is cheap next to a whole
    file but not next to a piece, so a format `in_pieces` remembers the heads of the files it has seen.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._heads: dict[tuple[str, str], Any] | None = None

    @property
    def text(self) -> TextFormat:
        return self

    def chunks(
        self, path: str, *, start: int = 0, columns: Sequence[str] | None = None, end: int | None = None
    ) -> Iterator[Chunk]:
        """Yield the records of a file from byte `start` on, up to byte `end` if it is given; see `Format`."""
        for parse in self.parts(path, start=start, columns=columns, end=end):
            yield from parse()

    @abstractmethod
    def parts(
        self, path: str, *, start: int = 0, columns: Sequence[str] | None = None, end: int | None = None
    ) -> Iterator[Part]:
        """Yield the same, unparsed; see `Format`."""

    @abstractmethod
    def finished_bytes(self, piece: bytes) -> int:
        """Return how many bytes of a piece, which begins with a record, are finished records."""

    def in_chunks_of(self, chunk_bytes: int) -> Self:
        """Return the same format with chunks of another size."""
        other = copy.copy(self)
        other._chunk_bytes = chunk_bytes
        return other

    def in_pieces(self, piece_bytes: int) -> Self:
        other = self.in_chunks_of(min(piece_bytes, self._chunk_bytes))
        other._heads = {}
        return other

    def _head(self, path: str, read: Callable[[], T], part: str = "head") -> T:
        """Return the head of a file, or another part of it that is read for every chunk reader: remembered
        if this format is `in_pieces`, otherwise read. From any thread; two may read the same."""
        if self._heads is None:
            return read()
        if (path, part) not in self._heads:
            self._heads[path, part] = read()
        found: T = self._heads[path, part]
        return found
