"""Shuffling a list of files: pieces of all files in a random order, many of them open at once.

A file is read in pieces, which are row groups of Parquet and ranges of bytes of text; see
`Format.bounds`. Each epoch opens the pieces of all files of a worker in an order of its own. As many are
open at once as make up the buffer, each is put into a random order when it is read, and they give one record
each in turn:

    pieces of the epoch, in random order:   p7 p2 p9 p4 p1 ...
    open, each in a random order:           p7: c a b   p2: f e d
    records:                                c f a e b d, then p9 and p4 are open ...

When an epoch has no more pieces to open, all its remaining records are put into one random order, its last
window. Otherwise a piece with few records would be used up before the rest, and its rows would be missing
from the end of the epoch. A small file is one window.

So a sorted file is mixed over its whole length, and the state is only how far each open piece was read: a
`ShuffleCursor`, which is small, and from which reading resumes with the very next record. Nothing depends on
the size of batches, or on when a position was taken.

A file that cannot be split, such as a compressed one, is one piece. It is read chunk by chunk from its
beginning to its end, with other files next to it.
"""

from __future__ import annotations

import itertools
import zlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from monolith import filesystem
from monolith.concurrency import ThreadPoolExecutor
from monolith.data.files.reading_ahead import InOrder, LoadedPiece, close_iterator
from monolith.data.format import Chunk, Format
from monolith.data.records import Records, concat
from monolith.data.shuffling import Block, ShuffleConfig, permutation
from monolith.data.source import AskedAhead, Position, Shard
from monolith.errors import DataError, RestoreError

FEW_OPEN = 8
"""Pieces that are open at once even if fewer fill the buffer, as row groups do, unless they are large."""
FEW_OPEN_BYTES = 1 << 30
"""Memory of open pieces beyond which no more are opened than the buffer needs, and two."""
MOST_OPEN = 256
"""The most pieces that are open at once: each is a few numbers in a position."""
_BLOCK_RECORDS = 32_768
_MOST_COUNTED = 10_000
"""The most files whose numbers of pieces are in a position, which is saved often."""
_INDEXERS = 8
"""Files whose bounds are read at the same time."""


class OpenPiece(NamedTuple):
    """How far an open piece was read."""

    epoch: int
    file: int
    """Its number among all files of the source."""
    place: int
    """Where the current chunk begins in the file."""
    skip: int = 0
    """Records of the chunk, in its random order, that were yielded."""
    size: int = 0
    """Records of the chunk; 0 if it was not read yet."""


class Unopened(NamedTuple):
    """Pieces that are still to be opened: every `step`-th of one epoch of a worker's shard, from `first`
    on."""

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
    """A cursor in the shuffled order; see `ShuffledPieces`.

    All that is needed to resume: nothing depends on the size of batches or on when a position was taken.
    """

    windows: tuple[Window, ...] = ()
    """Windows that are yielded before anything else; those of former workers may be several."""
    open: tuple[OpenPiece, ...] = ()
    """The pieces that are open, the one that gives the next record first."""
    rest: tuple[Unopened, ...] = ()
    """Pieces to open after these, before the epochs of this worker's shard."""
    next_epoch: int = 0
    """The first epoch that is not in `rest` and was not started."""
    opened: int = 0
    """Pieces that this reader has opened so far."""
    given: int = 0
    """Records that it has yielded so far."""
    good: int = 0
    bad: int = 0
    """Records that were read so far, and that were malformed."""


class _OpenChunk(NamedTuple):
    """The current chunk of an open piece."""

    cursor: OpenPiece
    """Before its first record."""
    then: OpenPiece | None
    """The same piece after the last record of its chunk; None at the end of the piece."""

    def after(self, records: int) -> OpenPiece | None:
        begin = self.cursor
        if records >= begin.size:
            return self.then
        # Not `_replace`, which takes twice as long: a position needs one for each of up to 256 pieces.
        return OpenPiece(begin.epoch, begin.file, begin.place, records, begin.size)


class _Turns(NamedTuple):
    """Records that the same open pieces give in turn."""

    first: int
    """The number of the first one in its block."""
    begin: ShuffleCursor
    chunks: Sequence[_OpenChunk]
    skips: NDArray[np.int64]
    """How many records of each chunk were yielded before."""

    def cursor(self, number: int) -> ShuffleCursor:
        # Each piece has given `turns` records, and the first `more` pieces one in addition.
        turns, more = divmod(number - self.first, len(self.chunks))
        skips = self.skips + turns
        skips[:more] += 1
        cursors = [one.after(skip) for one, skip in zip(self.chunks, skips.tolist(), strict=True)]
        turned = tuple(one for one in cursors[more:] + cursors[:more] if one is not None)
        return replace(self.begin, open=turned, given=self.begin.given + number - self.first)


class _PieceReader:
    """An open piece, with its current chunk in random order."""

    def __init__(
        self, cursor: OpenPiece, end: int | None, chunks: Iterator[Chunk], shuffled: Records | None = None
    ) -> None:
        self.epoch, self.file = cursor.epoch, cursor.file
        self.place = self.next = cursor.place
        self.skip = cursor.skip
        self.end = end
        """Where the piece ends; None for the end of the file."""
        self.chunks = chunks
        self.shuffled = shuffled
        """The records of the first chunk in their random order, if another thread has put them into it."""
        self.records = Records(0, {})
        self.chunk = _OpenChunk(cursor, None)
        """What `records` are; the same object until the next chunk is read."""
        self.bytes = 0
        self.reached = 0.0
        """The fraction that was read of a file that cannot be split."""

    @property
    def left(self) -> int:
        """The records of the chunk that were not yielded yet."""
        return self.chunk.cursor.size - self.skip

    @property
    def cursor(self) -> OpenPiece:
        return self.chunk.cursor._replace(skip=self.skip)

    def note_chunk(self) -> None:
        """Note the chunk that was read."""
        begin = OpenPiece(self.epoch, self.file, self.place, 0, len(self.records))
        then = None if self.next == self.end else OpenPiece(self.epoch, self.file, self.next)
        self.chunk = _OpenChunk(begin, then)

    def close(self) -> None:
        close_iterator(self.chunks)


class ShuffledPieces:
    """The records of a list of files, shuffled. One thread reads, and any may ask for a fraction.

    Args:
        paths: All files, sorted.
        available: The files that exist. Of deleted ones, a position must say how many pieces they had, and
            that all of these were read.
        epochs: How often they are read; None without end.
        on_chunk: Called with each chunk that is read for the first time, its path and its place; returns how
            many good and malformed records were read so far.
        on_empty: Called with each file that has no records.
    """

    def __init__(
        self,
        paths: Sequence[str],
        form: Format,
        *,
        available: Collection[str],
        columns: Sequence[str] | None,
        epochs: int | None,
        shuffle: ShuffleConfig,
        on_chunk: Callable[[str, int, Chunk], tuple[int, int]],
        on_empty: Callable[[str], None],
    ) -> None:
        self._paths = paths
        self._available = available
        self._counts: Sequence[int] = ()
        """How many pieces each file had, as a position says; negative for files that were not opened."""
        self.digest = zlib.crc32("\n".join(paths).encode())
        self._form = form
        self._split = form.in_pieces(shuffle.piece_bytes)
        self._columns = columns
        self._epochs = epochs
        self._shuffle = shuffle
        self._loader: InOrder[LoadedPiece | None] | None = None
        """Reads pieces ahead while `blocks` iterates, in the order in which they are opened."""
        self._asked: Sequence[AskedAhead] = ()
        self._on_chunk = on_chunk
        self._on_empty = on_empty
        self._ends: list[dict[int, int | None] | None] = [None] * len(paths)
        """By file, if its bounds are known: where each of its pieces begins, and ends."""
        self._plans: dict[Shard, NDArray[np.int64]] = {}
        self._orders: dict[tuple[int, Shard], NDArray[np.int64]] = {}
        self._parts: dict[tuple[int, int], tuple[float, float]] = {}
        """By chunk of a file that cannot be split: the fraction of the file before it and up to its end."""

    # The pieces of files

    def _plan(self, shard: Shard) -> NDArray[np.int64]:
        """Return the pieces of a worker's files, each a file and a place: int64 (pieces, 2)."""
        if shard not in self._plans:
            files = range(shard.worker, len(self._paths), shard.workers)
            unknown = [number for number in files if self._ends[number] is None]
            with ThreadPoolExecutor(min(_INDEXERS, max(len(unknown), 1)), "monolith-pieces") as pool:
                for number, ends in zip(unknown, pool.map(self._find_ends, unknown), strict=True):
                    self._ends[number] = ends
                    if not ends:
                        self._on_empty(self._paths[number])
            pieces = [(number, place) for number in files for place in self._ends[number] or ()]
            self._plans[shard] = np.array(pieces, dtype=np.int64).reshape(-1, 2)
        return self._plans[shard]

    def _find_ends(self, number: int) -> dict[int, int | None]:
        if self._paths[number] not in self._available:
            if not self._counts or self._counts[number] < 0:
                raise RestoreError(
                    f"cannot restore a file source: {self._paths[number]} is not among the files of this "
                    "source any more, and the checkpoint does not say how much of it was read. Put it back."
                )
            return {
                -1 - piece: None for piece in range(self._counts[number])
            }  # places that do not exist, so they are never read
        bounds = self._split.bounds(self._paths[number])
        return {0: None} if bounds is None else dict(pairwise(bounds))

    def _piece(self, unopened: Unopened) -> tuple[int, int] | None:
        """Return the first of some unopened pieces, as a file and a place; None if there is none."""
        shard = Shard(unopened.worker, unopened.workers)
        if unopened.first >= len(self._plan(shard)):
            return None
        file, place = self._order(unopened.epoch, shard)[unopened.first].tolist()
        return file, place

    def _order(self, epoch: int, shard: Shard) -> NDArray[np.int64]:
        """Return the pieces of a worker's plan in the order in which an epoch opens them."""
        key = (epoch, shard)
        if key not in self._orders:
            if len(self._orders) > 16:  # epochs that are over
                self._orders.clear()
            plan = self._plan(shard)
            order = permutation(len(plan), self._shuffle.seed, epoch)
            self._orders[key] = plan[order.numpy()]
        return self._orders[key]

    def is_over(self, cursor: ShuffleCursor) -> bool:
        """Return whether nothing is left to read after a cursor."""
        done = self._epochs is not None and cursor.next_epoch >= self._epochs
        return done and not cursor.open and not cursor.windows and not cursor.rest

    def files_from(self, cursor: ShuffleCursor, shard: Shard) -> set[str]:
        """Return the files that are read from a cursor on."""
        left = {one.file for one in cursor.open}
        left.update(one.file for window in cursor.windows for one in window.cursors)
        if self._epochs is None or cursor.next_epoch < self._epochs:
            left.update(range(shard.worker, len(self._paths), shard.workers))
        for one in cursor.rest:
            part = Shard(one.worker, one.workers)
            left.update(self._order(one.epoch, part)[one.first :: one.step, 0].tolist())
        return {self._paths[number] for number in left}

    def _unopened(self, cursor: ShuffleCursor, shard: Shard) -> int | None:
        """Return how many pieces are yet to be opened after a cursor; None without end."""
        if self._epochs is None:
            return None
        later = max(self._epochs - cursor.next_epoch, 0) * len(self._plan(shard))
        return later + sum(
            len(range(one.first, len(self._plan(Shard(one.worker, one.workers))), one.step))
            for one in cursor.rest
        )

    def fraction(self, cursor: ShuffleCursor, shard: Shard, records: int) -> float | None:
        """Return the fraction of all pieces before the record so many after a cursor."""
        if shard not in self._plans:
            return None if cursor.given else 0.0  # reading opens the files first
        left = self._unopened(cursor, shard)
        if left is None or not left + cursor.opened:
            return None
        begun = sum(1 - self._fraction_of(one) for one in cursor.open)
        for window in cursor.windows:
            begun += sum(1 - self._fraction_of(one) for one in window.cursors) * (
                1 - window.taken / window.size
            )
        done = 1 - (left + begun) / (left + cursor.opened)
        return done * (cursor.given + records) / cursor.given if cursor.given else done

    def _fraction_of(self, cursor: OpenPiece) -> float:
        """Return the fraction of an open piece that was yielded."""
        begin, end = self._parts.get((cursor.file, cursor.place), (0.0, 1.0 if cursor.size else 0.0))
        return begin + (end - begin) * cursor.skip / max(cursor.size, 1)

    # Reading

    def blocks(
        self, cursor: ShuffleCursor, shard: Shard, threads: int = 0, asked: Sequence[AskedAhead] = ()
    ) -> Iterator[Block[ShuffleCursor]]:
        """Yield records from a cursor on, with the cursors between them.

        Args:
            threads: How many read and parse pieces ahead of their turn; 0 reads each when it is its turn. The
                records and their order are the same.
            asked: Are asked about each chunk by the thread that reads it.
        """
        self._asked = asked
        readers: list[_PieceReader] = []
        if threads:
            pieces = self._unopened_pieces(cursor, shard)
            tasks = (partial(self._load, one) for one in pieces)
            # The first piece of all is read alone: formats say once what is odd about a file.
            self._loader = InOrder(threads, "monolith-read", tasks, first_alone=True)
        try:
            while True:
                # 1. Windows first: at the end of an epoch, or those of former workers.
                while cursor.windows:
                    yield from self._window(cursor, readers)
                    window, *later = cursor.windows
                    given = cursor.given + window.size - window.taken
                    cursor, readers = replace(cursor, windows=tuple(later), given=given), []
                # 2. Reopen the pieces that were open at the cursor. `size` marks a chunk that was read and
                #    counted before, so it must still have as many records.
                for piece in cursor.open:
                    readers.append(self._reader(piece))
                    cursor = self._read_chunk(readers[-1], cursor, piece.size)
                # 3. One record of each open piece in turn, until the epoch has no more pieces to open.
                dealt = _Interleaved()
                while True:
                    # The open pieces alone decide whether another one is opened, and they are all in the
                    # cursor. So a reader that resumes opens the next one after the same record.
                    readers = [reader for reader in readers if reader.left]
                    cursor = self._open_more(readers, cursor, shard)
                    last = not self._has_more(readers, cursor)
                    if dealt.count and (last or dealt.count >= _BLOCK_RECORDS):
                        yield dealt.block()
                        dealt = _Interleaved()
                    if last:
                        break
                    count, more = dealt.add(readers, cursor)
                    cursor = replace(cursor, given=cursor.given + count)
                    # Rotate, so that the piece that gives the next record is first, as in a cursor.
                    readers = readers[more:] + readers[:more]
                    if not readers[-1].left:
                        cursor = self._read_chunk(readers[-1], cursor)
                if not readers:
                    return
                # 4. The remaining records of the epoch are one window, permuted together.
                cursors = tuple(reader.cursor for reader in readers)
                cursor = replace(cursor, windows=(Window(0, cursors),), open=())
        finally:
            for reader in readers:
                reader.close()
            if self._loader is not None:
                for loaded in self._loader.close():
                    if loaded is not None:
                        close_iterator(loaded.rest)
                self._loader = None

    def _unopened_pieces(self, cursor: ShuffleCursor, shard: Shard) -> Iterator[OpenPiece]:
        """Yield the pieces that are opened from a cursor on, in the order in which `_open_more` does."""
        later = itertools.count(cursor.next_epoch)
        for one in itertools.chain(cursor.rest, (Unopened(epoch, *shard) for epoch in later)):
            part = Shard(one.worker, one.workers)
            if one.epoch >= cursor.next_epoch and (
                not len(self._plan(part)) or (self._epochs is not None and one.epoch >= self._epochs)
            ):
                return
            for first in range(one.first, len(self._plan(part)), one.step):
                found = self._piece(one._replace(first=first))
                assert found is not None
                yield OpenPiece(one.epoch, *found)

    def _load(self, piece: OpenPiece) -> LoadedPiece | None:
        """Read the first chunk of a piece, in any thread; None for a file that cannot be split."""
        ends = self._ends[piece.file]
        if ends is None or None in ends.values():
            return None
        chunks = self._split.chunks(self._paths[piece.file], start=piece.place, columns=self._columns)
        chunk = next(chunks, None)
        if chunk is None:
            return LoadedPiece(None, None, chunks)
        if chunk.next == ends.get(piece.place):
            # Most pieces are one chunk. Its file is closed here, in a thread that has time for it.
            close_iterator(chunks)
            chunks = iter(())
        return LoadedPiece(chunk, self._shuffled(chunk.records, piece), chunks)

    def _shuffled(self, records: Records, chunk: OpenPiece) -> Records:
        """Return the records of a chunk in its order, which only depends on the seed, the epoch and where it
        is."""
        for one in self._asked:
            one.look(records)
        path = zlib.crc32(self._paths[chunk.file].encode())
        return records.take(permutation(len(records), self._shuffle.seed, chunk.epoch, path, chunk.place))

    def _has_more(self, readers: Sequence[_PieceReader], cursor: ShuffleCursor) -> bool:
        """Whether open pieces are read in turn: their epoch has more pieces to open, or a piece more
        chunks."""
        if any(reader.next != reader.end for reader in readers):
            return True
        latest = max((reader.epoch for reader in readers), default=-1)
        return any(one.epoch <= latest and self._piece(one) is not None for one in cursor.rest)

    def _window(
        self, cursor: ShuffleCursor, readers: Sequence[_PieceReader]
    ) -> Iterator[Block[ShuffleCursor]]:
        """Yield the remaining records of the first window.

        Args:
            readers: Its pieces, if they are open.
        """
        window, *later = cursor.windows
        if not readers:
            readers = [self._reader(piece) for piece in window.cursors]
            for reader, piece in zip(readers, window.cursors, strict=True):
                self._read_chunk(reader, cursor, piece.size)
        records = concat([reader.records.slice(reader.skip, len(reader.records)) for reader in readers])
        first = window.cursors[0]
        # The first piece identifies the window: no other window of the epoch begins with it.
        order = permutation(len(records), self._shuffle.seed, first.epoch, first.file, first.place)

        def cursor_after(taken: int) -> ShuffleCursor:
            left = (window._replace(taken=taken), *later) if taken < len(records) else tuple(later)
            return replace(cursor, windows=left, given=cursor.given + taken - window.taken)

        for begin in range(window.taken, len(records), _BLOCK_RECORDS):
            rows = order[begin : begin + _BLOCK_RECORDS]
            yield Block(records.take(rows), partial(_shifted, cursor_after, begin))

    def end(self, cursor: ShuffleCursor) -> ShuffleCursor:
        """Return the cursor at the end of all epochs, with the counts of another."""
        return replace(
            cursor, windows=(), open=(), rest=(), next_epoch=max(cursor.next_epoch, self._epochs or 0)
        )

    def _open_more(self, readers: list[_PieceReader], cursor: ShuffleCursor, shard: Shard) -> ShuffleCursor:
        """Open pieces until there are enough; return the cursor without these in `rest`."""
        buffered = sum([reader.chunk.cursor.size for reader in readers])
        used = sum([reader.bytes for reader in readers])
        while len(readers) < MOST_OPEN and (
            buffered < self._shuffle.buffer
            or len(readers) < 2
            or (len(readers) < FEW_OPEN and used < FEW_OPEN_BYTES)
        ):
            if not cursor.rest:
                epoch = cursor.next_epoch
                # A new epoch starts only when nothing is open: its pieces never mix with those before.
                if (
                    readers
                    or (self._epochs is not None and epoch >= self._epochs)
                    or not len(self._plan(shard))
                ):
                    break
                cursor = replace(cursor, rest=(Unopened(epoch, *shard),), next_epoch=epoch + 1)
            unopened = cursor.rest[0]
            if readers and unopened.epoch > max(reader.epoch for reader in readers):
                break  # an epoch starts when those before it have ended
            found = self._piece(unopened)
            if found is None:
                cursor = replace(cursor, rest=cursor.rest[1:])
                continue
            rest = (unopened._replace(first=unopened.first + unopened.step), *cursor.rest[1:])
            cursor = replace(cursor, rest=rest, opened=cursor.opened + 1)
            piece = OpenPiece(unopened.epoch, *found)
            loaded = None if self._loader is None else self._loader.take(used // max(len(readers), 1))
            reader = self._reader(piece, loaded)
            try:
                cursor = self._read_chunk(reader, cursor)
            finally:
                if not len(reader.records):
                    reader.close()
            if len(reader.records):
                readers.append(reader)
                buffered, used = buffered + len(reader.records), used + reader.bytes
        return cursor

    def _reader(self, cursor: OpenPiece, loaded: LoadedPiece | None = None) -> _PieceReader:
        path, ends = self._paths[cursor.file], self._ends[cursor.file]
        if ends is None:  # a file of a former worker
            ends = self._ends[cursor.file] = self._find_ends(cursor.file)
        if None in ends.values():
            return _PieceReader(
                cursor, None, self._form.chunks(path, start=cursor.place, columns=self._columns)
            )
        # If a payload is a batch of records, a cursor may be inside a piece.
        begin = max((one for one in ends if one <= cursor.place), default=0)
        if loaded is None:
            chunks = self._split.chunks(path, start=cursor.place, columns=self._columns)
            return _PieceReader(cursor, ends.get(begin), chunks)
        return _PieceReader(cursor, ends.get(begin), loaded.chunks(), loaded.shuffled)

    def _read_chunk(self, reader: _PieceReader, cursor: ShuffleCursor, size: int = 0) -> ShuffleCursor:
        """Read the next chunk of a piece that has records; return the cursor with the new counts.

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
            # A piece ends exactly at a chunk, and a chunk that was read before a restart has the same number
            # of records: otherwise the file was replaced, and the cursor means other records.
            if (reader.end is not None and chunk.next > reader.end) or (size and len(chunk.records) != size):
                raise _replaced(path, reader.place)
            reader.next = chunk.next
            if not size:  # chunks that were read before a restart were counted then
                good, bad = self._on_chunk(path, reader.place, chunk)
                cursor = replace(cursor, good=good, bad=bad)
            if reader.end is None:
                self._note_fraction(reader, path, chunk)
            shuffled, reader.shuffled = reader.shuffled, None
            if len(chunk.records):
                here = OpenPiece(reader.epoch, reader.file, reader.place)
                reader.records = self._shuffled(chunk.records, here) if shuffled is None else shuffled
                reader.bytes = chunk.records.nbytes
        reader.note_chunk()
        if size:
            reader.skip = skip
        if reader.next == reader.end:
            reader.close()
        return cursor

    def _note_fraction(self, reader: _PieceReader, path: str, chunk: Chunk) -> None:
        if chunk.reached is not None:
            end = min(chunk.reached / max(filesystem.file_size(path), 1), 1.0)
            begin = reader.reached if reader.reached or not reader.place else end
            self._parts[reader.file, reader.place] = (begin, end)
            reader.reached = end

    # Positions

    def save(self, cursor: ShuffleCursor) -> Position:
        return {
            "files": self.digest,
            "windows": [[one.taken, [list(piece) for piece in one.cursors]] for one in cursor.windows],
            "open": [list(one) for one in cursor.open],
            "rest": [list(one) for one in cursor.rest],
            **{name: getattr(cursor, name) for name in _NUMBERS},
            **self._saved_counts(),
        }

    def _saved_counts(self) -> Position:
        """Return how many pieces files have: enough to resume after some, which were read, were deleted."""
        if len(self._paths) > _MOST_COUNTED:
            return {}
        return {"pieces": [-1 if ends is None else len(ends) for ends in self._ends]}

    def read_cursor(self, saved: Position) -> ShuffleCursor:
        """Return the cursor in a position.

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
        cursor = ShuffleCursor(
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
        return cursor

    def redistribute(self, old: Sequence[tuple[Shard, ShuffleCursor]], workers: int) -> list[ShuffleCursor]:
        """Return the remaining records of former workers as cursors of another number of workers.

        Windows and open pieces go to one worker each, from where they were; unopened pieces are distributed
        one by one. From the first epoch on that no worker had started, each worker reads its
        shard of all.
        """
        begun = max(cursor.next_epoch for _, cursor in old)
        windows: list[list[Window]] = [[] for _ in range(workers)]
        pieces: list[list[OpenPiece]] = [[] for _ in range(workers)]
        unopened: list[list[Unopened]] = [[] for _ in range(workers)]
        for window in (one for _, cursor in old for one in cursor.windows):
            min(windows, key=len).append(window)
        for piece in sorted(one for _, cursor in old for one in cursor.open):
            min(pieces, key=len).append(piece)
        for shard, cursor in old:
            later = [Unopened(epoch, *shard) for epoch in range(cursor.next_epoch, begun)]
            for number, one in enumerate((*cursor.rest, *later)):
                size = len(self._plan(Shard(one.worker, one.workers)))
                for turn in range(workers):
                    first = one.first + turn * one.step
                    if first < size:
                        part = one._replace(first=first, step=one.step * workers)
                        unopened[(number + turn) % workers].append(part)
        return [
            ShuffleCursor(
                windows=tuple(windows[worker]),
                open=tuple(pieces[worker]),
                rest=tuple(sorted(unopened[worker])),
                next_epoch=begun,
                # Each count of a former worker goes to one of the new workers.
                **{
                    name: sum(getattr(cursor, name) for _, cursor in old[worker::workers])
                    for name in ("opened", "given", "good", "bad")
                },
            )
            for worker in range(workers)
        ]


_NUMBERS = ("next_epoch", "opened", "given", "good", "bad")


def _listed(saved: object) -> list[Any]:
    if not isinstance(saved, list):
        raise RestoreError(
            "cannot restore a file source: the position is not of a source that shuffles pieces"
        )
    return saved


def _rows(saved: object, kind: type[OpenPiece] | type[Unopened]) -> Iterator[list[int]]:
    for row in _listed(saved):
        if (
            not isinstance(row, list)
            or len(row) != len(kind._fields)
            or not all(isinstance(one, int) and one >= 0 for one in row)
        ):
            raise RestoreError(f"cannot restore a file source: {row!r:.200} is not the rest of a file")
        yield row


def _shifted(cursor: Callable[[int], ShuffleCursor], first: int, number: int) -> ShuffleCursor:
    return cursor(first + number)


def _replaced(path: str, place: int) -> DataError:
    return DataError(
        f"file source: {path} has other records at place {place} than when they were read before; it was "
        "replaced since. Restore the file, or start from the beginning."
    )


class _Interleaved:
    """Collects the records that open pieces give in turn, and orders them in one operation: most of the cost
    is per call and column, and a piece of a text file is small."""

    def __init__(self) -> None:
        self.count = 0
        self._turns: list[_Turns] = []
        self._chunks: dict[int, tuple[_PieceReader, Records, int]] = {}
        """By identity of a chunk: who reads it, its records, and the first of them that is taken."""
        self._order: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        """The number of the chunk, in the order in which they were first seen, and of the record in it."""
        self._numbers: dict[int, int] = {}

    def add(self, readers: Sequence[_PieceReader], cursor: ShuffleCursor) -> tuple[int, int]:
        """Interleave until a piece has no more; return how many records, and which reader comes next."""
        # A hundred pieces may be open, and one of them ends every few hundred records: work on all pieces
        # is done on arrays where it can be.
        width = len(readers)
        skips = np.array([reader.skip for reader in readers])
        self._turns.append(_Turns(self.count, cursor, [reader.chunk for reader in readers], skips))
        # Interleave until the first piece has used up its chunk: reader `number` gives its last record in
        # turn `left - 1`, which is record (left - 1) * width + number.
        left = np.array([reader.chunk.cursor.size for reader in readers]) - skips
        count = min(int(((left - 1) * width + np.arange(width)).min()) + 1, _BLOCK_RECORDS)
        turns, more = divmod(count, width)
        numbers = np.empty(width, np.int64)
        for index, reader in enumerate(readers):
            key = id(reader.chunk)
            number = self._numbers.get(key)
            if number is None:
                number = self._numbers[key] = len(self._numbers)
                self._chunks[key] = (reader, reader.records, reader.skip)
            numbers[index] = number
            reader.skip += turns + (index < more)
        taken = (skips + np.arange(turns)[:, None]).reshape(-1)
        self._order.append(
            (
                np.concatenate([np.tile(numbers, turns), numbers[:more]]),
                np.concatenate([taken, skips[:more] + turns]),
            )
        )
        self.count += count
        return count, more

    def block(self) -> Block[ShuffleCursor]:
        """Return the records in the order of the turns."""
        chunks = [
            # A reader that has the next chunk by now has used up this one.
            (records, first, reader.skip if reader.records is records else len(records))
            for reader, records, first in self._chunks.values()
        ]
        # Concatenate the used range of every chunk, then take all records in one gather: `bases` maps a
        # record number within a chunk to its row in the concatenation.
        sizes = np.array([last - first for _, first, last in chunks])
        bases = np.cumsum(sizes) - sizes - np.array([first for _, first, _ in chunks])
        numbers, taken = (np.concatenate(part) for part in zip(*self._order, strict=True))
        parts = [records.slice(first, last) for records, first, last in chunks if last > first]
        records = concat(parts).take(torch.from_numpy(bases[numbers] + taken))
        firsts = [turns.first for turns in self._turns]

        def cursor_before(number: int) -> ShuffleCursor:
            return self._turns[max(bisect_left(firsts, number) - 1, 0)].cursor(number)

        return Block(records, cursor_before)
