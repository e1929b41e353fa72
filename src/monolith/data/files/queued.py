"""Files that a worker leases from a queue; see `order` and `work_queue`."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Collection, Sequence
from dataclasses import fields

from monolith.data.files.cursors import FileCursor, Left, OldWorker
from monolith.data.files.order import Files, Step
from monolith.data.files.work_queue import FileQueue, Lease
from monolith.data.source import Position, Shard
from monolith.errors import DataError, RestoreError, TransientFilesystemError

_log = logging.getLogger(__name__)

_WORKER = "worker "
"""What the name of a reader begins with, before its number, that was given one."""


class Queued(Files):
    """Files that this worker gets from a queue.

    Holds the leases of all files of which it does not know yet that they count: those that
    were read since the last commit, and the one being read.
    """

    def __init__(self, queue: FileQueue, worker: int | None, *, auto_commit: bool) -> None:
        self._queue = queue
        self._named = False
        self._worker = f"unnamed {secrets.token_hex(8)}"
        if worker is not None:
            self._call(worker)
        self._begun = False
        self.auto_commit = auto_commit
        self._deferred = self._interrupted = False
        self._lock = threading.RLock()  # guards all below: one thread reads, another may commit
        self._held: dict[int, Lease] = {}  # by number, in the order in which they were taken
        self._reported: tuple[int, int] | None = None
        self._ended = False

    def deal(self, shard: Shard) -> None:
        if not self._named and shard.workers > 1:
            self._call(shard.worker)

    def _call(self, worker: int) -> None:
        self._named, self._worker = True, f"{_WORKER}{worker}"

    def after(self, spot: FileCursor) -> FileCursor | Step:  # noqa: ARG002
        with self._lock:
            if self._interrupted:
                return Step.END
            try:
                lease = self._queue.take(self._worker)
                if lease is None:
                    # Workers that wait for each other's files would wait for ever.
                    for held in self._held.values():
                        self._queue.mark_read(held)
                    return Step.WAIT if self._queue.others_are_reading(self._worker) else Step.END
            except TransientFilesystemError:  # a full disk: the queue has said so, and asks for patience
                return Step.WAIT
            self._ended = False
            self._held[lease.number] = lease
        try:
            return FileCursor(round=lease.number, file=lease.path, **lease.progress)
        except TypeError as cause:
            raise DataError(f"file source: no place in {lease.path}: {lease.progress}") from cause

    def wait(self) -> None:
        self._renew()
        self._queue.wait()

    def rewind(self, spot: FileCursor) -> None:
        self._begin()
        # A file that was taken to fill a batch which was never yielded.
        with self._lock:
            self._ended = False
            kept = {*self._finished(spot), -1 if spot.file is None else spot.round}
            for number in [number for number in self._held if number not in kept]:
                self._queue.give_back(self._held.pop(number))

    def _begin(self) -> None:
        """Release the leases of an earlier worker of this name: no other worker would ever get them."""
        if not self._begun:
            self._begun = True
            self._queue.release(self._worker)

    def lost(self, spot: FileCursor) -> bool:
        with self._lock:
            return spot.round not in self._held

    def taken(self, spot: FileCursor, *, ended: bool) -> None:
        self._renew()
        with self._lock:
            self._ended = ended
            here = (spot.round, spot.place)
            if self.auto_commit and (ended or here != self._reported):
                self._commit(self._finished(spot), spot)
                self._reported = here

    def _renew(self) -> None:
        with self._lock:
            for number, lease in list(self._held.items()):
                renewed = self._queue.renew(lease)
                if renewed is None:
                    del self._held[number]
                else:
                    self._held[number] = renewed

    def _finished(self, spot: FileCursor) -> list[int]:
        """Return the files of which the consumer has all records: those that were taken before this one."""
        numbers = list(self._held)
        if self._ended:
            return numbers
        if spot.file is None:
            return []
        return numbers[: numbers.index(spot.round)] if spot.round in numbers else []

    def save(self, spot: FileCursor) -> Position:
        with self._lock:
            return {"finished": self._finished(spot), "reader": self._worker}

    def restore(self, saved: Position, spot: FileCursor) -> None:
        finished, reader = saved.get("finished"), saved.get("reader")
        if not isinstance(finished, list) or not all(isinstance(number, int) for number in finished):
            raise RestoreError("cannot restore a file source: the position is not of one with a queue")
        with self._lock:
            self._follow(reader)
            self._begin()
            for held in self._held.values():
                self._queue.give_back(held)
            self._held, self._ended = {}, False
            for number in [*finished, *([] if spot.file is None else [spot.round])]:
                lease = self._queue.take(self._worker, number)
                if lease is not None:
                    self._held[number] = lease
                    if number == spot.round and spot.file not in (None, lease.path):
                        # The queue says which file a number is; the position must not name another one.
                        raise RestoreError(
                            f"cannot restore a file source: the position is in {spot.file}, but file "
                            f"{number} of the queue is {lease.path}"
                        )
                elif number == spot.round:
                    # What another worker has by now is its business: it began where we had reported.
                    _log.info("file source: %s is finished, or another worker's by now", spot.file)

    def _follow(self, reader: object) -> None:
        """Take the name of the reader that saved a position, unless this one was given its own.

        That reader is gone, and may have been killed after its checkpoint was saved and before the queue was
        told. Only under its name can this worker get its files and finish those that the checkpoint contains;
        otherwise they would be leased again, and read twice, when its leases expire.
        """
        if self._named or not isinstance(reader, str) or reader == self._worker:
            return
        self._queue.release(self._worker)
        self._worker, self._begun = reader, False

    def commit(self, position: Position) -> None:
        spot = FileCursor(**{field.name: position[field.name] for field in fields(FileCursor)})
        with self._lock:
            self._commit(position["finished"], spot)

    def _commit(self, finished: Sequence[int], spot: FileCursor) -> None:
        for number in finished:
            if number in self._held:
                self._queue.finish(self._held.pop(number))
        current = None if spot.file is None else self._held.get(spot.round)
        if current is not None and not self._queue.report(current, spot.progress()):
            del self._held[spot.round]

    def close(self) -> None:
        with self._lock:
            if not self._deferred:
                self._queue.release(self._worker)
            self._queue.flush()
            self._held = {}

    def defer_to_chief(self) -> None:
        self._deferred = True

    @property
    def trouble(self) -> str:  # type: ignore[override]  # it changes
        return self._queue.trouble

    def interrupt(self) -> None:
        with self._lock:
            self._interrupted = True

    def left(self, old: Sequence[OldWorker]) -> list[list[Left]]:
        """Tell the queue what the positions contain; it leases the rest by itself."""
        named = {name for name in self._queue.readers() if name.startswith(_WORKER)}
        self._settle({str(one.position.get("reader")) for one in old} | named, old)
        return [[] for _ in old]

    def give_back(self, old: OldWorker) -> None:
        """Return the files of a reader that is gone to the queue, from its position on."""
        self._settle({str(old.position.get("reader"))}, [old])

    def _settle(self, readers: Collection[str], old: Sequence[OldWorker]) -> None:
        finished = [number for one in old for number in one.position.get("finished", ())]
        reached = {one.spot.round: one.spot.progress() for one in old if one.spot.file is not None}
        self._queue.settle(readers, finished, reached)

    def begin(self, old: Sequence[OldWorker], left: Sequence[Left], shard: Shard) -> Position:  # noqa: ARG002
        return {"finished": [], "reader": None if shard.workers == 1 else f"{_WORKER}{shard.worker}"}
