"""Which file a file source reads next: of a list that is sharded among the workers, or of a watch.

The source reads a file to its end and then asks `FileOrder.after` for the next one. Lists and watches are
below; `growing` has files that are appended to while they are read, and `leased` files of a work queue.
"""

from __future__ import annotations

import logging
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from itertools import pairwise
from typing import Any, NamedTuple

from monolith import concurrency, filesystem
from monolith.data.files.cursors import FileCursor, FormerWorker, RemainingFile
from monolith.data.files.discovery import Watch
from monolith.data.format import Chunk
from monolith.data.shuffling import ShuffleConfig, permutation
from monolith.data.source import Position, Shard
from monolith.errors import DataError, FilesystemError, RestoreError

_log = logging.getLogger(__name__)

MOST_CHUNKS = 4096
"""Chunks whose ends `ReadProgress` remembers: more than any stage buffers."""
MOST_REMOTE_FILES = 1000
"""The size of each remote file costs a request; with more files the fraction read is unknown."""


class Step(Enum):
    """The answer of `FileOrder.after` if there is no next file."""

    WAIT = "nothing yet"
    END = "nothing"


class FileOrder(ABC):
    """Which file comes next. The defaults are those of files that belong to this worker for good."""

    shuffles_across_files = False
    """Whether a shuffled block may continue in the next file: only if the next is always the same."""
    grows = False
    """Whether records may be appended to a file that was read to its end."""
    live = False
    """Whether files are read as they appear."""
    repeats_order = False
    """Whether the files follow each other in the same order after a restart."""
    trouble = ""
    """Why the next file cannot be found now, for an operator; empty if it can."""

    @abstractmethod
    def assign(self, shard: Shard) -> None:
        """Choose the files of one worker; called once, before anything else."""

    @abstractmethod
    def after(self, cursor: FileCursor) -> FileCursor | Step:
        """Return the beginning of the file after that of a cursor; of the first file, if it has none."""

    def wait(self, stop: concurrency.Event) -> None:  # noqa: B027  a default, as those below
        """Sleep until the next file may be there, or an event is set."""

    def rewind(self, cursor: FileCursor) -> None:  # noqa: B027
        """Note that reading starts at a cursor, although it may have been further before."""

    def is_lost(self, cursor: FileCursor) -> bool:  # noqa: ARG002
        """Return whether the file of a cursor is no longer for this worker to read."""
        return False

    def consumed(self, cursor: FileCursor, *, ended: bool) -> None:  # noqa: B027
        """Note that the consumer has all records before a cursor; `ended`, that there are no more for now."""

    @abstractmethod
    def save(self, cursor: FileCursor) -> Position:
        """Return the part of a position that is not in the cursor."""

    @abstractmethod
    def restore(self, saved: Position, cursor: FileCursor) -> None:
        """Resume from a position with this cursor."""

    def commit(self, position: Position) -> None:  # noqa: B027
        """Note that a checkpoint contains a position."""

    def close(self) -> None:  # noqa: B027
        """Release the files of this worker."""

    # Another number of workers

    @abstractmethod
    def remaining(self, former: Sequence[FormerWorker]) -> list[list[RemainingFile]]:
        """Return the files that each former worker had left, in its order, and that no new shard contains.

        Raises:
            RestoreError: That is unknown.
        """

    @abstractmethod
    def begin(
        self, former: Sequence[FormerWorker], remaining: Sequence[RemainingFile], shard: Shard
    ) -> Position:
        """Return what `save` would of a new worker that starts with some remaining files."""


class _ShardPaths:
    """The paths of one worker, and their order in each epoch."""

    def __init__(self, every: Sequence[str], shard: Shard, seed: int | None) -> None:
        self.paths = every[shard.worker :: shard.workers]
        self.digest = zlib.crc32("\n".join(self.paths).encode())
        self._seed = seed
        self._ordered = (-1, list[str]())

    def order(self, epoch: int) -> Sequence[str]:
        if self._seed is None:
            return self.paths
        found = self._ordered  # read once: any thread may replace it
        if found[0] != epoch:
            order = permutation(len(self.paths), self._seed, epoch).tolist()
            found = self._ordered = (epoch, [self.paths[number] for number in order])
        return found[1]


class _Backlog:
    """Files of former workers that a worker reads before the epochs that are sharded among the new ones."""

    def __init__(self, saved: Sequence[Any] = (), first_epoch: int = 0) -> None:
        self.saved = saved
        self.files = [RemainingFile.read(one) for one in saved]
        self.first_epoch = first_epoch
        """The first epoch that is read as a shard of all files, from its beginning."""
        self._numbers = {(one.round, one.file): number for number, one in enumerate(self.files)}

    def has(self, cursor: FileCursor) -> bool:
        return (cursor.round, cursor.file) in self._numbers

    def before(self, cursor: FileCursor) -> list[RemainingFile]:
        """Return the files before that of a cursor."""
        assert cursor.file is not None
        return self.files[: self._numbers[cursor.round, cursor.file]]

    def after(self, cursor: FileCursor) -> RemainingFile | None:
        number = 0 if cursor.file is None else self._numbers[cursor.round, cursor.file] + 1
        return self.files[number] if number < len(self.files) else None

    def from_here(self, cursor: FileCursor) -> list[RemainingFile]:
        """Return the files from a cursor on."""
        if cursor.file is None:
            return self.files
        return [RemainingFile.of(cursor), *self.files[self._numbers[cursor.round, cursor.file] + 1 :]]

    def save(self, cursor: FileCursor) -> Position:
        """Return the part of a position about the backlog: nothing once it was read."""
        if cursor.round >= self.first_epoch and (cursor.file is not None or not self.first_epoch):
            return {}
        return {"backlog": self.saved, "first_epoch": self.first_epoch}

    @classmethod
    def restored(cls, saved: Position, known: Collection[str]) -> _Backlog:
        """Return the backlog in a position.

        Raises:
            RestoreError: It is malformed, or names a file that is not among those known.
        """
        saved_backlog, first = saved.get("backlog", []), saved.get("first_epoch", 0)
        if not isinstance(saved_backlog, list) or not isinstance(first, int) or first < 0:
            raise RestoreError("cannot restore a file source: malformed backlog in the position")
        backlog = cls(saved_backlog, first)
        _check_known((one.file for one in backlog.files), known)
        return backlog


class ListedFiles(FileOrder):
    """Paths that are known from the beginning. Path i of n workers belongs to worker i modulo n."""

    shuffles_across_files = True
    repeats_order = True

    def __init__(self, paths: Sequence[str], epochs: int | None, shuffle: ShuffleConfig | None) -> None:
        self._all = sorted(paths)
        if twice := {one for one, next_one in pairwise(self._all) if one == next_one}:
            raise DataError(f"file source: listed more than once: {', '.join(sorted(twice)[:5])}")
        if not self._all:
            raise DataError(
                "file source: the list of files is empty; find_files() says what a pattern matches"
            )
        self._known = frozenset(self._all)
        self._epochs = epochs
        self._seed = shuffle.seed if shuffle is not None and shuffle.files else None
        self._mine = _ShardPaths((), Shard(), None)
        self._backlog = _Backlog()

    def assign(self, shard: Shard) -> None:
        files = len(self._all)
        self._mine = _ShardPaths(self._all, shard, self._seed)
        if files < shard.workers and (shard.worker == 0 or not self._mine.paths):
            _log.warning(
                "file source: fewer files than workers, %d for %d: there is no data for worker %s; split the "
                "files into %d or more, or run fewer workers",
                files,
                shard.workers,
                ", ".join(map(str, range(files, shard.workers))),
                shard.workers,
            )

    def after(self, cursor: FileCursor) -> FileCursor | Step:
        if cursor.file is None or self._backlog.has(cursor):
            remaining = self._backlog.after(cursor)
            return self._first(self._backlog.first_epoch) if remaining is None else remaining.cursor()
        order = self._mine.order(cursor.round)
        number = order.index(cursor.file) + 1
        if number < len(order):
            return FileCursor(round=cursor.round, file=order[number])
        return self._first(cursor.round + 1)

    def _first(self, epoch: int) -> FileCursor | Step:
        if not self._mine.paths or (self._epochs is not None and epoch >= self._epochs):
            return Step.END
        return FileCursor(round=epoch, file=self._mine.order(epoch)[0])

    def save(self, cursor: FileCursor) -> Position:
        return {"files": self._mine.digest, **self._backlog.save(cursor)}

    def restore(self, saved: Position, cursor: FileCursor) -> None:
        digest = saved.get("files")
        if not isinstance(digest, int) or digest < 0:
            raise RestoreError("cannot restore a file source: the position is not of one with a list")
        backlog = _Backlog.restored(saved, self._known)
        if cursor.file is not None and cursor.file not in self._mine.paths and not backlog.has(cursor):
            raise RestoreError(
                f"cannot restore a file source: the position is in {cursor.file}, which is not among the "
                f"{len(self._mine.paths)} files of this worker"
            )
        if self._epochs is not None and cursor.round >= self._epochs:
            raise RestoreError(
                f"cannot restore a file source: the position is in epoch {cursor.round}, "
                f"there are {self._epochs} from 0 on"
            )
        if self._seed is not None and digest != self._mine.digest:
            raise RestoreError(
                "cannot restore a file source: the list of files has changed, so that shuffling would put "
                "them into another order. Give the same files, or shuffle with files=False."
            )
        self._backlog = backlog

    def remaining(self, former: Sequence[FormerWorker]) -> list[list[RemainingFile]]:
        # Epochs from the first that no worker has started are sharded anew; the rest is the backlog.
        begun = max(map(self._first_unstarted, former))
        return [self._remaining_before(begun, one) for one in former]

    def begin(
        self, former: Sequence[FormerWorker], remaining: Sequence[RemainingFile], shard: Shard
    ) -> Position:
        return {
            "files": _ShardPaths(self._all, shard, None).digest,
            "backlog": [list(one) for one in remaining],
            "first_epoch": max(map(self._first_unstarted, former)),
        }

    def _first_unstarted(self, former: FormerWorker) -> int:
        """Return the first epoch of which a former worker had not started its shard."""
        first = _Backlog.restored(former.position, self._known).first_epoch
        return first if former.cursor.file is None else max(first, former.cursor.round + 1)

    def _remaining_before(self, epoch: int, former: FormerWorker) -> list[RemainingFile]:
        """Return the files that a former worker had not read of all epochs before one."""
        paths = _ShardPaths(self._all, former.shard, self._seed)
        backlog = _Backlog.restored(former.position, self._known)
        if former.position.get("files") != paths.digest:
            raise RestoreError(
                "the list of files has changed, so it is unknown what each worker had left; give the same "
                "files"
            )
        cursor, first = former.cursor, backlog.first_epoch
        if cursor.file is None or backlog.has(cursor):
            found = list(backlog.from_here(cursor))
        else:
            order = paths.order(cursor.round)
            rest = order[order.index(cursor.file) + 1 :]
            found = [RemainingFile.of(cursor), *(RemainingFile(cursor.round, path) for path in rest)]
            first = cursor.round + 1
        later = ((later, path) for later in range(first, epoch) for path in paths.order(later))
        return found + [RemainingFile(*one) for one in later]

    # How much there is, for `ReadProgress`; from any thread

    @property
    def paths(self) -> set[str]:
        """All files that this worker reads."""
        return {*self._mine.paths, *(one.file for one in self._backlog.files)}

    def total(self, sizes: Mapping[str, int]) -> int | None:
        """Return the sum of the sizes of all files, each counted as often as it is read; None without end."""
        backlog, each = self._backlog, sum(sizes[path] for path in self._mine.paths)
        if self._epochs is None:
            return None
        return sum(sizes[one.file] for one in backlog.files) + each * (self._epochs - backlog.first_epoch)

    def total_before(self, cursor: FileCursor, sizes: Mapping[str, int]) -> int:
        """Return the sum of the sizes of the files before that of a cursor."""
        backlog = self._backlog
        if cursor.file is None:
            return 0
        if backlog.has(cursor):
            return sum(sizes[one.file] for one in backlog.before(cursor))
        order = self._mine.order(cursor.round)
        epochs = (cursor.round - backlog.first_epoch) * sum(sizes[path] for path in order)
        earlier = order[: order.index(cursor.file)]
        return sum(sizes[one.file] for one in backlog.files) + epochs + sum(sizes[path] for path in earlier)


class WatchedFiles(FileOrder):
    """Files that match patterns now, and those that appear later.

    A hash of its name decides the worker of a file: the number of files is unknown, and workers list the
    folder at different times.
    """

    shuffles_across_files = True
    live = True

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._shard = Shard()
        self._seen: list[str] = []
        self._known: set[str] = set()
        self._first = 0
        """Files at the start of `_seen` that former workers have read."""
        self._parts: dict[str, RemainingFile] = {}
        """Files of `_seen` that former workers have read a part of."""
        self._waits_at = FileCursor()
        """The end of the last file that was read, while there is no other."""

    def assign(self, shard: Shard) -> None:
        self._shard = shard

    def after(self, cursor: FileCursor) -> FileCursor | Step:
        number = self._first if cursor.file is None else self._seen.index(cursor.file) + 1
        if number == len(self._seen):
            mine = [path for path in self._watch.list_files() if _shard_of(path, self._shard) == self._shard]
            new = [path for path in mine if path not in self._known]
            self._seen += new
            self._known |= set(new)
        if number < len(self._seen):
            self._watch.found()
            path = self._seen[number]
            return self._parts.get(path, RemainingFile(0, path)).cursor()
        self._waits_at = cursor
        return Step.END if self._watch.is_over() else Step.WAIT

    def wait(self, stop: concurrency.Event) -> None:
        self._watch.wait(stop)

    def is_lost(self, cursor: FileCursor) -> bool:
        return cursor == self._waits_at  # all of it was read, and it may have been deleted

    def save(self, cursor: FileCursor) -> Position:
        found: Position = {"seen": list(self._seen)}
        if cursor.file is not None and cursor == self._waits_at:
            found["at_end"] = True
        if self._first or self._parts:
            found |= {"first": self._first, "parts": [list(one) for one in self._parts.values()]}
        return found

    def restore(self, saved: Position, cursor: FileCursor) -> None:
        seen = saved.get("seen")
        if not isinstance(seen, list) or not all(isinstance(path, str) for path in seen):
            raise RestoreError("cannot restore a file source: the position is not of one that watches")
        if cursor.file is not None and cursor.file not in seen:
            raise RestoreError(
                f"cannot restore a file source: the position is in {cursor.file}, unseen before"
            )
        first, saved_parts = saved.get("first", 0), saved.get("parts", [])
        if not isinstance(first, int) or not 0 <= first <= len(seen) or not isinstance(saved_parts, list):
            raise RestoreError("cannot restore a file source: malformed files in the position")
        parts = {one.file: one for one in map(RemainingFile.read, saved_parts)}
        # Files that were read may be gone by now. Those that will be opened must match the patterns.
        at_end = bool(saved.get("at_end"))
        number = first if cursor.file is None else seen.index(cursor.file) + at_end
        to_read = {*seen[number:], *parts}
        if to_read:
            _check_known(to_read, set(self._watch.list_files()))
        self._seen, self._known, self._first, self._parts = list(seen), set(seen), first, parts
        self._waits_at = cursor if at_end else FileCursor()

    def remaining(self, former: Sequence[FormerWorker]) -> list[list[RemainingFile]]:
        return [self._remaining_of(one) for one in former]

    def begin(
        self, former: Sequence[FormerWorker], remaining: Sequence[RemainingFile], shard: Shard
    ) -> Position:
        mine = [one.file for one in remaining]
        # This worker lists the folder again, and must not take files for new that were read, or that another
        # new worker reads.
        seen = [path for one in former for path in one.position["seen"] if _shard_of(path, shard) == shard]
        done = [path for path in seen if path not in set(mine)]
        parts = [list(one) for one in remaining if any(one[2:])]
        return {"seen": [*done, *mine], "first": len(done), "parts": parts}

    def _remaining_of(self, former: FormerWorker) -> list[RemainingFile]:
        cursor = former.cursor
        self.restore(former.position, cursor)
        if cursor.file is not None and cursor == self._waits_at:
            return []
        number = self._first if cursor.file is None else self._seen.index(cursor.file)
        found = [self._parts.get(path, RemainingFile(0, path)) for path in self._seen[number:]]
        return found if cursor.file is None else [RemainingFile.of(cursor), *found[1:]]


def _check_known(files: Iterable[str], known: Collection[str]) -> None:
    """Refuse a position that names files which the source would not find by itself.

    Positions also come from other processes, such as the chunks of a data service. Paths are compared as they
    are written, so `..` and links into another folder are other paths.
    """
    strange = sorted({file for file in files if file not in known})
    if strange:
        raise RestoreError(
            f"cannot restore a file source: the position names {', '.join(map(repr, strange[:3]))}"
            f"{f' and {len(strange) - 3} more' if len(strange) > 3 else ''}, not among the files of this "
            "source. Give the same files or patterns as when the position was saved."
        )


def _shard_of(path: str, shard: Shard) -> Shard:
    """Return the shard of a watched file, among as many as `shard` is one of."""
    return Shard(zlib.crc32(path.encode()) % shard.workers, shard.workers)


class _ChunkMark(NamedTuple):
    """Where a chunk is, in records and in bytes."""

    file: FileCursor
    first: int
    """Records of the reader before it."""
    last: int
    begin: int
    """Bytes of its file before it."""
    end: int


class ReadProgress:
    """Which fraction of a list of files was read, in bytes as they are on disk. Any thread may ask.

    The number of records of a CSV is unknown before it is read, but its size is known. A chunk says after how
    many bytes of its file it ends, and a position how many records precede it; records inside of a chunk are
    interpolated. The sizes of files are looked up on the first call.
    """

    def __init__(self, files: ListedFiles) -> None:
        self._files = files
        self._lock = concurrency.Lock()  # guards all below: one thread reads, and any may ask
        self._marks: deque[_ChunkMark] = deque(maxlen=MOST_CHUNKS)
        self._unknown = False
        """Whether the format does not say where chunks end, or the sizes are unknown."""
        self._sizes: dict[str, int] = {}

    def restart(self) -> None:
        """Note that reading starts, from another cursor than before."""
        with self._lock:
            self._marks.clear()

    def note(self, cursor: FileCursor, chunk: Chunk) -> None:
        """Note a chunk that begins at a cursor."""
        with self._lock:
            if chunk.reached is None:
                self._unknown = True
                return
            # If reading resumed in the middle of a file, only the end of its first chunk is known.
            begin = chunk.reached if cursor.place else 0
            if self._marks and (last := self._marks[-1]).file.is_in_file_of(cursor):
                begin = last.end
            first = cursor.good
            self._marks.append(_ChunkMark(cursor, first, first + len(chunk.records), begin, chunk.reached))

    def fraction(self, cursor: FileCursor, records: int) -> float | None:
        """Return the fraction of all bytes before the record so many after a cursor; None if unknown."""
        number = cursor.good + cursor.skip + cursor.taken + records
        with self._lock:
            file, inside = self._find(number)
            sizes = None if self._unknown else self._look_up()
            self._unknown = sizes is None
        if sizes is None:
            return None
        try:
            total, before = self._files.total(sizes), self._files.total_before(file or cursor, sizes)
        except (KeyError, ValueError):  # other files were assigned to this worker just now
            return None
        return (before + inside) / total if total else None

    def _find(self, number: int) -> tuple[FileCursor | None, float]:
        """Return the file of a record, by its number among all that were read, and the bytes before it."""
        found: _ChunkMark | None = None
        for mark in reversed(self._marks):
            if found is not None and mark.last < number:
                break
            found = mark
        if found is None:
            return None, 0.0
        part = min(max(number - found.first, 0) / max(found.last - found.first, 1), 1.0)
        return found.file, found.begin + part * (found.end - found.begin)

    def _look_up(self) -> dict[str, int] | None:
        """Return the size of every file; None if that is expensive or fails."""
        missing = self._files.paths - self._sizes.keys()
        if sum(map(filesystem.is_remote, missing)) > MOST_REMOTE_FILES:
            return None
        try:
            self._sizes |= {path: filesystem.file_size(path) for path in missing}
        except FilesystemError:  # reading the file reports it
            return None
        return self._sizes
