"""Which file a file source reads next: of a list that is sharded among the workers, or of a watch.

The source reads a file to its end and then asks `Files.after` for the next one. Lists and watches are below;
`growing` has files that are appended to while they are read, and `queued` files of a work queue.
"""

from __future__ import annotations

import logging
import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from itertools import pairwise
from typing import Any

from monolith.data.files.cursors import FileCursor, Left, OldWorker
from monolith.data.files.discovery import Watch
from monolith.data.shuffling import ShuffleConfig, permutation
from monolith.data.source import Position, Shard
from monolith.errors import DataError, RestoreError

_log = logging.getLogger(__name__)


class Step(Enum):
    """What comes after a file, if not another one."""

    WAIT = "nothing yet"
    END = "nothing"


class Files(ABC):
    """Which file comes next. The defaults are those of files that belong to this worker for good."""

    mixes = False
    """Whether a shuffled stretch may continue in the next file: only if the next is always the same."""
    grows = False
    """Whether more may come in a file that was read to its end."""
    live = False
    """Whether files are read as they appear."""
    repeats_order = False
    """Whether the files follow each other in the same order after a restart."""
    trouble = ""
    """Why the next file cannot be found now, for an operator; empty if it can."""

    @abstractmethod
    def deal(self, shard: Shard) -> None:
        """Choose the files of one worker; called once, before anything else."""

    @abstractmethod
    def after(self, spot: FileCursor) -> FileCursor | Step:
        """Return the beginning of the file after the one of `spot`; of the first file, if `spot` has none."""

    def wait(self) -> None:  # noqa: B027  a default, as those below
        """Sleep until the next file may be there."""

    def rewind(self, spot: FileCursor) -> None:  # noqa: B027
        """Note that reading starts at `spot`, though it may have come further before."""

    def lost(self, spot: FileCursor) -> bool:  # noqa: ARG002
        """Return whether the file of `spot` is no longer for this worker to read."""
        return False

    def taken(self, spot: FileCursor, *, ended: bool) -> None:  # noqa: B027
        """Note that the consumer has all records before `spot`; `ended`, that there are no more for now."""

    @abstractmethod
    def save(self, spot: FileCursor) -> Position:
        """Return what a position has in addition to the spot."""

    @abstractmethod
    def restore(self, saved: Position, spot: FileCursor) -> None:
        """Resume from a position whose spot is `spot`."""

    def commit(self, position: Position) -> None:  # noqa: B027
        """Note that a checkpoint contains a position."""

    def close(self) -> None:  # noqa: B027
        """Release what this worker has."""

    # For another number of workers

    @abstractmethod
    def left(self, old: Sequence[OldWorker]) -> list[list[Left]]:
        """Return the files that each old worker had left, in its order, and that no new worker's shard has.

        Raises:
            RestoreError: It cannot be told.
        """

    @abstractmethod
    def begin(self, old: Sequence[OldWorker], left: Sequence[Left], shard: Shard) -> Position:
        """Return what the position of a new worker that starts with `left` has in addition to its spot."""


class _Paths:
    """The paths of one worker, and their order in each epoch."""

    def __init__(self, every: Sequence[str], shard: Shard, seed: int | None) -> None:
        self.paths = every[shard.worker :: shard.workers]
        self.digest = zlib.crc32("\n".join(self.paths).encode())
        self._seed = seed
        self._ordered = (-1, list[str]())

    def order(self, epoch: int) -> Sequence[str]:
        if self._seed is None:
            return self.paths
        found = self._ordered  # any thread may ask
        if found[0] != epoch:
            order = permutation(len(self.paths), self._seed, epoch).tolist()
            found = self._ordered = (epoch, [self.paths[number] for number in order])
        return found[1]


class _Backlog:
    """Files of old workers that a worker reads before the epochs that are sharded among the new ones."""

    def __init__(self, saved: Sequence[Any] = (), first_epoch: int = 0) -> None:
        self.saved = saved
        self.left = [Left.read(one) for one in saved]
        self.first_epoch = first_epoch
        """The first that is read as one's shard, from its beginning."""
        self._numbers = {(one.round, one.file): number for number, one in enumerate(self.left)}

    def has(self, spot: FileCursor) -> bool:
        return (spot.round, spot.file) in self._numbers

    def before(self, spot: FileCursor) -> list[Left]:
        """Return what is read of it before the file of a spot."""
        assert spot.file is not None
        return self.left[: self._numbers[spot.round, spot.file]]

    def after(self, spot: FileCursor) -> Left | None:
        number = 0 if spot.file is None else self._numbers[spot.round, spot.file] + 1
        return self.left[number] if number < len(self.left) else None

    def from_here(self, spot: FileCursor) -> list[Left]:
        """Return what is left of it."""
        if spot.file is None:
            return self.left
        return [Left.of(spot), *self.left[self._numbers[spot.round, spot.file] + 1 :]]

    def save(self, spot: FileCursor) -> Position:
        """Return what a position must say of it, which is nothing when it was read."""
        if spot.round >= self.first_epoch and (spot.file is not None or not self.first_epoch):
            return {}
        return {"backlog": self.saved, "first_epoch": self.first_epoch}

    @classmethod
    def restored(cls, saved: Position, known: Collection[str]) -> _Backlog:
        """Return the backlog that a position has.

        Raises:
            RestoreError: It is malformed, or names a file that is not among those known.
        """
        saved_backlog, first = saved.get("backlog", []), saved.get("first_epoch", 0)
        if not isinstance(saved_backlog, list) or not isinstance(first, int) or first < 0:
            raise RestoreError("cannot restore a file source: malformed backlog in the position")
        backlog = cls(saved_backlog, first)
        _check_known((one.file for one in backlog.left), known)
        return backlog


class ListedPaths(Files):
    """Paths that are known from the beginning."""

    mixes = True
    repeats_order = True

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
        self._known = frozenset(self._all)
        self._epochs = epochs
        self._seed = shuffle.seed if shuffle is not None and shuffle.files else None
        self._mine = _Paths((), Shard(), None)
        self._backlog = _Backlog()

    def deal(self, shard: Shard) -> None:
        files = len(self._all)
        self._mine = _Paths(self._all, shard, self._seed)
        if files < shard.workers and (shard.worker == 0 or not self._mine.paths):
            _log.warning(
                "file source: fewer files than workers, %d for %d: there is no data for worker %s; cut the "
                "files into %d or more, or run fewer workers",
                files,
                shard.workers,
                ", ".join(map(str, range(files, shard.workers))),
                shard.workers,
            )

    # How much there is; from any thread

    @property
    def paths(self) -> set[str]:
        """All that this worker reads."""
        return {*self._mine.paths, *(one.file for one in self._backlog.left)}

    def weight(self, weights: Mapping[str, int]) -> int | None:
        """Return what all that this worker reads weighs, as often as it is read; None without end."""
        backlog, each = self._backlog, sum(weights[path] for path in self._mine.paths)
        if self._epochs is None:
            return None
        return sum(weights[one.file] for one in backlog.left) + each * (self._epochs - backlog.first_epoch)

    def weight_before(self, spot: FileCursor, weights: Mapping[str, int]) -> int:
        """Return what is read before the file of a spot weighs together."""
        backlog = self._backlog
        if spot.file is None:
            return 0
        if backlog.has(spot):
            return sum(weights[one.file] for one in backlog.before(spot))
        order = self._mine.order(spot.round)
        rounds = (spot.round - backlog.first_epoch) * sum(weights[path] for path in order)
        earlier = order[: order.index(spot.file)]
        return (
            sum(weights[one.file] for one in backlog.left) + rounds + sum(weights[path] for path in earlier)
        )

    def after(self, spot: FileCursor) -> FileCursor | Step:
        if spot.file is None or self._backlog.has(spot):
            left = self._backlog.after(spot)
            return self._first(self._backlog.first_epoch) if left is None else left.spot()
        order = self._mine.order(spot.round)
        number = order.index(spot.file) + 1
        if number < len(order):
            return FileCursor(round=spot.round, file=order[number])
        return self._first(spot.round + 1)

    def _first(self, epoch: int) -> FileCursor | Step:
        if not self._mine.paths or (self._epochs is not None and epoch >= self._epochs):
            return Step.END
        return FileCursor(round=epoch, file=self._mine.order(epoch)[0])

    def save(self, spot: FileCursor) -> Position:
        return {"files": self._mine.digest, **self._backlog.save(spot)}

    def restore(self, saved: Position, spot: FileCursor) -> None:
        digest = saved.get("files")
        if not isinstance(digest, int) or digest < 0:
            raise RestoreError("cannot restore a file source: the position is not of one with a list")
        backlog = _Backlog.restored(saved, self._known)
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

    def left(self, old: Sequence[OldWorker]) -> list[list[Left]]:
        begun = max(map(self._begun, old))
        return [self._left_before(begun, one) for one in old]

    def begin(self, old: Sequence[OldWorker], left: Sequence[Left], shard: Shard) -> Position:
        return {
            "files": _Paths(self._all, shard, None).digest,
            "backlog": [list(one) for one in left],
            "first_epoch": max(map(self._begun, old)),
        }

    def _begun(self, old: OldWorker) -> int:
        """Return the first epoch of which an old worker had not begun its share."""
        first = _Backlog.restored(old.position, self._known).first_epoch
        return first if old.spot.file is None else max(first, old.spot.round + 1)

    def _left_before(self, epoch: int, old: OldWorker) -> list[Left]:
        """Return what an old worker had not read of all epochs before one."""
        paths = _Paths(self._all, old.shard, self._seed)
        backlog = _Backlog.restored(old.position, self._known)
        if old.position.get("files") != paths.digest:
            raise RestoreError(
                "the list of files has changed, so it is unknown what each worker had left; give the same "
                "files"
            )
        spot, first, left = old.spot, backlog.first_epoch, list[Left]()
        if spot.file is None or backlog.has(spot):
            left = backlog.from_here(spot)
        else:
            order = paths.order(spot.round)
            rest = order[order.index(spot.file) + 1 :]
            left, first = [Left.of(spot), *(Left(spot.round, path) for path in rest)], spot.round + 1
        return left + [Left(later, path) for later in range(first, epoch) for path in paths.order(later)]


class Watched(Files):
    """Files that match the patterns now, and those that will."""

    mixes = True
    live = True

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._shard = Shard()
        self._seen: list[str] = []
        self._known: set[str] = set()
        self._first = 0
        """Files of those seen that others have read: the first of ours comes after them."""
        self._parts: dict[str, Left] = {}
        """Files of those seen of which others have read a part."""
        self._waits_at = FileCursor()
        """The end of the last file that was read, while there is no other."""

    def deal(self, shard: Shard) -> None:
        self._shard = shard

    def after(self, spot: FileCursor) -> FileCursor | Step:
        number = self._first if spot.file is None else self._seen.index(spot.file) + 1
        if number == len(self._seen):
            mine = [path for path in self._watch.list_files() if _reader_of(path, self._shard) == self._shard]
            new = [path for path in mine if path not in self._known]
            self._seen += new
            self._known |= set(new)
        if number < len(self._seen):
            self._watch.found()
            path = self._seen[number]
            return self._parts.get(path, Left(0, path)).spot()
        self._waits_at = spot
        return Step.END if self._watch.is_over() else Step.WAIT

    def wait(self) -> None:
        self._watch.wait()

    def lost(self, spot: FileCursor) -> bool:
        return spot == self._waits_at  # all of it was read, and it may be gone

    def save(self, spot: FileCursor) -> Position:
        found: Position = {"seen": list(self._seen)}
        if spot.file is not None and spot == self._waits_at:
            found["at_end"] = True
        if self._first or self._parts:
            found |= {"first": self._first, "parts": [list(one) for one in self._parts.values()]}
        return found

    def restore(self, saved: Position, spot: FileCursor) -> None:
        seen = saved.get("seen")
        if not isinstance(seen, list) or not all(isinstance(path, str) for path in seen):
            raise RestoreError("cannot restore a file source: the position is not of one that watches")
        if spot.file is not None and spot.file not in seen:
            raise RestoreError(f"cannot restore a file source: the position is in {spot.file}, unseen before")
        first, parts = saved.get("first", 0), saved.get("parts", [])
        if not isinstance(first, int) or not 0 <= first <= len(seen) or not isinstance(parts, list):
            raise RestoreError("cannot restore a file source: malformed files in the position")
        left = {one.file: one for one in map(Left.read, parts)}
        # Files that were read may be gone by now. Those that will be opened must match the patterns.
        at_end = bool(saved.get("at_end"))
        number = first if spot.file is None else seen.index(spot.file) + at_end
        to_read = {*seen[number:], *left}
        if to_read:
            _check_known(to_read, set(self._watch.list_files()))
        self._seen, self._known, self._first, self._parts = list(seen), set(seen), first, left
        self._waits_at = spot if at_end else FileCursor()

    def left(self, old: Sequence[OldWorker]) -> list[list[Left]]:
        return [self._left(one) for one in old]

    def begin(self, old: Sequence[OldWorker], left: Sequence[Left], shard: Shard) -> Position:
        mine = [one.file for one in left]
        # A worker that lists files must not find those again that others have read, or will read.
        others = [path for one in old for path in one.position["seen"] if _reader_of(path, shard) == shard]
        others = [path for path in others if path not in set(mine)]
        parts = [list(one) for one in left if any(one[2:])]
        return {"seen": [*others, *mine], "first": len(others), "parts": parts}

    def _left(self, old: OldWorker) -> list[Left]:
        spot = old.spot
        self.restore(old.position, spot)
        if spot.file is not None and spot == self._waits_at:
            return []
        number = self._first if spot.file is None else self._seen.index(spot.file)
        left = [self._parts.get(path, Left(0, path)) for path in self._seen[number:]]
        return left if spot.file is None else [Left.of(spot), *left[1:]]


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


def _reader_of(path: str, shard: Shard) -> Shard:
    """Return the share that a file is in which was found by looking."""
    return Shard(zlib.crc32(path.encode()) % shard.workers, shard.workers)
