"""Event files: summaries on disk, as TensorBoard reads them, without TensorFlow.

Needs the package tensorboard, which writes and reads the files. One writer has one file;
a run that goes on after a restart begins another one beside it.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from monolith.errors import FilesystemError, MissingExtraError, TransientFilesystemError
from monolith.observe.summaries import PLUGIN_NAME, TensorSummary

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
    from tensorboard.compat.proto.summary_pb2 import SummaryMetadata  # type: ignore[import-untyped]

_PURPOSE = "TensorBoard summaries"
_REOPEN_SECONDS = 30.0
"""Another file is tried so long after one that could not be written."""
_REOPEN_BYTES = 1 << 20
"""And only if so many bytes are free."""

_log = logging.getLogger(__name__)
EVENT_FILE_MARK = ".tfevents."
"""What the names of all event files have in common."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredSummary:
    """A summary as it was found in an event file."""

    path: str
    tag: str
    step: int
    wall_time: float
    """Unix seconds at which it was written."""
    data: NDArray[Any]
    content: bytes
    description: str


def summary_metadata(
    description: str | None = None, content: bytes | str = b"", plugin_name: str = PLUGIN_NAME
) -> SummaryMetadata:
    """Return the metadata by which TensorBoard hands a tensor to a plugin."""
    try:
        from tensorboard.compat.proto import summary_pb2  # type: ignore[import-untyped]
    except ImportError as cause:
        raise MissingExtraError("tensorboard", "tensorboard", _PURPOSE) from cause
    return summary_pb2.SummaryMetadata(
        plugin_data=summary_pb2.SummaryMetadata.PluginData(
            plugin_name=plugin_name, content=content.encode() if isinstance(content, str) else content
        ),
        summary_description=description or "",
        data_class=summary_pb2.DATA_CLASS_TENSOR,
    )


class SummaryWriter:
    """Writes scalars and tensors into an event file of its own. Thread-safe; a thread of its own writes.

    Args:
        folder: Is made if it is not there. TensorBoard shows it as one run.
        clock: Unix seconds, stamped on what is written.
        timer: Seconds that only grow.

    A disk that is full for a while costs the summaries of that while, with a warning; then another file is
    begun. TensorBoard shows both as one run.

    Raises:
        MissingExtraError: tensorboard is not installed.
        FilesystemError: The file cannot be made or, from any later call, written, for a reason that stays.
    """

    def __init__(
        self,
        folder: str,
        *,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]
        except ImportError as cause:
            raise MissingExtraError("tensorboard", "tensorboard", _PURPOSE) from cause
        self.folder = folder
        self._clock, self._timer = clock, timer
        self._closed = False
        self._open: Callable[[], Any] = lambda: EventFileWriter(folder)
        self._again_at: float | None = None
        """When another file may be begun, after one that could not be written."""
        try:
            self._file = self._open()
        except OSError as cause:
            raise self._failed(cause) from cause

    def start(self, step: int) -> None:
        """Say that training goes on after `step`: what an earlier run wrote for later steps is not shown."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._add(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars({tag: value}, step)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write numbers of one step, by tag."""
        from tensorboard.compat.proto import summary_pb2

        metadata = summary_metadata(plugin_name="scalars")
        metadata.data_class = summary_pb2.DATA_CLASS_SCALAR
        self._write({tag: (np.float32(value), metadata) for tag, value in values.items()}, step)

    def tensor(self, summary: TensorSummary, step: int) -> None:
        """Write a tensor for the `monolith` plugin."""
        metadata = summary_metadata(summary.description, summary.content)
        self._write({summary.tag: (summary.data, metadata)}, step)

    def flush(self) -> None:
        """Wait until all is on disk."""
        if self._again_at is None:
            self._try(self._file.flush)

    def close(self) -> None:
        """Finish the file; closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._again_at is None:
            self._try(self._file.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, values: Mapping[str, tuple[Any, SummaryMetadata]], step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.util.tensor_util import make_tensor_proto  # type: ignore[import-untyped]

        written = [
            Summary.Value(tag=tag, tensor=make_tensor_proto(value), metadata=metadata)
            for tag, (value, metadata) in values.items()
        ]
        self._add(Event(step=step, summary=Summary(value=written)))

    def _add(self, event: Event) -> None:
        event.wall_time = self._clock()
        if self._again_at is not None:
            if self._timer() < self._again_at:
                return

            if not self._try(self._reopen):
                return
            self._again_at = None
        self._try(lambda: self._file.add_event(event))

    def _reopen(self) -> None:
        with suppress(Exception):  # it could not be written before
            self._file.close()
        with suppress(FileNotFoundError):  # a remote folder
            found = os.statvfs(self.folder)
            # Each attempt leaves a thread behind if it fails, so first see whether it can succeed.
            if found.f_bavail * found.f_frsize < _REOPEN_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._file = self._open()

    def _try(self, act: Callable[[], object]) -> bool:
        """Write; return whether that went well. A full disk is warned about once, and tried again later."""
        try:
            act()
        except OSError as cause:
            if cause.errno not in TransientFilesystemError.ERRNOS:
                raise self._failed(cause) from cause
            if self._again_at is None:
                _log.warning("summaries in %s are not written for now: %s", self.folder, cause)
            self._again_at = self._timer() + _REOPEN_SECONDS
            return False
        return True

    def _failed(self, cause: OSError) -> FilesystemError:
        passing = cause.errno in TransientFilesystemError.ERRNOS
        error = (TransientFilesystemError if passing else FilesystemError)(
            f"cannot write summaries to {self.folder}: {cause}"
        )
        error.errno = cause.errno
        return error


def read_summaries(paths: Iterable[str], plugin_name: str = PLUGIN_NAME) -> Iterator[StoredSummary]:
    """Yield the tensors that event files hold for a plugin, file after file, in the order of writing.

    A file that is still written to, or was torn, is read up to its last whole record.

    Raises:
        MissingExtraError: tensorboard is not installed.
    """
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader  # type: ignore[import-untyped]
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError as cause:
        raise MissingExtraError("tensorboard", "tensorboard", _PURPOSE) from cause
    for path in paths:
        known: dict[str, SummaryMetadata] = {}  # writers may leave it out after the first record of a tag
        for event in EventFileLoader(path).Load():
            for value in event.summary.value:
                metadata = known.setdefault(value.tag, value.metadata)
                if metadata.plugin_data.plugin_name == plugin_name and value.HasField("tensor"):
                    latest = value.metadata if value.metadata.plugin_data.plugin_name else metadata
                    yield StoredSummary(
                        path,
                        value.tag,
                        event.step,
                        event.wall_time,
                        make_ndarray(value.tensor),
                        latest.plugin_data.content,
                        latest.summary_description,
                    )
