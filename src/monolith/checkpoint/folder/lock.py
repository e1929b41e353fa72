"""The lock on a model_dir: two processes that save into one folder would delete each other's files.

The operating system locks the file `.lock`, and releases the lock when the process ends, in whatever way. So
there is nothing to clean up, and the existence of the file means nothing.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import weakref
from pathlib import Path
from types import TracebackType

from monolith import filesystem
from monolith.errors import ModelDirLockedError
from monolith.filesystem.backends import LocalBackend, errors_as, locate

LOCK_FILE = ".lock"

_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL}

_log = logging.getLogger(__name__)


class ModelDirLock:
    """Locks a folder for this process while its block runs.

    Only local and mounted disks can be locked. Elsewhere the block runs without a lock, and the operator must
    not start two runs there.
    """

    def __init__(self, model_dir: str) -> None:
        self._model_dir = model_dir
        self._file: int | None = None

    def __enter__(self) -> ModelDirLock:
        """Lock the folder; it is created if it is missing.

        Raises:
            ModelDirLockedError: It is locked already, by this process or another.
        """
        backend, folder = locate(self._model_dir)
        if not isinstance(backend, LocalBackend):
            _log.debug("%s cannot be locked: it is not on a disk of this machine", self._model_dir)
            return self
        filesystem.make_dirs(self._model_dir)
        path = Path(folder) / LOCK_FILE
        with errors_as("lock", path):
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                self._take(file, path)
            except BaseException:
                os.close(file)
                raise
        self._file = file
        _close_in_children(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _take(self, file: int, path: Path) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as cause:
            pid, host = _read_holder(file)
            holder = "another process" if pid is None else f"process {pid} on {host}"
            raise ModelDirLockedError(
                f"cannot use {self._model_dir}: {holder} writes checkpoints there and holds {path}. "
                "Choose another model_dir, or wait until that process ends.",
                pid,
                host,
            ) from cause
        except OSError as cause:
            if cause.errno not in _UNSUPPORTED:
                raise
            _log.warning("%s is not locked: its filesystem cannot lock files", self._model_dir)
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _close_in_children(lock: ModelDirLock) -> None:
    """Close the file in forked children: they would keep the lock after their parent was killed."""
    reference = weakref.ref(lock)

    def close() -> None:
        found = reference()
        if found is not None:
            found._close()

    os.register_at_fork(after_in_child=close)


def _read_holder(file: int) -> tuple[int | None, str | None]:
    pid, _, host = os.pread(file, 1024, 0).decode(errors="replace").strip().partition(" ")
    return (int(pid), host) if pid.isdecimal() else (None, None)
