"""Which file a file source reads next, and places between its records.

One of three decides: a list, dealt out among the workers; a watch, for files that are yet to appear;
or a queue that all workers take from. The source reads, and hears from them what comes after a file.
"""

from __future__ import annotations

import logging
import secrets
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from itertools import pairwise
from typing import Protocol

from monolith.data.files.discovery import Watch
from monolith.data.files.work_queue import FileQueue, Lease, Progress
from monolith.data.format import Chunk
from monolith.data.share import Share
from monolith.data.shuffling import ShuffleConfig, permutation
from monolith.data.source import Position
from monolith.errors import DataError, RestoreError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spot:
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

    def past(self, chunk: Chunk) -> Spot:
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

    def progress(self) -> Progress:
        return {"place": self.place, "skip": self.skip, "length": self.length, "taken": self.taken}


class Step(Enum):
    """What comes after a file, if not another one."""

    WAIT = "nothing yet"
    END = "nothing"


class Files(Protocol):
    """Which file comes next."""

    mixes: bool
    """Whether a stretch that is shuffled may go on in the next file: only if the next is always the same."""

    def deal(self, share: Share) -> None:
        """Hear which of the workers this is; once, before anything else."""

    def after(self, spot: Spot) -> Spot | Step:
        """Return the beginning of the file after the one of `spot`; of the first, if that has none."""

    def wait(self) -> None: ...

    def rewind(self, spot: Spot) -> None:
        """Hear that reading begins at `spot`, though it may have come further before."""

    def lost(self, spot: Spot) -> bool:
        """Whether the file of `spot` is no longer for this worker to read."""

    def taken(self, spot: Spot, *, ended: bool) -> None:
        """Hear that the consumer has all records before `spot`; `ended`, that there are no more for now."""

    def save(self, spot: Spot) -> Position: ...

    def restore(self, saved: Position, spot: Spot) -> None: ...

    def commit(self, position: Position) -> None: ...

    def close(self) -> None: ...


class ListedPaths:
    """Paths that are known from the beginning."""

    mixes = True

    def __init__(
        self,
        paths: Sequence[str],
        epochs: int | None,
        shuffle: ShuffleConfig | None,
    ) -> None:
        self._all = sorted(paths)
        if twice := {one for one, next_one in pairwise(self._all) if one == next_one}:
            raise DataError(f"file source: listed more than once: {', '.join(sorted(twice)[:5])}")
        if not self._all:
            raise DataError(
                "file source: the list of files is empty; find_files() says what a pattern matches"
            )
        self._paths: list[str] = []
        self._epochs = epochs
        self._seed = shuffle.seed if shuffle is not None and shuffle.files else None
        self._digest = 0
        self._ordered = (-1, list[str]())

    def deal(self, share: Share) -> None:
        files = len(self._all)
        self._paths = self._all[share.worker :: share.workers]
        self._digest = zlib.crc32("\n".join(self._paths).encode())
        if files < share.workers and (share.worker == 0 or not self._paths):
            _log.warning(
                "file source: fewer files than workers, %d for %d: there is no data for worker %s; cut the "
                "files into %d or more, or run fewer workers",
                files,
                share.workers,
                ", ".join(map(str, range(files, share.workers))),
                share.workers,
            )

    def after(self, spot: Spot) -> Spot | Step:
        if not self._paths:
            return Step.END
        if spot.file is None:
            return Spot(file=self._order(0)[0])
        order = self._order(spot.round)
        number = order.index(spot.file) + 1
        if number < len(order):
            return Spot(round=spot.round, file=order[number])
        if self._epochs is not None and spot.round + 1 >= self._epochs:
            return Step.END
        return Spot(round=spot.round + 1, file=self._order(spot.round + 1)[0])

    def _order(self, epoch: int) -> list[str]:
        if self._seed is None:
            return self._paths
        if self._ordered[0] != epoch:
            order = permutation(len(self._paths), self._seed, epoch).tolist()
            self._ordered = (epoch, [self._paths[number] for number in order])
        return self._ordered[1]

    def wait(self) -> None: ...

    def rewind(self, spot: Spot) -> None: ...

    def lost(self, spot: Spot) -> bool:  # noqa: ARG002
        return False

    def taken(self, spot: Spot, *, ended: bool) -> None: ...

    def save(self, spot: Spot) -> Position:  # noqa: ARG002
        return {"files": self._digest}

    def restore(self, saved: Position, spot: Spot) -> None:
        digest = saved.get("files")
        if not isinstance(digest, int) or digest < 0:
            raise RestoreError("cannot restore a file source: the position is not of one with a list")
        if spot.file is not None and spot.file not in self._paths:
            raise RestoreError(
                f"cannot restore a file source: the position is in {spot.file}, which is not among the "
                f"{len(self._paths)} files of this worker"
            )
        if self._epochs is not None and spot.round >= self._epochs:
            raise RestoreError(
                f"cannot restore a file source: the position is in epoch {spot.round}, "
                f"there are {self._epochs} from 0 on"
            )
        if self._seed is not None and digest != self._digest:
            raise RestoreError(
                "cannot restore a file source: the list of files has changed, so that shuffling would put "
                "them into another order. Give the same files, or shuffle with files=False."
            )

    def commit(self, position: Position) -> None: ...

    def close(self) -> None: ...


class Watched:
    """Files that match now, and those that will."""

    mixes = True

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._share = Share()
        self._seen: list[str] = []
        self._known: set[str] = set()

    def deal(self, share: Share) -> None:
        self._share = share

    def after(self, spot: Spot) -> Spot | Step:
        number = 0 if spot.file is None else self._seen.index(spot.file) + 1
        if number == len(self._seen):
            mine = [path for path in self._watch.look() if self._is_mine(path)]
            new = [path for path in mine if path not in self._known]
            self._seen += new
            self._known |= set(new)
        if number < len(self._seen):
            self._watch.found()
            return Spot(file=self._seen[number])
        return Step.END if self._watch.is_over() else Step.WAIT

    def _is_mine(self, path: str) -> bool:
        return zlib.crc32(path.encode()) % self._share.workers == self._share.worker

    def wait(self) -> None:
        self._watch.wait()

    def rewind(self, spot: Spot) -> None: ...

    def lost(self, spot: Spot) -> bool:  # noqa: ARG002
        return False

    def taken(self, spot: Spot, *, ended: bool) -> None: ...

    def save(self, spot: Spot) -> Position:  # noqa: ARG002
        return {"seen": list(self._seen)}

    def restore(self, saved: Position, spot: Spot) -> None:
        seen = saved.get("seen")
        if not isinstance(seen, list) or not all(isinstance(path, str) for path in seen):
            raise RestoreError("cannot restore a file source: the position is not of one that watches")
        if spot.file is not None and spot.file not in seen:
            raise RestoreError(f"cannot restore a file source: the position is in {spot.file}, unseen before")
        self._seen, self._known = list(seen), set(seen)

    def commit(self, position: Position) -> None: ...

    def close(self) -> None: ...


class Queued:
    """Files that this worker gets from a queue.

    Holds the leases of all files of which it does not know yet that they count: those that
    were read since the last commit, and the one being read.
    """

    mixes = False  # the next file may be another's after a restart

    def __init__(self, queue: FileQueue, worker: int | None, *, auto_commit: bool) -> None:
        self._queue = queue
        self._named = False
        self._worker = f"unnamed {secrets.token_hex(8)}"
        if worker is not None:
            self._call(worker)
        self._begun = False
        self._auto_commit = auto_commit
        self._lock = threading.RLock()  # guards all below: who reads is not always who commits
        self._held: dict[int, Lease] = {}  # by number, in the order in which they were taken
        self._reported: tuple[int, int] | None = None
        self._ended = False

    def deal(self, share: Share) -> None:
        if not self._named and share.workers > 1:
            self._call(share.worker)

    def _call(self, worker: int) -> None:
        self._named, self._worker = True, f"worker {worker}"

    def after(self, spot: Spot) -> Spot | Step:  # noqa: ARG002
        with self._lock:
            lease = self._queue.take(self._worker)
            if lease is None:
                # Workers that wait for each other's files would wait for ever.
                for held in self._held.values():
                    self._queue.mark_read(held)
                return Step.WAIT if self._queue.others_hold(self._worker) else Step.END
            self._ended = False
            self._held[lease.number] = lease
        try:
            return Spot(round=lease.number, file=lease.path, **lease.progress)
        except TypeError as cause:
            raise DataError(f"file source: no place in {lease.path}: {lease.progress}") from cause

    def wait(self) -> None:
        self._renew()
        self._queue.wait()

    def rewind(self, spot: Spot) -> None:
        self._begin()
        # A file that was taken to fill a batch which was never yielded.
        with self._lock:
            self._ended = False
            kept = {*self._finished(spot), -1 if spot.file is None else spot.round}
            for number in [number for number in self._held if number not in kept]:
                self._queue.give_back(self._held.pop(number))

    def _begin(self) -> None:
        """Void what a worker of this name held that is no more: nobody else would ever read it."""
        if not self._begun:
            self._begun = True
            self._queue.release(self._worker)

    def lost(self, spot: Spot) -> bool:
        with self._lock:
            return spot.round not in self._held

    def taken(self, spot: Spot, *, ended: bool) -> None:
        self._renew()
        with self._lock:
            self._ended = ended
            here = (spot.round, spot.place)
            if self._auto_commit and (ended or here != self._reported):
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

    def _finished(self, spot: Spot) -> list[int]:
        """Return the files of which the consumer has all records: those that were taken before this one."""
        numbers = list(self._held)
        if self._ended:
            return numbers
        if spot.file is None:
            return []
        return numbers[: numbers.index(spot.round)] if spot.round in numbers else []

    def save(self, spot: Spot) -> Position:
        with self._lock:
            return {"finished": self._finished(spot), "reader": self._worker}

    def restore(self, saved: Position, spot: Spot) -> None:
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
                elif number == spot.round:
                    # What another worker has by now is its business: it began where we had reported.
                    _log.info("file source: %s is finished, or another worker's by now", spot.file)

    def _follow(self, reader: object) -> None:
        """Take the name of the reader that saved a position, unless this one was given its own.

        That one is no more, and may have been killed after its checkpoint was saved and before the queue
        heard of it. Only under its name can we have its files, and finish what the checkpoint holds; else
        they would be handed out again when its leases run out.
        """
        if self._named or not isinstance(reader, str) or reader == self._worker:
            return
        self._queue.release(self._worker)
        self._worker, self._begun = reader, False

    def commit(self, position: Position) -> None:
        spot = Spot(**{field.name: position[field.name] for field in fields(Spot)})
        with self._lock:
            self._commit(position["finished"], spot)

    def _commit(self, finished: Sequence[int], spot: Spot) -> None:
        for number in finished:
            if number in self._held:
                self._queue.finish(self._held.pop(number))
        current = None if spot.file is None else self._held.get(spot.round)
        if current is not None and not self._queue.report(current, spot.progress()):
            del self._held[spot.round]

    def close(self) -> None:
        with self._lock:
            self._queue.release(self._worker)
            self._held = {}
