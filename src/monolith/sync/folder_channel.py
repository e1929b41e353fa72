"""The delta channel through a folder that publishers and subscribers share, local or remote.

    FOLDER/share-0-of-2/epoch.json                              describes the log of shard 0 of 2
                        delta-EPOCH-00000000000000000017        one frame each
                        snapshot-EPOCH-00000000000000000012-3   consecutive frames; the third snapshot made
                        state                                   the newest publish state
                        want-snapshot                           a reader asks for a snapshot

Every file is written under a temporary name and renamed, so no reader sees half a file. A file that is
damaged all the same is logged, and the reader takes, or asks for, a snapshot instead. Only the writer removes
files; a reader writes nothing but `want-snapshot`.

Compaction: deltas are bounded in bytes and in number, and the oldest are removed first. A new snapshot is
    made whenever half of that bound is new deltas, so the newest snapshot is always followed by deltas still
    present, and the one before it can be removed.

A reader at position n does, each time it polls:

    delta n + 1 is there        -> read it, and the ones after it
    n is the newest             -> wait
    otherwise (a gap, another   -> take the newest snapshot if all deltas after it are there;
    epoch, a damaged file)         else create `want-snapshot` and wait
"""

from __future__ import annotations

import json
import logging
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from urllib.parse import quote

from torch import Tensor

from monolith import concurrency, filesystem
from monolith.errors import (
    ConfigError,
    CorruptMessageError,
    FileMissingError,
    FilesystemError,
    UnavailableError,
)
from monolith.sync.channel import LOG_BYTES, ShardLog, SnapshotMaker, TakeSnapshot, Unfinished
from monolith.sync.messages import Delta, LogPosition, Message, PublishState, SnapshotBegin, SnapshotEnd
from monolith.sync.wire_format import (
    FRAME_LIMIT,
    LEAD_BYTES,
    decode,
    encode,
    frame_bytes,
    log_from_plain,
    log_to_plain,
)
from monolith.wire.flight import Clock

LOG_FILES = 4096
_EPOCH = "epoch.json"
_STATE = "state"
_WANT = "want-snapshot"
_SHARD = re.compile(r"share-(\d{1,9})-of-(\d{1,9})", re.ASCII)
_DELTA = re.compile(r"delta-(?P<epoch>[^/]*)-(?P<sequence>\d{20})", re.ASCII)
_SNAPSHOT = re.compile(r"snapshot-(?P<epoch>[^/]*)-(?P<sequence>\d{20})-(?P<number>\d{1,18})", re.ASCII)
_EPOCH_LIMIT = 16 << 20
_LATER_S = 0.001

_log = logging.getLogger(__name__)


class FolderDeltaWriter:
    """A publisher's end of one shard in a folder.

    Args:
        log_bytes: The most bytes of deltas in the folder; a snapshot comes in addition.
        log_files: The most deltas in the folder.
        check_every: Seconds between two checks whether a reader asks for a snapshot.
        clock: Unix seconds.
    """

    def __init__(
        self,
        folder: str,
        *,
        log_bytes: int = LOG_BYTES,
        log_files: int = LOG_FILES,
        check_every: float = 1.0,
        clock: Callable[[], float] = concurrency.time,
    ) -> None:
        if min(log_bytes, log_files) < 1:
            raise ConfigError("delta folder: log_bytes and log_files must be at least 1")
        self._root = folder
        self._folder = ""
        self._limit_bytes, self._limit_files = log_bytes, log_files
        self._clock = clock
        self._maker = SnapshotMaker(self._write_snapshot, asked=self._is_asked, check_every=check_every)
        # Guards the list of deltas and its counts. Only the publisher's thread writes `_newest`, so `append`
        # reads it without; only the thread of the maker writes `_snapshots`.
        self._lock = concurrency.Lock()
        self._newest = LogPosition("", 0)
        self._deltas: deque[tuple[str, int]] = deque()
        """Path and bytes of each delta, the oldest first."""
        self._bytes = self._fresh_bytes = self._fresh_files = 0
        self._snapshots = 0

    address = None

    def open(self, log: ShardLog, snapshot: TakeSnapshot) -> None:
        number, shards = log.shard
        self._folder = filesystem.join(self._root, f"share-{number}-of-{shards}")
        try:
            filesystem.make_dirs(self._folder)
            # First the description, then the removal: a reader that sees the new epoch ignores older files,
            # and one that saw the old epoch finds its files, or a gap that makes it look again.
            about = {"log": log_to_plain(log), "began_at": self._begins_at()}
            with filesystem.atomic_write(self._path(_EPOCH)) as file:
                file.write(json.dumps(about).encode())
            self._remove_others(log.newest.epoch)
        except FilesystemError as cause:
            raise UnavailableError(f"cannot begin an epoch in {self._folder}: {cause}") from cause
        with self._lock:
            self._newest = log.newest
            self._deltas.clear()
            self._bytes = self._fresh_bytes = self._fresh_files = 0
        self._maker.begin(snapshot)

    def append(self, delta: Delta) -> None:
        position = delta.position
        if position.epoch != self._newest.epoch or position.sequence > self._newest.sequence + 1:
            raise UnavailableError(f"the log is at {self._newest}: {position} cannot follow. Begin an epoch.")
        if position.sequence <= self._newest.sequence:
            return
        path, frame = self._path(f"delta-{_name(position)}"), encode(delta)
        try:
            with filesystem.atomic_write(path) as file:
                file.write(frame)
        except FilesystemError as cause:
            raise UnavailableError(f"cannot publish to {self._folder}: {cause}") from cause
        with self._lock:
            self._newest = position
            self._deltas.append((path, len(frame)))
            self._bytes += len(frame)
            self._fresh_bytes += len(frame)
            self._fresh_files += 1
            gone = self._trim()
            due = 2 * self._fresh_bytes >= self._limit_bytes or 2 * self._fresh_files >= self._limit_files
            if due:
                self._fresh_bytes = self._fresh_files = 0
        # Outside the lock: both may take long on a remote folder.
        if due:
            self._maker.want()
        _remove(gone)

    def set_state(self, state: PublishState) -> None:
        try:
            with filesystem.atomic_write(self._path(_STATE)) as file:
                file.write(encode(state))
        except FilesystemError as cause:
            raise UnavailableError(f"cannot publish to {self._folder}: {cause}") from cause

    def unfinished(self) -> Unfinished | None:
        return self._maker.unfinished()

    def close(self) -> None:
        """Stop making snapshots. The files stay. Closing again does nothing."""
        self._maker.close()

    def _path(self, name: str) -> str:
        return filesystem.join(self._folder, name)

    def _begins_at(self) -> float:
        """Return the time; or a later one if an epoch in the folder started later by another machine's
        clock."""
        known = [0.0]
        for folder in filesystem.list_folders(self._root):
            with suppress(FilesystemError, ValueError, KeyError, TypeError, RecursionError):
                known.append(
                    float(json.loads(_read(filesystem.join(folder, _EPOCH), _EPOCH_LIMIT))["began_at"])
                )
        return max(self._clock(), max(known) + _LATER_S)

    def _trim(self) -> list[str]:
        """Return the oldest deltas if there are more than the bound allows. The lock is held."""
        gone: list[str] = []
        while self._bytes > self._limit_bytes or len(self._deltas) > self._limit_files:
            path, size = self._deltas.popleft()
            self._bytes -= size
            gone.append(path)
        return gone

    def _is_asked(self) -> bool:
        return filesystem.exists(self._path(_WANT))

    def _write_snapshot(self, messages: Iterator[Message]) -> None:
        folder = self._folder
        filesystem.remove(self._path(_WANT))  # before it starts: a later request wants another
        first = next(messages)
        assert isinstance(first, SnapshotBegin)
        self._snapshots += 1
        name = f"snapshot-{_name(first.position)}-{self._snapshots}"
        with filesystem.atomic_write(filesystem.join(folder, name)) as file:
            file.write(encode(first))
            for message in messages:
                file.write(encode(message))
        # Only after the rename: a reader always finds one whole snapshot.
        _remove(
            path
            for path in filesystem.list_files(folder)
            if _SNAPSHOT.fullmatch(filesystem.base_name(path)) and filesystem.base_name(path) != name
        )

    def _remove_others(self, epoch: str) -> None:
        """Remove the files of other epochs, and unfinished ones."""
        ours = quote(epoch, safe="")
        for path in filesystem.list_files(self._folder):
            name = filesystem.base_name(path)
            found = _DELTA.fullmatch(name) or _SNAPSHOT.fullmatch(name)
            if filesystem.is_temporary(name) or (found is not None and found["epoch"] != ours):
                filesystem.remove(path)
            elif found is not None and found["epoch"] == ours and _DELTA.fullmatch(name):
                filesystem.remove(path)  # of an epoch that is started again


def _name(position: LogPosition) -> str:
    return f"{quote(position.epoch, safe='')}-{position.sequence:020}"


def _remove(paths: Iterator[str] | Sequence[str]) -> None:
    for path in paths:
        try:
            filesystem.remove(path)
        except FilesystemError as error:
            _log.warning("delta folder: %s", error)


# Reading


@dataclass(frozen=True, slots=True)
class _Found:
    """The files in the folder of a shard."""

    log: ShardLog
    """As it was when the epoch started."""
    began_at: float
    deltas: dict[int, str] = field(default_factory=dict)
    """Sequence to path."""
    snapshot: tuple[int, int, str] | None = None
    """The newest snapshot: sequence, number, path."""

    @property
    def newest(self) -> int:
        return max(
            [self.log.newest.sequence, *self.deltas, -1 if self.snapshot is None else self.snapshot[0]]
        )

    @property
    def oldest(self) -> int:
        """The first sequence of the unbroken run of deltas up to the newest."""
        first = self.newest + 1
        while first - 1 in self.deltas:
            first -= 1
        return first

    def lacks_deltas_after(self, position: LogPosition | None) -> bool:
        """Whether a reader at this position cannot continue with deltas."""
        return (
            position is None
            or position.epoch != self.log.newest.epoch
            or (position.sequence < self.newest and position.sequence + 1 not in self.deltas)
        )


class FolderDeltaReader:
    """A subscriber's end of all shards in a folder. For one thread.

    Args:
        poll_every: Seconds between two looks for new files.
        patience: Seconds to wait for a snapshot that was asked for, to repair a difference.
        limit: The most bytes of one frame.
    """

    def __init__(
        self,
        folder: str,
        *,
        poll_every: float = 0.1,
        patience: float = 60.0,
        limit: int = FRAME_LIMIT,
        clock: Clock = concurrency.monotonic,
        sleep: Callable[[float], None] = concurrency.sleep,
    ) -> None:
        self._root = folder
        self._poll_every = poll_every
        self._patience = patience
        self._limit = limit
        self._clock = clock
        self._sleep = sleep
        self._damaged: set[str] = set()
        """Paths of damaged files."""

    def logs(self) -> Sequence[ShardLog]:
        """Return the published logs. If there are several numbers of shards, the latest start counts."""
        found = [self._scan(folder) for folder in self._folders()]
        latest = max(found, key=lambda one: one.began_at, default=None)
        if latest is None:
            return []
        same = [one for one in found if one.log.shard[1] == latest.log.shard[1]]
        return [
            replace(one.log, newest=LogPosition(one.log.newest.epoch, one.newest), oldest=one.oldest)
            for one in sorted(same, key=lambda one: one.log.shard)
        ]

    def read(self, shard: int, after: LogPosition | None, *, wait: float) -> Iterator[Message]:
        """Yield the messages after a position; see `DeltaReader`."""
        folder = self._folder_of(shard)
        position, state, lost = after, -1, LogPosition("", 0)
        give_up = self._clock() + wait
        while True:
            news = False
            said = self._state(folder)
            if said is not None and said.number != state:
                state, news = said.number, True
                yield said
            found = self._scan(folder)
            if found.lacks_deltas_after(position):
                for message in self._snapshot(folder, found, lost):
                    news = True
                    if isinstance(message, SnapshotBegin):
                        position = message.position
                    yield message
            else:
                assert position is not None
                for delta in self._deltas(found, position):
                    news = True
                    if delta is None:  # damaged: only a snapshot that contains it helps
                        lost, position = position, None
                        break
                    position = delta.position
                    yield delta
            now = self._clock()
            if news:
                give_up = now + wait
            elif now >= give_up:
                return
            else:
                self._sleep(min(self._poll_every, give_up - now))

    def read_buckets(self, shard: int, buckets: Tensor) -> Iterator[Message]:  # noqa: ARG002
        """Ask for a snapshot, wait for it and yield it: of all buckets, as all readers share it."""
        folder = self._folder_of(shard)
        before = self._scan(folder).snapshot
        self._ask(folder)
        give_up = self._clock() + self._patience
        while (found := self._scan(folder)).snapshot == before:
            if self._clock() >= give_up:
                raise UnavailableError(
                    f"{folder}: no snapshot was made within {self._patience:g} s of a request for one"
                )
            self._sleep(self._poll_every)
        yield from self._snapshot(folder, found, LogPosition("", 0))

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _folders(self) -> list[str]:
        try:
            found = filesystem.list_folders(self._root)
        except FileMissingError:
            return []
        except FilesystemError as cause:
            raise UnavailableError(f"cannot read {self._root}: {cause}") from cause
        shards = [path for path in found if _SHARD.fullmatch(filesystem.base_name(path))]
        return [path for path in shards if filesystem.exists(filesystem.join(path, _EPOCH))]

    def _folder_of(self, shard: int) -> str:
        for log in self.logs():
            if log.shard[0] == shard:
                return filesystem.join(self._root, f"share-{shard}-of-{log.shard[1]}")
        raise UnavailableError(f"shard {shard} has no publisher in {self._root} yet")

    def _scan(self, folder: str) -> _Found:
        path = filesystem.join(folder, _EPOCH)
        try:
            about = json.loads(_read(path, _EPOCH_LIMIT))
            found = _Found(log_from_plain(about["log"]), float(about["began_at"]))
            files = filesystem.list_files(folder)
        except FilesystemError as cause:
            raise UnavailableError(f"cannot read {folder}: {cause}") from cause
        except (CorruptMessageError, ValueError, KeyError, TypeError, RecursionError) as cause:
            raise CorruptMessageError(f"{path} does not describe a log: {cause}") from cause
        ours = quote(found.log.newest.epoch, safe="")
        snapshots: list[tuple[int, int, str]] = []
        for file in files:
            name = filesystem.base_name(file)
            if (delta := _DELTA.fullmatch(name)) and delta["epoch"] == ours:
                found.deltas[int(delta["sequence"])] = file
            elif (one := _SNAPSHOT.fullmatch(name)) and one["epoch"] == ours and file not in self._damaged:
                snapshots.append((int(one["sequence"]), int(one["number"]), file))
        return replace(found, snapshot=max(snapshots, default=None))

    def _state(self, folder: str) -> PublishState | None:
        path = filesystem.join(folder, _STATE)
        try:
            message = decode(_read(path, self._limit), limit=self._limit)
        except FileMissingError:
            return None
        except FilesystemError as cause:
            raise UnavailableError(f"cannot read {path}: {cause}") from cause
        except CorruptMessageError as error:
            self._report(path, error)
            return None
        return message if isinstance(message, PublishState) else None

    def _deltas(self, found: _Found, position: LogPosition) -> Iterator[Delta | None]:
        """Yield the consecutive deltas after a position; None for a damaged one."""
        sequence = position.sequence + 1
        while sequence in found.deltas:
            path = found.deltas[sequence]
            try:
                message = decode(_read(path, self._limit), limit=self._limit)
                if not isinstance(message, Delta) or message.position != LogPosition(
                    position.epoch, sequence
                ):
                    raise CorruptMessageError("its content does not match its name")
            except FileMissingError:
                return  # it was removed after the scan
            except FilesystemError as cause:
                raise UnavailableError(f"cannot read {path}: {cause}") from cause
            except CorruptMessageError as error:
                self._report(path, error)
                yield None
                return
            yield message
            sequence += 1

    def _snapshot(self, folder: str, found: _Found, lost: LogPosition) -> Iterator[Message]:
        """Yield the newest snapshot if it is after `lost` and all deltas after it are there; else ask for
        one."""
        epoch = found.log.newest.epoch
        usable = (
            found.snapshot is not None
            and not (epoch == lost.epoch and found.snapshot[0] <= lost.sequence)
            and not found.lacks_deltas_after(LogPosition(epoch, found.snapshot[0]))
        )
        if not usable:
            self._ask(folder)
            return
        assert found.snapshot is not None
        path = found.snapshot[2]
        begun = False
        try:
            for message in self._frames(path):
                begun = True
                yield message
        except CorruptMessageError as error:
            self._report(path, error)
            self._damaged.add(path)
            self._ask(folder)
            raise UnavailableError(f"the snapshot {path} is damaged; a new one was requested") from error
        except FilesystemError as cause:
            if not begun and not filesystem.exists(path):
                return  # a newer one replaced it after the scan; the next scan finds it
            raise UnavailableError(f"cannot read {path}: {cause}") from cause

    def _frames(self, path: str) -> Iterator[Message]:
        message: Message | None = None
        with filesystem.open_read(path) as file:
            while lead := file.read(LEAD_BYTES):
                size = frame_bytes(lead, limit=self._limit)
                message = decode(bytearray(lead + file.read(size - LEAD_BYTES)), limit=self._limit)
                yield message
        if not isinstance(message, SnapshotEnd):
            raise CorruptMessageError("it is incomplete")

    def _ask(self, folder: str) -> None:
        # A reader without permission to write waits for the next snapshot.
        with suppress(FilesystemError):
            path = filesystem.join(folder, _WANT)
            if not filesystem.exists(path):
                with filesystem.atomic_write(path):
                    pass

    def _report(self, path: str, error: CorruptMessageError) -> None:
        if path not in self._damaged:
            self._damaged.add(path)
            _log.warning("delta folder: %s is damaged, taking a snapshot instead: %s", path, error)


def _read(path: str, limit: int) -> bytes:
    """Return a file's bytes, at most one more than a frame may have: the excess is found by `decode`."""
    with filesystem.open_read(path) as file:
        return file.read(limit + 1)
