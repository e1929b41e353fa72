"""A disk in memory: full, slow, and torn where a machine died before it synced.

It is a backend of `monolith.filesystem`: in a simulated thread the path `sim://run/checkpoint` names a file
of the disk of its machine. Machines of one simulation may share a disk, as real ones share a network volume.

What survives a kill: names that were renamed and bytes that were synced. A file that was not synced keeps a
prefix of its bytes, of a length that the seed chooses. A SQLite database keeps whole transactions.
"""

from __future__ import annotations

import errno
import fnmatch
import io
import os
import posixpath
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO

from monolith.filesystem.backends import Backend
from monolith.testing.scheduler import MachineKilled, SimMachine, Simulation


@dataclass
class DiskFaults:
    """How bad a disk is. May be changed while a simulation runs."""

    delay: tuple[float, float] = (0.0, 0.001)
    """Least and most virtual seconds that opening, syncing and renaming take."""
    free_bytes: int | None = None
    """Bytes that may still be written, of which removed files give none back; None is without a limit."""
    error_chance: float = 0.0
    """Chance that opening, syncing or renaming fails with an error of the device, once."""


class _File:
    """The bytes of one file, and how many of them survive a kill of the machine that writes it."""

    def __init__(self, writer: SimMachine | None) -> None:
        self.bytes = b""
        self.synced = 0
        self.writer = writer
        self.commits: list[bytes] = []
        """Of a database: its bytes after each transaction that is committed and not synced."""


class SimDisk:
    """A disk that one or more machines share; implements `monolith.filesystem.backends.Backend`."""

    renames_folders = True

    def __init__(self, simulation: Simulation, faults: DiskFaults | None = None) -> None:
        self._simulation = simulation
        self.faults = DiskFaults() if faults is None else faults
        self._files: dict[str, _File] = {}
        self._folders: set[str] = {""}
        self.locks: dict[str, SimMachine] = {}
        """File -> the machine that has locked it. A lock ends with its machine, not when that is paused."""
        self._cut: dict[str, float] = {}
        """Folder -> the virtual time until which its files cannot be used."""

    def attach(self, machine: SimMachine) -> None:
        """Let a machine use this disk."""
        machine.disk = self
        machine.on_kill.append(lambda: self._tear(machine))

    def cut(self, folder: str, seconds: float) -> None:
        """Let no file in a folder be read, written or renamed for a while, as on a volume that is away."""
        self._simulation.note(f"disk: {folder} is away for {seconds:.1f} s")
        self._cut[_plain(folder.removeprefix("sim://"))] = self._simulation.now + seconds

    def is_same(self, other: Backend) -> bool:
        return other is self

    def identity(self, path: str) -> str:
        return f"sim://{_plain(path)}"

    def exists(self, path: str) -> bool:
        return _plain(path) in self._files or self.is_folder(path)

    def is_folder(self, path: str) -> bool:
        return _plain(path) in self._folders

    def entries(self, path: str) -> tuple[list[str], list[str]]:
        folder = _plain(path)
        if folder not in self._folders:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

        def inside(names: Iterable[str]) -> list[str]:
            return sorted(posixpath.basename(one) for one in names if one and _parent(one) == folder)

        return inside(self._folders), inside(self._files)

    def glob(self, pattern: str) -> list[str]:
        wanted = _plain(pattern)
        depth = wanted.count("/")
        names = [*self._files, *self._folders]
        return sorted(one for one in names if one.count("/") == depth and fnmatch.fnmatchcase(one, wanted))

    def open_read(self, path: str) -> BinaryIO:
        self._take_time(path)
        return io.BytesIO(self._file(path).bytes)

    def create(self, path: str, *, private: bool = False) -> BinaryIO:  # noqa: ARG002
        self._take_time(path)
        name = _plain(path)
        if _parent(name) not in self._folders:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self._files[name] = _File(self._simulation.current.machine)
        return _Writer(self, self._files[name])

    def sync(self, file: BinaryIO, path: str) -> None:
        file.flush()
        self._take_time(path)
        found = self._file(path)
        found.synced = len(found.bytes)

    def make_dirs(self, path: str) -> None:
        self._simulation.check_alive()
        name = _plain(path)
        while name not in self._folders:
            if name in self._files:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            self._folders.add(name)
            name = _parent(name)

    def remove_file(self, path: str) -> None:
        self._simulation.check_alive()
        self._file(path)
        del self._files[_plain(path)]

    def remove_tree(self, path: str) -> None:
        self._simulation.check_alive()
        root = _plain(path)
        if root not in self._folders:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self._files = {name: file for name, file in self._files.items() if not name.startswith(f"{root}/")}
        self._folders = {name for name in self._folders if name != root and not name.startswith(f"{root}/")}

    def rename(self, source: str, target: str) -> None:
        self._take_time(source)
        old, new = _plain(source), _plain(target)
        if old in self._files:
            self._files[new] = self._files.pop(old)
            return
        if old not in self._folders:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
        if new in self._folders and any(self.entries(target)):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), target)

        def moved(name: str) -> str:
            return new + name[len(old) :] if name == old or name.startswith(f"{old}/") else name

        self._files = {moved(name): file for name, file in self._files.items()}
        self._folders = {moved(name) for name in self._folders}

    def lock(self, path: str, holder: bytes) -> Callable[[], None] | None:
        self._take_time(path)
        name, here = _plain(path), self._simulation.current.machine
        held_by = self.locks.get(name)
        if held_by is not None and held_by.alive:
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK), path)
        file = self._files[name] = _File(here)
        file.bytes, file.synced = holder, len(holder)
        self.locks[name] = here

        def release() -> None:
            if here.alive and self.locks.get(name) is here:
                del self.locks[name]

        return release

    def open_database(self, path: str) -> sqlite3.Connection:
        self._take_time(path)
        file = self._files.setdefault(_plain(path), _File(None))
        here = self._simulation.current.machine
        # As with PRAGMA locking_mode = EXCLUSIVE, which is what the databases under test use.
        if file.writer not in (None, here) and file.writer.alive:
            raise sqlite3.OperationalError("database is locked")
        file.writer = here
        found = sqlite3.connect(
            ":memory:", check_same_thread=False, isolation_level=None, factory=_SimDatabase
        )
        found.attach(self, file)
        return found

    def _file(self, path: str) -> _File:
        found = self._files.get(_plain(path))
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return found

    def _wait(self) -> None:
        simulation = self._simulation
        if self.faults.delay[1] > 0:
            simulation.block("disk", simulation.random.uniform(*self.faults.delay))
        else:
            simulation.check_alive()

    def _take_time(self, path: str) -> None:
        self._wait()
        simulation = self._simulation
        for folder, until in self._cut.items():
            if simulation.now < until and _plain(path).startswith(f"{folder}/"):
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        if self.faults.error_chance and simulation.random.random() < self.faults.error_chance:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    def _tear(self, machine: SimMachine) -> None:
        """Lose what a killed machine had not synced."""
        for file in self._files.values():
            if file.writer is machine and file.commits:
                file.bytes = self._simulation.random.choice([file.bytes, *file.commits])
                file.synced = len(file.bytes)
                file.commits.clear()
            elif file.writer is machine and file.synced < len(file.bytes):
                kept = self._simulation.random.randint(file.synced, len(file.bytes))
                file.bytes = file.bytes[:kept]


class _Writer(io.BytesIO):
    """An open file; its bytes are on the disk, unsynced, as soon as they are flushed."""

    def __init__(self, disk: SimDisk, file: _File) -> None:
        super().__init__()
        self._disk, self._file = disk, file

    def write(self, data: Any) -> int:
        self._disk._simulation.check_alive()
        size, faults = memoryview(data).nbytes, self._disk.faults
        if faults.free_bytes is not None:
            if size > faults.free_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            faults.free_bytes -= size
        return super().write(data)

    def flush(self) -> None:
        if not self._disk._simulation.dead():
            self._file.bytes = self.getvalue()

    def close(self) -> None:
        if not self.closed:
            self.flush()
        super().close()


class _SimDatabase(sqlite3.Connection):
    """A database in memory, whose bytes are on the disk after each commit.

    Like one of SQLite in WAL mode: a kill never tears a transaction, and with `synchronous = NORMAL` it may
    undo the last ones. Only FULL syncs them before COMMIT returns.
    """

    def attach(self, disk: SimDisk, file: _File) -> None:
        self._disk, self._file = disk, file
        if file.bytes:
            self.deserialize(file.bytes)

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        if self._disk._simulation.dead():
            raise MachineKilled
        if sql.startswith("PRAGMA journal_mode"):  # a log next to it would not be among its bytes
            sql = "PRAGMA journal_mode"
        if sql != "COMMIT":
            return super().execute(sql, parameters)
        file = self._file
        try:
            self._disk._take_time("database")
        except OSError as cause:
            raise sqlite3.OperationalError("disk I/O error") from cause
        done = super().execute(sql)
        file.commits.append(self.serialize())
        (synchronous,) = super().execute("PRAGMA synchronous").fetchone()
        if synchronous >= 2:
            self._disk._wait()
            file.bytes = file.commits[-1]
            file.synced = len(file.bytes)
            file.commits.clear()
        return done

    def close(self) -> None:
        if not self._disk._simulation.dead():
            if self._file.commits:  # closing the last connection of a database syncs it
                self._file.bytes = self._file.commits[-1]
                self._file.synced = len(self._file.bytes)
                self._file.commits.clear()
            self._file.writer = None
        super().close()


def _plain(path: str) -> str:
    return posixpath.normpath(path).strip("/").removeprefix(".")


def _parent(name: str) -> str:
    return posixpath.dirname(name)
