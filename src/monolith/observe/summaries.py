"""Summaries of a model for TensorBoard and its `monolith` plugin, and the event files that contain them.

A summary is a tensor with a head, a line of JSON that says how the tensor is split into segments, one for
each feature. Two kinds are drawn: weights of an architecture search (`nas_data`) and the contributions of
segments to a layer (`insight_data`). Readers compare heads byte for byte, so keys are in a fixed order and
Python's own separators are used. `monolith.nn` computes the values.

Event files need the package tensorboard, and no TensorFlow. One writer has one file; a run that resumes
after a restart writes another one next to it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from monolith import concurrency
from monolith.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
import errno
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

from monolith.errors import FilesystemError, TransientFilesystemError, optional_package

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
    from tensorboard.compat.proto.summary_pb2 import SummaryMetadata  # type: ignore[import-untyped]


PLUGIN_NAME = "monolith"
NAS_LEAF = "monolith_nas_weight"
"""The last part of the tag of NAS weights."""
INSIGHT_LEAF = "monolith_feature_insight"
"""The last part of the tag of feature insight."""


class SummaryType(StrEnum):
    """How the segments of a summary are to be read."""

    GATING = "gating"
    SELECTING = "selecting"
    MIXED = "mixed"
    SIMPLE = "simple"
    FI_DIRECT = "fi_direct"
    FI_TRAIN = "fi_train"


Sizes = Sequence[int] | Sequence[Sequence[int]]
"""Width of each segment; or, for each, the widths a search may choose from."""
Groups = Sequence[Sequence[str]]
"""Names of segments that belong together."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorSummary:
    """A tensor and what a reader needs to know of it."""

    tag: str
    data: NDArray[Any]
    content: bytes
    """The head: UTF-8 JSON, or nothing."""
    description: str


@overload
def prepare_head(
    segment_names: Sequence[str],
    segment_sizes: Sizes,
    group_info: Groups | None = None,
    raw_tag: str | None = None,
    out_type: Literal["tensor"] = "tensor",
) -> tuple[Tensor, SummaryType | None]: ...
@overload
def prepare_head(
    segment_names: Sequence[str],
    segment_sizes: Sizes,
    group_info: Groups | None = None,
    raw_tag: str | None = None,
    *,
    out_type: Literal["json"],
) -> tuple[dict[str, Any], SummaryType | None]: ...
@overload
def prepare_head(
    segment_names: Sequence[str],
    segment_sizes: Sizes,
    group_info: Groups | None = None,
    raw_tag: str | None = None,
    *,
    out_type: Literal["bytes"],
) -> tuple[bytes, SummaryType | None]: ...
def prepare_head(
    segment_names: Sequence[str],
    segment_sizes: Sizes,
    group_info: Groups | None = None,
    raw_tag: str | None = None,
    out_type: str = "tensor",
) -> tuple[Any, SummaryType | None]:
    """Return the head of a summary and its type.

    Args:
        group_info: Segments that belong together, by name; by default each is its own group.
        raw_tag: The type, where sizes do not tell: whole numbers mean `gating`, lists `selecting`.
        out_type: "json" for an object, "bytes" for its text, "tensor" for the text as uint8.

    Returns:
        Without names and sizes an empty head, and `raw_tag` as the type.

    Raises:
        ConfigError: Names and sizes differ in number, or a segment is in no group.
    """
    kind = None if raw_tag is None else _type_of(raw_tag)
    if not len(segment_names) and not len(segment_sizes):
        return _formed({}, out_type), kind
    sizes = _checked_sizes(segment_names, segment_sizes)
    if kind is None:
        whole = all(isinstance(size, int) for size in sizes)
        kind = SummaryType.GATING if whole else SummaryType.SELECTING
    head: dict[str, Any] = {
        "tag_type": kind.value,
        "segment_names": list(segment_names),
        "segment_sizes": sizes,
    }
    if kind in (SummaryType.GATING, SummaryType.FI_TRAIN):
        head["group_index"] = _group_index(segment_names, group_info)
    return _formed(head, out_type), kind


def nas_data(
    weight: Tensor | NDArray[Any],
    segment_names: Sequence[str] = (),
    segment_sizes: Sizes = (),
    group_info: Groups | None = None,
    raw_tag: str | None = None,
    *,
    description: str | None = None,
    name: str | None = None,
) -> TensorSummary:
    """Return the summary of the weights with which a search prefers one architecture to another.

    Args:
        description: By default the type.
        name: Comes before the type in the tag.
    """
    content, kind = prepare_head(segment_names, segment_sizes, group_info, raw_tag, out_type="bytes")
    if kind is None:
        raise ConfigError("nas_data: without segments the type of the summary is unknown; give raw_tag")
    return TensorSummary(_tag(kind, name, NAS_LEAF), _array(weight), content, description or kind.value)


def insight_data(
    values: Tensor | NDArray[Any],
    segment_names: Sequence[str],
    segment_sizes: Sequence[int],
    *,
    group_info: Groups | None = None,
    label: Tensor | NDArray[Any] | None = None,
    description: str | None = None,
    name: str | None = None,
) -> TensorSummary:
    """Return the summary of what each segment holds, for a batch of examples.

    Args:
        values: float of shape (examples, sum of the sizes): the segments side by side.
        label: Of shape (examples,) or (examples, k): with it the type is `fi_train`, and the labels
            are the last columns of what is written; without it the type is `fi_direct`.

    Raises:
        ConfigError: There are no segments, or something does not fit.
    """
    if not len(segment_names):
        raise ConfigError("feature insight needs at least one segment; give segment_names and segment_sizes")
    kind = SummaryType.FI_DIRECT if label is None else SummaryType.FI_TRAIN
    head, _ = prepare_head(segment_names, segment_sizes, group_info, kind, out_type="json")
    data = _array(values).astype(np.float32)
    if not all(isinstance(size, int) for size in head["segment_sizes"]):
        raise ConfigError(
            f"feature insight: a segment has one width, got segment_sizes={head['segment_sizes']}"
        )
    if data.ndim != 2 or data.shape[1] != sum(head["segment_sizes"]):
        raise ConfigError(
            f"feature insight: values must have shape (examples, {sum(head['segment_sizes'])}), "
            f"the sum of segment_sizes, got {data.shape}"
        )
    labels = np.empty((len(data), 0), np.float32)
    if label is not None:
        labels = _array(label).astype(np.float32)
        labels = labels.reshape(-1, 1) if labels.ndim < 2 else labels
        if labels.ndim != 2 or len(labels) != len(data):
            raise ConfigError(
                f"feature insight: label must have one row for each of {len(data)} examples, "
                f"got shape {labels.shape}"
            )
    head["label_size"] = labels.shape[1]
    return TensorSummary(
        _tag(kind, name, INSIGHT_LEAF),
        np.concatenate([data, labels], 1),
        json.dumps(head).encode(),
        description or kind.value,
    )


def _type_of(raw_tag: str) -> SummaryType:
    try:
        return SummaryType(raw_tag)
    except ValueError as cause:
        raise ConfigError(
            f"unknown summary type {raw_tag!r}; choose one of {', '.join(SummaryType)}"
        ) from cause


def _checked_sizes(names: Sequence[str], sizes: Sizes) -> list[int | list[int]]:
    if len(names) != len(sizes):
        raise ConfigError(
            "summary: segment_names and segment_sizes must have the same length, "
            f"got {len(names)} and {len(sizes)}"
        )
    return [[int(one) for one in size] if isinstance(size, Sequence) else int(size) for size in sizes]


def _group_index(names: Sequence[str], groups: Groups | None) -> list[int]:
    """Return the group of each segment, renumbered from 0 in the order of the groups that occur."""
    if groups is None:
        return list(range(len(names)))
    if any(isinstance(group, str) or not isinstance(group, Sequence) for group in groups):
        raise ConfigError(f"summary: group_info must be lists of names of segments, got {groups!r}")
    # A name that is in several groups belongs to the last of them.
    group_of = {name: number for number, group in enumerate(groups) for name in group}
    if missing := [name for name in names if name not in group_of]:
        raise ConfigError(f"summary: group_info has no group for {', '.join(missing)}")
    rank = {number: place for place, number in enumerate(sorted({group_of[name] for name in names}))}
    return [rank[group_of[name]] for name in names]


def _formed(head: dict[str, Any], out_type: str) -> Any:
    if out_type == "json":
        return head
    text = json.dumps(head).encode() if head else b""
    if out_type == "bytes":
        return text
    if out_type == "tensor":
        import torch

        return torch.tensor(list(text), dtype=torch.uint8)
    raise ConfigError(f"summary: out_type must be tensor, json or bytes, got {out_type!r}")


def _tag(kind: SummaryType, name: str | None, leaf: str) -> str:
    return f"{name}_{kind}/{leaf}" if name else f"{kind}/{leaf}"


def _array(values: Tensor | NDArray[Any]) -> NDArray[Any]:
    if isinstance(values, np.ndarray):
        return values
    return values.detach().cpu().numpy()


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
    with optional_package("tensorboard", "tensorboard", _PURPOSE):
        from tensorboard.compat.proto import summary_pb2  # type: ignore[import-untyped]
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
        clock: Callable[[], float] = concurrency.time,
        timer: Callable[[], float] = concurrency.monotonic,
    ) -> None:
        with optional_package("tensorboard", "tensorboard", _PURPOSE):
            from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]
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
        """Mark that training resumes after `step`: readers then hide later steps of an earlier run."""
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
    with optional_package("tensorboard", "tensorboard", _PURPOSE):
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader  # type: ignore[import-untyped]
        from tensorboard.util.tensor_util import make_ndarray
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
