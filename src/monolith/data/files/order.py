"""Which file a file source reads next, and places between its records.

One of three decides: a list, dealt out among the workers; a watch, for files that are yet to appear;
or a queue that all workers take from. The source reads, and hears from them what comes after a file.
"""

from __future__ import annotations

import logging
import secrets
import threading
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

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


class Left(NamedTuple):
    """A file of which something is left to read, and from where; see `Spot`."""

    round: int
    file: str
    place: int = 0
    skip: int = 0
    length: int = 0
    taken: int = 0

    def spot(self) -> Spot:
        return Spot(**self._asdict())

    @classmethod
    def of(cls, spot: Spot) -> Left:
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
    """One of the workers of an earlier run: its share, its position, and where it stood."""

    share: Share
    position: Position
    spot: Spot


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

    # For another number of workers

    def left(self, old: Sequence[OldWorker]) -> list[list[Left]]:
        """Return what each old worker had left to read, in its order, and will not be read as the share of
        a new worker.

        Raises:
            RestoreError: It cannot be told.
        """

    def begin(self, old: Sequence[OldWorker], left: Sequence[Left], share: Share) -> Position:
        """Return what the position of a new worker has, beside its spot, that begins with some of what was
        left."""


class _Paths:
    """The paths of one worker, and their order in each epoch."""

    def __init__(self, every: Sequence[str], share: Share, seed: int | None) -> None:
        self.paths = every[share.worker :: share.workers]
        self.digest = zlib.crc32("\n".join(self.paths).encode())
        self._seed = seed
        self._ordered = (-1, list[str]())

    def order(self, epoch: int) -> Sequence[str]:
        if self._seed is None:
            return self.paths
        if self._ordered[0] != epoch:
            order = permutation(len(self.paths), self._seed, epoch).tolist()
            self._ordered = (epoch, [self.paths[number] for number in order])
        return self._ordered[1]


class _Backlog:
    """What is read before the epochs that are dealt out to as many workers as there are now."""

    def __init__(self, saved: Sequence[Any] = (), first_epoch: int = 0) -> None:
        self.saved = saved
        self.left = [Left.read(one) for one in saved]
        self.first_epoch = first_epoch
        """The first that is read as one's share, from its beginning."""
        self._numbers = {(one.round, one.file): number for number, one in enumerate(self.left)}

    def has(self, spot: Spot) -> bool:
        return (spot.round, spot.file) in self._numbers

    def after(self, spot: Spot) -> Left | None:
        number = 0 if spot.file is None else self._numbers[spot.round, spot.file] + 1
        return self.left[number] if number < len(self.left) else None

    def from_here(self, spot: Spot) -> list[Left]:
        """Return what is left of it."""
        if spot.file is None:
            return self.left
        return [Left.of(spot), *self.left[self._numbers[spot.round, spot.file] + 1 :]]

    def save(self, spot: Spot) -> Position:
        """Return what a position must say of it, which is nothing when it was read."""
        if spot.round >= self.first_epoch and (spot.file is not None or not self.first_epoch):
            return {}
        return {"backlog": self.saved, "first_epoch": self.first_epoch}

    @classmethod
    def restored(cls, saved: Position) -> _Backlog:
        backlog, first = saved.get("backlog", []), saved.get("first_epoch", 0)
        if not isinstance(backlog, list) or not isinstance(first, int) or first < 0:
            raise RestoreError("cannot restore a file source: malformed backlog in the position")
        return cls(backlog, first)


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
        self._epochs = epochs
        self._seed = shuffle.seed if shuffle is not None and shuffle.files else None
        self._mine = _Paths((), Share(), None)
        self._backlog = _Backlog()

    def deal(self, share: Share) -> None:
        files = len(self._all)
        self._mine = _Paths(self._all, share, self._seed)
        if files < share.workers and (share.worker == 0 or not self._mine.paths):
            _log.warning(
                "file source: fewer files than workers, %d for %d: there is no data for worker %s; cut the "
                "files into %d or more, or run fewer workers",
                files,
                share.workers,
                ", ".join(map(str, range(files, share.workers))),
                share.workers,
            )

    def after(self, spot: Spot) -> Spot | Step:
        if spot.file is None or self._backlog.has(spot):
            left = self._backlog.after(spot)
            return self._first(self._backlog.first_epoch) if left is None else left.spot()
        order = self._mine.order(spot.round)
        number = order.index(spot.file) + 1
        if number < len(order):
            return Spot(round=spot.round, file=order[number])
        return self._first(spot.round + 1)

    def _first(self, epoch: int) -> Spot | Step:
        if not self._mine.paths or (self._epochs is not None and epoch >= self._epochs):
            return Step.END
        return Spot(round=epoch, file=self._mine.order(epoch)[0])

    def wait(self) -> None: ...

    def rewind(self, spot: Spot) -> None: ...

    def lost(self, spot: Spot) -> bool:  # noqa: ARG002
        return False

    def taken(self, spot: Spot, *, ended: bool) -> None: ...

    def save(self, spot: Spot) -> Position:
        return {"files": self._mine.digest, **self._backlog.save(spot)}

    def restore(self, saved: Position, spot: Spot) -> None:
        digest = saved.get("files")
        if not isinstance(digest, int) or digest < 0:
            raise RestoreError("cannot restore a file source: the position is not of one with a list")
        backlog = _Backlog.restored(saved)
        if spot.file is not None and spot.file not in self._mine.paths and not backlog.has(spot):
            raise RestoreError(
                f"cannot restore a file source: the position is in {spot.file}, which is not among the "
                f"{len(self._mine.paths)} files of this worker"
            )
        if self._epochs is not None and spot.round >= self._epochs:
            raise RestoreError(
                f"cannot restore a file source: the position is in epoch {spot.round}, "
                f"there are {self._epochs} from 0 on"
            )
        if self._seed is not None and digest != self._mine.digest:
            raise RestoreError(
                "cannot restore a file source: the list of files has changed, so that shuffling would put "
                "them into another order. Give the same files, or shuffle with files=False."
            )
        self._backlog = backlog

    def commit(self, position: Position) -> None: ...

    def close(self) -> None: ...

    def left(self, old: Sequence[OldWorker]) -> list[list[Left]]:
        begun = max(map(self._begun, old))
        return [self._left_before(begun, one) for one in old]

    def begin(self, old: Sequence[OldWorker], left: Sequence[Left], share: Share) -> Position:
        return {
            "files": _Paths(self._all, share, None).digest,
            "backlog": [list(one) for one in left],
            "first_epoch": max(map(self._begun, old)),
        }

    def _begun(self, old: OldWorker) -> int:
        """Return the first epoch of which an old worker had not begun its share."""
        first = _Backlog.restored(old.position).first_epoch
        return first if old.spot.file is None else max(first, old.spot.round + 1)

    def _left_before(self, epoch: int, old: OldWorker) -> list[Left]:
        """Return what an old worker had not read of all epochs before one."""
        paths, backlog = _Paths(self._all, old.share, self._seed), _Backlog.restored(old.position)
        if old.position.get("files") != paths.digest:
            raise RestoreError(
                "the list of files has changed, so nobody knows what was left to whom; give the same files"
            )
        spot, first, left = old.spot, backlog.first_epoch, list[Left]()
        if spot.file is None or backlog.has(spot):
            left = backlog.from_here(spot)
        else:
            order = paths.order(spot.round)
            rest = order[order.index(spot.file) + 1 :]
            left, first = [Left.of(spot), *(Left(spot.round, path) for path in rest)], spot.round + 1
        return left + [Left(later, path) for later in range(first, epoch) for path in paths.order(later)]


class Watched:
    """Files that match now, and those that will."""

    mixes = True

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._share = Share()
        self._seen: list[str] = []
        self._known: set[str] = set()
        self._first = 0
        """Files of those seen that others have read: the first of ours comes after them."""
        self._parts: dict[str, Left] = {}
        """Files of those seen of which others have read a part."""

    def deal(self, share: Share) -> None:
        self._share = share

    def after(self, spot: Spot) -> Spot | Step:
        number = self._first if spot.file is None else self._seen.index(spot.file) + 1
        if number == len(self._seen):
            mine = [path for path in self._watch.look() if _reader_of(path, self._share) == self._share]
            new = [path for path in mine if path not in self._known]
            self._seen += new
            self._known |= set(new)
        if number < len(self._seen):
            self._watch.found()
            path = self._seen[number]
            return self._parts.get(path, Left(0, path)).spot()
        return Step.END if self._watch.is_over() else Step.WAIT

    def wait(self) -> None:
        self._watch.wait()

    def rewind(self, spot: Spot) -> None: ...

    def lost(self, spot: Spot) -> bool:  # noqa: ARG002
        return False

    def taken(self, spot: Spot, *, ended: bool) -> None: ...

    def save(self, spot: Spot) -> Position:  # noqa: ARG002
        found: Position = {"seen": list(self._seen)}
        if self._first or self._parts:
            found |= {"first": self._first, "parts": [list(one) for one in self._parts.values()]}
        return found

    def restore(self, saved: Position, spot: Spot) -> None:
        seen = saved.get("seen")
        if not isinstance(seen, list) or not all(isinstance(path, str) for path in seen):
            raise RestoreError("cannot restore a file source: the position is not of one that watches")
        if spot.file is not None and spot.file not in seen:
            raise RestoreError(f"cannot restore a file source: the position is in {spot.file}, unseen before")
        first, parts = saved.get("first", 0), saved.get("parts", [])
        if not isinstance(first, int) or not 0 <= first <= len(seen) or not isinstance(parts, list):
            raise RestoreError("cannot restore a file source: malformed files in the position")
        self._seen, self._known, self._first = list(seen), set(seen), first
        self._parts = {left.file: left for left in map(Left.read, parts)}

    def commit(self, position: Position) -> None: ...

    def close(self) -> None: ...

    def left(self, old: Sequence[OldWorker]) -> list[list[Left]]:
        return [self._left(one) for one in old]

    def begin(self, old: Sequence[OldWorker], left: Sequence[Left], share: Share) -> Position:
        mine = [one.file for one in left]
        # Who looks for files must not find again what others have read, or are going to.
        others = [path for one in old for path in one.position["seen"] if _reader_of(path, share) == share]
        others = [path for path in others if path not in set(mine)]
        parts = [list(one) for one in left if any(one[2:])]
        return {"seen": [*others, *mine], "first": len(others), "parts": parts}

    def _left(self, old: OldWorker) -> list[Left]:
        spot = old.spot
        self.restore(old.position, spot)
        number = self._first if spot.file is None else self._seen.index(spot.file)
        left = [self._parts.get(path, Left(0, path)) for path in self._seen[number:]]
        return left if spot.file is None else [Left.of(spot), *left[1:]]


def _reader_of(path: str, share: Share) -> Share:
    """Return the share that a file is in which was found by looking."""
    return Share(zlib.crc32(path.encode()) % share.workers, share.workers)


_WORKER = "worker "
"""What the name of a reader begins with, before its number, that was given one."""


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
        self.auto_commit = auto_commit
        self._entrusted = self._interrupted = False
        self._lock = threading.RLock()  # guards all below: who reads is not always who commits
        self._held: dict[int, Lease] = {}  # by number, in the order in which they were taken
        self._reported: tuple[int, int] | None = None
        self._ended = False

    def deal(self, share: Share) -> None:
        if not self._named and share.workers > 1:
            self._call(share.worker)

    def _call(self, worker: int) -> None:
        self._named, self._worker = True, f"{_WORKER}{worker}"

    def after(self, spot: Spot) -> Spot | Step:  # noqa: ARG002
        with self._lock:
            if self._interrupted:
                return Step.END
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
            if not self._entrusted:
                self._queue.release(self._worker)
            self._held = {}

    def entrust(self) -> None:
        self._entrusted = True

    def interrupt(self) -> None:
        with self._lock:
            self._interrupted = True

    def left(self, old: Sequence[OldWorker]) -> list[list[Left]]:
        """Tell the queue what the positions hold, and have it hand out the rest."""
        named = {name for name in self._queue.readers() if name.startswith(_WORKER)}
        self._settle({str(one.position.get("reader")) for one in old} | named, old)
        return [[] for _ in old]

    def give_back(self, old: OldWorker) -> None:
        """Take what a reader has that is no more, and have the queue hand out what is left after a position
        of it."""
        self._settle({str(old.position.get("reader"))}, [old])

    def _settle(self, readers: Collection[str], old: Sequence[OldWorker]) -> None:
        finished = [number for one in old for number in one.position.get("finished", ())]
        reached = {one.spot.round: one.spot.progress() for one in old if one.spot.file is not None}
        self._queue.settle(readers, finished, reached)

    def begin(self, old: Sequence[OldWorker], left: Sequence[Left], share: Share) -> Position:  # noqa: ARG002
        return {"finished": [], "reader": None if share.workers == 1 else f"{_WORKER}{share.worker}"}
