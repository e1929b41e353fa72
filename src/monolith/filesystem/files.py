"""Files and folders, one call each, on any filesystem.

A file that others may read is written with `atomic_write`: under its own name it
is there whole, or it is not there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import threading
from collections.abc import Iterator
from typing import BinaryIO, TypeGuard

from monolith.errors import FileMissingError, FilesystemError, TransientFilesystemError
from monolith.filesystem.backends import Backend, LocalBackend, errors_as, filesystem_error, locate
from monolith.filesystem.paths import AnyPath, join, temporary


def exists(path: AnyPath) -> bool:
    """Whether there is a file or folder at `path`."""
    with errors_as("look for", path):
        backend, inner = locate(path)
        return backend.exists(inner)


def is_folder(path: AnyPath) -> bool:
    """Whether there is a folder at `path`."""
    with errors_as("look for", path):
        backend, inner = locate(path)
        return backend.is_folder(inner)


def list_files(path: AnyPath, *, recursive: bool = False) -> list[str]:
    """Paths of the files in the folder `path`, sorted; with `recursive`, of those below it too.

    What is unfinished is listed as well; see `is_temporary`.

    Raises:
        FileMissingError: There is no such folder.
    """
    folders, files = _entries(path)
    found = [join(path, name) for name in files]
    if recursive:
        for name in folders:
            found += list_files(join(path, name), recursive=True)
    return sorted(found)


def list_folders(path: AnyPath) -> list[str]:
    """Paths of the folders directly in the folder `path`, sorted.

    Raises:
        FileMissingError: There is no such folder.
    """
    return [join(path, name) for name in _entries(path)[0]]


def glob(pattern: AnyPath) -> list[str]:
    """Existing paths that match, sorted: `*` within a name, `**` across folders."""
    with errors_as("list", pattern):
        backend, inner = locate(pattern)
        return backend.glob(inner)


def make_dirs(path: AnyPath) -> None:
    """Make the folder `path` and those above it; it may exist already."""
    with errors_as("make the folder", path):
        backend, inner = locate(path)
        backend.make_dirs(inner)


def read_bytes(path: AnyPath) -> bytes:
    """The whole content of a file.

    Raises:
        FileMissingError: There is no such file.
    """
    with errors_as("read", path):
        backend, inner = locate(path)
        with backend.open_read(inner) as file:
            return file.read()


def open_read(path: AnyPath) -> BinaryIO:
    """Open a file for reading; the caller closes it.

    Raises:
        FileMissingError: There is no such file.
    """
    with errors_as("read", path):
        backend, inner = locate(path)
        return backend.open_read(inner)


def open_database(path: AnyPath) -> sqlite3.Connection:
    """Open a SQLite file on a local disk, or create one that only its owner can read or write.

    Any thread may use the connection, one at a time. It begins no transaction by itself and does not wait for
    the lock of another process.

    Raises:
        FilesystemError: The path is not on a local disk, or may not be written.
    """
    with errors_as("open the database", path):
        backend, inner = locate(path)
        return backend.open_database(inner)


def file_size(path: AnyPath) -> int:
    """The bytes of a file.

    Raises:
        FileMissingError: There is no such file.
    """
    with errors_as("look at", path), open_read(path) as file:
        return file.seek(0, os.SEEK_END)


def free_bytes(path: AnyPath) -> int | None:
    """The bytes that this process may still write to the disk of a folder; None if that cannot be told."""
    backend, inner = locate(path)
    if not isinstance(backend, LocalBackend):
        return None
    try:
        found = os.statvfs(inner)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


@contextlib.contextmanager
def atomic_write(path: AnyPath, *, private: bool = False) -> Iterator[BinaryIO]:
    """Write a file that appears under its name only when the block ends without an exception.

    Until then the bytes are in `<path>-tmp-<random>`, which an exception removes and
    a kill leaves behind. A file that had the name stays as it was until it is
    replaced in one step. On a local disk the file and its name survive a crash
    once the block has ended. The folder must exist.

    Args:
        private: For a file with secrets: on a local disk only its owner can read or write it.

    Raises:
        FilesystemError: The disk is full, the folder is missing or may not be written.
            An exception of the block itself passes through.
    """
    with errors_as("write", path):
        backend, target = locate(path)
        unfinished = temporary(target)
        file = backend.create(unfinished, private=True) if private else backend.create(unfinished)
    try:
        yield file
        with errors_as("write", path):
            backend.sync(file, unfinished)
            file.close()
            backend.rename(unfinished, target)
    except BaseException as cause:
        _discard(backend, file, unfinished)
        if _is_failed_write(cause):
            raise filesystem_error("write", path, cause) from cause
        raise


def remove(path: AnyPath, *, missing_ok: bool = True) -> None:
    """Remove a file.

    Raises:
        FileMissingError: There is none, and `missing_ok` is false.
    """
    with errors_as("remove", path):
        backend, inner = locate(path)
        try:
            backend.remove_file(inner)
        except FileNotFoundError:
            if not missing_ok:
                raise


def remove_tree(path: AnyPath, *, missing_ok: bool = True) -> None:
    """Remove a folder and everything in it.

    Raises:
        FileMissingError: There is none, and `missing_ok` is false.
    """
    with errors_as("remove", path):
        backend, inner = locate(path)
        try:
            backend.remove_tree(inner)
        except FileNotFoundError:
            if not missing_ok:
                raise


def rename(source: AnyPath, target: AnyPath) -> None:
    """Give `source` the name `target` on the same filesystem, replacing a file that has it.

    One step on local disks and HDFS; an object store copies, then deletes.

    Raises:
        FileMissingError: There is no `source`.
        FilesystemError: The two are on different filesystems, or `target` is a full folder.
    """
    with errors_as(f"rename {os.fspath(source)} to", target):
        backend, old = locate(source)
        other, new = locate(target)
        if not backend.exists(old):
            raise FileMissingError(f"cannot rename {os.fspath(source)}: it does not exist")
        if not backend.is_same(other):
            raise FilesystemError(
                f"cannot rename {os.fspath(source)} to {os.fspath(target)}: they are on different "
                "filesystems. Copy, then remove."
            )
        backend.rename(old, new)


class FileReserve:
    """Open files in reserve, to be closed when the process has no file descriptor left. Thread-safe.

    Connections may have taken all files that a process may open; without a reserve it could not save either.

        with reserve.given_up():    # so many files more can be opened in the block
            save()
    """

    def __init__(self, files: int = 64) -> None:
        self._count = files
        self._lock = threading.Lock()  # guards the two below
        self._held: list[int] = []
        self._users = 0
        self._fill()

    @contextlib.contextmanager
    def given_up(self) -> Iterator[None]:
        """Leave the files of the reserve to the block; take as many back afterwards as there are."""
        with self._lock:
            self._users += 1
            self._let_go()
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._fill()

    def close(self) -> None:
        """Give the files up for good. Closing again does nothing."""
        with self._lock:
            self._count = 0
            self._let_go()

    def __del__(self) -> None:
        self._let_go()

    def _fill(self) -> None:
        with contextlib.suppress(OSError):
            while len(self._held) < self._count:
                self._held.append(os.open(os.devnull, os.O_RDONLY))

    def _let_go(self) -> None:
        while self._held:
            os.close(self._held.pop())


def is_out_of_files(error: BaseException) -> bool:
    """Whether an error, or one that caused it, is that this process or the machine can open no more files."""
    found: BaseException | None = error
    while found is not None:
        if getattr(found, "errno", None) in (errno.EMFILE, errno.ENFILE):
            return True
        found = found.__cause__ or found.__context__
    return False


def _entries(path: AnyPath) -> tuple[list[str], list[str]]:
    with errors_as("list", path):
        backend, inner = locate(path)
        return backend.entries(inner)


def _is_failed_write(cause: BaseException) -> TypeGuard[OSError]:
    """Whether the block failed in writing to its file; other errors of its own are not ours to rename."""
    return (
        isinstance(cause, OSError)
        and not isinstance(cause, FilesystemError)
        and cause.filename is None
        and cause.errno in {errno.EFBIG, errno.EROFS, *TransientFilesystemError.ERRNOS}
    )


def _discard(backend: Backend, file: BinaryIO, unfinished: str) -> None:
    # The error that brought us here says more than one from cleaning up after it. fsspec
    # files raise what their store raises, so nothing narrower than Exception will do.
    with contextlib.suppress(Exception):
        file.close()
    with contextlib.suppress(Exception):
        backend.remove_file(unfinished)
