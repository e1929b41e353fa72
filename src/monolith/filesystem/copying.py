"""Copies of files and of whole folders, between any two filesystems.

A folder is copied next to its destination and renamed into place when it is
complete. Object stores cannot rename a folder; there a failed copy is removed again,
and only a kill can leave a part of one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import timedelta

from monolith.errors import ConfigError, FileMissingError, FilesystemError
from monolith.filesystem.backends import Backend, LocalBackend, errors_as, filesystem_error, locate
from monolith.filesystem.files import (
    atomic_write,
    exists,
    is_folder,
    make_dirs,
    open_read,
    remove,
    remove_tree,
    rename,
)
from monolith.filesystem.paths import AnyPath, base_name, join, parent, temporary

_CHUNK_BYTES = 4 << 20


def copy_file(
    source: AnyPath,
    target: AnyPath,
    *,
    overwrite: bool = True,
    skip_missing: bool = True,
    max_retries: int = 5,
    pause: timedelta = timedelta(milliseconds=50),
    sleep: Callable[[float], None] = time.sleep,
    private: bool = False,
) -> bool:
    """Copy one file; `target` is replaced whole or left as it was.

    A missing `source` is looked for again, since stores may show a new file late.

    Args:
        skip_missing: Whether a `source` that stays missing is skipped.
        max_retries: How often to look again.
        pause: Before the first further look; doubles each time.
        private: Whether only the owner of the copy can read it, if it is on a local disk.

    Returns:
        Whether there was something to copy.

    Raises:
        FileMissingError: `source` stays missing and `skip_missing` is false, or the
            folder of `target` does not exist.
        FilesystemError: `target` exists and `overwrite` is false, or it cannot be written.
    """
    if not overwrite and exists(target):
        raise FilesystemError(
            f"cannot copy {os.fspath(source)}: {os.fspath(target)} exists. Pass overwrite=True to replace it."
        )
    for attempt in range(max_retries + 1):
        try:
            reading = open_read(source)
        except FileMissingError:
            if attempt < max_retries:
                sleep(pause.total_seconds() * 2**attempt)
                continue
            if skip_missing:
                return False
            raise
        doing = f"copy {os.fspath(source)} to"
        with reading, errors_as(doing, target), atomic_write(target, private=private) as writing:
            shutil.copyfileobj(reading, writing, _CHUNK_BYTES)
        return True
    raise AssertionError("unreachable: the last attempt returns or raises")


def link_or_copy(source: AnyPath, target: AnyPath, *, durable: bool = True, private: bool = False) -> bool:
    """Give a file that will never change a second name, or copy it if there can be none.

    There can be one on the same local filesystem. Both names are equal: removing one leaves the other.

    Args:
        durable: Whether both must survive a crash of the machine afterwards, if they are on a local disk.
        private: Whether `target` is in a folder of this user alone. Otherwise a file that only this user can
            read becomes as readable as the folder: a file has one mode for all of its names.

    Returns:
        Whether it is a second name, and not a copy.

    Raises:
        FileMissingError: There is no `source`, or no folder for `target`.
        FilesystemError: `target` cannot be written.
    """
    old, inner = locate(source)
    new, outer = locate(target)
    if isinstance(old, LocalBackend) and isinstance(new, LocalBackend):
        unfinished = temporary(outer)
        try:
            os.link(inner, unfinished)
        except OSError as cause:
            if isinstance(cause, FileNotFoundError):
                raise filesystem_error(f"link {os.fspath(source)} to", target, cause) from cause
        else:
            try:
                with errors_as(f"link {os.fspath(source)} to", target):
                    if durable or not private:
                        with new.open_read(unfinished) as file:
                            if not private:
                                _share(file.fileno(), os.path.dirname(outer) or ".")  # noqa: PTH120
                            if durable:
                                os.fsync(file.fileno())
                    if durable:
                        new.rename(unfinished, outer)
                    else:
                        os.replace(unfinished, outer)  # noqa: PTH105
            except BaseException:
                with contextlib.suppress(OSError):
                    new.remove_file(unfinished)
                raise
            return True
    copy_file(source, target, skip_missing=False, max_retries=0, private=private)
    return False


def _share(file: int, folder: str) -> None:
    """Let those read a file who can read a folder."""
    wanted = stat.S_IMODE(os.stat(folder).st_mode) & 0o444  # noqa: PTH116
    mode = stat.S_IMODE(os.fstat(file).st_mode)
    if mode | wanted != mode:
        with contextlib.suppress(PermissionError):  # another user's, who has linked to it and so can read it
            os.fchmod(file, mode | wanted)


class _NoSourceError(FileMissingError, ValueError):
    """There is nothing to copy, which the original's CopyRecursively calls a ValueError."""


def copy_tree(
    source: AnyPath,
    target: AnyPath,
    *,
    max_workers: int = 1,
    skip_missing: bool = True,
    max_retries: int = 5,
    pause: timedelta = timedelta(milliseconds=50),
    sleep: Callable[[float], None] = time.sleep,
    on_progress: Callable[[int, int], None] | None = None,
) -> bool:
    """Copy a folder and everything in it, empty folders too; or one file.

    What is at `target` is replaced, and untouched until the copy is complete wherever
    the store can rename a folder. Links are followed: the copy holds what they
    point to.

    Args:
        max_workers: How many files to copy at once.
        skip_missing: Whether to pass over a `source`, or a file in it, that is gone.
        max_retries: Further looks for a file that is gone; see `copy_file`.
        on_progress: Called in this thread after each file with how many are done and how
            many there are.

    Returns:
        Whether there was something to copy.

    Raises:
        FileMissingError: There is no `source` and `skip_missing` is false; it is a ValueError, too.
        FilesystemError: One of the two is inside the other, which removes nothing; or a
            file could not be copied, after which no `target` that looks complete is left.
    """
    if max_workers < 1:
        raise ConfigError(
            f"cannot copy {os.fspath(source)}: max_workers must be at least 1, got {max_workers}"
        )
    backend, _ = locate(target)
    _refuse_overlap(source, target)
    if not exists(source):
        if skip_missing:
            return False
        raise _NoSourceError(f"cannot copy {os.fspath(source)}: {os.fspath(source)} doesn't exist!")

    def copy(old: str, new: str) -> bool:
        return copy_file(
            old, new, skip_missing=skip_missing, max_retries=max_retries, pause=pause, sleep=sleep
        )

    if not is_folder(source):
        if is_folder(target):
            remove_tree(target)
        copied = copy(os.fspath(source), os.fspath(target))
        if on_progress is not None:
            on_progress(1, 1)
        return copied

    with _whole_folder(backend, target) as place:
        folders, files = _plan(os.fspath(source), place)
        for folder in folders:
            make_dirs(folder)
        if on_progress is not None:
            on_progress(0, len(files))
        if max_workers == 1:
            for done, (old, new) in enumerate(files, start=1):
                copy(old, new)
                if on_progress is not None:
                    on_progress(done, len(files))
        else:
            _copy_in_parallel(files, copy, max_workers, on_progress)
    return True


def _copy_in_parallel(
    files: list[tuple[str, str]],
    copy: Callable[[str, str], bool],
    max_workers: int,
    on_progress: Callable[[int, int], None] | None,
) -> None:
    with ThreadPoolExecutor(max_workers, thread_name_prefix="copy") as pool:
        futures = [pool.submit(copy, old, new) for old, new in files]
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                future.result()
                if on_progress is not None:
                    on_progress(done, len(files))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


@contextlib.contextmanager
def _whole_folder(backend: Backend, target: AnyPath) -> Iterator[str]:
    """Yield the path to fill; what is there becomes `target` when the block ends well, else it goes."""
    final = os.fspath(target).rstrip("/")
    if above := parent(final):
        make_dirs(above)
    place = temporary(final) if backend.renames_folders else final
    if not backend.renames_folders:
        _remove_any(final)
    try:
        make_dirs(place)
        yield place
        if place != final:
            _swap(place, final)
    except BaseException:
        with contextlib.suppress(FilesystemError):  # the first error says more
            remove_tree(place)
        raise


def _swap(place: str, final: str) -> None:
    """Put `place` where `final` is. A kill between the two renames leaves no `final`, never half of one."""
    if not exists(final):
        rename(place, final)
        return
    old = temporary(final)
    rename(final, old)
    try:
        rename(place, final)
    except BaseException:
        rename(old, final)
        raise
    _remove_any(old)


def _remove_any(path: str) -> None:
    if is_folder(path):
        remove_tree(path)
    else:
        remove(path)


def _plan(source: str, target: str) -> tuple[list[str], list[tuple[str, str]]]:
    """The folders to make, outer before inner, and the files to copy, as (from, to)."""
    with errors_as("list", source):
        backend, inner = locate(source)
        names, files = backend.entries(inner)
    folders = []
    copies = [(join(source, name), join(target, name)) for name in files]
    for name in names:
        more_folders, more_copies = _plan(join(source, name), join(target, name))
        folders += [join(target, name), *more_folders]
        copies += more_copies
    return folders, copies


def _refuse_overlap(source: AnyPath, target: AnyPath) -> None:
    first, inner = locate(source)
    second, outer = locate(target)
    if not first.is_same(second):
        return
    a, b = first.identity(inner), second.identity(outer)
    if a == b or a.startswith(b.rstrip("/") + "/") or b.startswith(a.rstrip("/") + "/"):
        raise FilesystemError(
            f"cannot copy {os.fspath(source)} to {os.fspath(target)}: one is the other or contains it, so "
            f"replacing the destination could remove the source. Choose a destination outside {base_name(a)}."
        )
