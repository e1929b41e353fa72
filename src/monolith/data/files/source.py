"""The file source: records of many files, in batches of one size, from any position on.

Files are read chunk by chunk; see `cursors` for what a position contains. A list of files that is shuffled is
read in pieces, in a random order: see `pieces`. If the files are not known beforehand, or keep their order,
stretches of records are shuffled as they come; see `monolith.data.shuffling`.

Which files, and in which order, is decided by one of these (`order`, `growing`, `queued`):

    a list     sharded among the workers; read several times, and again when it has new files
    a watch    files that are yet to appear, or that grow
    a queue    that all workers take files from, so that a fast worker reads more
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from itertools import islice

from monolith.data.files.bad_records import BadRecordPolicy, locate_empty_cell, quarantine
from monolith.data.files.bytes_read import BytesRead
from monolith.data.files.cursors import (
    FileCursor,
    Left,
    OldWorker,
    Pass,
    block_of,
    deal,
    read_saved_shard,
    saved_cursor,
    shard_of,
)
from monolith.data.files.discovery import Watch
from monolith.data.files.growing import Growing, growing_text
from monolith.data.files.order import Files, ListedPaths, Step, Watched
from monolith.data.files.pieces import Pieces, ShuffleCursor
from monolith.data.files.queued import Queued
from monolith.data.files.work_queue import FileQueue
from monolith.data.format import BadRecord, Chunk, Format
from monolith.data.records import Records, known_columns
from monolith.data.shuffling import (
    Batcher,
    Block,
    Epochs,
    ShuffleConfig,
    Shuffler,
    Stretch,
    check_epochs_unset,
    permutation,
)
from monolith.data.source import Position, Shard, ShardChoice, Source, WorkQueueSource, closed_after
from monolith.errors import (
    ConfigError,
    DataError,
    NotRepeatableError,
    RestoreError,
    TooManyBadRecordsError,
)
from monolith.observe import Metrics

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Read:
    """A chunk and the cursor before it; or no chunk, at the end of a file or while waiting for one."""

    spot: FileCursor
    chunk: Chunk | None = None
    waits: bool = False


class FileSource(Source, WorkQueueSource):
    """Records of files, in batches.

    Args:
        files: Paths; or a watch over patterns; or a queue. Paths are sorted, and path i is for worker i
            modulo `num_workers`. A watch shards by a hash of the name, since the number of files is
            unknown.
        columns: To read; None for all. One that a table does not have is named in a warning.
        worker: Which of `num_workers` this is; by default what `read_shard` says.
            For a queue it is a name: a worker that starts under a name gets the files that were leased to
            that name before, so give it only if it is unique, such as the rank. Without it, the leases of
            a process that died run out by themselves.
        batch_size: Records per batch, across the ends of files and epochs. Only the last is shorter,
            and with a watch what is there when nothing new is; see `max_wait`.
        epochs: How often to read a list; None for ever.
        drop_remainder: Leave out batches that are shorter.
        auto_commit: With a queue, report by oneself, at the end of each chunk, what the consumer came
            back from. Only for a loop that is never restored: a trainer calls `commit` with each checkpoint,
            and what it was given after the last one must come again if it is killed.
        max_wait: With a watch, how long the first record of a batch waits for the rest of it, before the
            batch is yielded with what there is; None waits for nothing.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        files: Sequence[str] | Watch | FileQueue,
        format: Format,  # noqa: A002  what it is
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"file source: batch_size must be at least 1, got {batch_size}")
        if max_wait is not None and max_wait < timedelta(0):
            raise ConfigError(f"file source: max_wait must not be negative, got {max_wait}")
        self._share = ShardChoice("file source", worker, num_workers)
        if epochs is not None and epochs < 1:
            raise ConfigError(f"file source: epochs must be at least 1, or None for ever, got {epochs}")
        if isinstance(files, str):
            files = [files]
        self._files: Files
        self._format = format
        self._columns = None if columns is None else list(columns)
        self._own_epochs = epochs
        self._paths = sorted(files) if isinstance(files, Sequence) else None
        self._pass = Pass()
        self._bytes: BytesRead | None = None
        self._pieces: Pieces | None = None
        """Reads the files, where they are a list that is shuffled."""
        self._stretches = False
        """Whether it does not after all: the position is of a version that shuffled stretches of records."""
        self._place = ShuffleCursor()
        if isinstance(files, Sequence):
            self._list(files, epochs, shuffle)
        elif epochs != 1:
            raise ConfigError(f"file source: a watch or a queue is read once, got {epochs} epochs")
        elif isinstance(files, Watch) and files.grows:
            if shuffle is not None:
                raise ConfigError("file source: files that grow are read in their order; leave shuffle out")
            self._files = Growing(files)
            format = growing_text(format, files.patterns)  # noqa: A001  as above
        elif isinstance(files, Watch):
            self._files = Watched(files)
        else:
            self._files = Queued(files, worker, auto_commit=auto_commit)
        self._format = format
        self._max_wait = 0.0 if max_wait is None else max_wait.total_seconds()
        self._clock = clock
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._drop_remainder = drop_remainder
        self._policy = BadRecordPolicy() if bad is None else bad
        self._metrics = metrics
        self._settings: Position = {}  # until the share is settled
        self._adopted: list[int] | None = None
        """The share of a worker that is no more, where what it left is read."""
        self._spot = FileCursor()
        self._reading = FileCursor()
        self._closed = False
        self._alone = True
        self._empty: set[str | None] = set()
        self._columns_seen = columns is None

    def read_shard(self, share: Shard) -> None:
        """Read one share: of a list or a watch, the files that are dealt to it; of a queue, whatever is left,
        under the number of the worker."""
        self._share.choose(share)

    def read_epochs(self, epochs: Epochs) -> None:
        """Read a list several times; see `Epochs`. An order of its own, if it has one, stays."""
        if self._paths is None:
            raise NotRepeatableError("a file source with a watch or a queue is read once")
        check_epochs_unset("file source", self._own_epochs, settled=bool(self._settings))
        self._own_epochs = epochs.count
        self._shuffle = self._shuffle or epochs.shuffle
        self._list(self._paths, epochs.count, self._shuffle)

    def _list(self, paths: Sequence[str], epochs: int | None, shuffle: ShuffleConfig | None) -> None:
        self._files = files = ListedPaths(paths, epochs, shuffle)
        self._bytes = BytesRead(files)
        self._pass = Pass(tuple(sorted(paths)))
        self._pieces = None
        if shuffle is not None and shuffle.files:
            self._pieces = Pieces(
                self._pass.files,
                self._format,
                there=frozenset(self._paths or ()),
                columns=self._columns,
                epochs=epochs,
                shuffle=shuffle,
                read=self._take_in,
                empty=self._note_empty,
            )

    def _begin(self, passed: Pass) -> None:
        """Read the files of a pass, whatever the list has besides."""
        if passed.files != self._pass.files:
            self._list(passed.files, self._own_epochs, self._shuffle)
            self._files.deal(read_saved_shard(self._adopted or self._settings["shard"]))
        self._pass = passed

    def _go_on(self, passed: Pass) -> bool:
        """Go on in a pass that a position is of; return whether a new pass begins instead.

        New files are a pass of their own, after this one: files that are shuffled, or dealt out to workers,
        are the same until the pass is over.
        """
        assert self._paths is not None
        new = [one for one in self._paths if one not in passed.known]
        if passed.ended and new and self._alone:
            _log.info(
                "file source: %d files are new, and are read; %d were trained on before, and are not",
                len(new),
                len(passed.known),
            )
            there = passed.known.intersection(self._paths)
            self._begin(Pass(tuple(new), tuple(sorted(there))))
            return True
        if new and not self._alone:
            _log.warning(
                "file source: %d files are new, such as %s, and are not read: several workers share the "
                "files that were there when they began. Set data.watch to train on files that come.",
                len(new),
                new[0],
            )
        self._begin(passed)
        return False

    def _left_from(self, spot: FileCursor) -> set[str]:
        """Return the files of a list that are read from a spot on."""
        left: set[str] = set()
        step: FileCursor | Step = spot if spot.file is not None else self._files.after(spot)
        while isinstance(step, FileCursor) and step.file is not None and step.round <= spot.round + 1:
            left.add(step.file)  # the next epoch has all of them, so those after it have no others
            step = self._files.after(step)
        return left

    def _check_there(self, files: Iterable[str]) -> None:
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

    def fraction_read(self, position: Position, records: int = 0) -> float | None:
        """Return the fraction of the bytes of a list of files that precedes a position."""
        if self._pieces is not None and "open" in position:
            if position.get("files") != self._pieces.digest:
                return None  # it is of the files before the new ones
            return self._pieces.fraction(self._pieces.restored(position), self._own_share(position), records)
        if self._bytes is None:
            return None
        return self._bytes.fraction(self._checked(position, share=False), records)

    def size(self) -> int | None:
        """Return how many records a list of files has in all epochs; None if only reading them would tell."""
        if self._paths is None or not self._alone or self._own_epochs is None:
            return None
        total = 0
        for path in self._pass.files:
            if (count := self._format.count(path)) is None:
                return None
            total += count
        return total * self._own_epochs

    def __iter__(self) -> Iterator[Records]:
        if self._closed:
            raise DataError("file source: cannot read, it was closed")
        self._settle()
        while not self._pass.ended:
            yield from self._read_pass() if self._mixing is None else self._mixed(self._mixing)
            if self._paths is None:
                return
            self._pass = replace(self._pass, ended=True)
            if self._go_on(self._pass):
                read = self._reading
                self._spot = self._reading = FileCursor(good=read.good, bad=read.bad)
                self._place = ShuffleCursor(good=read.good, bad=read.bad)

    def _read_pass(self) -> Iterator[Records]:
        """Yield the records of one pass over a list; of a watch or a queue, all that will come."""
        self._files.rewind(self._spot)
        batcher: Batcher[FileCursor] = Batcher(self._batch_size)
        due = 0.0  # when the records that are held have waited for long enough
        flushes = self.live and self._max_wait > 0  # also if a stream never pauses
        with closed_after(self._blocks(self._spot)) as blocks:
            for block in blocks:
                waits = isinstance(block, FileCursor)  # there is nothing more for now
                if isinstance(block, Block):
                    held = not batcher.is_empty
                    for batch, self._spot in batcher.add(block):
                        yield batch
                        self._files.taken(self._spot, ended=False)
                        held = False
                    if not batcher.is_empty and not held:
                        due = self._clock() + self._max_wait
                if not waits and not (flushes and not batcher.is_empty):
                    continue
                if not batcher.is_empty and (self._drop_remainder or self._clock() < due):
                    continue
                self._spot = block.cursor(len(block.records)) if isinstance(block, Block) else block
                if (rest := batcher.rest()) is not None:
                    yield rest
                self._files.taken(self._spot, ended=waits)
        self._judge(self._reading, at_end=True)
        self._check_any()
        self._spot = self._reading
        if (rest := batcher.rest()) is not None and not self._drop_remainder:
            if self._paths is not None:
                self._pass = replace(self._pass, ended=True)
            yield rest
        self._files.taken(self._spot, ended=True)

    def _mixed(self, pieces: Pieces) -> Iterator[Records]:
        """Yield the batches of a list of files that is shuffled."""
        batcher: Batcher[ShuffleCursor] = Batcher(self._batch_size)
        with closed_after(pieces.blocks(self._place, self._own_share(self.position()))) as blocks:
            for block in blocks:
                for batch, self._place in batcher.add(block):
                    yield batch
        self._judge(self._reading, at_end=True)
        self._check_any()
        rest = batcher.rest()
        given = self._place.given + (0 if rest is None else len(rest))
        ended = replace(self._place, given=given, good=self._reading.good, bad=self._reading.bad)
        self._place = pieces.end(ended)
        self._pass = replace(self._pass, ended=True)
        if rest is not None and not self._drop_remainder:
            yield rest

    def _take_in(self, path: str, place: int, chunk: Chunk) -> tuple[int, int]:
        """Look at a chunk of a list of files that is shuffled; return how many records were read by now."""
        self._look_for_columns(path, chunk.records)
        spot = replace(self._reading, file=path, place=place)
        self._reading = spot.past(chunk)
        self._look_at_bad(spot, chunk)
        return self._reading.good, self._reading.bad

    def _note_empty(self, path: str | None) -> None:
        if path not in self._empty:
            _log.warning("file source: %s is empty: it has no records", path)
        self._empty.add(path)

    @property
    def _mixing(self) -> Pieces | None:
        """What reads the files in pieces; None where they are read one after the other."""
        return None if self._stretches else self._pieces

    def _own_share(self, position: Position) -> Shard:
        """Return the share that the worker of a position reads, which is not its own if it was adopted."""
        return read_saved_shard(position.get("adopted", self._settings.get("shard", position.get("shard"))))

    def position(self) -> Position:
        self._settle()
        whose = {} if self._adopted is None else {"adopted": self._adopted}
        if self._mixing is not None:
            return {**self._settings, **whose, **self._mixing.save(self._place), **self._pass.saved()}
        spot = saved_cursor(self._spot)
        return {**self._settings, **whose, **spot, **self._files.save(self._spot), **self._pass.saved()}

    def restore(self, position: Position) -> None:
        self._settle()
        self._read_as(position)
        # A refused position must leave the source as it was: all that changes on the way is put back.
        before = self._files, self._bytes, self._pieces, self._pass, self._adopted
        try:
            if self._mixing is not None:
                self._check_settings(position)
                self._adopted = None if "adopted" not in position else list(shard_of(position))
                self._place = self._restored_place(position)
                self._reading = FileCursor(good=self._place.good, bad=self._place.bad)
                return
            spot = self._checked(position)
            if (adopted := position.get("adopted")) != self._adopted:
                self._files.deal(read_saved_shard(self._settings["shard"] if adopted is None else adopted))
                self._adopted = adopted
            self._spot = self._reading = self._restored(position, spot)
        except RestoreError:  # a failed restore changes nothing
            self._files, self._bytes, self._pieces, self._pass, self._adopted = before
            raise

    def _restored_place(self, position: Position) -> ShuffleCursor:
        """Go to a position of files that are shuffled, and return where to read on."""
        passed = Pass.read(position)
        if passed is None:
            self._pass = replace(self._pass, ended=False)
        else:
            self._begin(passed)
        pieces = self._mixing
        assert pieces is not None
        place = pieces.restored(position)
        if passed is None:
            return place
        if not pieces.is_over(place):
            passed = replace(passed, ended=False)  # there are more epochs than there were
        if self._go_on(passed):
            return ShuffleCursor(good=place.good, bad=place.bad)
        if not passed.ended:
            self._check_there(pieces.files_left(place, self._own_share(position)))
        return place

    def _restored(self, position: Position, spot: FileCursor) -> FileCursor:
        """Go to a position, and return where to read on."""
        passed = None if self._paths is None else Pass.read(position)
        if passed is None:
            self._pass = replace(self._pass, ended=False)
            self._files.restore(position, spot)
            return spot
        if self._own_epochs is None or spot.round + 1 < self._own_epochs:
            passed = replace(passed, ended=False)  # there are more epochs than there were
        if self._go_on(passed):
            return FileCursor(good=spot.good, bad=spot.bad)
        if not (passed.ended and spot.round + 1 > (self._own_epochs or 1)):
            self._files.restore(position, spot)
        if not passed.ended:
            self._check_there(self._left_from(spot))
        return spot

    def redistribute(self, positions: Sequence[Position], workers: int) -> list[Position]:
        """Return what was left to several workers as positions of another number of them.

        Files, or pieces of them, are dealt from the places reached, so that all workers have about as many;
        the files of a stretch that is being shuffled stay together. From the first epoch on that no worker
        had started, each worker reads its shard of all files. A queue is told the positions, and leases what
        is left by itself.

        Raises:
            RestoreError: They are not those of all workers; the files have changed; or `num_workers` of
                this source says otherwise.
        """
        self._settle()
        share = Shard(*self._settings["shard"])
        if share.workers != workers:
            raise RestoreError(f"the file source has num_workers {share.workers}, this run has {workers}")
        for one in positions:
            self._read_as(one)
        found_shares = [shard_of(one) for one in positions]
        shares = [Shard(number, len(positions)) for number in range(len(positions))]
        if not isinstance(self._files, Queued) and found_shares != shares:
            raise RestoreError(
                f"the positions are of shares {', '.join(str(list(one)) for one in found_shares)} of the "
                "files, which are not all"
            )
        passes = [] if self._paths is None else [Pass.read(one) for one in positions]
        passed = next((one for one in passes if one is not None), None)
        if passed is not None:
            ended = all(one is not None and one.ended for one in passes)
            passed = replace(passed, ended=ended)
            self._begin(passed)
        saved = {} if passed is None else passed.saved()
        if (pieces := self._mixing) is not None:
            for one in positions:
                self._check_settings(one, share=False)
            places = pieces.redistributed(
                [(shard_of(one), pieces.restored(one)) for one in positions], workers
            )
            for worker, place in enumerate(places):
                self._check_there(pieces.files_left(place, Shard(worker, workers)))
            return [
                {**self._settings, "shard": [worker, workers], **pieces.save(place), **saved}
                for worker, place in enumerate(places)
            ]
        old = [OldWorker(shard_of(one), one, self._checked(one, share=False)) for one in positions]
        over = passed is not None and passed.ended
        every = [[] for _ in old] if over else self._files.left(old)
        if self._paths is not None:
            self._check_there(one.file for left in every for one in left)
        dealt = deal([unit for left in every for unit in self._units(left)], workers)
        found = []
        for worker, left in enumerate(dealt):
            mine = old[worker::workers]  # whose records it counts as its own
            spot = replace(
                left[0].spot() if left else FileCursor(),
                good=sum(one.spot.good for one in mine),
                bad=sum(one.spot.bad for one in mine),
            )
            begin = self._files.begin(old, left, Shard(worker, workers))
            found.append(
                {
                    **self._settings,
                    "shard": [worker, workers],
                    **saved_cursor(spot),
                    **begin,
                    **saved,
                }
            )
        return found

    @property
    def repeats_order(self) -> bool:
        return self._files.repeats_order

    @property
    def live(self) -> bool:
        return self._files.live

    @property
    def work_queue(self) -> WorkQueueSource | None:
        """This source, if it reads a queue that is told which positions were saved."""
        return self if isinstance(self._files, Queued) and not self._files.auto_commit else None

    def give_back(self, position: Position) -> Position:
        """Give the unfinished files of a worker back to the queue, from the places it had reached."""
        self._settle()
        spot = self._checked(position, share=False)
        self._queued.give_back(OldWorker(shard_of(position), position, spot))
        return {**position, **saved_cursor(FileCursor(good=spot.good, bad=spot.bad)), "finished": []}

    def defer_to_chief(self) -> None:
        self._queued.defer_to_chief()

    def interrupt(self) -> None:
        self._queued.interrupt()

    @property
    def trouble(self) -> str:
        """Why the queue of files cannot note what is read, for a person; empty if it can."""
        return self._files.trouble

    @property
    def _queued(self) -> Queued:
        assert isinstance(self._files, Queued), "ask work_queue first"
        return self._files

    def adopt(self, position: Position, end: Position | None = None) -> Position:  # noqa: ARG002
        """Return a position from which this source reads the files that were another worker's, in its order.

        Raises:
            RestoreError: A queue handed them out, which may have given them to others by now.
        """
        if isinstance(self._files, Queued):
            raise RestoreError(
                "what a stage on top of a queue of files held back cannot be moved; use the batch_size and "
                "the shuffle of FileSource instead of rebatch and shuffle of a pipeline"
            )
        return {**position, "adopted": list(shard_of(position))}

    def _units(self, left: Sequence[Left]) -> Iterator[list[Left]]:
        """Yield which of the files that one worker had left must stay together: those of a stretch."""
        while left:
            files, missing = 0, left[0].length
            while not files or (missing > 0 and files < len(left)):
                if left[0].length:
                    missing -= self._count(left[files], missing)
                files += 1
            yield list(left[:files])
            left = left[files:]

    def _count(self, left: Left, enough: int) -> int:
        """Return how many records are left of a file, if they are fewer than so many."""
        found = -left.skip
        reader = self._format.chunks(left.file, start=left.place, columns=self._columns)
        with closed_after(reader) as chunks:
            for chunk in chunks:
                found += len(chunk.records)
                if found >= enough:
                    break
        return found

    def commit(self, position: Position) -> None:
        """Tell the queue that all records before a position count; without a queue, do nothing.

        For a position that was just saved: another worker resumes from it if this one dies.
        """
        self._files.commit(position)

    def reject(self, bad: Sequence[BadRecord]) -> None:
        """Count records that could be read and are bad all the same, and keep them in the quarantine.

        The policy does not count them: the stage that found them has its own limit.
        """
        self._count_bad(len(bad))
        if self._policy.quarantine is not None and bad:
            # Named after what they hold, so that finding them again writes the file again, and not one more.
            number = zlib.crc32(b"".join(record.payload for record in bad))
            quarantine(self._policy.quarantine, self._reading.file or "records", number, bad)

    def find_empty_cell(self, column: str) -> str | None:
        """Return where the first empty cell of a column is, in the file that is being read or the one before
        it; None where there is none. Reads them again."""
        paths = sorted(self._paths or ())
        file = self._reading.file
        before = paths[paths.index(file) - 1 : paths.index(file)] if file in paths else []
        for path in [] if file is None else [file, *before]:
            with suppress(DataError, OSError):  # the place is a service, and nothing to fail for
                if (place := locate_empty_cell(self._format, path, column)) is not None:
                    return f"{place} of {path}"
        return None

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._files.close()

    # Reading

    def _checked(self, position: Position, *, share: bool = True) -> FileCursor:
        """Return where a position of a source with the same settings is.

        Args:
            share: Whether it must be of the same share, too, unless it was adopted.
        """
        self._check_settings(position, share=share)
        if missing := [field.name for field in fields(FileCursor) if field.name not in position]:
            raise RestoreError(f"cannot restore a file source: the position lacks {', '.join(missing)}")
        numbers = {field.name: position[field.name] for field in fields(FileCursor)}
        file = numbers.pop("file")
        if not (file is None or isinstance(file, str)) or not all(
            isinstance(number, int) and number >= 0 for number in numbers.values()
        ):
            raise RestoreError(f"cannot restore a file source: malformed numbers in {position!r:.200}")
        return FileCursor(file=file, **numbers)

    def _read_as(self, position: Position) -> None:
        """Read files in pieces, or in stretches if a position was saved by a version that did: its order goes
        on to the end of the run."""
        if self._pieces is None or not isinstance(position, Mapping):
            return
        assert self._shuffle is not None
        stretches = position.get("shuffle") == [self._shuffle.seed, self._shuffle.buffer, True]
        if stretches and not self._stretches:
            _log.warning(
                "file source: the checkpoint is of a version that shuffled %d records at a time, and the run "
                "resumes in that order. To mix files over their whole length, start a new run from this "
                "checkpoint with restore.dir and restore.restart_data.",
                self._shuffle.buffer,
            )
        self._stretches = stretches
        self._settings["shuffle"] = self._order()

    def _order(self) -> list[object] | None:
        """Return what the order of records follows from, for a position."""
        shuffle = self._shuffle
        if shuffle is None:
            return None
        if self._mixing is not None:
            return [shuffle.seed, shuffle.buffer, f"pieces of {shuffle.piece_bytes} bytes"]
        return [shuffle.seed, shuffle.buffer, shuffle.files]

    def _check_settings(self, position: Position, *, share: bool = True) -> None:
        """Refuse a position of a source with other settings; see `_checked`."""
        if not isinstance(position, Mapping) or position.get("source") != "files":
            raise RestoreError(f"cannot restore a file source from {position!r:.200}: not a position of one")
        others = set() if share and "adopted" not in position else {"shard"}
        for name, value in self._settings.items():
            if name not in others and (name not in position or position[name] != value):
                raise RestoreError(
                    f"cannot restore a file source: the position was taken with {name} "
                    f"{position.get(name)}, this one has {value}. Use the same settings, or start from the "
                    "beginning."
                )

    def _settle(self) -> None:
        """See to it that files are dealt out to this worker."""
        if not self._settings:
            share = self._share.settle()
            self._files.deal(share)
            self._alone = share.workers == 1
            self._settings = {
                "source": "files",
                "shuffle": self._order(),
                "shard": list(share),
            }

    def _blocks(self, spot: FileCursor) -> Iterator[Block[FileCursor] | FileCursor]:
        """Yield what is read together and yielded in one order; a place where there is nothing for now."""
        reads: Iterator[Block[FileCursor] | _Read] = (
            self._chunks(spot) if self._shuffle is None else self._shuffled(self._shuffle, spot)
        )
        for read in reads:
            if isinstance(read, Block):
                yield read
            elif read.chunk is not None:
                yield block_of(read.spot, read.chunk)
            elif read.waits:
                yield read.spot

    def _shuffled(self, config: ShuffleConfig, spot: FileCursor) -> Iterator[Block[FileCursor] | _Read]:
        """Yield stretches in their order, and a sign whenever there is nothing yet."""
        shuffler: Shuffler[FileCursor] = Shuffler(
            config.buffer,
            lambda begin, size: permutation(size, config.seed, *_numbers(begin)),
            lambda begin: f"file source: {begin.file}",
        )
        for read in self._chunks(spot):
            begun = shuffler.begin
            ends = read.chunk is None and (read.waits or not self._files.mixes)
            ends = ends or bool(read.spot.length)  # another stretch begins, of a worker that is no more
            if begun is not None and (ends or read.spot.round != begun.round):
                yield from _in_order(shuffler.end(read.spot))
            if read.chunk is None:
                yield read
                continue
            for stretch in shuffler.add(block_of(read.spot, read.chunk)):
                yield from _in_order(stretch)
        yield from _in_order(shuffler.end(self._reading))

    def _chunks(self, spot: FileCursor) -> Iterator[_Read]:
        """Yield chunks from a place on, the end of each file, and a sign whenever there is nothing yet."""
        self._reading = spot
        if self._bytes is not None:
            self._bytes.begin()
        while True:
            if spot.file is not None and not self._files.lost(spot):
                reader = self._format.chunks(spot.file, start=spot.place, columns=self._columns)
                begun, found = spot.place, False
                with closed_after(reader) as chunks:
                    for chunk in chunks:
                        found = found or bool(len(chunk.records) or chunk.bad)
                        self._look_for_columns(spot.file, chunk.records)
                        if spot.skip > len(chunk.records):
                            raise DataError(
                                f"file source: {spot.file} has {len(chunk.records)} records at place "
                                f"{spot.place}, but {spot.skip} of them were read before; it was replaced "
                                "since. Start from the beginning."
                            )
                        self._reading = spot.past(chunk)
                        if self._bytes is not None:
                            self._bytes.note(spot, chunk)
                        self._look_at_bad(spot, chunk)
                        yield _Read(spot, chunk)
                        spot = self._reading
                        if self._files.lost(spot):
                            _log.warning(
                                "file source: the lease on %s expired; another worker continues the file",
                                spot.file,
                            )
                            break
                if not begun and not found and not self._files.grows:
                    self._note_empty(spot.file)
                yield _Read(spot)
            step = self._files.after(spot)
            while step is Step.WAIT:
                yield _Read(spot, waits=True)
                self._files.wait()
                step = self._files.after(spot)
            if not isinstance(step, FileCursor):
                return
            spot = replace(step, good=spot.good, bad=spot.bad)
            self._reading = spot

    def _check_any(self) -> None:
        """Refuse a list of files without a record in them; among others, their files may have some."""
        if self._empty and self._alone and not self._reading.good and not self._reading.bad:
            raise DataError(
                f"file source: {_all_of(len(self._empty))} no record; the last is {self._reading.file}"
            )

    def _look_for_columns(self, path: str, records: Records) -> None:
        """Say once which of the columns to read a table does not have: mostly a slip of the pen."""
        if self._columns_seen or not records.complete:
            return
        self._columns_seen = True
        missing = [name for name in self._columns or () if name not in records.columns]
        if missing:
            with closed_after(self._format.chunks(path)) as chunks:
                there = [name for chunk in islice(chunks, 1) for name in chunk.records.columns]
            _log.warning(
                "file source: %s has no column %s; %s",
                path,
                ", ".join(map(repr, missing)),
                known_columns(missing[0], there, "it has"),
                extra={"cause": f"missing columns {missing}"},
            )

    def _look_at_bad(self, spot: FileCursor, chunk: Chunk) -> None:
        if self._metrics is not None:
            self._metrics.counter("data_records", "Records read from files.").inc(len(chunk.records))
        self._count_bad(len(chunk.bad))
        if chunk.bad:
            assert spot.file is not None
            if self._policy.quarantine is not None:
                quarantine(self._policy.quarantine, spot.file, spot.place, chunk.bad)
            self._judge(self._reading, at_end=False, last=f"{spot.file}: {chunk.bad[0].reason}")

    def _count_bad(self, count: int) -> None:
        if self._metrics is not None:
            bad = self._metrics.counter("data_bad_records", "Records of files that could not be used.")
            bad.inc(count)

    def _judge(self, spot: FileCursor, *, at_end: bool, last: str = "") -> None:
        total = spot.good + spot.bad
        if total < self._policy.after and not at_end and self._policy.max_share > 0:
            return
        if spot.bad > self._policy.max_share * total:
            raise TooManyBadRecordsError(
                f"file source: {spot.bad} of {total} records could not be read, more than the share of "
                f"{self._policy.max_share} that is allowed"
                + (f"; one of the last is in {last}" if last else "")
                + ". Look at the data, or allow more with data.max_unreadable of the config "
                "(--data.max-unreadable 0.01), in Python BadRecordPolicy(max_share=...) of the source."
            )


def _all_of(files: int) -> str:
    return "the only file has" if files == 1 else f"all {files} files have"


def _in_order(stretch: Stretch[FileCursor] | None) -> Iterator[Block[FileCursor]]:
    """Yield a stretch, with the places between its records as they are now."""
    if stretch is None:
        return
    begin, end, size = stretch.begin, stretch.end, len(stretch.records)

    def place(number: int) -> FileCursor:
        return end if number == size else replace(begin, length=size, taken=number)

    yield Block(stretch.records, place, stretch.first)


def _numbers(begin: FileCursor) -> tuple[int, int, int, int]:
    """Return what the order of a stretch follows from, besides the seed."""
    assert begin.file is not None
    return begin.round, zlib.crc32(begin.file.encode()), begin.place, begin.skip
