"""The file source: records of many files, in batches of one size, from any position on.

Which files, and in which order, is decided by a `FileOrder` (`order`, `growing`, `leased`):

    a list     sharded among the workers; read in epochs, and continued when it has new files
    a watch    files that are yet to appear, or that grow
    a queue    all workers lease files from it, so that a fast worker reads more

Files are read chunk by chunk (`reading`); `cursors` says what a position contains. A list of files that is
shuffled is read in pieces, in a random order (`pieces`). If the files are not known beforehand, or stay in
their order, blocks of records are shuffled as they come; see `monolith.data.shuffling`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from datetime import timedelta

from monolith import concurrency
from monolith.data.files.bad_records import BadRecordPolicy, RecordChecks, locate_empty_cell
from monolith.data.files.cursors import (
    FileCursor,
    FileSet,
    FormerWorker,
    distribute,
    read_shard_of,
    saved_cursor,
    shard_of,
)
from monolith.data.files.discovery import Watch
from monolith.data.files.growing import GrowingFiles, growing_text
from monolith.data.files.leased import LeasedFiles
from monolith.data.files.order import FileOrder, ListedFiles, ReadProgress, Step, WatchedFiles
from monolith.data.files.pieces import ShuffleCursor, ShuffledPieces
from monolith.data.files.reading import FileReader
from monolith.data.files.reading_ahead import default_threads
from monolith.data.files.work_queue import FileQueue
from monolith.data.format import BadRecord, Format
from monolith.data.records import Records
from monolith.data.shuffling import Batcher, Block, Epochs, ShuffleConfig, check_epochs_unset
from monolith.data.source import (
    AskedAhead,
    Position,
    Predicate,
    Shard,
    ShardChoice,
    Source,
    WorkQueueSource,
    closed_after,
)
from monolith.errors import ConfigError, DataError, NotRepeatableError, RestoreError
from monolith.observe import Metrics

_log = logging.getLogger(__name__)

_DEFAULT_PIECE_BYTES = (ShuffleConfig().piece_bytes, 128 << 10)
"""That of now, and that of versions whose positions are read."""


def _pieces_setting(shuffle: ShuffleConfig) -> list[object]:
    """Return what the order of shuffled pieces depends on, as it is in a position."""
    return [shuffle.seed, shuffle.buffer, f"pieces of {shuffle.piece_bytes} bytes"]


class FileSource(Source, WorkQueueSource):
    r"""Records of files, in batches.

    Args:
        files: Paths; or a watch over patterns; or a queue. Paths are sorted, and path i is for worker i
            modulo `num_workers`. A watch shards by a hash of the name, since the number of files is
            unknown.
        columns: To read; None for all. One that a table does not have is named in a warning.
        worker: Which of `num_workers` this is; by default `read_shard` decides.
            For a queue it is a name: a worker that starts under a name gets the files that were leased to
            that name before, so give it only if it is unique, such as the rank. Without it, the leases of
            a process that died expire; the only worker of a run with a model_dir has the name of its run.
        batch_size: Records per batch, across the ends of files and epochs. Only the last is shorter,
            and with a watch a batch that waited for `max_wait`.
        epochs: How often to read a list; None without end.
        drop_remainder: Drop batches that are shorter.
        auto_commit: With a queue, report progress at the end of each chunk that the consumer has finished.
            Only for a loop that is never restored: a trainer calls `commit` with each checkpoint, and
            records after the last one must come again if it is killed.
        max_wait: With a watch, how long the first record of a batch waits for the rest of it, before the
            batch is yielded as it is; None does not wait.
        clock: Seconds that only grow.
        threads: How many parse files ahead, and make batches ahead if `to_batches` does not say; 0 does it in
            the thread that iterates. None takes three of four cores of the machine, up to 16, as
            `data.threads` of a config does. Records, batches and their order do not depend on it.

    Examples:
        >>> from pathlib import Path
        >>> from monolith import FileSource
        >>> from monolith.data import format_of
        >>> _ = Path("clicks.csv").write_text("user,price\n17,0.5\n18,2.0\n19,1.0\n")
        >>> source = FileSource(["clicks.csv"], format_of("clicks.csv"), batch_size=2)
        >>> for records in source:
        ...     print(records["user"].flat_values)
        tensor([17, 18])
        tensor([19])
        >>> source.position()["file"]
        'clicks.csv'
    """

    def __init__(  # noqa: PLR0913  keywords that users write; see decision 0065
        self,
        files: Sequence[str] | Watch | FileQueue,
        format: Format,  # noqa: A002  it is one
        *,
        batch_size: int,
        columns: Sequence[str] | None = None,
        worker: int | None = None,
        num_workers: int | None = None,
        epochs: int | None = 1,
        shuffle: ShuffleConfig | None = None,
        drop_remainder: bool = False,
        bad: BadRecordPolicy | None = None,
        auto_commit: bool = False,
        max_wait: timedelta | None = None,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = concurrency.monotonic,
        threads: int | None = None,
    ) -> None:
        threads = default_threads() if threads is None else threads
        if threads < 0:
            raise ConfigError(f"file source: threads must be 0 or more, got {threads}")
        if batch_size < 1:
            raise ConfigError(f"file source: batch_size must be at least 1, got {batch_size}")
        if max_wait is not None and max_wait < timedelta(0):
            raise ConfigError(f"file source: max_wait must not be negative, got {max_wait}")
        self._choice = ShardChoice("file source", worker, num_workers)
        if epochs is not None and epochs < 1:
            raise ConfigError(f"file source: epochs must be at least 1, or None for ever, got {epochs}")
        if isinstance(files, str):
            files = [files]
        if not isinstance(files, Sequence) and epochs != 1:
            raise ConfigError(f"file source: a watch or a queue is read once, got {epochs} epochs")
        grows = False
        if isinstance(files, Watch) and files.grows:
            grows = True  # little is appended at a time, and a file is opened for each of it
            if shuffle is not None:
                raise ConfigError("file source: files that grow are read in their order; leave shuffle out")
            format = growing_text(format, files.patterns)  # noqa: A001  as above
        self._format = format
        self._columns = None if columns is None else list(columns)
        self._checks = RecordChecks(bad, self._columns, metrics)
        self._asked: list[AskedAhead] = []
        parsing = 0 if grows else threads
        self._reader = FileReader(format, self._columns, self._checks, parsing, self._asked)
        self._batch_size = batch_size
        self._epochs = epochs
        self._shuffle = shuffle
        self._drop_remainder = drop_remainder
        self._max_wait = 0.0 if max_wait is None else max_wait.total_seconds()
        self._clock = clock
        self._threads = threads
        self._closed = False

        # Which files are read. Of these, `_paths`, `_file_set`, `_progress` and `_pieces` are for lists only.
        self._stop = concurrency.Event()
        """Set to read no more in place of waiting."""
        self._order: FileOrder
        self._queue: LeasedFiles | None = None
        self._paths = sorted(files) if isinstance(files, Sequence) else None
        self._file_set = FileSet()
        self._progress: ReadProgress | None = None
        self._pieces: ShuffledPieces | None = None
        """Reads the files, if they are a list that is shuffled."""
        self._old_shuffle = False
        """Whether it does not after all: the position is of a version that shuffled block by block."""
        if isinstance(files, Sequence):
            self._use_list(files)
        elif isinstance(files, Watch):
            self._order = GrowingFiles(files) if files.grows else WatchedFiles(files)
        else:
            self._order = self._queue = LeasedFiles(files, worker, auto_commit=auto_commit)

        # The position: the settings that it depends on (empty until the shard is settled), and a cursor.
        self._settings: Position = {}
        self._adopted: list[int] | None = None
        """The shard of a former worker whose remaining records are read."""
        self._only_worker = True
        self._cursor = FileCursor()
        self._shuffle_cursor = ShuffleCursor()

    # Shards, epochs, and the files of a list

    def read_for(self, run: str) -> None:
        """Lease files of a queue under the name of a run, unless `worker` or the shard gives a number."""
        if self._queue is not None:
            self._queue.read_for(run)

    def read_until(self, stop: concurrency.Event) -> None:
        self._stop = stop

    def read_shard(self, shard: Shard) -> None:
        """Read one shard: of a list or a watch, its files; of a queue, any files, under the worker's name."""
        self._choice.choose(shard)

    def read_epochs(self, epochs: Epochs) -> None:
        """Read a list several times; see `Epochs`. An order of its own, if it has one, stays."""
        if self._paths is None:
            raise NotRepeatableError("a file source with a watch or a queue is read once")
        check_epochs_unset("file source", self._epochs, settled=bool(self._settings))
        self._epochs = epochs.count
        self._shuffle = self._shuffle or epochs.shuffle
        self._use_list(self._paths)

    def _use_list(self, paths: Sequence[str]) -> None:
        self._order = order = ListedFiles(paths, self._epochs, self._shuffle)
        self._progress = ReadProgress(order)
        self._file_set = FileSet(tuple(sorted(paths)))
        self._pieces = self._pieces_of(self._file_set)

    def _pieces_of(self, file_set: FileSet) -> ShuffledPieces | None:
        """Return the files of a set in shuffled pieces; None if files are not shuffled over their length."""
        if self._shuffle is None or not self._shuffle.files:
            return None
        return ShuffledPieces(
            file_set.files,
            self._format,
            available=frozenset(self._paths or ()),
            columns=self._columns,
            epochs=self._epochs,
            shuffle=self._shuffle,
            on_chunk=self._reader.check_piece,
            on_empty=self._checks.note_empty,
        )

    def _use_file_set(self, file_set: FileSet) -> None:
        """Read the files of a set, although the list may have more."""
        if file_set.files != self._file_set.files:
            self._use_list(file_set.files)
            self._order.assign(read_shard_of(self._adopted or self._settings["shard"]))
        self._file_set = file_set

    def _continue_with(self, file_set: FileSet) -> bool:
        """Continue with the file set of a position; return whether a set of new files starts instead.

        New files are a set of their own, read after this one: the files that are shuffled, or divided among
        workers, must be the same until all of them are read.
        """
        assert self._paths is not None
        new = [one for one in self._paths if one not in file_set.known]
        if file_set.ended and new and self._only_worker:
            _log.info(
                "file source: reading %d new files; %d were trained on before and are not read again",
                len(new),
                len(file_set.known),
            )
            there = file_set.known.intersection(self._paths)
            self._use_file_set(FileSet(tuple(new), tuple(sorted(there))))
            return True
        if new and not self._only_worker:
            _log.warning(
                "file source: %d new files, such as %s, are not read: the files were divided among several "
                "workers when they started. Set data.watch to train on files that appear later.",
                len(new),
                new[0],
            )
        self._use_file_set(file_set)
        return False

    def _files_from(self, cursor: FileCursor) -> set[str]:
        """Return the files of a list that are read from a cursor on."""
        found: set[str] = set()
        step: FileCursor | Step = cursor if cursor.file is not None else self._order.after(cursor)
        while isinstance(step, FileCursor) and step.file is not None and step.round <= cursor.round + 1:
            found.add(step.file)  # the next epoch has all of them, so later epochs add none
            step = self._order.after(step)
        return found

    def _check_available(self, files: Iterable[str]) -> None:
        """Refuse a position that names files to read which the list does not have.

        Also one that was made up: a source opens no file that it would not have found by itself.
        """
        gone = sorted(set(files).difference(self._paths or ()))
        if gone:
            which = "is" if len(gone) == 1 else f"and {len(gone) - 1} more are"
            raise RestoreError(
                f"cannot restore a file source: {gone[0]} {which} not among the files of this source: "
                "deleted, renamed, or not of its path any more, before all of it was trained on. Put it "
                "back; or, to read all files that are there from their start, start a new model_dir from "
                "this one with restore.dir and restore.restart_data."
            )

    def _settle(self) -> None:
        """Assign the files of this worker, on first use; from then on its shard stays the same."""
        if not self._settings:
            shard = self._choice.settle()
            self._order.assign(shard)
            self._only_worker = shard.workers == 1
            self._settings = {"source": "files", "shuffle": self._shuffle_setting(), "shard": list(shard)}

    # Reading

    def __iter__(self) -> Iterator[Records]:
        if self._closed:
            raise DataError("file source: cannot read, it was closed")
        self._settle()
        while not self._file_set.ended:
            pieces = self._shuffled_pieces
            yield from self._read_in_order() if pieces is None else self._read_shuffled(pieces)
            if self._paths is None:
                return
            self._file_set = replace(self._file_set, ended=True)
            if self._continue_with(self._file_set):
                good, bad = self._reader.reached.good, self._reader.reached.bad
                self._cursor = self._reader.reached = FileCursor(good=good, bad=bad)
                self._shuffle_cursor = ShuffleCursor(good=good, bad=bad)

    def _read_in_order(self) -> Iterator[Records]:
        """Yield the records of one file set of a list; of a watch or a queue, all that will come.

        The cursor moves before each yield, so a position that is taken while the consumer has a batch
        includes that batch. The order learns that a batch was consumed when the consumer asks for the next.
        """
        self._order.rewind(self._cursor)
        batcher: Batcher[FileCursor] = Batcher(self._batch_size)
        due = 0.0  # when the buffered records have waited long enough
        flushes = self.live and self._max_wait > 0  # also if the stream never pauses
        stop = self._stop  # of this iteration; a later one may have another
        read = self._reader.blocks(self._order, self._cursor, self._shuffle, self._progress, stop)
        with closed_after(read) as blocks:
            for block in blocks:
                waits = isinstance(block, FileCursor)  # there is nothing more for now
                if waits and stop.is_set():
                    return  # the cursor is before the records that were read and not yielded
                if isinstance(block, Block):
                    had_some = not batcher.is_empty
                    for batch, self._cursor in batcher.add(block):
                        yield batch
                        self._order.consumed(self._cursor, ended=False)
                        had_some = False
                    if not batcher.is_empty and not had_some:
                        due = self._clock() + self._max_wait
                if not waits and not (flushes and not batcher.is_empty):
                    continue
                if not batcher.is_empty and (self._drop_remainder or self._clock() < due):
                    continue
                self._cursor = block.cursor(len(block.records)) if isinstance(block, Block) else block
                if (rest := batcher.rest()) is not None:
                    yield rest
                self._order.consumed(self._cursor, ended=waits)
        self._finish_checks()
        self._cursor = self._reader.reached
        if (rest := batcher.rest()) is not None and not self._drop_remainder:
            if self._paths is not None:
                self._file_set = replace(self._file_set, ended=True)
            yield rest
        self._order.consumed(self._cursor, ended=True)

    def _read_shuffled(self, pieces: ShuffledPieces) -> Iterator[Records]:
        """Yield the batches of a list of files that is shuffled."""
        batcher: Batcher[ShuffleCursor] = Batcher(self._batch_size)
        shard = self._shard_in(self.position())
        with closed_after(pieces.blocks(self._shuffle_cursor, shard, self._threads, self._asked)) as blocks:
            for block in blocks:
                for batch, self._shuffle_cursor in batcher.add(block):
                    yield batch
        self._finish_checks()
        rest, reached = batcher.rest(), self._reader.reached
        given = self._shuffle_cursor.given + (0 if rest is None else len(rest))
        ended = replace(self._shuffle_cursor, given=given, good=reached.good, bad=reached.bad)
        self._shuffle_cursor = pieces.end(ended)
        self._file_set = replace(self._file_set, ended=True)
        if rest is not None and not self._drop_remainder:
            yield rest

    def _finish_checks(self) -> None:
        reached = self._reader.reached
        self._checks.finish(
            reached.good, reached.bad, has_all_files=self._only_worker, last_file=reached.file
        )

    @property
    def _shuffled_pieces(self) -> ShuffledPieces | None:
        """The reader of pieces; None if files are read one after the other."""
        return None if self._old_shuffle else self._pieces

    # Positions

    def position(self) -> Position:
        self._settle()
        adopted = {} if self._adopted is None else {"adopted": self._adopted}
        pieces = self._shuffled_pieces
        if pieces is not None:
            where = pieces.save(self._shuffle_cursor)
        else:
            where = {**saved_cursor(self._cursor), **self._order.save(self._cursor)}
        return {**self._settings, **adopted, **where, **self._file_set.saved()}

    def restore(self, position: Position) -> None:
        self._settle()
        self._detect_old_shuffle(position)
        # A refused position must leave the source as it was: everything that changes on the way is restored.
        before = self._order, self._progress, self._pieces, self._file_set, self._adopted
        try:
            if self._shuffled_pieces is not None:
                self._check_settings(position)
                self._adopted = None if "adopted" not in position else list(shard_of(position))
                self._shuffle_cursor = cursor = self._restore_shuffled(position)
                self._reader.reached = FileCursor(good=cursor.good, bad=cursor.bad)
                return
            file_cursor = self._read_cursor(position)
            if (adopted := position.get("adopted")) != self._adopted:
                self._order.assign(read_shard_of(self._settings["shard"] if adopted is None else adopted))
                self._adopted = adopted
            self._cursor = self._reader.reached = self._restore_in_order(position, file_cursor)
        except RestoreError:
            self._order, self._progress, self._pieces, self._file_set, self._adopted = before
            raise

    def _restore_shuffled(self, position: Position) -> ShuffleCursor:
        """Restore the file set of a shuffled list, and return the cursor to resume from."""
        file_set = FileSet.read(position)
        if file_set is None:
            self._file_set = replace(self._file_set, ended=False)
        else:
            self._use_file_set(file_set)
        pieces = self._shuffled_pieces
        assert pieces is not None
        cursor = pieces.read_cursor(position)
        if file_set is None:
            return cursor
        if not pieces.is_over(cursor):
            file_set = replace(file_set, ended=False)  # there are more epochs than there were
        if self._continue_with(file_set):
            return ShuffleCursor(good=cursor.good, bad=cursor.bad)
        if not file_set.ended:
            self._check_available(pieces.files_from(cursor, self._shard_in(position)))
        return cursor

    def _restore_in_order(self, position: Position, cursor: FileCursor) -> FileCursor:
        """Restore the order of files, and return the cursor to resume from."""
        file_set = None if self._paths is None else FileSet.read(position)
        if file_set is None:
            self._file_set = replace(self._file_set, ended=False)
            self._order.restore(position, cursor)
            return cursor
        if self._epochs is None or cursor.round + 1 < self._epochs:
            file_set = replace(file_set, ended=False)  # there are more epochs than there were
        if self._continue_with(file_set):
            return FileCursor(good=cursor.good, bad=cursor.bad)
        if not (file_set.ended and cursor.round + 1 > (self._epochs or 1)):
            self._order.restore(position, cursor)
        if not file_set.ended:
            self._check_available(self._files_from(cursor))
        return cursor

    def _detect_old_shuffle(self, position: Position) -> None:
        """Shuffle as the version did that saved a position, in smaller pieces or block by block: a run keeps
        its order."""
        if self._pieces is None or not isinstance(position, Mapping):
            return
        assert self._shuffle is not None
        for piece_bytes in _DEFAULT_PIECE_BYTES:
            other = replace(self._shuffle, piece_bytes=piece_bytes)
            if (
                position.get("shuffle") == _pieces_setting(other)
                and self._shuffle.piece_bytes in _DEFAULT_PIECE_BYTES
                and other != self._shuffle
            ):
                self._shuffle = other
                self._pieces = self._pieces_of(self._file_set)
        is_old = position.get("shuffle") == [self._shuffle.seed, self._shuffle.buffer, True]
        if is_old and not self._old_shuffle:
            _log.warning(
                "file source: the checkpoint is of a version that shuffled %d records at a time, and the run "
                "resumes in that order. To mix files over their whole length, start a new run from this "
                "checkpoint with restore.dir and restore.restart_data.",
                self._shuffle.buffer,
            )
        self._old_shuffle = is_old
        self._settings["shuffle"] = self._shuffle_setting()

    def _shuffle_setting(self) -> list[object] | None:
        """Return the settings that the order of records depends on, for a position."""
        shuffle = self._shuffle
        if shuffle is None:
            return None
        if self._shuffled_pieces is not None:
            return _pieces_setting(shuffle)
        return [shuffle.seed, shuffle.buffer, shuffle.files]

    def _shard_in(self, position: Position) -> Shard:
        """Return the shard that the worker of a position reads, which is not its own if it was adopted."""
        return read_shard_of(position.get("adopted", self._settings.get("shard", position.get("shard"))))

    def _check_settings(self, position: Position, *, same_shard: bool = True) -> None:
        """Refuse a position of a source with other settings.

        Args:
            same_shard: Whether it must be of the same shard, too, unless it was adopted.
        """
        if not isinstance(position, Mapping) or position.get("source") != "files":
            raise RestoreError(f"cannot restore a file source from {position!r:.200}: not a position of one")
        ignored = set() if same_shard and "adopted" not in position else {"shard"}
        for name, value in self._settings.items():
            if name not in ignored and (name not in position or position[name] != value):
                raise RestoreError(
                    f"cannot restore a file source: the position was taken with {name} "
                    f"{position.get(name)}, this one has {value}. Use the same settings, or start from the "
                    "beginning."
                )

    def _read_cursor(self, position: Position, *, same_shard: bool = True) -> FileCursor:
        """Return the cursor in a position of a source with the same settings; see `_check_settings`."""
        self._check_settings(position, same_shard=same_shard)
        if missing := [field.name for field in fields(FileCursor) if field.name not in position]:
            raise RestoreError(f"cannot restore a file source: the position lacks {', '.join(missing)}")
        numbers = {field.name: position[field.name] for field in fields(FileCursor)}
        file = numbers.pop("file")
        if not (file is None or isinstance(file, str)) or not all(
            isinstance(number, int) and number >= 0 for number in numbers.values()
        ):
            raise RestoreError(f"cannot restore a file source: malformed numbers in {position!r:.200}")
        return FileCursor(file=file, **numbers)

    def commit(self, position: Position) -> None:
        """Report to the queue that all records before a position count; without a queue, do nothing.

        For a position that was just saved: another worker resumes from it if this one dies.
        """
        self._order.commit(position)

    # Another number of workers

    def redistribute(self, positions: Sequence[Position], workers: int) -> list[Position]:
        """Return the records that several workers had left as positions of another number of workers.

        Files, or pieces of them, are distributed evenly from the places reached; the files of a shuffled
        block stay together. From the first epoch on that no worker had started, each worker reads its shard
        of all files. A queue is told the positions, and leases the remaining files by itself.

        Raises:
            RestoreError: They are not those of all workers; the files have changed; or `num_workers` of
                this source says otherwise.
        """
        self._settle()
        shard = Shard(*self._settings["shard"])
        if shard.workers != workers:
            raise RestoreError(f"the file source has num_workers {shard.workers}, this run has {workers}")
        for one in positions:
            self._detect_old_shuffle(one)
        shards = [shard_of(one) for one in positions]
        if self._queue is None and shards != [Shard(number, len(shards)) for number in range(len(shards))]:
            raise RestoreError(
                f"the positions are of shards {', '.join(str(list(one)) for one in shards)} of the files, "
                "which are not all"
            )
        sets = [] if self._paths is None else [FileSet.read(one) for one in positions]
        file_set = next((one for one in sets if one is not None), None)
        if file_set is not None:
            ended = all(one is not None and one.ended for one in sets)
            file_set = replace(file_set, ended=ended)
            self._use_file_set(file_set)
        if (pieces := self._shuffled_pieces) is not None:
            found = self._redistribute_pieces(pieces, positions, workers)
        else:
            found = self._redistribute_files(positions, workers, over=file_set is not None and file_set.ended)
        saved = {} if file_set is None else file_set.saved()
        return [
            {**self._settings, "shard": [worker, workers], **one, **saved} for worker, one in enumerate(found)
        ]

    def _redistribute_pieces(
        self, pieces: ShuffledPieces, positions: Sequence[Position], workers: int
    ) -> list[Position]:
        for one in positions:
            self._check_settings(one, same_shard=False)
        former = [(shard_of(one), pieces.read_cursor(one)) for one in positions]
        cursors = pieces.redistribute(former, workers)
        for worker, cursor in enumerate(cursors):
            self._check_available(pieces.files_from(cursor, Shard(worker, workers)))
        return [pieces.save(cursor) for cursor in cursors]

    def _redistribute_files(
        self, positions: Sequence[Position], workers: int, *, over: bool
    ) -> list[Position]:
        former = [
            FormerWorker(shard_of(one), one, self._read_cursor(one, same_shard=False)) for one in positions
        ]
        remaining = [[] for _ in former] if over else self._order.remaining(former)
        if self._paths is not None:
            self._check_available(one.file for files in remaining for one in files)
        groups = [group for files in remaining for group in self._reader.group(files)]
        found: list[Position] = []
        for worker, files in enumerate(distribute(groups, workers)):
            counted = [one.cursor for one in former[worker::workers]]  # each count goes to one new worker
            cursor = replace(
                files[0].cursor() if files else FileCursor(),
                good=sum(one.good for one in counted),
                bad=sum(one.bad for one in counted),
            )
            begin = self._order.begin(former, files, Shard(worker, workers))
            found.append({**saved_cursor(cursor), **begin})
        return found

    def adopt(self, position: Position, end: Position | None = None) -> Position:  # noqa: ARG002
        """Return a position from which this source reads the files of another worker, in its order.

        Raises:
            RestoreError: The files were leased from a queue, which may have leased them again by now.
        """
        if self._queue is not None:
            raise RestoreError(
                "the records that a stage on top of a queue of files buffers cannot be moved; use the "
                "batch_size and the shuffle of FileSource instead of rebatch and shuffle of a pipeline"
            )
        return {**position, "adopted": list(shard_of(position))}

    # The work queue. These are called only if `work_queue` is this source.

    @property
    def work_queue(self) -> WorkQueueSource | None:
        """This source, if it reads a queue that is told which positions were saved."""
        return self if self._queue is not None and not self._queue.auto_commit else None

    def give_back(self, position: Position) -> Position:
        """Give the unfinished files of a worker back to the queue, from the places it had reached."""
        assert self._queue is not None
        self._settle()
        cursor = self._read_cursor(position, same_shard=False)
        self._queue.give_back(FormerWorker(shard_of(position), position, cursor))
        return {**position, **saved_cursor(FileCursor(good=cursor.good, bad=cursor.bad)), "finished": []}

    def defer_to_chief(self) -> None:
        assert self._queue is not None
        self._queue.defer_to_chief()

    def interrupt(self) -> None:
        assert self._queue is not None
        self._queue.interrupt()

    def ask_ahead(self, predicate: Predicate) -> Predicate:
        if not self._threads:
            return predicate
        self._asked.append(AskedAhead(predicate))
        return self._asked[-1]

    # Facts about the data

    @property
    def reads_again(self) -> bool:
        return self._epochs != 1

    @property
    def repeats_order(self) -> bool:
        return self._order.repeats_order

    @property
    def live(self) -> bool:
        return self._order.live

    @property
    def batch_threads(self) -> int:
        """As many as parse; 0 with `auto_commit`, which takes records that were read for trained."""
        return 0 if self._queue is not None and self._queue.auto_commit else self._threads

    @property
    def trouble(self) -> str:
        return self._order.trouble

    def size(self) -> int | None:
        """Return how many records a list of files has in all epochs; None if only reading them would tell."""
        if self._paths is None or not self._only_worker or self._epochs is None:
            return None
        total = 0
        for path in self._file_set.files:
            if (count := self._format.count(path)) is None:
                return None
            total += count
        return total * self._epochs

    def fraction_read(self, position: Position, records: int = 0) -> float | None:
        """Return the fraction of the bytes of a list of files that precedes a position."""
        if self._pieces is not None and "open" in position:
            if position.get("files") != self._pieces.digest:
                return None  # it is of an earlier file set
            cursor = self._pieces.read_cursor(position)
            return self._pieces.fraction(cursor, self._shard_in(position), records)
        if self._progress is None:
            return None
        return self._progress.fraction(self._read_cursor(position, same_shard=False), records)

    def reject(self, bad: Sequence[BadRecord]) -> None:
        self._checks.reject(bad, self._reader.reached.file)

    def find_empty_cell(self, column: str) -> str | None:
        """Return where the first empty cell of a column is, in the current file or the one before it; None if
        there is none. Reads them again."""
        paths = sorted(self._paths or ())
        file = self._reader.reached.file
        before = paths[paths.index(file) - 1 : paths.index(file)] if file in paths else []
        for path in [] if file is None else [file, *before]:
            with suppress(DataError, OSError):  # the place only helps a message, so its search must not fail
                if (place := locate_empty_cell(self._format, path, column)) is not None:
                    return f"{place} of {path}"
        return None

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._order.close()
