"""The file source: records of many files, in batches of one size, from any place on.

Files are read chunk by chunk. A position names a chunk and how many of its records were
yielded; restoring reads that chunk once more and passes over these. With shuffling, a
stretch of records takes the place of the chunk: its order follows from the seed and from
where it begins, so two numbers more are all there is to save.

Which files, and in which order, is decided by one of three: a list, dealt out among the
workers; a watch, for files that are yet to appear; or a queue that all workers take from.
"""

from __future__ import annotations

import base64
import json
import logging
import secrets
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from itertools import pairwise
from typing import Protocol

from monolith.data.discovery import Watch
from monolith.data.format import BadRecord, Chunk, Format
from monolith.data.iteration import closed_after
from monolith.data.records import Records, concat
from monolith.data.shuffling import ShuffleConfig, permutation
from monolith.data.source import Position
from monolith.data.work_queue import FileQueue, Lease, Progress
from monolith.errors import ConfigError, DataError, RestoreError, TooManyBadRecordsError
from monolith.filesystem import atomic_write, base_name, join, make_dirs
from monolith.observe import Metrics

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRecordPolicy:
    """What becomes of records that cannot be read."""

    max_share: float = 0.0
    """Of all records; reading stops when more are malformed. 0 stops at the first."""
    after: int = 1000
    """Records to read before the share is judged: one in the first ten says little. It is judged at the
    end in any case."""
    quarantine: str | None = None
    """A folder for them: one file of JSON lines per chunk that had any, with path, place, reason and
    payload in base64. A chunk that is read again, after a restart or in another epoch, writes the same."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_share <= 1:
            raise ConfigError(f"bad records: max_share must be from 0 to 1, got {self.max_share}")
        if self.after < 0:
            raise ConfigError(f"bad records: after must be 0 or more, got {self.after}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Spot:
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

    def past(self, chunk: Chunk) -> _Spot:
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


class _Step(Enum):
    """What comes after a file, if not another one."""

    WAIT = "nothing yet"
    END = "nothing"


@dataclass(frozen=True, slots=True)
class _Read:
    """A chunk and where it begins; or no chunk, at the end of a file or while waiting for one."""

    spot: _Spot
    chunk: Chunk | None = None
    waits: bool = False


@dataclass(slots=True)
class _Block:
    """Records that are yielded before any after them."""

    begin: _Spot
    end: _Spot
    records: Records
    first: int
    """Of `records`; those before it were yielded earlier."""
    shuffled: bool = False

    def spot(self, done: int) -> _Spot:
        """Return the place before record `done`."""
        if done == len(self.records):
            return self.end
        if not self.shuffled:
            return replace(self.begin, skip=done)
        return replace(self.begin, length=len(self.records), taken=done)


class _Stretch:
    """Records that will be put into another order together.

    One that was begun before a restart has the length it had then, however much is there now.
    """

    def __init__(self, begin: _Spot, buffer: int, resumed: int, taken: int) -> None:
        self.begin = begin
        self.missing = resumed or buffer
        self._resumed = resumed
        self._taken = taken if resumed else 0
        self._parts: list[Records] = []

    def add(self, records: Records) -> None:
        self._parts.append(records)
        self.missing -= len(records)

    def block(self, end: _Spot, seed: int) -> _Block:
        begin = self.begin
        if self._resumed and self.missing:
            raise DataError(
                f"file source: {begin.file} has fewer records than when its position was saved; "
                "it was replaced since. Begin anew."
            )
        assert begin.file is not None
        records = concat(self._parts)
        name = zlib.crc32(begin.file.encode())
        order = permutation(len(records), seed, begin.round, name, begin.place, begin.skip)
        return _Block(begin, end, records.take(order), self._taken, shuffled=True)


class _Files(Protocol):
    """Which file comes next."""

    mixes: bool
    """Whether a stretch that is shuffled may go on in the next file: only if the next is always the same."""

    def after(self, spot: _Spot) -> _Spot | _Step:
        """Return the beginning of the file after the one of `spot`; of the first, if that has none."""

    def wait(self) -> None: ...

    def rewind(self, spot: _Spot) -> None:
        """Hear that reading begins at `spot`, though it may have come further before."""

    def lost(self, spot: _Spot) -> bool:
        """Whether the file of `spot` is no longer for this worker to read."""

    def taken(self, spot: _Spot, *, ended: bool) -> None:
        """Hear that the consumer has all records before `spot`; `ended`, that there are no more for now."""

    def save(self, spot: _Spot) -> Position: ...

    def restore(self, saved: Position, spot: _Spot) -> None: ...

    def commit(self, position: Position) -> None: ...

    def close(self) -> None: ...


class FileSource:
    """Records of files, in batches.

    Args:
        files: Paths; or a watch over patterns; or a queue. Paths are sorted, and path i is for worker i
            modulo `num_workers`. A watch deals out by a hash of the name, since nobody knows how many
            there will be.
        columns: To read; None for all.
        worker: Which of `num_workers` this is, 0 by default. A queue takes it for a name: whoever begins
            under a name gets what was leased to that name before, so give it only where it is one of a
            kind, such as the rank. Without it, the leases of a process that died run out by themselves.
        batch_size: Records per batch, across the ends of files and epochs. Only the last is shorter,
            and with a watch what is there when nothing new is.
        epochs: How often to read a list; None for ever.
        drop_remainder: Leave out batches that are shorter.
        auto_commit: With a queue, report by oneself, at the end of each chunk, what the consumer came
            back from. A trainer that saves checkpoints says False, and calls `commit` with each.
    """

    def __init__(
        self,
        files: Sequence[str] | Watch | FileQueue,
        format: Format,  # noqa: A002  what it is
        *,
        batch_size: int,
        columns: Sequence[str] | None = None,
        worker: int | None = None,
        num_workers: int = 1,
        epochs: int | None = 1,
        shuffle: ShuffleConfig | None = None,
        drop_remainder: bool = False,
        bad: BadRecordPolicy | None = None,
        auto_commit: bool = True,
        metrics: Metrics | None = None,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"file source: batch_size must be at least 1, got {batch_size}")
        if num_workers < 1 or not 0 <= (worker or 0) < num_workers:
            raise ConfigError(f"file source: there is no worker {worker} of {num_workers}")
        share = worker or 0
        if epochs is not None and epochs < 1:
            raise ConfigError(f"file source: epochs must be at least 1, or None for ever, got {epochs}")
        if isinstance(files, str):
            files = [files]
        self._files: _Files
        if isinstance(files, Sequence):
            self._files = _Listed(files, share, num_workers, epochs, shuffle)
        elif epochs != 1:
            raise ConfigError(f"file source: a watch or a queue is read once, got {epochs} epochs")
        elif isinstance(files, Watch):
            self._files = _Watched(files, share, num_workers)
        else:
            self._files = _Queued(files, worker, auto_commit=auto_commit)
        self._format = format
        self._columns = None if columns is None else list(columns)
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._drop_remainder = drop_remainder
        self._policy = BadRecordPolicy() if bad is None else bad
        self._metrics = metrics
        self._settings: Position = {
            "source": "files",
            "shuffle": None if shuffle is None else [shuffle.seed, shuffle.buffer, shuffle.files],
            "shard": [share, num_workers],
        }
        self._spot = _Spot()
        self._reading = _Spot()
        self._closed = False

    @property
    def records(self) -> int:
        """How many records were read, since the beginning of the data and across restarts."""
        return self._reading.good

    @property
    def bad_records(self) -> int:
        """How many were malformed, likewise."""
        return self._reading.bad

    def __iter__(self) -> Iterator[Records]:
        if self._closed:
            raise DataError("file source: cannot read, it was closed")
        self._files.rewind(self._spot)
        pending: list[Records] = []
        missing = self._batch_size
        with closed_after(self._blocks(self._spot)) as blocks:
            for block in blocks:
                if isinstance(block, _Spot):  # there is nothing more for now
                    if pending and self._drop_remainder:
                        continue
                    self._spot = block
                    if pending:
                        yield concat(pending)
                        pending, missing = [], self._batch_size
                    self._files.taken(self._spot, ended=True)
                    continue
                done = block.first
                while done < len(block.records):
                    count = min(missing, len(block.records) - done)
                    pending.append(block.records.slice(done, done + count))
                    done += count
                    missing -= count
                    if not missing:
                        self._spot = block.spot(done)
                        yield concat(pending)
                        self._files.taken(self._spot, ended=False)
                        pending, missing = [], self._batch_size
        self._judge(self._reading, at_end=True)
        self._spot = self._reading
        if pending and not self._drop_remainder:
            yield concat(pending)
        self._files.taken(self._spot, ended=True)

    def position(self) -> Position:
        spot = {field.name: getattr(self._spot, field.name) for field in fields(self._spot)}
        return {**self._settings, **spot, **self._files.save(self._spot)}

    def restore(self, position: Position) -> None:
        if not isinstance(position, Mapping) or position.get("source") != "files":
            raise RestoreError(f"cannot restore a file source from {position!r:.200}: not a position of one")
        for name, value in self._settings.items():
            if name not in position or position[name] != value:
                raise RestoreError(
                    f"cannot restore a file source: the position was taken with {name} "
                    f"{position.get(name)}, this one has {value}. Use the same settings, or begin anew."
                )
        if missing := [field.name for field in fields(_Spot) if field.name not in position]:
            raise RestoreError(f"cannot restore a file source: the position lacks {', '.join(missing)}")
        numbers = {field.name: position[field.name] for field in fields(_Spot)}
        file = numbers.pop("file")
        if not (file is None or isinstance(file, str)) or not all(
            isinstance(number, int) and number >= 0 for number in numbers.values()
        ):
            raise RestoreError(
                f"cannot restore a file source: the numbers make no sense in {position!r:.200}"
            )
        spot = _Spot(file=file, **numbers)
        self._files.restore(position, spot)
        self._spot = self._reading = spot

    def commit(self, position: Position) -> None:
        """Tell the queue that all records before a position count; without a queue, do nothing.

        For a position that was just saved: another worker goes on from it should this one die.
        """
        self._files.commit(position)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._files.close()

    # Reading

    def _blocks(self, spot: _Spot) -> Iterator[_Block | _Spot]:
        """Yield what is read together and yielded in one order; a place where there is nothing for now."""
        if self._shuffle is None:
            for read in self._chunks(spot):
                if read.chunk is None:
                    if read.waits:
                        yield read.spot
                else:
                    yield _Block(read.spot, read.spot.past(read.chunk), read.chunk.records, read.spot.skip)
            return
        stretch: _Stretch | None = None
        for read in self._chunks(spot):
            if stretch is not None:
                ends = read.chunk is None and (read.waits or not self._files.mixes)
                if ends or read.spot.round != stretch.begin.round:
                    yield stretch.block(read.spot, self._shuffle.seed)
                    stretch = None
            if read.chunk is None:
                if read.waits:
                    yield read.spot
                continue
            here, size = read.spot.skip, len(read.chunk.records)
            while here < size:
                if stretch is None:
                    # Only the first stretch of what is being resumed has a length already.
                    begin = replace(read.spot, skip=here, length=0, taken=0)
                    resumed = read.spot.length if here == read.spot.skip else 0
                    stretch = _Stretch(begin, self._shuffle.buffer, resumed, read.spot.taken)
                before, here = here, min(here + stretch.missing, size)
                stretch.add(read.chunk.records.slice(before, here))
                if not stretch.missing:
                    rest = replace(read.spot, skip=here, length=0, taken=0)
                    end = read.spot.past(read.chunk) if here == size else rest
                    yield stretch.block(end, self._shuffle.seed)
                    stretch = None
        if stretch is not None:
            yield stretch.block(self._reading, self._shuffle.seed)

    def _chunks(self, spot: _Spot) -> Iterator[_Read]:
        """Yield chunks from a place on, the end of each file, and a sign whenever there is nothing yet."""
        self._reading = spot
        while True:
            if spot.file is not None and not self._files.lost(spot):
                reader = self._format.chunks(spot.file, start=spot.place, columns=self._columns)
                with closed_after(reader) as chunks:
                    for chunk in chunks:
                        if spot.skip > len(chunk.records):
                            raise DataError(
                                f"file source: {spot.file} has {len(chunk.records)} records at place "
                                f"{spot.place}, but {spot.skip} of them were read before; it was replaced "
                                "since. Begin anew."
                            )
                        self._reading = spot.past(chunk)
                        self._look_at_bad(spot, chunk)
                        yield _Read(spot, chunk)
                        spot = self._reading
                        if self._files.lost(spot):
                            _log.warning(
                                "file source: the lease on %s ran out; another worker goes on", spot.file
                            )
                            break
                yield _Read(spot)
            step = self._files.after(spot)
            while step is _Step.WAIT:
                yield _Read(spot, waits=True)
                self._files.wait()
                step = self._files.after(spot)
            if not isinstance(step, _Spot):
                return
            spot = replace(step, good=spot.good, bad=spot.bad)
            self._reading = spot

    def _look_at_bad(self, spot: _Spot, chunk: Chunk) -> None:
        if self._metrics is not None:
            self._metrics.counter("data_records", "Records read from files.").inc(len(chunk.records))
            bad = self._metrics.counter("data_bad_records", "Records of files that could not be read.")
            bad.inc(len(chunk.bad))
        if chunk.bad:
            assert spot.file is not None
            if self._policy.quarantine is not None:
                _quarantine(self._policy.quarantine, spot.file, spot.place, chunk.bad)
            self._judge(self._reading, at_end=False, last=f"{spot.file}: {chunk.bad[0].reason}")

    def _judge(self, spot: _Spot, *, at_end: bool, last: str = "") -> None:
        total = spot.good + spot.bad
        if total < self._policy.after and not at_end and self._policy.max_share > 0:
            return
        if spot.bad > self._policy.max_share * total:
            raise TooManyBadRecordsError(
                f"file source: {spot.bad} of {total} records could not be read, more than the share of "
                f"{self._policy.max_share} that is allowed"
                + (f"; one of the last is in {last}" if last else "")
                + ". Look at the data, or allow more with BadRecordPolicy(max_share=...)."
            )


def _quarantine(folder: str, path: str, place: int, bad: Sequence[BadRecord]) -> None:
    # Named after the chunk, so that reading it again writes the file again, and not one more.
    name = f"{base_name(path)}-{zlib.crc32(path.encode()):08x}-{place}.jsonl"
    make_dirs(folder)
    with atomic_write(join(folder, name)) as file:
        for record in bad:
            line = {
                "path": path,
                "place": record.place,
                "reason": record.reason,
                "payload": base64.b64encode(record.payload).decode(),
            }
            file.write(json.dumps(line).encode() + b"\n")


# Which file comes next


class _Listed:
    """Paths that are known from the beginning."""

    mixes = True

    def __init__(
        self,
        paths: Sequence[str],
        worker: int,
        num_workers: int,
        epochs: int | None,
        shuffle: ShuffleConfig | None,
    ) -> None:
        ordered = sorted(paths)
        if twice := {one for one, next_one in pairwise(ordered) if one == next_one}:
            raise DataError(f"file source: listed more than once: {', '.join(sorted(twice)[:5])}")
        self._paths = ordered[worker::num_workers]
        self._epochs = epochs
        self._seed = shuffle.seed if shuffle is not None and shuffle.files else None
        self._digest = zlib.crc32("\n".join(self._paths).encode())
        self._ordered = (-1, list[str]())

    def after(self, spot: _Spot) -> _Spot | _Step:
        if not self._paths:
            return _Step.END
        if spot.file is None:
            return _Spot(file=self._order(0)[0])
        order = self._order(spot.round)
        number = order.index(spot.file) + 1
        if number < len(order):
            return _Spot(round=spot.round, file=order[number])
        if self._epochs is not None and spot.round + 1 >= self._epochs:
            return _Step.END
        return _Spot(round=spot.round + 1, file=self._order(spot.round + 1)[0])

    def _order(self, epoch: int) -> list[str]:
        if self._seed is None:
            return self._paths
        if self._ordered[0] != epoch:
            order = permutation(len(self._paths), self._seed, epoch).tolist()
            self._ordered = (epoch, [self._paths[number] for number in order])
        return self._ordered[1]

    def wait(self) -> None: ...

    def rewind(self, spot: _Spot) -> None: ...

    def lost(self, spot: _Spot) -> bool:  # noqa: ARG002
        return False

    def taken(self, spot: _Spot, *, ended: bool) -> None: ...

    def save(self, spot: _Spot) -> Position:  # noqa: ARG002
        return {"files": self._digest}

    def restore(self, saved: Position, spot: _Spot) -> None:
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


class _Watched:
    """Files that match now, and those that will."""

    mixes = True

    def __init__(self, watch: Watch, worker: int, num_workers: int) -> None:
        self._watch = watch
        self._worker, self._num_workers = worker, num_workers
        self._seen: list[str] = []
        self._known: set[str] = set()

    def after(self, spot: _Spot) -> _Spot | _Step:
        number = 0 if spot.file is None else self._seen.index(spot.file) + 1
        if number == len(self._seen):
            mine = [path for path in self._watch.look() if self._is_mine(path)]
            new = [path for path in mine if path not in self._known]
            self._seen += new
            self._known |= set(new)
        if number < len(self._seen):
            self._watch.found()
            return _Spot(file=self._seen[number])
        return _Step.END if self._watch.is_over() else _Step.WAIT

    def _is_mine(self, path: str) -> bool:
        return zlib.crc32(path.encode()) % self._num_workers == self._worker

    def wait(self) -> None:
        self._watch.wait()

    def rewind(self, spot: _Spot) -> None: ...

    def lost(self, spot: _Spot) -> bool:  # noqa: ARG002
        return False

    def taken(self, spot: _Spot, *, ended: bool) -> None: ...

    def save(self, spot: _Spot) -> Position:  # noqa: ARG002
        return {"seen": list(self._seen)}

    def restore(self, saved: Position, spot: _Spot) -> None:
        seen = saved.get("seen")
        if not isinstance(seen, list) or not all(isinstance(path, str) for path in seen):
            raise RestoreError("cannot restore a file source: the position is not of one that watches")
        if spot.file is not None and spot.file not in seen:
            raise RestoreError(f"cannot restore a file source: the position is in {spot.file}, unseen before")
        self._seen, self._known = list(seen), set(seen)

    def commit(self, position: Position) -> None: ...

    def close(self) -> None: ...


class _Queued:
    """Files that this worker gets from a queue.

    Holds the leases of all files of which it does not know yet that they count: those that
    were read since the last commit, and the one being read.
    """

    mixes = False  # the next file may be another's after a restart

    def __init__(self, queue: FileQueue, worker: int | None, *, auto_commit: bool) -> None:
        self._queue = queue
        self._worker = f"unnamed {secrets.token_hex(8)}" if worker is None else f"worker {worker}"
        self._begun = False
        self._auto_commit = auto_commit
        self._held: dict[int, Lease] = {}  # by number, in the order in which they were taken
        self._reported: tuple[int, int] | None = None
        self._ended = False

    def after(self, spot: _Spot) -> _Spot | _Step:  # noqa: ARG002
        lease = self._queue.take(self._worker)
        if lease is None:
            # Workers that wait for each other's files would wait for ever.
            for held in self._held.values():
                self._queue.mark_read(held)
            return _Step.WAIT if self._queue.others_hold(self._worker) else _Step.END
        self._ended = False
        self._held[lease.number] = lease
        try:
            return _Spot(round=lease.number, file=lease.path, **lease.progress)
        except TypeError as cause:
            raise DataError(f"file source: no place in {lease.path}: {lease.progress}") from cause

    def wait(self) -> None:
        self._renew()
        self._queue.wait()

    def rewind(self, spot: _Spot) -> None:
        self._begin()
        # A file that was taken to fill a batch which was never yielded.
        self._ended = False
        kept = {*self._finished(spot), -1 if spot.file is None else spot.round}
        for number in [number for number in self._held if number not in kept]:
            self._queue.give_back(self._held.pop(number))

    def _begin(self) -> None:
        """Void what a worker of this name held that is no more: nobody else would ever read it."""
        if not self._begun:
            self._begun = True
            self._queue.release(self._worker)

    def lost(self, spot: _Spot) -> bool:
        return spot.round not in self._held

    def taken(self, spot: _Spot, *, ended: bool) -> None:
        self._renew()
        self._ended = ended
        here = (spot.round, spot.place)
        if self._auto_commit and (ended or here != self._reported):
            self._commit(self._finished(spot), spot)
            self._reported = here

    def _renew(self) -> None:
        for number, lease in list(self._held.items()):
            renewed = self._queue.renew(lease)
            if renewed is None:
                del self._held[number]
            else:
                self._held[number] = renewed

    def _finished(self, spot: _Spot) -> list[int]:
        """Return the files of which the consumer has all records: those that were taken before this one."""
        numbers = list(self._held)
        if self._ended:
            return numbers
        if spot.file is None:
            return []
        return numbers[: numbers.index(spot.round)] if spot.round in numbers else []

    def save(self, spot: _Spot) -> Position:
        return {"finished": self._finished(spot)}

    def restore(self, saved: Position, spot: _Spot) -> None:
        finished = saved.get("finished")
        if not isinstance(finished, list) or not all(isinstance(number, int) for number in finished):
            raise RestoreError("cannot restore a file source: the position is not of one with a queue")
        self._begin()
        for held in self._held.values():
            self._queue.give_back(held)
        self._held, self._ended = {}, False
        for number in [*finished, *([] if spot.file is None else [spot.round])]:
            # What another worker has by now is its business: it began where we had reported.
            lease = self._queue.take(self._worker, number)
            if lease is not None:
                self._held[number] = lease

    def commit(self, position: Position) -> None:
        spot = _Spot(**{field.name: position[field.name] for field in fields(_Spot)})
        self._commit(position["finished"], spot)

    def _commit(self, finished: Sequence[int], spot: _Spot) -> None:
        for number in finished:
            if number in self._held:
                self._queue.finish(self._held.pop(number))
        current = None if spot.file is None else self._held.get(spot.round)
        if current is not None and not self._queue.report(current, spot.progress()):
            del self._held[spot.round]

    def close(self) -> None:
        self._queue.release(self._worker)
        self._held = {}
