"""The delta channel through a folder that publishers and subscribers share, local or remote.

    FOLDER/share-0-of-2/epoch.json                              what is published, since when
                        delta-EPOCH-00000000000000000017        one frame each
                        snapshot-EPOCH-00000000000000000012-3   frames, one after the other; the third made
                        state                                   the newest publish state
                        want-snapshot                           a reader asks for one

Every file is written aside and renamed, so none is ever seen half written by a process that follows the
rules; what is damaged all the same is reported, and passed over by taking, or asking for, a snapshot. Nobody
but the writer removes files. Deltas are bounded in bytes and in number: the oldest go first, and a snapshot
is made whenever half of what may be kept is new.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from urllib.parse import quote

from torch import Tensor

from monolith import filesystem
from monolith.errors import (
    ConfigError,
    CorruptMessageError,
    FileMissingError,
    FilesystemError,
    UnavailableError,
)
from monolith.sync.channel import ShareLog, TakeSnapshot
from monolith.sync.delta_log import LOG_BYTES
from monolith.sync.messages import Delta, LogPlace, Message, PublishState, SnapshotBegin, SnapshotEnd
from monolith.sync.snapshot_maker import SnapshotMaker
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
_SHARE = re.compile(r"share-(\d{1,9})-of-(\d{1,9})", re.ASCII)
_DELTA = re.compile(r"delta-(?P<epoch>[^/]*)-(?P<sequence>\d{20})", re.ASCII)
_SNAPSHOT = re.compile(r"snapshot-(?P<epoch>[^/]*)-(?P<sequence>\d{20})-(?P<number>\d{1,18})", re.ASCII)
_EPOCH_LIMIT = 16 << 20
_LATER_S = 0.001

_log = logging.getLogger(__name__)


class FolderDeltaWriter:
    """A publisher's end of one share in a folder.

    Args:
        log_bytes: The most bytes of deltas that are kept; a snapshot comes on top of them.
        log_files: The most deltas that are kept.
        look_every: Seconds after which it looks again whether a reader asks for a snapshot.
        clock: Unix seconds.
    """

    def __init__(
        self,
        folder: str,
        *,
        log_bytes: int = LOG_BYTES,
        log_files: int = LOG_FILES,
        look_every: float = 1.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if min(log_bytes, log_files) < 1:
            raise ConfigError("delta folder: log_bytes and log_files must be at least 1")
        self._root = folder
        self._folder = ""
        self._limit_bytes, self._limit_files = log_bytes, log_files
        self._clock = clock
        self._maker = SnapshotMaker(self._write_snapshot, asked=self._is_asked, look_every=look_every)
        self._lock = threading.Lock()  # guards all below
        self._newest = LogPlace("", 0)
        self._kept: deque[tuple[str, int]] = deque()
        """Path and bytes of each delta, the oldest first."""
        self._bytes = self._fresh_bytes = self._fresh_files = 0
        self._snapshots = 0

    def open(self, log: ShareLog, snapshot: TakeSnapshot) -> None:
        number, shares = log.share
        self._folder = filesystem.join(self._root, f"share-{number}-of-{shares}")
        try:
            filesystem.make_dirs(self._folder)
            about = {"log": log_to_plain(log), "began_at": self._begins_at()}
            with filesystem.atomic_write(self._path(_EPOCH)) as file:
                file.write(json.dumps(about).encode())
            self._remove_others(log.newest.epoch)
        except FilesystemError as cause:
            raise UnavailableError(f"cannot begin an epoch in {self._folder}: {cause}") from cause
        with self._lock:
            self._newest = log.newest
            self._kept.clear()
            self._bytes = self._fresh_bytes = self._fresh_files = 0
        self._maker.begin(snapshot)

    def append(self, delta: Delta) -> None:
        place = delta.place
        if place.epoch != self._newest.epoch or place.sequence > self._newest.sequence + 1:
            raise UnavailableError(f"the log is at {self._newest}: {place} cannot follow. Begin an epoch.")
        if place.sequence <= self._newest.sequence:
            return
        path, frame = self._path(f"delta-{_name(place)}"), encode(delta)
        try:
            with filesystem.atomic_write(path) as file:
                file.write(frame)
        except FilesystemError as cause:
            raise UnavailableError(f"cannot publish to {self._folder}: {cause}") from cause
        with self._lock:
            self._newest = place
            self._kept.append((path, len(frame)))
            self._bytes += len(frame)
            self._fresh_bytes += len(frame)
            self._fresh_files += 1
            gone = self._trim()
            due = 2 * self._fresh_bytes >= self._limit_bytes or 2 * self._fresh_files >= self._limit_files
            if due:
                self._fresh_bytes = self._fresh_files = 0
        if due:
            self._maker.want()
        _remove(gone)

    def say(self, state: PublishState) -> None:
        try:
            with filesystem.atomic_write(self._path(_STATE)) as file:
                file.write(encode(state))
        except FilesystemError as cause:
            raise UnavailableError(f"cannot publish to {self._folder}: {cause}") from cause

    def close(self) -> None:
        """Stop making snapshots. What was published stays. Closing again does nothing."""
        self._maker.close()

    def _path(self, name: str) -> str:
        return filesystem.join(self._folder, name)

    def _begins_at(self) -> float:
        """Return the time, or a later one where what is there began later by the clock of another machine."""
        known = [0.0]
        for folder in filesystem.list_folders(self._root):
            with suppress(FilesystemError, ValueError, KeyError, TypeError, RecursionError):
                known.append(
                    float(json.loads(_read(filesystem.join(folder, _EPOCH), _EPOCH_LIMIT))["began_at"])
                )
        return max(self._clock(), max(known) + _LATER_S)

    def _trim(self) -> list[str]:
        """Return the oldest deltas, if there are more than may be kept. The lock is held."""
        gone: list[str] = []
        while self._bytes > self._limit_bytes or len(self._kept) > self._limit_files:
            path, size = self._kept.popleft()
            self._bytes -= size
            gone.append(path)
        return gone

    def _is_asked(self) -> bool:
        return filesystem.exists(self._path(_WANT))

    def _write_snapshot(self, messages: Iterator[Message]) -> None:
        folder = self._folder
        filesystem.remove(self._path(_WANT))  # before it begins: who asks later wants another
        first = next(messages)
        assert isinstance(first, SnapshotBegin)
        self._snapshots += 1
        name = f"snapshot-{_name(first.place)}-{self._snapshots}"
        with filesystem.atomic_write(filesystem.join(folder, name)) as file:
            file.write(encode(first))
            for message in messages:
                file.write(encode(message))
        _remove(
            path
            for path in filesystem.list_files(folder)
            if _SNAPSHOT.fullmatch(filesystem.base_name(path)) and filesystem.base_name(path) != name
        )

    def _remove_others(self, epoch: str) -> None:
        """Remove what was published in other epochs, and what was left unfinished."""
        ours = quote(epoch, safe="")
        for path in filesystem.list_files(self._folder):
            name = filesystem.base_name(path)
            found = _DELTA.fullmatch(name) or _SNAPSHOT.fullmatch(name)
            if filesystem.is_temporary(name) or (found is not None and found["epoch"] != ours):
                filesystem.remove(path)
            elif found is not None and found["epoch"] == ours and _DELTA.fullmatch(name):
                filesystem.remove(path)  # of an epoch that is begun again


def _name(place: LogPlace) -> str:
    return f"{quote(place.epoch, safe='')}-{place.sequence:020}"


def _remove(paths: Iterator[str] | Sequence[str]) -> None:
    for path in paths:
        try:
            filesystem.remove(path)
        except FilesystemError as error:
            _log.warning("delta folder: %s", error)


# Reading


@dataclass(frozen=True, slots=True)
class _Found:
    """What lies in the folder of a share."""

    log: ShareLog
    """As the epoch began."""
    began_at: float
    deltas: dict[int, str] = field(default_factory=dict)
    """Sequence to path."""
    snapshot: tuple[int, int, str] | None = None
    """The newest: sequence, number, path."""

    @property
    def newest(self) -> int:
        return max(
            [self.log.newest.sequence, *self.deltas, -1 if self.snapshot is None else self.snapshot[0]]
        )

    @property
    def oldest(self) -> int:
        """The first sequence from which on all are there."""
        first = self.newest + 1
        while first - 1 in self.deltas:
            first -= 1
        return first

    def has_lost(self, place: LogPlace | None) -> bool:
        """Whether what comes after a place can be had no more."""
        return (
            place is None
            or place.epoch != self.log.newest.epoch
            or (place.sequence < self.newest and place.sequence + 1 not in self.deltas)
        )


class FolderDeltaReader:
    """A subscriber's end of all shares in a folder. For one thread.

    Args:
        poll_every: Seconds after which it looks again whether there is something new.
        patience: Seconds that it waits for a snapshot it has asked for, to repair a difference.
        limit: The most bytes of one frame.
    """

    def __init__(
        self,
        folder: str,
        *,
        poll_every: float = 0.1,
        patience: float = 60.0,
        limit: int = FRAME_LIMIT,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._root = folder
        self._poll_every = poll_every
        self._patience = patience
        self._limit = limit
        self._clock = clock
        self._sleep = sleep
        self._spoiled: set[str] = set()
        """Paths of what turned out to be damaged."""

    def shares(self) -> Sequence[ShareLog]:
        """Return what is published; of several numbers of shares, those that were begun last."""
        found = [self._look(folder) for folder in self._folders()]
        latest = max(found, key=lambda one: one.began_at, default=None)
        if latest is None:
            return []
        same = [one for one in found if one.log.share[1] == latest.log.share[1]]
        return [
            replace(one.log, newest=LogPlace(one.log.newest.epoch, one.newest), oldest=one.oldest)
            for one in sorted(same, key=lambda one: one.log.share)
        ]

    def read(self, share: int, after: LogPlace | None, *, wait: float) -> Iterator[Message]:
        """Yield what comes after a place; see `DeltaReader`."""
        folder = self._folder_of(share)
        place, state, lost = after, -1, LogPlace("", 0)
        give_up = self._clock() + wait
        while True:
            news = False
            said = self._state(folder)
            if said is not None and said.number != state:
                state, news = said.number, True
                yield said
            found = self._look(folder)
            if found.has_lost(place):
                for message in self._snapshot(folder, found, lost):
                    news = True
                    if isinstance(message, SnapshotBegin):
                        place = message.place
                    yield message
            else:
                assert place is not None
                for delta in self._deltas(found, place):
                    news = True
                    if delta is None:  # damaged: a snapshot that has it will do
                        lost, place = place, None
                        break
                    place = delta.place
                    yield delta
            now = self._clock()
            if news:
                give_up = now + wait
            elif now >= give_up:
                return
            else:
                self._sleep(min(self._poll_every, give_up - now))

    def read_buckets(self, share: int, buckets: Tensor) -> Iterator[Message]:  # noqa: ARG002
        """Ask for a snapshot, wait for it and yield it: of all buckets, since it is for all readers."""
        folder = self._folder_of(share)
        before = self._look(folder).snapshot
        self._ask(folder)
        give_up = self._clock() + self._patience
        while (found := self._look(folder)).snapshot == before:
            if self._clock() >= give_up:
                raise UnavailableError(
                    f"{folder}: no snapshot was made in {self._patience:g} s, though asked for"
                )
            self._sleep(self._poll_every)
        yield from self._snapshot(folder, found, LogPlace("", 0))

    def close(self) -> None:
        """Nothing is held open."""

    def _folders(self) -> list[str]:
        try:
            found = filesystem.list_folders(self._root)
        except FileMissingError:
            return []
        except FilesystemError as cause:
            raise UnavailableError(f"cannot read {self._root}: {cause}") from cause
        shares = [path for path in found if _SHARE.fullmatch(filesystem.base_name(path))]
        return [path for path in shares if filesystem.exists(filesystem.join(path, _EPOCH))]

    def _folder_of(self, share: int) -> str:
        for log in self.shares():
            if log.share[0] == share:
                return filesystem.join(self._root, f"share-{share}-of-{log.share[1]}")
        raise UnavailableError(f"nobody publishes share {share} in {self._root} yet")

    def _look(self, folder: str) -> _Found:
        path = filesystem.join(folder, _EPOCH)
        try:
            about = json.loads(_read(path, _EPOCH_LIMIT))
            found = _Found(log_from_plain(about["log"]), float(about["began_at"]))
            files = filesystem.list_files(folder)
        except FilesystemError as cause:
            raise UnavailableError(f"cannot read {folder}: {cause}") from cause
        except (CorruptMessageError, ValueError, KeyError, TypeError, RecursionError) as cause:
            raise CorruptMessageError(f"{path} does not say what is published: {cause}") from cause
        ours = quote(found.log.newest.epoch, safe="")
        snapshots: list[tuple[int, int, str]] = []
        for file in files:
            name = filesystem.base_name(file)
            if (delta := _DELTA.fullmatch(name)) and delta["epoch"] == ours:
                found.deltas[int(delta["sequence"])] = file
            elif (one := _SNAPSHOT.fullmatch(name)) and one["epoch"] == ours and file not in self._spoiled:
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

    def _deltas(self, found: _Found, place: LogPlace) -> Iterator[Delta | None]:
        """Yield the deltas after a place, as many as follow each other; None for one that is damaged."""
        sequence = place.sequence + 1
        while sequence in found.deltas:
            path = found.deltas[sequence]
            try:
                message = decode(_read(path, self._limit), limit=self._limit)
                if not isinstance(message, Delta) or message.place != LogPlace(place.epoch, sequence):
                    raise CorruptMessageError("it is something else than its name says")
            except FileMissingError:
                return  # it was removed since we looked
            except FilesystemError as cause:
                raise UnavailableError(f"cannot read {path}: {cause}") from cause
            except CorruptMessageError as error:
                self._report(path, error)
                yield None
                return
            yield message
            sequence += 1

    def _snapshot(self, folder: str, found: _Found, lost: LogPlace) -> Iterator[Message]:
        """Yield the newest snapshot, if it is later than what is lost and deltas can follow it; else ask."""
        epoch = found.log.newest.epoch
        usable = (
            found.snapshot is not None
            and not (epoch == lost.epoch and found.snapshot[0] <= lost.sequence)
            and not found.has_lost(LogPlace(epoch, found.snapshot[0]))
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
            self._spoiled.add(path)
            self._ask(folder)
            raise UnavailableError(f"the snapshot {path} is damaged; another was asked for") from error
        except FilesystemError as cause:
            if not begun and not filesystem.exists(path):
                return  # a newer one took its place since the look; the next look finds it
            raise UnavailableError(f"cannot read {path}: {cause}") from cause

    def _frames(self, path: str) -> Iterator[Message]:
        message: Message | None = None
        with filesystem.open_read(path) as file:
            while lead := file.read(LEAD_BYTES):
                size = frame_bytes(lead, limit=self._limit)
                message = decode(bytearray(lead + file.read(size - LEAD_BYTES)), limit=self._limit)
                yield message
        if not isinstance(message, SnapshotEnd):
            raise CorruptMessageError("it has no end")

    def _ask(self, folder: str) -> None:
        # Who may not write here waits for the next one.
        with suppress(FilesystemError):
            path = filesystem.join(folder, _WANT)
            if not filesystem.exists(path):
                with filesystem.atomic_write(path):
                    pass

    def _report(self, path: str, error: CorruptMessageError) -> None:
        if path not in self._spoiled:
            self._spoiled.add(path)
            _log.warning("delta folder: %s is damaged, taking a snapshot instead: %s", path, error)


def _read(path: str, limit: int) -> bytes:
    """Return a file's bytes; not more than a frame, and one, may have."""
    with filesystem.open_read(path) as file:
        return file.read(limit + 1)
