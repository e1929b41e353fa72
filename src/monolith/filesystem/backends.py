"""The two kinds of filesystems: local disks, and everything that fsspec reaches.

A local disk is used directly: there, renaming is atomic and `fsync` makes it durable.
Elsewhere fsspec translates; the guarantees of stores differ, so a backend says whether
it can rename a folder in one step.

Backends raise plain `OSError`; `errors_as` turns it into a `FilesystemError`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob as globlib
import os
import posixpath
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Protocol, cast

from monolith.concurrency import machine
from monolith.errors import FileMissingError, FilesystemError, TransientFilesystemError, lacks_memory
from monolith.filesystem.paths import AnyPath, base_name, is_url, normal_url
from monolith.filesystem.private import open_regular


class Backend(Protocol):
    """One filesystem; `path` is in its own spelling, without a protocol."""

    renames_folders: bool
    """Whether a folder of any size moves in one step that cannot be seen half done."""

    def is_same(self, other: Backend) -> bool:
        """Whether both are one filesystem, within which files can be renamed."""

    def identity(self, path: str) -> str:
        """The same text for two spellings of one place here."""

    def exists(self, path: str) -> bool: ...

    def is_folder(self, path: str) -> bool: ...

    def entries(self, path: str) -> tuple[list[str], list[str]]:
        """Names of the folders and of the files directly in `path`, each sorted."""

    def glob(self, pattern: str) -> list[str]:
        """Matching paths, sorted, spelled as `pattern` is."""

    def open_read(self, path: str) -> BinaryIO: ...

    def create(self, path: str, *, private: bool = False) -> BinaryIO:
        """Open a new file for writing; a private one for its owner alone, if the store can."""

    def sync(self, file: BinaryIO, path: str) -> None:
        """Return when the written bytes survive a crash, if the store can promise it."""

    def make_dirs(self, path: str) -> None: ...

    def remove_file(self, path: str) -> None: ...

    def remove_tree(self, path: str) -> None: ...

    def rename(self, source: str, target: str) -> None:
        """Give `source` the name `target`, replacing a file that has it."""

    def lock(self, path: str, holder: bytes) -> Callable[[], None] | None:
        """Lock a file for this process, until it ends or the returned function is called.

        Args:
            path: The file, which is created if it is missing.
            holder: Names this process: written to the file, for processes that find it locked.

        Returns:
            None if this filesystem has no locks.

        Raises:
            BlockingIOError: The file is locked already, by this process or another; the file names it.
        """

    def open_database(self, path: str) -> sqlite3.Connection:
        """Open a SQLite file, or create one for its owner alone; see `monolith.filesystem.open_database`."""


def locate(path: AnyPath) -> tuple[Backend, str]:
    """The backend `path` lives on, and its spelling there.

    Raises:
        FilesystemError: No filesystem of that protocol, or its package is not installed.
    """
    text = normal_url(os.fspath(path))
    if not is_url(text):
        return LocalBackend(), text
    protocol, _, rest = text.partition("://")
    if protocol in {"file", "local"}:
        return LocalBackend(), rest
    if protocol == "sim" and (here := machine()) is not None:
        return cast(Backend, here.disk), rest
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    try:
        filesystem, inner = url_to_fs(text)
    except ImportError as cause:
        if lacks_memory(cause):
            raise
        raise FilesystemError(
            f"cannot open {text}: {protocol}:// needs a package that is not installed: {cause}. "
            "Install it with pip."
        ) from cause
    except ValueError as cause:
        raise FilesystemError(
            f"cannot open {text}: {cause}. Use a local path or a protocol that fsspec knows, "
            "such as hdfs://, s3:// or gs://."
        ) from cause
    return FsspecBackend(filesystem, protocol), cast(str, inner)


@contextlib.contextmanager
def errors_as(doing: str, path: AnyPath) -> Iterator[None]:
    """Turn an `OSError` into a `FilesystemError` that says what was being done to which path."""
    try:
        yield
    except FilesystemError:
        raise
    except OSError as cause:
        raise filesystem_error(doing, path, cause) from cause


def filesystem_error(doing: str, path: AnyPath, cause: OSError) -> FilesystemError:
    """The error to raise for `cause`, with advice if there is some."""
    kind: type[FilesystemError] = FilesystemError
    if isinstance(cause, FileNotFoundError):
        kind = FileMissingError
    elif cause.errno in TransientFilesystemError.ERRNOS:
        kind = TransientFilesystemError
    what = cause.strerror or str(cause) or type(cause).__name__
    error = kind(f"cannot {doing} {os.fspath(path)}: {what}. {_advice(cause)}".rstrip())
    error.errno = cause.errno
    return error


def _advice(cause: OSError) -> str:
    if isinstance(cause, FileNotFoundError):
        return "Check the path; to write there, make its folder first."
    if isinstance(cause, PermissionError):
        return "Check the owner and mode of the path and of the folders above it."
    return _ADVICE.get(cause.errno or 0, "")


_ADVICE = {
    errno.ENOSPC: "The disk is full: free space, or write elsewhere. Nothing was put in place.",
    errno.EDQUOT: "The quota is used up: free space, or write elsewhere. Nothing was put in place.",
    errno.EFBIG: "The file is larger than the filesystem or `ulimit -f` allows. Nothing was put in place.",
    errno.EROFS: "The disk is mounted read-only: choose another folder.",
    errno.EIO: "The device failed; see the system log before you trust it again.",
    errno.EMFILE: "This process has too many files open: raise `ulimit -n`.",
    errno.ENFILE: "This machine has too many files open: raise `fs.file-max`.",
    errno.EXDEV: "Both names must be on one disk: copy, then remove.",
    errno.EISDIR: "That is a folder, a file was expected.",
    errno.ENOTDIR: "Part of the path is a file, a folder was expected.",
    errno.ENOTEMPTY: "The folder is not empty: remove it first.",
}


class LocalBackend:
    """Disks the operating system has mounted."""

    renames_folders = True

    def is_same(self, other: Backend) -> bool:
        return isinstance(other, LocalBackend)

    def identity(self, path: str) -> str:
        return os.path.realpath(path)

    def exists(self, path: str) -> bool:
        try:
            os.stat(path)  # noqa: PTH116  os.path.exists would hide a permission error
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def is_folder(self, path: str) -> bool:
        return os.path.isdir(path)  # noqa: PTH112

    def entries(self, path: str) -> tuple[list[str], list[str]]:
        folders: list[str] = []
        files: list[str] = []
        with os.scandir(path or ".") as found:
            for entry in found:
                (folders if entry.is_dir() else files).append(entry.name)
        return sorted(folders), sorted(files)

    def glob(self, pattern: str) -> list[str]:
        return sorted(globlib.glob(pattern, recursive=True))  # noqa: PTH207  keeps the caller's spelling

    def open_read(self, path: str) -> BinaryIO:
        return open(path, "rb")  # noqa: PTH123  the caller closes it

    def create(self, path: str, *, private: bool = False) -> BinaryIO:
        mode = 0o600 if private else 0o666
        return open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode))

    def sync(self, file: BinaryIO, path: str) -> None:
        if file.closed:
            with self.open_read(path) as again:
                os.fsync(again.fileno())
        else:
            file.flush()
            os.fsync(file.fileno())

    def make_dirs(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)  # noqa: PTH103

    def remove_file(self, path: str) -> None:
        os.unlink(path)  # noqa: PTH108

    def remove_tree(self, path: str) -> None:
        if os.path.islink(path):  # noqa: PTH114
            os.unlink(path)  # noqa: PTH108  the link goes, not what it points to
        else:
            shutil.rmtree(path)

    def rename(self, source: str, target: str) -> None:
        os.replace(source, target)  # noqa: PTH105
        _sync_folder(os.path.dirname(target))  # noqa: PTH120

    def lock(self, path: str, holder: bytes) -> Callable[[], None] | None:
        file = open_regular(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(file, 0)
            os.pwrite(file, holder, 0)
        except BaseException:
            os.close(file)
            raise
        return lambda: os.close(file)

    def open_database(self, path: str) -> sqlite3.Connection:
        os.close(open_regular(path, os.O_CREAT | os.O_RDWR, 0o600))
        return sqlite3.connect(path, timeout=0.0, check_same_thread=False, isolation_level=None)


class FsspecBackend:
    """Any filesystem of fsspec."""

    def __init__(self, filesystem: Any, protocol: str) -> None:
        self._fs = filesystem
        self.renames_folders = protocol in {"hdfs", "viewfs", "arrow_hdfs"}

    def is_same(self, other: Backend) -> bool:
        return isinstance(other, FsspecBackend) and bool(self._fs == other._fs)

    def identity(self, path: str) -> str:
        return posixpath.normpath("/" + path)

    def exists(self, path: str) -> bool:
        self._fs.invalidate_cache()  # others write here too
        return bool(self._fs.exists(path))

    def is_folder(self, path: str) -> bool:
        self._fs.invalidate_cache()
        return bool(self._fs.isdir(path))

    def entries(self, path: str) -> tuple[list[str], list[str]]:
        self._fs.invalidate_cache()
        here = path.rstrip("/")
        folders: list[str] = []
        files: list[str] = []
        for entry in self._fs.ls(path, detail=True):
            if entry["name"].rstrip("/") == here:
                if entry["type"] != "directory":
                    raise NotADirectoryError(errno.ENOTDIR, "Not a directory")
                continue  # object stores may list a folder's own marker
            (folders if entry["type"] == "directory" else files).append(base_name(entry["name"]))
        return sorted(folders), sorted(files)

    def glob(self, pattern: str) -> list[str]:
        self._fs.invalidate_cache()
        return sorted(cast(str, self._fs.unstrip_protocol(found)) for found in self._fs.glob(pattern))

    def open_read(self, path: str) -> BinaryIO:
        return cast(BinaryIO, self._fs.open(path, "rb"))

    def create(self, path: str, *, private: bool = False) -> BinaryIO:  # noqa: ARG002
        return cast(BinaryIO, self._fs.open(path, "wb"))

    def sync(self, file: BinaryIO, path: str) -> None:
        """Nothing to do: a store has the bytes when `close` returns, and offers no more."""

    def make_dirs(self, path: str) -> None:
        self._fs.makedirs(path, exist_ok=True)

    def remove_file(self, path: str) -> None:
        self._fs.rm_file(path)

    def remove_tree(self, path: str) -> None:
        self._fs.rm(path, recursive=True)

    def rename(self, source: str, target: str) -> None:
        try:
            self._move(source, target)
        except FileExistsError:
            # HDFS will not rename onto a file. For a moment there is neither, never half of one.
            self._fs.rm_file(target)
            self._move(source, target)

    def lock(self, path: str, holder: bytes) -> Callable[[], None] | None:  # noqa: ARG002
        return None

    def open_database(self, path: str) -> sqlite3.Connection:
        raise OSError(errno.EOPNOTSUPP, "a database needs a local disk", path)

    def _move(self, source: str, target: str) -> None:
        from fsspec import AbstractFileSystem  # type: ignore[import-untyped]

        folder = self.is_folder(source)
        if folder or type(self._fs).mv is not AbstractFileSystem.mv:
            self._fs.mv(source, target, recursive=folder)
        else:
            # The inherited mv would read brackets in a file's name as a pattern.
            self._fs.cp_file(source, target)
            self._fs.rm_file(source)


def _sync_folder(path: str) -> None:
    """Make a rename inside `path` survive a crash."""
    descriptor = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as cause:
        if cause.errno not in {errno.EINVAL, errno.ENOTSUP}:  # some network mounts cannot sync a folder
            raise
    finally:
        os.close(descriptor)
