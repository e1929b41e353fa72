"""Files that a worker leases from a queue; see `order` and `work_queue`.

The queue and the checkpoint must agree on which records count. The order of these steps ensures it:

    1. read a file under a lease; the queue still has the progress of the last commit 2. save a checkpoint
    with the position: the files read since (`finished`), and the cursor in the current one 3. commit: finish
    those files, report the cursor

If a worker dies before 2, its records are lost with it, and the next lease starts at the last commit. If it
dies between 2 and 3, its successor is restored under its name, takes its leases over, and commits again.

Names under which files are leased:

    worker 3               worker 3 of several. One that starts releases the leases of the process before it,
                           which gets no more files: it is refused with an error that ends it.
    run 5e1f... 09ab...    the only worker of a run, and its process. One that starts releases the leases of
                           all processes of its run. Their names differ: what an earlier one that is alive
                           after all takes later is waited for, as a file of another worker, and not lost.
    unnamed 77c0...        any other. Its leases expire, unless a process restores a position of it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Sequence
from contextlib import nullcontext, suppress
from dataclasses import fields

from monolith import concurrency
from monolith.data.files.cursors import FileCursor, FormerWorker, RemainingFile
from monolith.data.files.order import FileOrder, Step
from monolith.data.files.work_queue import FileQueue, Lease
from monolith.data.source import Position, Shard
from monolith.errors import DataError, RestoreError, TransientFilesystemError

_log = logging.getLogger(__name__)

_WORKER = "worker "
"""The prefix of the name of a worker that has a number."""
_RUN = "run "
"""The prefix of the name of a process of a run with one worker."""


class LeasedFiles(FileOrder):
    """Files that this worker leases from a queue.

    It has the leases of all files that no committed position contains yet: those that were read since the
    last commit, and the current one.
    """

    def __init__(self, queue: FileQueue, worker: int | None, *, auto_commit: bool) -> None:
        self._queue = queue
        self._is_named = False
        self._session = concurrency.token_hex(8)
        """Tells this reader from others of the same name: earlier processes, earlier attempts of this one."""
        self._is_lasting = False
        """Whether readers come one after another under this name: numbered workers, and restored ones."""
        self._run = ""
        """The prefix of the names of all processes of this run; empty if it has none."""
        self._worker = f"unnamed {concurrency.token_hex(8)}"
        if worker is not None:
            self._set_name(worker)
        self._begun = False
        self.auto_commit = auto_commit
        self._deferred = self._interrupted = False
        self._lock = concurrency.RLock()  # guards all below: one thread reads, another may commit
        self._leases: dict[int, Lease] = {}  # by number, in the order in which they were taken
        self._reported: tuple[int, int] | None = None
        self._ended = False

    def assign(self, shard: Shard) -> None:
        if not self._is_named and shard.workers > 1:
            self._set_name(shard.worker)

    def read_for(self, run: str) -> None:
        if not self._is_named:
            self._run = f"{_RUN}{hashlib.sha256(run.encode()).hexdigest()[:16]} "
            self._worker = f"{self._run}{concurrency.token_hex(4)}"

    def _set_name(self, worker: int) -> None:
        self._is_named, self._is_lasting = True, True
        self._worker, self._run = f"{_WORKER}{worker}", ""

    def after(self, cursor: FileCursor) -> FileCursor | Step:  # noqa: ARG002
        with self._lock:
            if self._interrupted:
                return Step.END
            try:
                self._begin()
                lease = self._queue.take(self._worker, session=self._session)
                if lease is None:
                    # Files that were read and not committed yet will not come back: workers that waited for
                    # each other's would wait for ever.
                    for known in self._leases.values():
                        self._queue.mark_read(known)
                    reading = self._queue.others_are_reading(self._worker, self._session)
                    return Step.WAIT if reading else Step.END
            except TransientFilesystemError:  # a full disk: the queue has logged it, and retries
                return Step.WAIT
            self._ended = False
            self._leases[lease.number] = lease
        try:
            return FileCursor(round=lease.number, file=lease.path, **lease.progress)
        except TypeError as cause:
            raise DataError(f"file source: malformed progress in {lease.path}: {lease.progress}") from cause

    def wait(self, stop: concurrency.Event) -> None:
        self._renew()
        self._queue.wait(stop)

    def rewind(self, cursor: FileCursor) -> None:
        with suppress(TransientFilesystemError):  # a full disk: `after` tries again
            self._begin()
        # Give back files that were leased to fill a batch that was never yielded.
        with self._lock:
            self._ended = False
            needed = {*self._finished(cursor), -1 if cursor.file is None else cursor.round}
            for number in [number for number in self._leases if number not in needed]:
                self._queue.give_back(self._leases.pop(number))

    def _begin(self) -> None:
        """Release the leases of an earlier process of this worker: no other worker would ever get them.

        From now on the queue refuses what that process reports: each lease has a token. It gives that process
        no more files, either: under the name of this one, they would be waited for by none.

        Raises:
            TransientFilesystemError: The queue cannot be written now.
        """
        if not self._begun:
            if self._run:
                self._queue.release_all(self._run)
            elif self._is_lasting:
                self._queue.begin(self._worker, self._session)
            self._begun = True

    def is_lost(self, cursor: FileCursor) -> bool:
        with self._lock:
            return cursor.round not in self._leases

    def consumed(self, cursor: FileCursor, *, ended: bool) -> None:
        self._renew()
        with self._lock:
            self._ended = ended
            here = (cursor.round, cursor.place)
            if self.auto_commit and (ended or here != self._reported):
                self._commit(self._finished(cursor), cursor)
                self._reported = here

    def _renew(self) -> None:
        with self._lock:
            for number, lease in list(self._leases.items()):
                renewed = self._queue.renew(lease)
                if renewed is None:
                    del self._leases[number]
                else:
                    self._leases[number] = renewed

    def _finished(self, cursor: FileCursor) -> list[int]:
        """Return the files of which the consumer has all records: those leased before the current one."""
        # Leases are in the order in which files were read, so all before the current one are finished.
        numbers = list(self._leases)
        if self._ended:
            return numbers
        if cursor.file is None:
            return []
        return numbers[: numbers.index(cursor.round)] if cursor.round in numbers else []

    def save(self, cursor: FileCursor) -> Position:
        with self._lock:
            return {"finished": self._finished(cursor), "reader": self._worker}

    def restore(self, saved: Position, cursor: FileCursor) -> None:
        finished, reader = saved.get("finished"), saved.get("reader")
        if not isinstance(finished, list) or not all(isinstance(number, int) for number in finished):
            raise RestoreError("cannot restore a file source: the position is not of one with a queue")
        with self._lock:
            self._take_over_name(reader)
            for known in self._leases.values():
                self._queue.give_back(known)
            self._leases, self._ended = {}, False
            # Take the files of the position again, so that `commit` can finish or report them.
            numbers = [*finished, *([] if cursor.file is None else [cursor.round])]
            with nullcontext() if numbers else suppress(TransientFilesystemError):  # `after` tries again
                self._begin()
            for number in numbers:
                lease = self._queue.take(self._worker, number, session=self._session)
                if lease is not None:
                    self._leases[number] = lease
                    if number == cursor.round and cursor.file not in (None, lease.path):
                        # The queue says which file a number is; the position must not name another one.
                        raise RestoreError(
                            f"cannot restore a file source: the position is in {cursor.file}, but file "
                            f"{number} of the queue is {lease.path}"
                        )
                elif number == cursor.round:
                    # Another worker has it by now, from the last reported progress on: it reads those
                    # records.
                    _log.info("file source: %s is finished, or another worker's by now", cursor.file)

    def _take_over_name(self, reader: object) -> None:
        """Take the name of the reader that saved a position, unless this one was given its own.

        That reader is gone, and may have been killed after its checkpoint was saved and before the queue was
        told. Only under its name can this worker get its files and finish those that the checkpoint contains;
        otherwise they would be leased again, and read twice, when its leases expire.
        """
        if self._is_named or not isinstance(reader, str) or reader == self._worker:
            return
        if self._run and reader.startswith(self._run):
            return  # an earlier process of this run, whose leases are released by the name of the run
        self._queue.release(self._worker)
        self._worker, self._run, self._begun, self._is_lasting = reader, "", False, True

    def commit(self, position: Position) -> None:
        cursor = FileCursor(**{field.name: position[field.name] for field in fields(FileCursor)})
        with self._lock:
            self._commit(position["finished"], cursor)

    def _commit(self, finished: Sequence[int], cursor: FileCursor) -> None:
        # A lease that was lost is not here any more: its new owner reports for that file.
        for number in finished:
            if number in self._leases:
                self._queue.finish(self._leases.pop(number))
        current = None if cursor.file is None else self._leases.get(cursor.round)
        if current is not None and not self._queue.report(current, cursor.progress()):
            del self._leases[cursor.round]

    def close(self) -> None:
        with self._lock:
            # A thread that still reads, of an attempt that failed, must take no more: the next attempt of
            # this worker has the same name, and would take the file for one that it has read itself.
            self._interrupted = True
            if not self._deferred:
                self._queue.release(self._worker, self._session)
            self._queue.flush()
            self._leases = {}

    def defer_to_chief(self) -> None:
        self._deferred = True

    @property
    def trouble(self) -> str:  # type: ignore[override]  # it changes
        return self._queue.trouble

    def interrupt(self) -> None:
        with self._lock:
            self._interrupted = True

    def remaining(self, former: Sequence[FormerWorker]) -> list[list[RemainingFile]]:
        """Report the positions to the queue, which leases the remaining files by itself."""
        readers = {str(one.position.get("reader")) for one in former}
        # The positions may be of another process of their run than the one that has leases now.
        runs = {name[: name.rindex(" ") + 1] for name in readers if name.startswith(_RUN)}
        now = {name for name in self._queue.readers() if name.startswith((_WORKER, *runs))}
        self._settle(readers | now, former)
        return [[] for _ in former]

    def give_back(self, former: FormerWorker) -> None:
        """Return the files of a former worker to the queue, from its position on."""
        self._settle({str(former.position.get("reader"))}, [former])

    def _settle(self, readers: Collection[str], former: Sequence[FormerWorker]) -> None:
        finished = [number for one in former for number in one.position.get("finished", ())]
        reached = {one.cursor.round: one.cursor.progress() for one in former if one.cursor.file is not None}
        self._queue.settle(readers, finished, reached)

    def begin(
        self,
        former: Sequence[FormerWorker],  # noqa: ARG002
        remaining: Sequence[RemainingFile],  # noqa: ARG002
        shard: Shard,
    ) -> Position:
        return {"finished": [], "reader": None if shard.workers == 1 else f"{_WORKER}{shard.worker}"}
