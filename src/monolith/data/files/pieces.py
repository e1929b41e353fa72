"""Shuffling a list of files: pieces of all of them in a random order, many of them open and dealt in turn.

A file is read in pieces, which are row groups of Parquet and stretches of bytes of text; see
`Format.bounds`. Each epoch opens the pieces of all files of a worker in an order of its own. As many are
open at once as make up the buffer, each is put into a random order when it is read, and they give one record
each in turn:

    pieces of the epoch, in random order:   p7 p2 p9 p4 p1 ...
    open, each in a random order:           p7: c a b   p2: f e d
    records:                                c f a e b d, then p9 and p4 are open ...

When an epoch has no more pieces to open, all records that are left of it are put into one random order, its
last window. Otherwise a piece with few records would be dealt before the others, and its rows would be
missing from the end of the epoch. A small file is one window.

So a sorted file is mixed over its whole length, and all that is to be remembered is how far each open piece
was read: a `ShuffleCursor`, which is small, and from which reading resumes with the very next record. Nothing
depends on how records are cut into batches, or on when a position was taken.

A file that cannot be split, such as a compressed one, is one piece. It is read chunk by chunk from its
beginning to its end, with other files next to it.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith import filesystem
from monolith.data.format import Chunk, Format
from monolith.data.records import Records, concat
from monolith.data.shuffling import Block, ShuffleConfig, permutation
from monolith.data.source import Position, Shard
from monolith.errors import DataError, RestoreError
from monolith.tensors import RaggedTensor

FEW_OPEN = 8
"""Pieces that are open at once even if fewer hold the buffer, as row groups do, unless they are large."""
FEW_OPEN_BYTES = 1 << 30
"""Memory of open pieces beyond which no more are opened than the buffer needs, and two."""
MOST_OPEN = 256
"""Pieces that are open at once at most: each is a few numbers in a position."""
_BLOCK_RECORDS = 32_768
_MOST_COUNTED = 10_000
"""The most files whose numbers of pieces are in a position, which is saved often."""
_INDEXERS = 8
"""Files whose pieces are looked for at the same time."""


class OpenPiece(NamedTuple):
    """How far an open piece was read."""

    epoch: int
    file: int
    """Its number among all files of the source."""
    place: int
    """Where the chunk begins that is being dealt."""
    skip: int = 0
    """Records of the chunk, in its random order, that were yielded."""
    size: int = 0
    """Records of the chunk; 0 if it was not read yet."""


class Unopened(NamedTuple):
    """Pieces that are still to be opened: of an epoch of some worker's share, from one on, with a step."""

    epoch: int
    worker: int
    workers: int
    first: int = 0
    step: int = 1


class Window(NamedTuple):
    """The last open pieces of an epoch, whose records are in one random order."""

    taken: int
    """Records of it that were yielded."""
    cursors: tuple[OpenPiece, ...]
    """The pieces, as they were when it began."""

    @property
    def size(self) -> int:
        return sum(one.size - one.skip for one in self.cursors)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShuffleCursor:
    """A place between two records of the shuffled order; see `Pieces`.

    All that is needed to resume: nothing depends on the size of batches or on when a position was taken.
    """

    windows: tuple[Window, ...] = ()
    """What is yielded before anything else; several of workers that are no more."""
    open: tuple[OpenPiece, ...] = ()
    """The pieces that are open, the one that gives the next record first."""
    rest: tuple[Unopened, ...] = ()
    """What is opened after these, before the epochs that are this worker's share."""
    next_epoch: int = 0
    """The first epoch that is not in `rest` and was not begun."""
    opened: int = 0
    """Pieces that were opened so far, of this reader."""
    given: int = 0
    """Records that were yielded so far, likewise."""
    good: int = 0
    bad: int = 0
    """Records that were read so far, and that were malformed."""


class _Stand(NamedTuple):
    """An open piece between two turns."""

    cursor: OpenPiece
    then: OpenPiece | None
    """The piece after the last record of the chunk; None at its end."""

    def after(self, records: int) -> OpenPiece | None:
        skip = self.cursor.skip + records
        return self.cursor._replace(skip=skip) if skip < self.cursor.size else self.then


class _Turns(NamedTuple):
    """Records that the same open pieces give in turn."""

    first: int
    """The number of the first one in its block."""
    begin: ShuffleCursor
    stands: Sequence[_Stand]

    def place(self, number: int) -> ShuffleCursor:
        turns, more = divmod(number - self.first, len(self.stands))
        cursors = [one.after(turns + (index < more)) for index, one in enumerate(self.stands)]
        turned = tuple(one for one in cursors[more:] + cursors[:more] if one is not None)
        return replace(self.begin, open=turned, given=self.begin.given + number - self.first)


class _PieceReader:
    """An open piece: the chunk that is being dealt, in its random order."""

    def __init__(self, cursor: OpenPiece, end: int | None, chunks: Iterator[Chunk]) -> None:
        self.epoch, self.file = cursor.epoch, cursor.file
        self.place = self.next = cursor.place
        self.skip = cursor.skip
        self.end = end
        """Where the piece ends; None for the end of the file."""
        self.chunks = chunks
        self.records = Records(0, {})
        self.bytes = 0
        self.reached = 0.0
        """Which part of a file that cannot be split was read."""

    @property
    def left(self) -> int:
        """The records of the chunk that were not dealt yet."""
        return len(self.records) - self.skip

    @property
    def stand(self) -> _Stand:
        return _Stand(
            OpenPiece(self.epoch, self.file, self.place, self.skip, len(self.records)),
            None if self.next == self.end else OpenPiece(self.epoch, self.file, self.next),
        )

    def close(self) -> None:
        if isinstance(self.chunks, Generator):
            self.chunks.close()


class Pieces:
    """The records of a list of files, shuffled. One thread reads, and any may ask for a fraction.

    Args:
        paths: All files, sorted.
        there: Those that may be read. Of others, which were deleted, a position must say how many pieces they
            had, and that all of these were read.
        epochs: How often they are read; None for ever.
        read: Told of each chunk that is read for the first time, with its path and place; returns how many
            good and malformed records were read so far.
        empty: Told of each file that has no records.
    """

    def __init__(
        self,
        paths: Sequence[str],
        form: Format,
        *,
        there: Collection[str],
        columns: Sequence[str] | None,
        epochs: int | None,
        shuffle: ShuffleConfig,
        read: Callable[[str, int, Chunk], tuple[int, int]],
        empty: Callable[[str], None],
    ) -> None:
        self._paths = paths
        self._there = there
        self._counts: Sequence[int] = ()
        """How many pieces each file had, as a position says; negative for files that were not opened."""
        self.digest = zlib.crc32("\n".join(paths).encode())
        self._form = form
        self._split = form.in_pieces(shuffle.piece_bytes)
        self._columns = columns
        self._epochs = epochs
        self._shuffle = shuffle
        self._read = read
        self._empty = empty
        self._ends: list[dict[int, int | None] | None] = [None] * len(paths)
        """Of each file that was looked at: where each of its pieces begins, and ends."""
        self._plans: dict[Shard, NDArray[np.int64]] = {}
        self._orders: dict[tuple[int, Shard], Tensor] = {}
        self._parts: dict[tuple[int, int], tuple[float, float]] = {}
        """Of chunks of files that cannot be split: which part of the file lies before and up to its end."""

    # What there is to read

    def _plan(self, share: Shard) -> NDArray[np.int64]:
        """Return the pieces of a worker's files, each a file and a place: int64 (pieces, 2)."""
        if share not in self._plans:
            files = range(share.worker, len(self._paths), share.workers)
            unknown = [number for number in files if self._ends[number] is None]
            with ThreadPoolExecutor(min(_INDEXERS, max(len(unknown), 1)), "monolith-pieces") as pool:
                for number, ends in zip(unknown, pool.map(self._look_at, unknown), strict=True):
                    self._ends[number] = ends
                    if not ends:
                        self._empty(self._paths[number])
            pieces = [(number, place) for number in files for place in self._ends[number] or ()]
            self._plans[share] = np.array(pieces, dtype=np.int64).reshape(-1, 2)
        return self._plans[share]

    def _look_at(self, number: int) -> dict[int, int | None]:
        if self._paths[number] not in self._there:
            if not self._counts or self._counts[number] < 0:
                raise RestoreError(
                    f"cannot restore a file source: {self._paths[number]} is not among the files of this "
                    "source any more, and the checkpoint does not say how much of it was read. Put it back."
                )
            return {-1 - piece: None for piece in range(self._counts[number])}  # places that are never read
        bounds = self._split.bounds(self._paths[number])
        return {0: None} if bounds is None else dict(pairwise(bounds))

    def _piece(self, unopened: Unopened) -> tuple[int, int] | None:
        """Return the first of some unopened pieces, as a file and a place; None if there is none."""
        share = Shard(unopened.worker, unopened.workers)
        plan = self._plan(share)
        if unopened.first >= len(plan):
            return None
        file, place = plan[int(self._order(unopened.epoch, share)[unopened.first])].tolist()
        return file, place

    def _order(self, epoch: int, share: Shard) -> Tensor:
        """Return the order in which an epoch opens the pieces of a worker's plan."""
        key = (epoch, share)
        if key not in self._orders:
            if len(self._orders) > 16:  # epochs that are over
                self._orders.clear()
            self._orders[key] = permutation(len(self._plan(share)), self._shuffle.seed, epoch)
        return self._orders[key]

    def is_over(self, place: ShuffleCursor) -> bool:
        """Return whether nothing is left to read after a place."""
        done = self._epochs is not None and place.next_epoch >= self._epochs
        return done and not place.open and not place.windows and not place.rest

    def files_left(self, place: ShuffleCursor, share: Shard) -> set[str]:
        """Return the files of which something is left to read after a place."""
        left = {one.file for one in place.open}
        left.update(one.file for window in place.windows for one in window.cursors)
        if self._epochs is None or place.next_epoch < self._epochs:
            left.update(range(share.worker, len(self._paths), share.workers))
        for one in place.rest:
            part = Shard(one.worker, one.workers)
            order = self._order(one.epoch, part)[one.first :: one.step]
            left.update(self._plan(part)[order.numpy(), 0].tolist())
        return {self._paths[number] for number in left}

    def _left(self, place: ShuffleCursor, share: Shard) -> int | None:
        """Return how many pieces are yet to be opened after a place; None without end."""
        if self._epochs is None:
            return None
        later = max(self._epochs - place.next_epoch, 0) * len(self._plan(share))
        return later + sum(
            len(range(one.first, len(self._plan(Shard(one.worker, one.workers))), one.step))
            for one in place.rest
        )

    def fraction(self, place: ShuffleCursor, share: Shard, records: int) -> float | None:
        """Return which part of everything lies before the place so many records after one, by pieces."""
        if share not in self._plans:
            return None if place.given else 0.0  # reading opens the files first
        left = self._left(place, share)
        if left is None or not left + place.opened:
            return None
        begun = sum(1 - self._part(one) for one in place.open)
        for window in place.windows:
            begun += sum(1 - self._part(one) for one in window.cursors) * (1 - window.taken / window.size)
        done = 1 - (left + begun) / (left + place.opened)
        return done * (place.given + records) / place.given if place.given else done

    def _part(self, cursor: OpenPiece) -> float:
        """Return which part of an open piece was yielded."""
        begin, end = self._parts.get((cursor.file, cursor.place), (0.0, 1.0 if cursor.size else 0.0))
        return begin + (end - begin) * cursor.skip / max(cursor.size, 1)

    # Reading

    def blocks(self, place: ShuffleCursor, share: Shard) -> Iterator[Block[ShuffleCursor]]:
        """Yield records from a place on, with the places between them."""
        readers: list[_PieceReader] = []
        try:
            while True:
                # 1. Windows first: at the end of an epoch, or those that old workers left.
                while place.windows:
                    yield from self._window(place, readers)
                    window, *later = place.windows
                    given = place.given + window.size - window.taken
                    place, readers = replace(place, windows=tuple(later), given=given), []
                # 2. Reopen the pieces that were open at the cursor. `size` marks a chunk that was read and
                #    counted before, so it must still have as many records.
                for cursor in place.open:
                    readers.append(self._reader(cursor))
                    place = self._fill(readers[-1], place, cursor.size)
                # 3. One record of each open piece in turn, until the epoch has no more pieces to open.
                dealt = _Interleaved()
                while True:
                    # The open pieces alone decide whether another one is opened, and they are all in the
                    # place. So a reader that resumes opens the next one after the same record.
                    readers = [reader for reader in readers if reader.left]
                    place = self._open_more(readers, place, share)
                    last = not self._goes_on(readers, place)
                    if dealt.count and (last or dealt.count >= _BLOCK_RECORDS):
                        yield dealt.block()
                        dealt = _Interleaved()
                    if last:
                        break
                    count, more = dealt.add(readers, place)
                    place = replace(place, given=place.given + count)
                    # Rotate, so that the piece that gives the next record is first, as in a cursor.
                    readers = readers[more:] + readers[:more]
                    if not readers[-1].left:
                        place = self._fill(readers[-1], place)
                if not readers:
                    return
                # 4. What is left of the epoch is one window, permuted together.
                cursors = tuple(reader.stand.cursor for reader in readers)
                place = replace(place, windows=(Window(0, cursors),), open=())
        finally:
            for reader in readers:
                reader.close()

    def _goes_on(self, readers: Sequence[_PieceReader], place: ShuffleCursor) -> bool:
        """Whether open pieces are dealt in turn, since their epoch has more pieces, or they have more."""
        if any(reader.next != reader.end for reader in readers):
            return True
        latest = max((reader.epoch for reader in readers), default=-1)
        return any(one.epoch <= latest and self._piece(one) is not None for one in place.rest)

    def _window(
        self, place: ShuffleCursor, readers: Sequence[_PieceReader]
    ) -> Iterator[Block[ShuffleCursor]]:
        """Yield what is left of the first window.

        Args:
            readers: Its pieces, if they are open.
        """
        window, *later = place.windows
        if not readers:
            readers = [self._reader(cursor) for cursor in window.cursors]
            for reader, cursor in zip(readers, window.cursors, strict=True):
                self._fill(reader, place, cursor.size)
        records = concat([reader.records.slice(reader.skip, len(reader.records)) for reader in readers])
        first = window.cursors[0]
        order = permutation(len(records), self._shuffle.seed, first.epoch, first.file, first.place)

        def place_at(taken: int) -> ShuffleCursor:
            left = (window._replace(taken=taken), *later) if taken < len(records) else tuple(later)
            return replace(place, windows=left, given=place.given + taken - window.taken)

        for begin in range(window.taken, len(records), _BLOCK_RECORDS):
            rows = order[begin : begin + _BLOCK_RECORDS]
            yield Block(records.take(rows), partial(_shifted, place_at, begin))

    def end(self, place: ShuffleCursor) -> ShuffleCursor:
        """Return the place after everything, of a reader that came to a place."""
        return replace(
            place, windows=(), open=(), rest=(), next_epoch=max(place.next_epoch, self._epochs or 0)
        )

    def _open_more(self, readers: list[_PieceReader], place: ShuffleCursor, share: Shard) -> ShuffleCursor:
        """Open pieces until there are enough; return the place, which then names what is left."""
        held, used = sum(len(reader.records) for reader in readers), sum(reader.bytes for reader in readers)
        while len(readers) < MOST_OPEN and (
            held < self._shuffle.buffer
            or len(readers) < 2
            or (len(readers) < FEW_OPEN and used < FEW_OPEN_BYTES)
        ):
            if not place.rest:
                epoch = place.next_epoch
                if (
                    readers
                    or (self._epochs is not None and epoch >= self._epochs)
                    or not len(self._plan(share))
                ):
                    break
                place = replace(place, rest=(Unopened(epoch, *share),), next_epoch=epoch + 1)
            unopened = place.rest[0]
            if readers and unopened.epoch > max(reader.epoch for reader in readers):
                break  # an epoch begins when those before it have ended
            found = self._piece(unopened)
            if found is None:
                place = replace(place, rest=place.rest[1:])
                continue
            rest = (unopened._replace(first=unopened.first + unopened.step), *place.rest[1:])
            place = replace(place, rest=rest, opened=place.opened + 1)
            reader = self._reader(OpenPiece(unopened.epoch, *found))
            try:
                place = self._fill(reader, place)
            finally:
                if not len(reader.records):
                    reader.close()
            if len(reader.records):
                readers.append(reader)
                held, used = held + len(reader.records), used + reader.bytes
        return place

    def _reader(self, cursor: OpenPiece) -> _PieceReader:
        path, ends = self._paths[cursor.file], self._ends[cursor.file]
        if ends is None:  # a file of a worker that is no more
            ends = self._ends[cursor.file] = self._look_at(cursor.file)
        if None in ends.values():
            return _PieceReader(
                cursor, None, self._form.chunks(path, start=cursor.place, columns=self._columns)
            )
        # Of a payload that is a batch, a cursor is inside a piece.
        begin = max((one for one in ends if one <= cursor.place), default=0)
        chunks = self._split.chunks(path, start=cursor.place, columns=self._columns)
        return _PieceReader(cursor, ends.get(begin), chunks)

    def _fill(self, reader: _PieceReader, place: ShuffleCursor, size: int = 0) -> ShuffleCursor:
        """Read the next chunk of a piece that has records; return the place with what was counted.

        Args:
            size: The records that the chunk had when it was read before a restart, and counted; 0 for one
                that was not.
        """
        path, skip = self._paths[reader.file], reader.skip
        reader.records, reader.skip, reader.bytes = Records(0, {}), 0, 0
        while reader.next != reader.end and not len(reader.records):
            reader.place = reader.next
            chunk = next(reader.chunks, None)
            if chunk is None:
                if reader.end is not None:
                    raise _replaced(path, reader.place)
                break
            if (reader.end is not None and chunk.next > reader.end) or (size and len(chunk.records) != size):
                raise _replaced(path, reader.place)
            reader.next = chunk.next
            if not size:
                good, bad = self._read(path, reader.place, chunk)
                place = replace(place, good=good, bad=bad)
            if reader.end is None:
                self._note_part(reader, path, chunk)
            if len(chunk.records):
                key = (self._shuffle.seed, reader.epoch, zlib.crc32(path.encode()), reader.place)
                reader.records = chunk.records.take(permutation(len(chunk.records), *key))
                reader.bytes = sum(map(_bytes_of, chunk.records.columns.values()))
        if size:
            reader.skip = skip
        if reader.next == reader.end:
            reader.close()
        return place

    def _note_part(self, reader: _PieceReader, path: str, chunk: Chunk) -> None:
        if chunk.reached is not None:
            end = min(chunk.reached / max(filesystem.file_size(path), 1), 1.0)
            begin = reader.reached if reader.reached or not reader.place else end
            self._parts[reader.file, reader.place] = (begin, end)
            reader.reached = end

    # Positions

    def save(self, place: ShuffleCursor) -> Position:
        return {
            "files": self.digest,
            "windows": [[one.taken, [list(cursor) for cursor in one.cursors]] for one in place.windows],
            "open": [list(one) for one in place.open],
            "rest": [list(one) for one in place.rest],
            **{name: getattr(place, name) for name in _NUMBERS},
            **self._saved_counts(),
        }

    def _saved_counts(self) -> Position:
        """Return how many pieces files have: enough to resume after some, which were read, were deleted."""
        if len(self._paths) > _MOST_COUNTED:
            return {}
        return {"pieces": [-1 if ends is None else len(ends) for ends in self._ends]}

    def restored(self, saved: Position) -> ShuffleCursor:
        """Return the place that a position has.

        Raises:
            RestoreError: It is malformed, or of other files.
        """
        if saved.get("files") != self.digest:
            raise RestoreError(
                "cannot restore a file source: the list of files has changed, so that shuffling would put "
                "them into another order. Give the same files, or shuffle with files=False."
            )
        counts = saved.get("pieces", [])
        if not isinstance(counts, list) or not all(isinstance(one, int) for one in counts):
            raise RestoreError(f"cannot restore a file source: malformed numbers in {counts!r:.200}")
        self._counts = counts if len(counts) == len(self._paths) else ()
        opened = [OpenPiece(*row) for row in _rows(saved.get("open"), OpenPiece)]
        rest = [Unopened(*row) for row in _rows(saved.get("rest"), Unopened)]
        windows = []
        for row in _listed(saved.get("windows")):
            taken, cursors = row if isinstance(row, list) and len(row) == 2 else (-1, [])
            windows.append(Window(taken, tuple(OpenPiece(*one) for one in _rows(cursors, OpenPiece))))
        numbers = {name: saved.get(name) for name in _NUMBERS}
        every = [*opened, *(one for window in windows for one in window.cursors)]
        if (
            not all(isinstance(one, int) and one >= 0 for one in numbers.values())
            or not all(isinstance(one.taken, int) and 0 <= one.taken < one.size for one in windows)
            or any(one.file >= len(self._paths) or one.skip > one.size for one in every)
            or any(one.worker >= one.workers or one.step < 1 for one in rest)
        ):
            raise RestoreError(f"cannot restore a file source: malformed numbers in {saved!r:.200}")
        place = ShuffleCursor(
            windows=tuple(windows),
            open=tuple(opened),
            rest=tuple(rest),
            **{name: int(numbers[name] or 0) for name in numbers},
        )
        latest = max([*(one.epoch for one in every), *(one.epoch for one in rest)], default=-1)
        if self._epochs is not None and latest >= self._epochs:
            raise RestoreError(
                f"cannot restore a file source: the position is in epoch {latest}, there are {self._epochs} "
                "from 0 on"
            )
        return place

    def redistributed(self, old: Sequence[tuple[Shard, ShuffleCursor]], workers: int) -> list[ShuffleCursor]:
        """Return what several workers had left as the places of another number of them.

        Windows and open pieces go to one worker each, from where they were left; what was yet to be opened is
        dealt piece by piece. From the first epoch on that no worker had started, each worker reads its
        shard of all.
        """
        begun = max(place.next_epoch for _, place in old)
        windows: list[list[Window]] = [[] for _ in range(workers)]
        cursors: list[list[OpenPiece]] = [[] for _ in range(workers)]
        unopened: list[list[Unopened]] = [[] for _ in range(workers)]
        for window in (one for _, place in old for one in place.windows):
            min(windows, key=len).append(window)
        for cursor in sorted(one for _, place in old for one in place.open):
            min(cursors, key=len).append(cursor)
        for share, place in old:
            later = [Unopened(epoch, *share) for epoch in range(place.next_epoch, begun)]
            for number, one in enumerate((*place.rest, *later)):
                pieces = len(self._plan(Shard(one.worker, one.workers)))
                for turn in range(workers):
                    first = one.first + turn * one.step
                    if first < pieces:
                        part = one._replace(first=first, step=one.step * workers)
                        unopened[(number + turn) % workers].append(part)
        return [
            ShuffleCursor(
                windows=tuple(windows[worker]),
                open=tuple(cursors[worker]),
                rest=tuple(sorted(unopened[worker])),
                next_epoch=begun,
                # What they have counted, each by one of the new workers.
                **{
                    name: sum(getattr(place, name) for _, place in old[worker::workers])
                    for name in ("opened", "given", "good", "bad")
                },
            )
            for worker in range(workers)
        ]


_NUMBERS = ("next_epoch", "opened", "given", "good", "bad")


def _listed(saved: object) -> list[Any]:
    if not isinstance(saved, list):
        raise RestoreError("cannot restore a file source: the position is not of one that is shuffled so")
    return saved


def _rows(saved: object, kind: type[OpenPiece] | type[Unopened]) -> Iterator[list[int]]:
    for row in _listed(saved):
        if (
            not isinstance(row, list)
            or len(row) != len(kind._fields)
            or not all(isinstance(one, int) and one >= 0 for one in row)
        ):
            raise RestoreError(f"cannot restore a file source: {row!r:.200} is not what is left of a file")
        yield row


def _shifted(place: Callable[[int], ShuffleCursor], first: int, number: int) -> ShuffleCursor:
    return place(first + number)


def _replaced(path: str, place: int) -> DataError:
    return DataError(
        f"file source: {path} has other records at place {place} than when they were read before; it was "
        "replaced since. Restore the file, or start from the beginning."
    )


class _Interleaved:
    """Gathers records that open pieces give in turn, to put them in order in one go: most of the cost is per
    call and column, and a piece of a text file is small."""

    def __init__(self) -> None:
        self.count = 0
        self._turns: list[_Turns] = []
        self._chunks: dict[int, tuple[Records, int, int]] = {}
        """By identity, which of the records of a chunk are taken: they are consecutive."""
        self._order: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        """The number of the chunk, by the time it was first seen, and of the record in it."""
        self._numbers: dict[int, int] = {}

    def add(self, readers: Sequence[_PieceReader], place: ShuffleCursor) -> tuple[int, int]:
        """Interleave until a piece has no more; return how many records, and which reader comes next."""
        self._turns.append(_Turns(self.count, place, [reader.stand for reader in readers]))
        width = len(readers)
        count = min((reader.left - 1) * width + number + 1 for number, reader in enumerate(readers))
        count = min(count, _BLOCK_RECORDS)
        turns, more = divmod(count, width)
        numbers, firsts = np.empty(width, np.int64), np.empty(width, np.int64)
        for index, reader in enumerate(readers):
            key, firsts[index] = id(reader.records), reader.skip
            numbers[index] = self._numbers.setdefault(key, len(self._numbers))
            reader.skip += turns + (index < more)
            _, first, _ = self._chunks.get(key, (reader.records, int(firsts[index]), 0))
            self._chunks[key] = (reader.records, first, reader.skip)
        taken = (firsts + np.arange(turns)[:, None]).reshape(-1)
        self._order.append(
            (
                np.concatenate([np.tile(numbers, turns), numbers[:more]]),
                np.concatenate([taken, firsts[:more] + turns]),
            )
        )
        self.count += count
        return count, more

    def block(self) -> Block[ShuffleCursor]:
        """Return the records, in the order in which they were dealt."""
        chunks = [self._chunks[key] for key in self._numbers]
        sizes = np.array([last - first for _, first, last in chunks])
        bases = np.cumsum(sizes) - sizes - np.array([first for _, first, _ in chunks])
        numbers, taken = (np.concatenate(part) for part in zip(*self._order, strict=True))
        parts = [records.slice(first, last) for records, first, last in chunks if last > first]
        records = concat(parts).take(torch.from_numpy(bases[numbers] + taken))
        firsts = [turns.first for turns in self._turns]

        def place(number: int) -> ShuffleCursor:
            return self._turns[max(bisect_left(firsts, number) - 1, 0)].place(number)

        return Block(records, place)


def _bytes_of(column: RaggedTensor) -> int:
    values = column.values
    inner = _bytes_of(values) if isinstance(values, RaggedTensor) else values.nbytes
    return inner + column.row_splits.nbytes
