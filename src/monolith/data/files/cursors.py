"""Cursors in files: the place between two records, what is left of a file, and passes over a list of files.

    round 1 (epoch)     file b.csv          chunk at place 4096        skip 17 records of it
    ───────────────────────┼────────────────────────┼───────────────────────────┼──────────► records to come

A file source reads chunk by chunk. Its cursor names a chunk by its place in the file and how many of the
chunk's records were yielded; restoring reads that chunk once more and skips these. While stretches of records
are shuffled, the cursor is where the stretch begins, with its length and how many of it were taken."""

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
    """Of a chunk in the file."""
    skip: int = 0
    """Records of that chunk that come before."""
    length: int = 0
    """Of the stretch that begins there and is being shuffled; 0 for none."""
    taken: int = 0
    """Records of that stretch that come before."""
    good: int = 0
    bad: int = 0
    """How many were read, and malformed, before that chunk: of this reader, not of this file."""

    def past(self, chunk: Chunk) -> FileCursor:
        """Return the place after a chunk that begins here."""
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


class Left(NamedTuple):
    """A file of which something is left to read, and from where; see `FileCursor`."""

    round: int
    file: str
    place: int = 0
    skip: int = 0
    length: int = 0
    taken: int = 0

    def spot(self) -> FileCursor:
        return FileCursor(**self._asdict())

    @classmethod
    def of(cls, spot: FileCursor) -> Left:
        assert spot.file is not None
        return cls(spot.round, spot.file, **spot.progress())

    @classmethod
    def read(cls, saved: object) -> Left:
        """Return what a position says is left.

        Raises:
            RestoreError: It makes no sense.
        """
        if isinstance(saved, list) and len(saved) == len(cls._fields):
            left = cls(*saved)
            numbers = (left.round, *left[2:])
            if isinstance(left.file, str) and all(isinstance(one, int) and one >= 0 for one in numbers):
                return left
        raise RestoreError(f"cannot restore a file source: {saved!r:.200} is not what is left of a file")


class OldWorker(NamedTuple):
    """One of the workers of an earlier run: its shard, its position, and where it stood."""

    shard: Shard
    position: Position
    spot: FileCursor


_MOST_NAMED = 10_000
"""The most files of a pass whose names are in a position, which is saved often."""


@dataclass(frozen=True, slots=True)
class Pass:
    """The files of a list that are read together, as often as there are epochs.

    A list that is read to its end may have more files when the run is started again. These are the next
    pass, and files of earlier ones are not read again, whether they are still there or not.
    """

    files: tuple[str, ...] = ()
    earlier: tuple[str, ...] = ()
    """Files of earlier passes, as far as they are still there."""
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
    def read(cls, position: Position) -> Pass | None:
        """Return the pass that a position is of; None where it does not say, as those of long lists.

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


def saved_cursor(spot: FileCursor) -> Position:
    return {field.name: getattr(spot, field.name) for field in fields(spot)}


def read_saved_shard(saved: object) -> Shard:
    """Return the share that a position names.

    Raises:
        RestoreError: There is no such share.
    """
    if isinstance(saved, list) and len(saved) == 2 and all(isinstance(one, int) for one in saved):
        share = Shard(*saved)
        if 0 <= share.worker < share.workers:
            return share
    raise RestoreError(f"cannot restore a file source: {saved!r:.200} is not a share of the files")


def shard_of(position: Position) -> Shard:
    """Return the share of the worker that a position is of."""
    return read_saved_shard(position.get("adopted", position.get("shard")))


def deal(units: Sequence[Sequence[Left]], workers: int) -> list[list[Left]]:
    """Deal out files, those of earlier epochs first, so that each worker has about as many."""
    dealt: list[list[Left]] = [[] for _ in range(workers)]
    for unit in sorted(units, key=lambda unit: unit[0].round):
        min(dealt, key=len).extend(unit)
    return dealt


def block_of(spot: FileCursor, chunk: Chunk) -> Block[FileCursor]:
    """Return a chunk that begins at a spot, of which the records before the spot were yielded earlier."""

    def place(number: int) -> FileCursor:
        if number == len(chunk.records):
            return spot.past(chunk)
        return replace(spot, skip=number, length=0, taken=0)

    return Block(chunk.records, place, spot.skip, spot.length, spot.taken)
