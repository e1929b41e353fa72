"""Versions: the servables of one model, next to each other in a folder.

    DIR/100/servable.json ...            complete, since the folder was renamed into place
    DIR/.200.writing.4f1c.../            being written, or left by a killed export, which resumes it
    DIR/.100.removed.77.../              being deleted

A process that serves a version has a shared lock on the file `.held` in it; the operating system releases the
lock when the process ends, however it ends. Retention removes only versions that it can lock exclusively. A
reader that was too late finds the folder gone, and chooses another version.

A version whose rows are not trusted is *withheld*: the file `withheld.json` in it gives the reason. It is
complete and stays in its folder, but servers load it only if an operator names it. The file is not part of
the manifest, since the verdict comes after the export and may be lifted.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from monolith import concurrency, filesystem
from monolith.errors import ConfigError, ExportError, FileMissingError, FilesystemError, MonolithError
from monolith.serve.manifest import MANIFEST_NAME, Servable, read_bounded, read_servable

LOCK_FILE = ".held"
"""The name is older than this module; processes of earlier releases lock the same file."""
WITHHELD = "withheld.json"
ENTRY = "entry"
_WRITING, _REMOVED = ".writing.", ".removed."


def check_version(version: str) -> str:
    """Return a version if it can be the name of a folder.

    Raises:
        ConfigError: It cannot.
    """
    if not version or version.startswith(".") or "/" in version or len(version) > 100:
        raise ConfigError(
            f"a version is the name of a folder, and does not begin with a dot; got {version!r}"
        )
    return version


def list_versions(root: str) -> list[str]:
    """Return the complete versions of a folder, oldest first: other names by time, then numbers by value.

    A missing folder has none.
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


def find_version(folder: str, *, serve_withheld: bool = False) -> str:
    """Return the folder of a version: `folder` itself, or its newest version, or that of its entry.

    Args:
        serve_withheld: Whether `folder` may be a withheld version. In a folder of versions, withheld ones are
            always skipped.

    Raises:
        FileMissingError: There is no version, or all are withheld.
        ConfigError: `folder` is a withheld version.
    """
    if filesystem.exists(filesystem.join(folder, MANIFEST_NAME)):
        if not serve_withheld and (mark := read_withheld(folder)) is not None:
            raise ConfigError(
                f"{folder} is withheld ({mark.describe()}). To use it all the same, say so: "
                "serve_withheld=True, or monolith serve --serve-withheld "
                f"{filesystem.base_name(folder)}"
            )
        return folder
    withheld: dict[str, Withheld] = {}
    for root in (folder, filesystem.join(folder, ENTRY)):
        versions = list_versions(root)
        withheld = withheld_versions(root, versions)
        if offered := [version for version in versions if version not in withheld]:
            return filesystem.join(root, offered[-1])
        if versions:
            break
    raise FileMissingError(
        f"there is no servable in {folder}: neither a file {MANIFEST_NAME} nor a folder of a version with "
        f"one{describe_withheld(withheld)}. Write one with: monolith export --to {folder}"
    )


# Withheld versions


@dataclass(frozen=True, kw_only=True, slots=True)
class Withheld:
    """Why servers must not load a version."""

    reason: str
    """Why publishing was paused."""
    first_bad_step: int = 0
    """The first step whose rows are not trusted; 0 if that is not known."""

    def describe(self) -> str:
        since = f"from step {self.first_bad_step} on, " if self.first_bad_step else ""
        return f"{since}{self.reason or 'no reason was given'}"


def withhold(folder: str, mark: Withheld) -> None:
    """Mark a version, complete or being written, so that servers do not load it."""
    with filesystem.atomic_write(filesystem.join(folder, WITHHELD)) as file:
        file.write(json.dumps(asdict(mark)).encode() + b"\n")


def release(folder: str) -> None:
    """Let servers load a version again. Does nothing to a version that is not withheld."""
    filesystem.remove(filesystem.join(folder, WITHHELD))


def read_withheld(folder: str) -> Withheld | None:
    """Return why a version is withheld; None if it is not. A mark that cannot be read withholds as well."""
    path = filesystem.join(folder, WITHHELD)
    try:
        if not filesystem.exists(path):
            return None
        plain = json.loads(read_bounded(path))
        return Withheld(reason=str(plain["reason"]), first_bad_step=int(plain["first_bad_step"]))
    except FileMissingError:
        return None  # it was released a moment ago
    except (FilesystemError, ValueError, LookupError, TypeError, RecursionError) as error:
        return Withheld(reason=f"{path}, which says why, cannot be read: {error}")


def withheld_versions(root: str, versions: Iterable[str]) -> dict[str, Withheld]:
    """Return the withheld ones of some versions, and why."""
    marks = ((version, read_withheld(filesystem.join(root, version))) for version in versions)
    return {version: mark for version, mark in marks if mark is not None}


def describe_withheld(withheld: dict[str, Withheld]) -> str:
    """Return a sentence about withheld versions for an error; empty if there are none."""
    if not withheld:
        return ""
    which = "; ".join(f"{version} ({mark.describe()})" for version, mark in withheld.items())
    return (
        f". Withheld since their rows are not trusted: {which}. Serve one all the same with "
        f"--serve-withheld {next(iter(withheld))}, or let servers take them with: monolith publish resume "
        "--include-withheld"
    )


# Versions in use


class LockedVersion:
    """A version that is in use: it is not removed until this is closed. Closing it twice does nothing.

    Raises:
        FileMissingError: The version was removed, or was never complete.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._file: int | None = None
        path = Path(folder) / LOCK_FILE
        try:
            file = filesystem.open_regular(path, os.O_RDONLY)
        except FileNotFoundError as cause:
            raise FileMissingError(f"{folder} is not a servable, or was removed a moment ago") from cause
        except OSError as cause:
            raise FilesystemError(f"cannot lock {folder}: {cause.strerror}") from cause
        try:
            # This waits only for a process that is renaming the folder, which has the exclusive lock.
            fcntl.flock(file, fcntl.LOCK_SH)
            if not _is_at(file, path):
                raise FileMissingError(f"{folder} was removed a moment ago")
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
        """Unlock the version."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def lock_version(folder: str, *, serve_withheld: bool = False) -> LockedVersion:
    """Lock a version, or the newest one of a folder; see `find_version`.

    Raises:
        FileMissingError: There is no version.
        ConfigError: It is withheld.
    """
    for _ in range(10):
        found = find_version(folder, serve_withheld=serve_withheld)
        try:
            return LockedVersion(found)
        except FileMissingError:
            if found == folder:
                raise
    raise FileMissingError(f"the versions in {folder} are removed faster than they can be opened")


def _is_at(file: int, path: Path) -> bool:
    """Whether an open file still has that name."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    here = os.fstat(file)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Lock a folder exclusively for a block; yield whether no other process uses it."""
    try:
        file = filesystem.open_regular(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
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


# New versions


class NewVersion:
    """A version that is being written to a hidden folder; `commit` renames it into place.

    An export that was killed is resumed if `digest` shows that it would write the same; other leftovers are
    removed.

    Raises:
        ExportError: Another process writes it, or the folder is not on a disk of this machine.
    """

    def __init__(self, root: str, version: str, digest: str) -> None:
        if filesystem.is_remote(root):
            raise ExportError(
                f"cannot export to {root}: a servable is written to a disk of this machine. "
                "Export there, then copy it."
            )
        self.root, self.version = root, check_version(version)
        self.digest = digest
        self.folder = str(Path(root) / f".{version}{_WRITING}{digest}")
        self._file: int | None = None
        filesystem.make_dirs(self.folder)
        file = filesystem.open_regular(Path(self.folder) / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as cause:
            os.close(file)
            raise ExportError(
                f"another process is exporting version {version} to {root}; wait for it"
            ) from cause
        self._file = file
        remove_leftovers(root, but=self.folder)

    @property
    def target(self) -> str:
        return filesystem.join(self.root, self.version)

    def commit(self) -> str:
        """Rename it into place; return its folder.

        Raises:
            ExportError: The name is taken.
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
        """Release its lock; the written files stay for the next attempt."""
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
    """Return the version if the same export exists already; None if the name is free.

    A withheld version of another export is removed unless a server uses it: the run was rolled back to a
    checkpoint before it, and reaches the same step again.

    Raises:
        ExportError: The name is taken by another export.
    """
    folder = filesystem.join(root, version)
    if not filesystem.exists(folder):
        return None
    try:
        found = read_servable(folder)
    except MonolithError as cause:
        raise ExportError(f"{folder} exists and is not a servable: {cause}. Remove it.") from cause
    if found.digest != digest:
        if read_withheld(folder) is not None and remove_versions([root], [version])[0]:
            return None
        raise ExportError(
            f"{folder} exists already: {found.model} of step {found.step}, exported from "
            f"{found.checkpoint} with other settings. Name another version with --version, or remove it."
        )
    return found


def _sync_folder(path: str) -> None:
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


# Retention


def remove_leftovers(root: str, but: str | None = None) -> None:
    """Remove the unfinished folders of killed exports and killed removals that no process uses."""
    for path in map(Path, filesystem.list_folders(root)):
        name = path.name
        if name.startswith(".") and (_WRITING in name or _REMOVED in name) and str(path) != but:
            with _alone(path) as alone:
                if alone:
                    shutil.rmtree(path, ignore_errors=True)


def remove_versions(roots: Sequence[str], versions: Collection[str]) -> tuple[list[str], list[str]]:
    """Remove versions that no process uses in any of the folders; the first folder first.

    Returns:
        The removed versions, and those that are in use.
    """
    removed, in_use = [], []
    for version in versions:
        folders = [path for root in roots if (path := Path(root) / version).is_dir()]
        with contextlib.ExitStack() as locks:
            if not all(locks.enter_context(_alone(folder)) for folder in folders):
                in_use.append(version)
                continue
            for folder in folders:
                hidden = folder.with_name(f".{version}{_REMOVED}{concurrency.token_hex(4)}")
                folder.rename(hidden)  # from here on no process finds it
                shutil.rmtree(hidden, ignore_errors=True)
        removed.append(version)
    return removed, in_use


def keep_newest(roots: Sequence[str], keep: int) -> tuple[list[str], list[str]]:
    """Remove all but the newest versions, unless a server uses them; see `remove_versions`.

    Withheld versions are counted separately: a long pause must not remove the last good version.

    Raises:
        ConfigError: No version would be left.
    """
    if keep < 1:
        raise ConfigError(f"keep must be at least 1, got {keep}")
    versions = list_versions(roots[0])
    withheld = withheld_versions(roots[0], versions)
    offered = [version for version in versions if version not in withheld]
    return remove_versions(roots, [*offered[:-keep], *list(withheld)[:-keep]])
