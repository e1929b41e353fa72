"""Cursors in files: a place between two records, the remaining part of a file, and sets of files.

    round 1 (epoch)     file b.csv          chunk at place 4096        skip 17 records of it
    ───────────────────────┼────────────────────────┼───────────────────────────┼──────────► records to come

A file source reads chunk by chunk. Its cursor names a chunk by its place in the file and how many of the
chunk's records were yielded; restoring reads that chunk once more and skips these. While blocks of records
are shuffled, the cursor is where the block begins, with its length and how many of its records were taken.

Three words for where reading is: a *place* is an offset in one file, as its format counts; a *cursor* is a
place between two records of the source; a *position* is a cursor as plain values, which a checkpoint
contains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from monolith.data.files.work_queue import Progress
from monolith.data.format import Chunk
from monolith.data.shuffling import Block
from monolith.data.source import Position, Shard
from monolith.errors import RestoreError


@dataclass(frozen=True, kw_only=True, slots=True)
class FileCursor:
    """A place between two records."""

    round: int = 0
    """The epoch; with a queue, the number of the file in it."""
    file: str | None = None
    """None before the first."""
    place: int = 0
    """Where a chunk begins in the file."""
    skip: int = 0
    """Records of that chunk before the cursor."""
    length: int = 0
    """Records of the shuffled block that begins there; 0 for none."""
    taken: int = 0
    """Records of that block that were yielded."""
    good: int = 0
    bad: int = 0
    """How many records were read, and malformed, before that chunk: by this reader, not in this file."""

    def past(self, chunk: Chunk) -> FileCursor:
        """Return the cursor after a chunk that begins here."""
        return replace(
            self,
            place=chunk.next,
            skip=0,
            length=0,
            taken=0,
            good=self.good + len(chunk.records),
            bad=self.bad + len(chunk.bad),
        )

    def is_in_file_of(self, other: FileCursor) -> bool:
        """Whether both are in the same file, read the same time."""
        return (self.round, self.file) == (other.round, other.file)

    def progress(self) -> Progress:
        return {"place": self.place, "skip": self.skip, "length": self.length, "taken": self.taken}


class RemainingFile(NamedTuple):
    """A file that is not read to its end, and where to resume; see `FileCursor`."""

    round: int
    file: str
    place: int = 0
    skip: int = 0
    length: int = 0
    taken: int = 0

    def cursor(self) -> FileCursor:
        return FileCursor(**self._asdict())

    @classmethod
    def of(cls, cursor: FileCursor) -> RemainingFile:
        assert cursor.file is not None
        return cls(cursor.round, cursor.file, **cursor.progress())

    @classmethod
    def read(cls, saved: object) -> RemainingFile:
        """Return the remaining file that a position contains.

        Raises:
            RestoreError: It is malformed.
        """
        if isinstance(saved, list) and len(saved) == len(cls._fields):
            found = cls(*saved)
            numbers = (found.round, *found[2:])
            if isinstance(found.file, str) and all(isinstance(one, int) and one >= 0 for one in numbers):
                return found
        raise RestoreError(f"cannot restore a file source: {saved!r:.200} is not the rest of a file")


class FormerWorker(NamedTuple):
    """A worker of an earlier run: its shard, its position, and the cursor in that."""

    shard: Shard
    position: Position
    cursor: FileCursor


_MOST_NAMED = 10_000
"""The most files of a set whose names are in a position, which is saved often."""


@dataclass(frozen=True, slots=True)
class FileSet:
    """The files of a list that are read together, as often as there are epochs.

    A list that was read to its end may have more files when the run is started again. The new files are the
    next set, and files of earlier sets are not read again, whether they still exist or not.
    """

    files: tuple[str, ...] = ()
    earlier: tuple[str, ...] = ()
    """Files of earlier sets, as far as they still exist."""
    ended: bool = False

    @property
    def known(self) -> frozenset[str]:
        return frozenset([*self.files, *self.earlier])

    def saved(self) -> Position:
        if not self.files or len(self.files) + len(self.earlier) > _MOST_NAMED:
            return {}
        earlier = {"earlier": list(self.earlier)} if self.earlier else {}
        return {"pass": {"files": list(self.files), **earlier, **({"ended": True} if self.ended else {})}}

    @classmethod
    def read(cls, position: Position) -> FileSet | None:
        """Return the file set of a position; None if it does not say, as those of long lists.

        Raises:
            RestoreError: It is malformed.
        """
        saved = position.get("pass")
        if saved is None:
            return None
        known = saved if isinstance(saved, Mapping) else {}
        files, earlier, ended = known.get("files"), known.get("earlier", []), known.get("ended", False)
        lists = isinstance(files, list) and isinstance(earlier, list) and isinstance(ended, bool)
        if lists and files and all(isinstance(one, str) for one in [*files, *earlier]):
            return cls(tuple(files), tuple(earlier), ended)
        raise RestoreError(f"cannot restore a file source: malformed files in {saved!r:.200}")


def saved_cursor(cursor: FileCursor) -> Position:
    return {field.name: getattr(cursor, field.name) for field in fields(cursor)}


def read_shard_of(saved: object) -> Shard:
    """Return the shard that a position names.

    Raises:
        RestoreError: There is no such shard.
    """
    if isinstance(saved, list) and len(saved) == 2 and all(isinstance(one, int) for one in saved):
        shard = Shard(*saved)
        if 0 <= shard.worker < shard.workers:
            return shard
    raise RestoreError(f"cannot restore a file source: {saved!r:.200} is not a shard of the files")


def shard_of(position: Position) -> Shard:
    """Return the shard of the worker that a position is of."""
    return read_shard_of(position.get("adopted", position.get("shard")))


def distribute(groups: Sequence[Sequence[RemainingFile]], workers: int) -> list[list[RemainingFile]]:
    """Distribute groups of files, those of earlier epochs first, so that each worker has about as many."""
    found: list[list[RemainingFile]] = [[] for _ in range(workers)]
    for group in sorted(groups, key=lambda group: group[0].round):
        min(found, key=len).extend(group)
    return found


def block_of(cursor: FileCursor, chunk: Chunk) -> Block[FileCursor]:
    """Return the chunk at a cursor as a block; the records before the cursor were yielded earlier."""

    def cursor_before(number: int) -> FileCursor:
        if number == len(chunk.records):
            return cursor.past(chunk)
        return replace(cursor, skip=number, length=0, taken=0)

    return Block(chunk.records, cursor_before, cursor.skip, cursor.length, cursor.taken)
