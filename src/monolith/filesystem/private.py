"""Files and folders in places that other users may write to, such as the system's temporary folder.

Another user of the machine may plant a link, a pipe or a whole folder under a name that this process is about
to use. Three rules keep that harmless, and `tools/check_files.py` refuses code that opens, makes or locks a
file or a folder without the functions of this package:

- A place that is shared (/tmp, /dev/shm, a runtime folder) holds this user's things only in a folder with a
  random name (`temporary_folder`), or in one that is checked to be this user's alone (`private_folder`).
- A file with a known name is opened with `open_regular`, which follows no link. One that no other user needs
  has mode 0600 and is checked to be this user's (`own`). Others get the mode that the umask leaves: a
  model_dir may be a team's, and everyone who can write to it is trusted.
- A file that appears whole is written under a random name, which must be free, and renamed: `atomic_write`.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from monolith.errors import FilesystemError
from monolith.filesystem.paths import AnyPath


def open_regular(
    path: AnyPath, flags: int, mode: int = 0o666, *, own: bool = False, folder: int | None = None
) -> int:
    """Open a file, or create it with O_CREAT, without following a link; return its descriptor.

    Args:
        flags: As of `os.open`, without O_TRUNC: what is found is checked before it is changed.
        mode: Of a file that is created, less the umask.
        own: Whether only this user may read and write the file. It is created with mode 0600; one that exists
            must be this user's, with such a mode and no second name.
        folder: A descriptor of the folder that a relative path begins in.

    Raises:
        FilesystemError: It is a link, a pipe or another special file, or not this user's own.
        OSError: As of `os.open`.
    """
    assert not flags & os.O_TRUNC
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe must not wait for its other end
    try:
        file = os.open(path, flags, 0o600 if own else mode, dir_fd=folder)
    except OSError as cause:
        if cause.errno == errno.ELOOP:
            raise _refused(path, "it is a symbolic link") from cause
        raise
    found = os.fstat(file)
    shared = stat.S_IMODE(found.st_mode) & 0o077
    why = ""
    if not stat.S_ISREG(found.st_mode):
        why = "it is no ordinary file"
    elif own and found.st_uid != os.geteuid():
        why = f"it is of user {found.st_uid}, not of user {os.geteuid()}"
    elif own and (shared or found.st_nlink > 1):
        why = f"it has mode {stat.S_IMODE(found.st_mode):04o} and {found.st_nlink} names, not 0600 and one"
    if why:
        os.close(file)
        raise _refused(path, why)
    return file


def _refused(path: AnyPath, why: str) -> FilesystemError:
    return FilesystemError(
        f"cannot open {os.fspath(path)}: {why}; another user may have put it there. Check it, then remove it."
    )


def private_folder(path: AnyPath) -> Path:
    """Make a folder that only this user can enter, or check one that exists; return its path.

    Raises:
        FilesystemError: What exists is a link or a file, of another user, or open to others.
        OSError: It cannot be made, as when the folder above is missing.
    """
    folder = Path(path)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise FilesystemError(
            f"{folder} must be a folder of this user with mode 0700, and is a {_kind(found.st_mode)} of user "
            f"{found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}; remove it, or name another folder."
        )
    return folder


def _kind(mode: int) -> str:
    return "folder" if stat.S_ISDIR(mode) else "link" if stat.S_ISLNK(mode) else "file"


def new_folder(prefix: str, above: AnyPath | None = None, *, suffix: str = "") -> Path:
    """Make a folder with a random name that only this user can enter, in `above` or the temporary folder."""
    return Path(tempfile.mkdtemp(suffix, prefix, above))


@contextmanager
def temporary_folder(prefix: str = "monolith-", above: AnyPath | None = None) -> Iterator[Path]:
    """Make a folder as `new_folder` does, and remove it after the block with everything in it."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=above, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
