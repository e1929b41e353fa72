"""Versions: the servables of one model, side by side in a folder.

    DIR/100/servable.json ...            complete, since the folder was renamed into place
    DIR/.200.writing.4f1c.../            being written, or what a killed export left to go on with
    DIR/.100.removed.77.../              being deleted

Whoever serves a version holds it: a shared lock on the file `.held` in it, which the operating system lets
go of when the process ends, in whatever way. Retention removes only what it can lock for itself. A reader
that was too late finds the folder gone, and chooses another version.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from monolith import filesystem
from monolith.errors import ConfigError, ExportError, FileMissingError, FilesystemError, MonolithError
from monolith.serve.servable.manifest import MANIFEST_NAME, Servable, read_servable

HELD = ".held"
ENTRY = "entry"
_WRITING, _REMOVED = ".writing.", ".removed."


def check_version(version: str) -> str:
    """Refuse a version that cannot be the name of a folder.

    Raises:
        ConfigError: It cannot.
    """
    if not version or version.startswith(".") or "/" in version or len(version) > 100:
        raise ConfigError(
            f"a version is the name of a folder, and does not begin with a dot; got {version!r}"
        )
    return version


def list_versions(root: str) -> list[str]:
    """Return the complete versions of a folder, oldest first: other names by time, then numbers by size.

    A folder that is not there has none.
    """
    if not filesystem.is_folder(root):
        return []
    found = [filesystem.base_name(path) for path in filesystem.list_folders(root)]
    complete = [
        name
        for name in found
        if not name.startswith(".") and filesystem.exists(filesystem.join(root, name, MANIFEST_NAME))
    ]
    return sorted(complete, key=lambda name: _age(root, name))


def _age(root: str, name: str) -> tuple[bool, float, str]:
    if name.isdecimal() and name.isascii():
        return True, float(int(name)), name
    created = 0.0
    with contextlib.suppress(MonolithError):
        created = read_servable(filesystem.join(root, name)).created
    return False, created, name


def find_version(folder: str) -> str:
    """Return the folder of a version: `folder` itself, or its newest version, or that of its entry.

    Raises:
        FileMissingError: There is none.
    """
    if filesystem.exists(filesystem.join(folder, MANIFEST_NAME)):
        return folder
    for root in (folder, filesystem.join(folder, ENTRY)):
        if versions := list_versions(root):
            return filesystem.join(root, versions[-1])
    raise FileMissingError(
        f"there is no servable in {folder}: neither a file {MANIFEST_NAME} nor a folder of a version with "
        f"one. Write one with: monolith export --to {folder}"
    )


class HeldVersion:
    """A version that is in use, and is not removed while it is held. Closing it twice does nothing.

    Raises:
        FileMissingError: It is gone, or was never complete.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._file: int | None = None
        path = Path(folder) / HELD
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as cause:
            raise FileMissingError(f"{folder} is no servable, or was removed just now") from cause
        except OSError as cause:
            raise FilesystemError(f"cannot hold {folder}: {cause.strerror}") from cause
        try:
            fcntl.flock(file, fcntl.LOCK_SH)  # who renames it into place, or away, has it for a moment
            if not _is_at(file, path):
                raise FileMissingError(f"{folder} was removed just now")
        except BaseException:
            os.close(file)
            raise
        self._file = file
        try:
            self.servable: Servable = read_servable(folder)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of it."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def hold_version(folder: str) -> HeldVersion:
    """Hold a version, or the newest one of a folder; see `find_version`.

    Raises:
        FileMissingError: There is none.
    """
    for _ in range(10):
        found = find_version(folder)
        try:
            return HeldVersion(found)
        except FileMissingError:
            if found == folder:
                raise
    raise FileMissingError(f"the versions in {folder} are removed faster than they can be opened")


def _is_at(file: int, path: Path) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    here = os.fstat(file)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Say whether nobody else has a folder while a block runs."""
    try:
        file = os.open(folder / HELD, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except FileNotFoundError:
        yield True
        return
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(file)


# Writing


class NewVersion:
    """A version that is being written, aside; `commit` renames it into place.

    What a killed export has left is gone on with where `digest` says that it was to be the same; anything
    else that nobody writes any more is removed.

    Raises:
        ExportError: Another process writes it, or the folder is not on a disk of this machine.
    """

    def __init__(self, root: str, version: str, digest: str) -> None:
        if filesystem.is_remote(root):
            raise ExportError(
                f"cannot export to {root}: a servable is written to a disk of this machine. Copy it then."
            )
        self.root, self.version = root, check_version(version)
        self.digest = digest
        self.folder = str(Path(root) / f".{version}{_WRITING}{digest}")
        self._file: int | None = None
        filesystem.make_dirs(self.folder)
        file = os.open(Path(self.folder) / HELD, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as cause:
            os.close(file)
            raise ExportError(
                f"another process exports version {version} to {root} at this moment; wait for it"
            ) from cause
        self._file = file
        remove_leftovers(root, but=self.folder)

    @property
    def target(self) -> str:
        return filesystem.join(self.root, self.version)

    def commit(self) -> str:
        """Rename it into place; return where it is.

        Raises:
            ExportError: Something else has that name.
        """
        try:
            Path(self.folder).rename(self.target)
        except OSError as cause:
            raise ExportError(
                f"cannot put version {self.version} into place: {self.target}: {cause.strerror}"
            ) from cause
        _sync_folder(self.root)
        self.close()
        return self.target

    def close(self) -> None:
        """Let go of it; what is written stays for the next try."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def existing_version(root: str, version: str, digest: str) -> Servable | None:
    """Return a version that is there already, made of the same; None where there is none of that name.

    Raises:
        ExportError: There is one that was made of something else.
    """
    folder = filesystem.join(root, version)
    if not filesystem.exists(folder):
        return None
    try:
        found = read_servable(folder)
    except MonolithError as cause:
        raise ExportError(f"{folder} is in the way, and no servable: {cause}. Remove it.") from cause
    if found.digest != digest:
        raise ExportError(
            f"{folder} is there already: {found.model} of step {found.step}, exported from "
            f"{found.checkpoint} otherwise. Name another version with --version, or remove it."
        )
    return found


def _sync_folder(path: str) -> None:
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


# Removing


def remove_leftovers(root: str, but: str | None = None) -> None:
    """Remove what is unfinished in a folder and nobody is at: of killed exports, and of killed removals."""
    for path in map(Path, filesystem.list_folders(root)):
        name = path.name
        if name.startswith(".") and (_WRITING in name or _REMOVED in name) and str(path) != but:
            with _alone(path) as alone:
                if alone:
                    shutil.rmtree(path, ignore_errors=True)


def remove_versions(roots: Sequence[str], versions: Collection[str]) -> tuple[list[str], list[str]]:
    """Remove versions that nobody holds in any of the folders that have them; the first folder first.

    Returns:
        Those that were removed, and those that are held.
    """
    removed, held = [], []
    for version in versions:
        folders = [path for root in roots if (path := Path(root) / version).is_dir()]
        with contextlib.ExitStack() as locks:
            if not all(locks.enter_context(_alone(folder)) for folder in folders):
                held.append(version)
                continue
            for folder in folders:
                aside = folder.with_name(f".{version}{_REMOVED}{secrets.token_hex(4)}")
                folder.rename(aside)  # from here on nobody finds it
                shutil.rmtree(aside, ignore_errors=True)
        removed.append(version)
    return removed, held


def keep_newest(roots: Sequence[str], keep: int) -> tuple[list[str], list[str]]:
    """Remove all but the newest versions, where nobody holds them; see `remove_versions`.

    Raises:
        ConfigError: None would be left.
    """
    if keep < 1:
        raise ConfigError(f"keep must be at least 1, got {keep}")
    return remove_versions(roots, list_versions(roots[0])[:-keep])
