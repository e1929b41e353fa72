"""Discovery by files: one file per entry in a folder that all processes see.

For tests, one machine, and a shared disk. `<folder>/<role>/<index>` has the address on its first
line; below it the time of the registration and a mark of the owner. The owner touches the file
while it lives: an entry that was not touched for `expire_after` counts as gone.

Changes are made under a lock, by renaming: a reader sees an entry whole or not at all. The clocks
of the machines may differ, and be set: what counts is when a reader saw the time of a file change. Only a
process that has just started must believe them, so they should then differ by less than `expire_after`.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from monolith import concurrency
from monolith.cluster.addresses import Address, Clock
from monolith.cluster.discovery import (
    Callback,
    Closing,
    PollingWatch,
    Registration,
    check_registration,
    check_role,
    closed_error,
)
from monolith.errors import AddressError, ConfigError, FilesystemError
from monolith.filesystem import atomic_write, make_dirs, open_regular
from monolith.observe import Sightings

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class FilesConfig:
    """Where entries lie, and how long one counts without a sign of life."""

    folder: str
    expire_after: timedelta = timedelta(seconds=60)
    heartbeat: timedelta = timedelta(seconds=15)
    """How often an entry is touched, and repaired if it was damaged."""
    watch_every: timedelta = timedelta(seconds=1)
    """How often a watch polls for changes."""

    def __post_init__(self) -> None:
        if not timedelta(0) < self.heartbeat < self.expire_after:
            raise ConfigError(
                f"discovery in {self.folder}: heartbeat ({self.heartbeat}) must be shorter than "
                f"expire_after ({self.expire_after}), or entries of live processes would expire"
            )


@dataclass(frozen=True, slots=True)
class _Entry:
    registration: Registration
    owner: str
    touched: float


class FilesDiscovery(Closing):
    """A `Discovery` in a folder: the process that made an entry touches it from a thread until it is closed.

    Examples:
        >>> from monolith import FilesDiscovery
        >>> from monolith.cluster.files_discovery import FilesConfig
        >>> with FilesDiscovery(FilesConfig(folder="registry")) as discovery:
        ...     discovery.register("worker", 1, "10.0.0.2:7000")
        ...     discovery.query("worker")
        {1: '10.0.0.2:7000'}
    """

    def __init__(
        self, config: FilesConfig, clock: Clock = concurrency.time, *, timer: Clock = concurrency.monotonic
    ) -> None:
        self._config = config
        self._clock = clock
        self._sightings = Sightings(clock, timer)
        self._looking = concurrency.Lock()  # guards the sightings
        self._folder = Path(config.folder)
        self._owner = concurrency.token_hex(8)
        self._lock = concurrency.Lock()  # guards _mine and _closed
        self._mine: dict[tuple[str, int], Registration] = {}
        self._closed = False
        self._stop = concurrency.Event()
        self._heart: concurrency.Thread | None = None
        self._watch = PollingWatch(self.query, config.watch_every, f"files-watch-{self._folder.name}")
        try:
            make_dirs(self._folder)
        except OSError as cause:
            raise FilesystemError(f"cannot make the discovery folder {self._folder}: {cause}") from cause

    def register(self, role: str, index: int, address: str) -> None:
        check_registration(role, index, address)
        registration = Registration(index, address, self._clock())
        with self._lock:
            if self._closed:
                raise closed_error(f"the discovery in {self._folder}")
            with self._locked():
                self._write(role, registration)
            self._mine[role, index] = registration
            if self._heart is None:
                self._heart = concurrency.Thread(
                    target=self._beat, name=f"files-heartbeat-{self._folder.name}", daemon=True
                )
                self._heart.start()

    def deregister(self, role: str, index: int, address: str | None = None) -> None:
        check_role(role)
        with self._lock, self._locked():
            mine = self._mine.get((role, index))
            if mine is not None and address in (None, mine.address):
                del self._mine[role, index]
            entry = self._read(role, index)
            if entry is None or address in (None, entry.registration.address):
                self._path(role, index).unlink(missing_ok=True)

    def query(self, role: str) -> dict[int, str]:
        return {entry.index: entry.address for entry in self.entries(role)}

    def entries(self, role: str) -> list[Registration]:
        if self._closed:
            return []
        check_role(role)
        try:
            names = [path.name for path in (self._folder / role).iterdir()]
        except FileNotFoundError:
            return []
        found = [self._read(role, int(name)) for name in names if name.isascii() and name.isdecimal()]
        with self._looking:
            return sorted(
                entry.registration for entry in found if entry is not None and not self._is_old(role, entry)
            )

    def _is_old(self, role: str, entry: _Entry) -> bool:
        most = self._config.expire_after.total_seconds()
        # A little more than `most`: an entry of exactly that age still counts.
        who, longest = (role, entry.registration.index), most + 1e-3
        return self._sightings.age(who, entry.touched, renewed_at=entry.touched, most=longest) > most

    def roles(self) -> list[str]:
        try:
            folders = [path.name for path in self._folder.iterdir() if path.is_dir()]
        except FileNotFoundError:
            return []
        return sorted(role for role in folders if not role.startswith(".") and self.entries(role))

    def watch(self, role: str, callback: Callback) -> Callable[[], None]:
        return self._watch.add(role, callback)

    def close(self) -> None:
        self._watch.close()
        with self._lock:
            self._closed = True
            heart, self._heart = self._heart, None
            mine, self._mine = self._mine, {}
        self._stop.set()
        if heart is not None:
            heart.join()
        if mine:
            with self._locked():
                for role, index in mine:
                    entry = self._read(role, index)
                    if entry is not None and entry.owner == self._owner:
                        self._path(role, index).unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._stop.wait(self._config.heartbeat.total_seconds()):
            try:
                self.touch()
            except OSError as error:  # a disk that is gone may come back, and the entries with it
                _log.warning("discovery in %s: cannot touch entries, retrying: %s", self._folder, error)

    def touch(self) -> None:
        """Give the entries made here a sign of life, and write those again that are gone or unreadable.

        The heartbeat does this; a test may.
        """
        with self._lock, self._locked():
            for (role, index), registration in self._mine.items():
                entry = self._read(role, index)
                if entry is None:
                    self._write(role, registration)
                elif entry.owner == self._owner:
                    now = self._clock()
                    os.utime(self._path(role, index), (now, now))
                # Else another process has the place now, and this one was replaced.

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder against other processes."""
        file = open_regular(self._folder / ".lock", os.O_WRONLY | os.O_CREAT)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    def _path(self, role: str, index: int) -> Path:
        return self._folder / role / str(index)

    def _write(self, role: str, registration: Registration) -> None:
        path = self._path(role, registration.index)
        make_dirs(path.parent)
        with atomic_write(str(path)) as file:
            file.write(f"{registration.address}\n{registration.registered_at}\n{self._owner}\n".encode())
        now = self._clock()
        os.utime(path, (now, now))

    def _read(self, role: str, index: int) -> _Entry | None:
        """Return an entry; None if there is none, or if the file is malformed."""
        path = self._path(role, index)
        try:
            with path.open("rb") as file:
                address, registered_at, owner = file.read().decode().split()
                touched = os.fstat(file.fileno()).st_mtime
            Address.parse(address)
            return _Entry(Registration(index, address, float(registered_at)), owner, touched)
        except FileNotFoundError:
            return None
        except (AddressError, ValueError) as error:
            _log.warning("discovery: ignoring %s, which is not an entry: %s", path, error)
            return None
