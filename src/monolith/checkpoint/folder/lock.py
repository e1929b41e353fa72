"""The lock on a model_dir: two processes that save into one folder would delete each other's files.

The operating system locks the file `.lock`, and releases the lock when the process ends, in whatever way. So
there is nothing to clean up, and the existence of the file means nothing.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import weakref
from collections.abc import Callable
from types import TracebackType

from monolith import filesystem
from monolith.errors import ModelDirLockedError
from monolith.filesystem.backends import errors_as, locate

LOCK_FILE = ".lock"

_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL}

_log = logging.getLogger(__name__)


class ModelDirLock:
    """Locks a folder for this process while its block runs.

    A process that is paused keeps its lock, and a process that has ended has none. Only local and mounted
    disks can be locked. Elsewhere the block runs without a lock, and the operator must not start two runs
    there.
    """

    def __init__(self, model_dir: str) -> None:
        self._model_dir = model_dir
        self._release: Callable[[], None] | None = None

    def __enter__(self) -> ModelDirLock:
        """Lock the folder; it is created if it is missing.

        Raises:
            ModelDirLockedError: It is locked already, by this process or another.
        """
        filesystem.make_dirs(self._model_dir)
        path = filesystem.join(self._model_dir, LOCK_FILE)
        backend, file = locate(path)
        with errors_as("lock", path):
            try:
                self._release = backend.lock(file, f"{os.getpid()} {socket.gethostname()}\n".encode())
            except BlockingIOError as cause:
                pid, host = _read_holder(path)
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
                return self
        if self._release is None:
            _log.debug("%s cannot be locked: it is not on a disk of this machine", self._model_dir)
        else:
            _close_in_children(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()


def _close_in_children(lock: ModelDirLock) -> None:
    """Close the file in forked children: they would keep the lock after their parent was killed."""
    reference = weakref.ref(lock)

    def close() -> None:
        found = reference()
        if found is not None:
            found._close()

    os.register_at_fork(after_in_child=close)


def _read_holder(path: str) -> tuple[int | None, str | None]:
    pid, _, host = filesystem.read_bytes(path)[:1024].decode(errors="replace").strip().partition(" ")
    return (int(pid), host) if pid.isdecimal() else (None, None)
