"""Reading files chunk by chunk, in the order that a `FileOrder` says, and shuffling them block by block.

    FileOrder.after(cursor) ──► file ──Format.parts──► chunks ──Shuffler──► blocks of records with cursors

With threads, parts of the file are parsed ahead (`reading_ahead`); of a list of files, also of the next ones.

A reader waits for files that are yet to appear: it yields a cursor while there is nothing to read, so that
the source can yield a batch that is not full. Lists of files that are shuffled as a whole are read by
`pieces`."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

from monolith.concurrency import Event
from monolith.data.files.bad_records import RecordChecks
from monolith.data.files.cursors import FileCursor, RemainingFile, block_of
from monolith.data.files.order import FileOrder, ReadProgress, Step
from monolith.data.files.reading_ahead import InOrder
from monolith.data.format import Chunk, Format, Part
from monolith.data.shuffling import Block, ShuffleConfig, ShuffledBlock, Shuffler, permutation
from monolith.data.source import AskedAhead, closed_after
from monolith.errors import DataError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _ReadChunk:
    """A chunk and the cursor before it; or no chunk, at the end of a file or while waiting for one."""

    cursor: FileCursor
    chunk: Chunk | None = None
    waits: bool = False


class _FileChunks:
    """The chunks of one file after the other, parsed ahead if there are threads.

    Of a list of files it is known which file is next, so the threads continue with that one.
    """

    def __init__(
        self,
        form: Format,
        columns: Sequence[str] | None,
        threads: int,
        order: FileOrder,
        asked: Sequence[AskedAhead],
    ) -> None:
        self._form, self._columns, self._order = form, columns, order
        self._asked = asked
        self._threads = threads
        self._ahead: InOrder[tuple[Sequence[Chunk], bool]] | None = None
        """Yields chunks, and whether their file ends with them."""

    def of(self, cursor: FileCursor) -> Iterator[Chunk]:
        """Yield the chunks of the file of a cursor from there on; call it for each file, in their order."""
        assert cursor.file is not None
        if not self._threads:
            yield from self._form.chunks(cursor.file, start=cursor.place, columns=self._columns)
            return
        if self._ahead is None:
            self._ahead = InOrder(self._threads, "monolith-read", self._tasks(cursor))
        ended, size = False, 0
        try:
            while not ended and (found := self._ahead.take(size)) is not None:
                chunks, ended = found
                size = sum(chunk.records.nbytes for chunk in chunks) or size
                yield from chunks
        finally:
            if not ended or not self._order.repeats_order:
                self.close()

    def _tasks(self, cursor: FileCursor) -> Iterator[Callable[[], tuple[Sequence[Chunk], bool]]]:
        while True:
            assert cursor.file is not None
            for part in self._form.parts(cursor.file, start=cursor.place, columns=self._columns):
                yield partial(_parse, part, self._asked)
            yield _end_file
            # Only a list says what is next without a side effect, such as a lease.
            step = self._order.after(cursor) if self._order.repeats_order else Step.END
            if not isinstance(step, FileCursor):
                return
            cursor = step

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None


def _parse(part: Part, asked: Sequence[AskedAhead]) -> tuple[Sequence[Chunk], bool]:
    chunks = part()
    for chunk in chunks:
        chunk.records.prepare()
        for one in asked:
            one.look(chunk.records)
    return chunks, False


def _end_file() -> tuple[Sequence[Chunk], bool]:
    return (), True


class FileReader:
    """Reads files chunk by chunk, and checks what it reads.

    `reached` is how far the files were read. The consumer may be behind it: records are buffered to shuffle
    them and to fill batches. Positions are therefore made of the cursors of blocks, never of `reached`.
    """

    def __init__(
        self,
        form: Format,
        columns: Sequence[str] | None,
        checks: RecordChecks,
        threads: int = 0,
        asked: Sequence[AskedAhead] = (),
    ) -> None:
        self._form = form
        self._columns = columns
        self._checks = checks
        self._threads = threads
        self._asked = asked
        self.reached = FileCursor()

    def blocks(
        self,
        order: FileOrder,
        cursor: FileCursor,
        shuffle: ShuffleConfig | None,
        progress: ReadProgress | None,
        stop: Event,
    ) -> Iterator[Block[FileCursor] | FileCursor]:
        """Yield blocks of records from a cursor on; and a cursor whenever there is nothing to read yet.

        Args:
            stop: Ends a wait for files; the consumer ends the reading at the cursor it is given then.
        """
        reads = self._chunks(order, cursor, progress, stop)
        for read in reads if shuffle is None else self._shuffled(reads, order, shuffle):
            if isinstance(read, Block):
                yield read
            elif read.chunk is not None:
                yield block_of(read.cursor, read.chunk)
            elif read.waits:
                yield read.cursor

    def _shuffled(
        self, reads: Iterator[_ReadChunk], order: FileOrder, config: ShuffleConfig
    ) -> Iterator[Block[FileCursor] | _ReadChunk]:
        """Yield shuffled blocks, and a read without a chunk whenever there is nothing yet."""
        shuffler: Shuffler[FileCursor] = Shuffler(
            config.buffer,
            lambda begin, size: permutation(size, config.seed, *_shuffle_key(begin)),
            lambda begin: f"file source: {begin.file}",
        )
        for read in reads:
            begun = shuffler.begin
            # A block must be the same after a restart. So it ends where the next file may be another one,
            # where reading waits, at the end of an epoch, and where a block of a former worker begins.
            ends = read.chunk is None and (read.waits or not order.shuffles_across_files)
            ends = ends or bool(read.cursor.length)
            if begun is not None and (ends or read.cursor.round != begun.round):
                yield from _with_cursors(shuffler.end(read.cursor))
            if read.chunk is None:
                yield read
                continue
            for block in shuffler.add(block_of(read.cursor, read.chunk)):
                yield from _with_cursors(block)
        yield from _with_cursors(shuffler.end(self.reached))

    def _chunks(
        self, order: FileOrder, cursor: FileCursor, progress: ReadProgress | None, stop: Event
    ) -> Iterator[_ReadChunk]:
        """Yield chunks from a cursor on, the end of each file, and a sign whenever there is nothing yet."""
        self.reached = cursor
        if progress is not None:
            progress.restart()
        with closing(_FileChunks(self._form, self._columns, self._threads, order, self._asked)) as files:
            while True:
                if cursor.file is not None and not order.is_lost(cursor):
                    begun, found = cursor.place, False
                    with closed_after(files.of(cursor)) as chunks:
                        for chunk in chunks:
                            found = found or bool(len(chunk.records) or chunk.bad)
                            self._check(cursor, chunk)
                            if progress is not None:
                                progress.note(cursor, chunk)
                            yield _ReadChunk(cursor, chunk)
                            cursor = self.reached
                            if order.is_lost(cursor):
                                _log.warning(
                                    "file source: the lease on %s expired; another worker continues the file",
                                    cursor.file,
                                )
                                break
                    if not begun and not found and not order.grows and cursor.file is not None:
                        self._checks.note_empty(cursor.file)
                    yield _ReadChunk(cursor)
                step = order.after(cursor)
                while step is Step.WAIT:
                    yield _ReadChunk(cursor, waits=True)
                    order.wait(stop)
                    if stop.is_set():
                        yield _ReadChunk(cursor, waits=True)
                    step = order.after(cursor)
                if not isinstance(step, FileCursor):
                    return
                # The counts are those of this reader, across files.
                cursor = self.reached = replace(step, good=cursor.good, bad=cursor.bad)

    def _check(self, cursor: FileCursor, chunk: Chunk) -> None:
        assert cursor.file is not None
        self._checks.check_columns(self._form, cursor.file, chunk.records)
        if cursor.skip > len(chunk.records):
            raise DataError(
                f"file source: {cursor.file} has {len(chunk.records)} records at place {cursor.place}, but "
                f"{cursor.skip} of them were read before; it was replaced since. Start from the beginning."
            )
        self.reached = cursor.past(chunk)
        self._checks.read(cursor.file, cursor.place, chunk, self.reached.good, self.reached.bad)

    def check_piece(self, path: str, place: int, chunk: Chunk) -> tuple[int, int]:
        """Check a chunk that `pieces` read; return how many good and bad records were read by now."""
        self._check(replace(self.reached, file=path, place=place, skip=0), chunk)
        return self.reached.good, self.reached.bad

    def group(self, remaining: Sequence[RemainingFile]) -> Iterator[list[RemainingFile]]:
        """Yield which of the files that one worker had left must stay together: those of one shuffled
        block."""
        while remaining:
            files, missing = 0, remaining[0].length
            while not files or (missing > 0 and files < len(remaining)):
                if remaining[0].length:
                    missing -= self._count(remaining[files], missing)
                files += 1
            yield list(remaining[:files])
            remaining = remaining[files:]

    def _count(self, remaining: RemainingFile, enough: int) -> int:
        """Return how many records are left of a file; counting stops at `enough`."""
        found = -remaining.skip
        reader = self._form.chunks(remaining.file, start=remaining.place, columns=self._columns)
        with closed_after(reader) as chunks:
            for chunk in chunks:
                found += len(chunk.records)
                if found >= enough:
                    break
        return found


def _with_cursors(block: ShuffledBlock[FileCursor] | None) -> Iterator[Block[FileCursor]]:
    """Yield a shuffled block with the cursors between its records: its first cursor and the records taken."""
    if block is None:
        return
    begin, end, size = block.begin, block.end, len(block.records)

    def cursor(number: int) -> FileCursor:
        return end if number == size else replace(begin, length=size, taken=number)

    yield Block(block.records, cursor, block.first)


def _shuffle_key(begin: FileCursor) -> tuple[int, int, int, int]:
    """Return the numbers that decide the order of a block, in addition to the seed."""
    assert begin.file is not None
    return begin.round, zlib.crc32(begin.file.encode()), begin.place, begin.skip
